"""The tool `python`, with programs on this machine and behind a server."""

import asyncio
import dataclasses
import threading
import time

import pytest
from raising import raises_with
from sandbox_tools import started_server

from hybridrl.agents import FunctionCall
from hybridrl.agents.tools.sandbox import PythonTool
from hybridrl.agents.tools.tool import BaseTool, ToolResponse, in_thread
from hybridrl.agents.tools.tool_session import ToolSession
from hybridrl.config.schema.multi_turn import MultiTurnConfig
from hybridrl.errors import RolloutError
from hybridrl.utils import clock


def answers(tool, *codes, settings=None):
    """What a session's tool answers to programs, and the faults."""

    async def session():
        tools = ToolSession({tool.name: tool}, settings or MultiTurnConfig(max_parallel_calls=len(codes)))
        found = await tools.call([FunctionCall(tool.name, {"code": code}) for code in codes])
        await tools.close()
        return [one.text for one in found], [one.fault for one in found]

    return asyncio.run(session())


@pytest.mark.parametrize("remote", [False, True], ids=["local", "server"])
def test_as_a_tool(remote) -> None:
    settings = MultiTurnConfig(max_parallel_calls=2, max_tool_response_length=2000)
    if remote:
        with started_server() as url:
            tool = PythonTool({"type": "native", "wall_s": 20.0, "url": url})
            (good, bad), _ = answers(tool, "print(2 ** 10)", "1 / 0", settings=settings)
    else:
        tool = PythonTool({"type": "native", "wall_s": 20.0})
        (good, bad), _ = answers(tool, "print(2 ** 10)", "1 / 0", settings=settings)
    assert good == "1024" and "ZeroDivisionError" in bad and bad.endswith("[exit code 1]")
    with raises_with(RolloutError, "wall_s"):
        PythonTool({"time": 3})


def test_what_cannot_work_is_refused_at_the_start() -> None:
    with raises_with(RolloutError, "wall_s=20", "tool_timeout_s=20"):
        PythonTool({"wall_s": 20.0}).check_settings(dataclasses.replace(MultiTurnConfig(), tool_timeout_s=20.0))
    PythonTool({"wall_s": 19.0}).check_settings(dataclasses.replace(MultiTurnConfig(), tool_timeout_s=20.0))
    with raises_with(RolloutError, "max_concurrent"):
        PythonTool({"max_concurrent": 0})
    with raises_with(RolloutError, "http://HOST"):
        PythonTool({"url": "nowhere"})
    with started_server() as url:
        pass
    with pytest.raises(RolloutError, match="refused"):
        PythonTool({"url": url})


class Waiter(BaseTool):
    """Waits, without its clock where it is asked to, until the test lets it go on."""

    def __init__(self, without_clock: bool) -> None:
        what = {"type": "object", "properties": {"code": {"type": "string"}}}
        super().__init__({}, {"type": "function", "function": {"name": "wait", "parameters": what}})
        self.without_clock, self.go_on = without_clock, threading.Event()

    async def execute(self, instance_id, parameters, **kwargs):
        def wait() -> str:
            if not self.without_clock:
                self.go_on.wait(60)
            else:
                with clock.stopped():
                    self.go_on.wait(60)
            return "done"

        return ToolResponse(await in_thread(wait)), None, {}


@pytest.mark.parametrize("without_clock", [True, False])
def test_the_time_that_a_call_waits_for_others_does_not_count(without_clock) -> None:
    tool = Waiter(without_clock)
    release = threading.Timer(1.0, tool.go_on.set)
    if without_clock:
        release.start()
    started = time.monotonic()
    (text,), (fault,) = answers(tool, "", settings=dataclasses.replace(MultiTurnConfig(), tool_timeout_s=0.2))
    tool.go_on.set()
    release.cancel()
    assert (text, fault) == ("done", "") if without_clock else fault == "timeout", time.monotonic() - started
