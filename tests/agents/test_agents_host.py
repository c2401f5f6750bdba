"""The process that starts agents: killed at random, and its agents too; and what an agent can make the run do."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.agents.gateway import AgentFailed, AgentHost
from hybridrl.errors import RolloutError
from hybridrl.processes.supervisor import descendants
from hybridrl.processes.untrusted_results import MalformedMessage, Result, decode_result
from hybridrl.scored import Scored
from hybridrl.utils.agent_host import AgentJob, AgentProgram

AGENT = """
import os, pickle, signal, sys, time
import numpy as np
from hybridrl.scored import Unscored, Scored


class Silent:
    def __repr__(self):
        raise RuntimeError


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def connections():
    # what the agent's process has inherited: its socket to the run is one of these
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:
            pass


def act(base_url, api_key, row):
    kind = row["kind"]
    if kind == "waits":
        time.sleep(row["seconds"])
        return row["number"]
    if kind == "numpy":
        return Scored(np.float32(0.5), {"values": np.arange(3), "share": np.float64(0.25)})
    if kind == "odd":
        return Scored(1.0, {"value": object()})
    if kind == "nan":
        return Scored(float("nan"))
    if kind == "deep":
        deep = []
        for _ in range(100_000):
            deep = [deep]
        return Scored(1.0, {"deep": deep})
    if kind in ("pickle", "framed", "endless"):
        data = pickle.dumps(("value", Harmful(row["path"])))
        if kind == "framed":
            data = len(data).to_bytes(8, "big") + data
        if kind == "endless":
            data = b"\\xff" * 8 + data
        for descriptor in connections():
            os.write(descriptor, data)
        os._exit(0)
    if kind == "value":
        return eval(row["value"])
    if kind == "text":
        raise ValueError("x" * 10**7)
    if kind == "closed output":
        os.close(1)
        sys.stdout.close()
        sys.stderr = None
        return 0.5
    if kind == "dies":
        os.kill(os.getppid(), signal.SIGKILL)  # its supervisor
        time.sleep(60)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)
    made = AgentHost(AgentProgram(function=f"{file}:act"))
    yield made
    made.close()


def job(kind: str, **row: Any) -> AgentJob:
    return AgentJob("http://x/sessions/i/v1", "i", "tiny", {"kind": kind, **row})


def kill_host(host: AgentHost) -> None:
    """Kill the process that starts agents, and wait until it has ended."""
    pid = host.pid
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def run(host: AgentHost, kind: str, **row: Any) -> Any:
    return asyncio.run(host.run(job(kind, **row)))


@pytest.mark.parametrize("kind", ["pickle", "framed", "endless"])
def test_what_an_agents_process_sends_is_never_executed(host: AgentHost, kind: str, tmp_path: Path) -> None:
    with pytest.raises(AgentFailed) as caught:
        run(host, kind, path=str(tmp_path / "executed"))
    assert not caught.value.by_itself
    assert not (tmp_path / "executed").exists()
    assert run(host, "waits", seconds=0, number=0.25) == 0.25


def test_values_of_a_score_arrive(host: AgentHost) -> None:
    assert run(host, "numpy") == Scored(0.5, {"values": [0, 1, 2], "share": 0.25})


@pytest.mark.parametrize(("kind", "words"), [("odd", "extra"), ("nan", "nan"), ("deep", "extra")])
def test_a_score_that_is_none_is_refused(host: AgentHost, kind: str, words: str) -> None:
    with pytest.raises(AgentFailed, match=words) as caught:
        run(host, kind)
    assert not caught.value.by_itself


def deep(depth: int) -> str:
    return f"(lambda f: f(f, {depth}))(lambda f, n: [] if n == 0 else [f(f, n - 1)])"


@pytest.mark.parametrize(
    "value", ["10**400", "Scored(10**400)", "Silent()", deep(900), "'0.5'", "Scored(1.0, {'x': 'y' * 2**27})"]
)
def test_what_is_unscored_says_nothing_of_the_session(host: AgentHost, value: str) -> None:
    """Such an agent did not fail by itself, so that a session whose last request was too long is not scored for it."""
    with pytest.raises(AgentFailed, match="returned") as caught:
        run(host, "value", value=value)
    assert not caught.value.by_itself


def test_a_long_traceback_is_cut_in_the_middle(host: AgentHost) -> None:
    with pytest.raises(AgentFailed, match="in act") as caught:
        run(host, "text")
    assert caught.value.by_itself and len(str(caught.value)) < 10**5 and "characters ..." in str(caught.value)


def test_a_result_arrives_though_the_agent_has_closed_its_output(host: AgentHost) -> None:
    assert run(host, "closed output") == 0.5


@pytest.mark.parametrize(
    "write",
    [
        r"printf '\377\376' > $HYBRIDRL_SCORE",
        "printf 9%.0s $(seq 400) > $HYBRIDRL_SCORE",
        "(echo '{\"reward\":'; printf 9%.0s $(seq 400); echo '}') > $HYBRIDRL_SCORE",
        "mkdir $HYBRIDRL_SCORE",
        "mkfifo $HYBRIDRL_SCORE",
        "ln -s /dev/zero $HYBRIDRL_SCORE",
        "head -c 100000000 /dev/zero > $HYBRIDRL_SCORE",
    ],
)
def test_a_command_that_writes_unscored_did_not_fail_by_itself(write: str, tmp_path: Path) -> None:
    """A folder or a pipe of that name was as if the command had left the score to the reward function."""
    (tmp_path / "agent.sh").write_text(write + "\n")
    made = AgentHost(AgentProgram(command=("/bin/sh", str(tmp_path / "agent.sh"))))
    try:
        with pytest.raises(AgentFailed, match=r"agent (wrote|made|returned)") as caught:
            run(made, "any")
        assert not caught.value.by_itself
    finally:
        made.close()


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr)))
def test_any_bytes_are_a_result_or_malformed(data: bytes | str) -> None:
    try:
        found = decode_result(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
    except MalformedMessage:
        return
    assert isinstance(found, Result)


def test_a_number_that_no_float_holds_is_malformed() -> None:
    for data in (b'["score", 1e999, null, "", ""]', b'["score", 1' + b"0" * 400 + b', null, "", ""]', b"[" * 10**5):
        with pytest.raises(MalformedMessage):
            decode_result(data)


def test_sessions_are_scored_truly_or_not_at_all_whoever_is_killed(host: AgentHost) -> None:
    """Agents and the process that starts them are killed at random; nothing is scored wrongly, and all goes on."""
    dice, count = random.Random(28), 40
    answers: list[Any] = []

    async def session(number: int) -> Any:
        await asyncio.sleep(number * 0.05)
        try:
            answers.append(await host.run(job("waits", seconds=0.3, number=number + 0.5)))
            return answers[-1]
        except AgentFailed as error:
            assert not error.by_itself
            return None

    async def killer(done: asyncio.Event) -> int:
        killed, had_answers = 0, 0
        while not done.is_set():
            await asyncio.sleep(dice.uniform(0.05, 0.2))
            agents = descendants(host.pid)  # this process may have others, such as those of its Ray
            kills_host = dice.random() < 0.3 and len(answers) > had_answers  # it gives up where none answers in between
            had_answers = len(answers) if kills_host else had_answers
            target = host.pid if kills_host else (dice.choice(agents) if agents else None)
            if target is not None:
                os.kill(target, signal.SIGKILL)
                killed += 1
        return killed

    async def all_of_them() -> tuple[list[Any], int]:
        done = asyncio.Event()
        killing = asyncio.ensure_future(killer(done))
        found = await asyncio.gather(*(session(number) for number in range(count)))
        done.set()
        return found, await killing

    found, killed = asyncio.run(all_of_them())
    assert killed > 3
    scored = {number: value for number, value in enumerate(found) if value is not None}
    assert scored and all(value == number + 0.5 for number, value in scored.items())
    kill_host(host)
    assert run(host, "waits", seconds=0, number=1.5) == 1.5


def test_agents_in_flight_outlive_the_process_that_started_them(host: AgentHost) -> None:
    async def one() -> Any:
        running = asyncio.ensure_future(host.run(job("waits", seconds=1.0, number=7.5)))
        await asyncio.sleep(0.3)
        os.kill(host.pid, signal.SIGKILL)
        return await running

    assert asyncio.run(one()) == 7.5


def test_a_supervisor_that_is_killed_gives_no_score(host: AgentHost) -> None:
    with pytest.raises(AgentFailed, match="without an answer"):
        run(host, "dies")


def test_a_process_that_dies_again_and_again_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.py").write_text("def act(base_url, api_key, row):\n    return 1\n")
    host = AgentHost(AgentProgram(function=f"{tmp_path / 'agent.py'}:act"))
    try:
        (tmp_path / "agent.py").write_text("import os\nos._exit(7)\n")
        kill_host(host)
        for _ in range(2):
            with pytest.raises(RolloutError) as caught:
                run(host, "any")
        assert "without one of them that answered" in str(caught.value)
    finally:
        host.close()
    assert "another one starts" in capfd.readouterr().err
    deadline = time.monotonic() + 60
    while psutil.pid_exists(host.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(RolloutError, match="closed"):
        run(host, "any")


def test_a_slow_import_of_an_agent_is_waited_for_and_a_stuck_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrl.utils.movement.USER_STILL_S", 5.0)
    for name, body in (
        ("slow", "for _ in range(80): open('/dev/null', 'w').write('x'); time.sleep(0.1)"),
        ("stuck", "time.sleep(1000)"),
    ):
        (tmp_path / f"{name}.py").write_text(f"import time\n{body}\ndef act(base_url, api_key, row): return 1.0\n")
    host = AgentHost(AgentProgram(f"{tmp_path}/slow.py:act"))
    try:
        assert asyncio.run(host.run(AgentJob("http://x/v1", "key", "model", {}))) == 1.0
    finally:
        host.close()
    before = set(psutil.Process().children())
    with pytest.raises(RolloutError, match="the process of agents does not start: nothing has moved for"):
        AgentHost(AgentProgram(f"{tmp_path}/stuck.py:act"))
    assert not [child for child in set(psutil.Process().children()) - before if child.is_running()]
