"""Tools: descriptions, files that name them, built-in ones, and calls that fail, hang, block or say too much."""

import asyncio
import contextlib
import http.server
import json
import pickle
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.agents import BaseTool, FunctionCall, ToolResponse, function_tool, session_executor
from hybridrl.agents.tools.builtin import Calculator, Gsm8kAnswer, HttpSearch, evaluate
from hybridrl.agents.tools.load_tools import close_tools, load_tools, selected_tools
from hybridrl.agents.tools.tool import tool_of
from hybridrl.agents.tools.tool_session import ToolSession
from hybridrl.config.schema.multi_turn import MultiTurnConfig
from hybridrl.errors import RolloutError
from hybridrl.sandbox import SandboxError
from hybridrl.scored import Reason, Scored, Unscored, UnscoredError

SETTINGS = MultiTurnConfig(max_parallel_calls=8, tool_timeout_s=5.0)


@function_tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def run(tools: list[BaseTool], calls: list[tuple[str, dict]], settings=SETTINGS, **kwargs):
    """The results of calls of one turn, and what `calc_reward` gave."""

    async def session():
        tools_of = ToolSession({tool.name: tool for tool in tools}, settings, kwargs)
        return await tools_of.call([FunctionCall(*call) for call in calls]), await tools_of.close()

    return asyncio.run(session())


class Stateful(BaseTool):
    """Counts its calls, in the instance that `create` made."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.log: list[str] = []
        self.counts: dict[str, int] = {}

    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}

    async def create(self, instance_id=None, **kwargs):
        await asyncio.sleep(0.01)
        instance, response = await super().create(instance_id)
        self.counts[instance] = kwargs["create_kwargs"]["start"]
        self.log.append("create")
        return instance, response

    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        return ToolResponse(text=str(self.counts[instance_id])), 0.5, {"calls": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.counts[instance_id])

    async def release(self, instance_id, **kwargs):
        self.log.append("release")


def test_a_function_is_described_by_its_hints_and_docstring() -> None:
    schema = tool_of(add).tool_schema["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first."}
    assert schema["parameters"]["required"] == ["a"] and add(1, 2) == 3
    with pytest.raises(RolloutError, match="function tool bare"):

        @function_tool
        def bare(x):
            return x


def test_a_tool_has_one_state_per_session_even_where_calls_are_parallel() -> None:
    tool = Stateful({})
    results, scores = run([tool], [("count", {})] * 3, count={"create_kwargs": {"start": 10}})
    assert sorted(one.text for one in results) == ["11", "12", "13"] and [one.reward for one in results] == [0.5] * 3
    assert scores == {"count": 13.0} and tool.log == ["create", "release"]
    given = {"create_kwargs": {"start": 1}, "execute_kwargs": None, "release_kwargs": None}  # as parquet fills rows
    assert run([tool], [("count", {})], count=given, other=None)[0][0].text == "2"


def test_calls_that_cannot_be_made_are_answered_with_the_reason() -> None:
    calls = [("add", {"a": 1}), ("sub", {"a": 1}), ("add", {"b": 1}), ("add", {"a": 1, "c": 2}), ("add", {"a": "x"})]
    results, _ = run([tool_of(add)], calls)
    assert [one.fault for one in results] == ["", "unknown", "arguments", "arguments", "error"]
    assert results[0].text == "2" and "choose from add" in results[1].text and "needs a" in results[2].text
    assert "no parameter c" in results[3].text and "TypeError" in results[4].text
    results, _ = run([tool_of(add)], [("add", {"a": 1})] * 3, MultiTurnConfig(max_parallel_calls=2))
    assert [one.fault for one in results] == ["", "", "limit"] and "at most 2" in results[2].text


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
def test_long_answers_are_cut(side, text) -> None:
    @function_tool
    def say() -> str:
        """Say it."""
        return "0123456789"

    settings = MultiTurnConfig(max_tool_response_length=4, tool_response_truncate_side=side)
    assert run([tool_of(say)], [("say", {})], settings)[0][0].text == text


def test_answers_that_no_tokenizer_takes_are_repaired() -> None:
    @function_tool
    def half() -> str:
        """Half of a character."""
        return "a\ud800b"

    assert run([tool_of(half)], [("half", {})])[0][0].text == "a?b"


RELEASED = threading.Event()


@function_tool
def waits() -> str:
    """Waits in a thread."""
    RELEASED.wait(60)
    return "late"


@function_tool
async def blocks() -> str:
    """Blocks its event loop."""
    RELEASED.wait(60)
    return "late"


@function_tool
async def sleeps() -> str:
    """Sleeps as it should."""
    await asyncio.sleep(60)
    return "late"


@function_tool
async def exits() -> str:
    """Ends the process, it thinks."""
    raise SystemExit(3)


@function_tool
def leaves() -> str:
    """Ends the process, it thinks."""
    sys.exit(3)


@pytest.mark.parametrize("tool", [waits, blocks, sleeps])
def test_a_tool_that_hangs_costs_its_session_the_time_limit_and_others_nothing(tool) -> None:
    name, settings = tool.__name__, MultiTurnConfig(max_parallel_calls=4, tool_timeout_s=1.0)
    took: list[float] = []

    async def hangs():
        session = ToolSession({one.name: one for one in (tool_of(tool), tool_of(add))}, settings)
        first = await session.call([FunctionCall(name, {})])
        second = await session.call([FunctionCall("add", {"a": 1})])  # the session goes on
        await session.close()
        return [first[0].fault, second[0].text]

    async def works():
        session = ToolSession({"add": tool_of(add)}, settings)
        started = time.monotonic()
        for _ in range(5):
            assert (await session.call([FunctionCall("add", {"a": 1})]))[0].text == "2"
        took.append(time.monotonic() - started)
        await session.close()

    async def both():
        return await asyncio.gather(hangs(), works())

    RELEASED.clear()
    try:
        assert asyncio.run(both())[0] == ["timeout", "2"]
    finally:
        RELEASED.set()
    assert len(took) == 1


class RewardFails(Stateful):
    """Its state is lost before it is scored."""

    async def calc_reward(self, instance_id, **kwargs):
        raise ConnectionError("the state is lost")


def test_a_tool_whose_reward_fails_is_released_and_has_unscored() -> None:
    tool = RewardFails({})
    results, scores = run([tool], [("count", {})], count={"create_kwargs": {"start": 1}})
    assert results[0].text == "2" and tool.log == ["create", "release"]
    assert scores["count"].reason is Reason.GRADING and "the state is lost" in scores["count"].detail
    for lost, reason in [(UnscoredError("infra", "no disk"), Reason.INFRA), (float("nan"), Reason.GRADING)]:
        tool = RewardFails({})
        tool.calc_reward = raises(lost) if isinstance(lost, Exception) else returns(lost)
        assert run([tool], [("count", {})], count={"create_kwargs": {"start": 1}})[1]["count"].reason is reason
    tool.calc_reward = returns(Scored(0.25))
    assert run([tool], [("count", {})], count={"create_kwargs": {"start": 1}})[1] == {"count": 0.25}
    tool.execute = raises(UnscoredError("timeout"))
    with pytest.raises(UnscoredError, match="timeout"):  # no answer to the model: it ends the session
        run([tool], [("count", {})], count={"create_kwargs": {"start": 1}})


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (float("nan"), Reason.GRADING),
        (np.float32("inf"), Reason.GRADING),
        (1e300, Reason.GRADING),
        ("good", Reason.GRADING),
        (np.ma.masked, Reason.GRADING),
        ([0.5], Reason.GRADING),
        (Unscored("infra", "no disk"), Reason.INFRA),
    ],
)
@pytest.mark.filterwarnings("ignore:Warning. converting a masked element")
def test_a_reward_of_a_call_that_is_no_number_ends_the_session_without_a_score(reward, reason) -> None:
    """The model did what it could: it gets no answer about it, and no other reward takes its place."""
    tool = Stateful({})
    tool.execute = returns((ToolResponse(text="fine"), reward, {}))
    for tools, name, kwargs in ([grading(reward)], "grade", {}), ([tool], "count", {"create_kwargs": {"start": 1}}):
        with pytest.raises(UnscoredError) as refused:
            run(tools, [(name, {})], **{name: kwargs})
        assert refused.value.unscored.reason is reason and (name in str(refused.value) or reason is Reason.INFRA)


def grading(reward):
    """A tool whose calls have this reward."""

    @function_tool
    def grade():
        """Grade what was done."""
        return "fine", reward

    return tool_of(grade)


@pytest.mark.parametrize("reward", [0.5, np.float32(0.5), Scored(0.5)])
def test_a_reward_of_a_call_is_a_number(reward) -> None:
    (result,), _ = run([grading(reward)], [("grade", {})])
    assert (result.text, result.reward, result.fault) == ("fine", 0.5, "")


def raises(error: Exception):
    async def method(*args, **kwargs):
        raise error

    return method


def returns(value):
    async def method(*args, **kwargs):
        return value

    return method


@pytest.mark.parametrize(("tool", "made"), [(add, 0), (waits, 1)])
def test_a_thread_that_cannot_be_started_is_no_answer_of_the_tool(monkeypatch, tool, made) -> None:
    """The session's own thread, and that of a tool that may block."""
    started = [0]

    def start(thread, original=threading.Thread.start) -> None:
        if thread.name in ("tools", "tool"):
            started[0] += 1
            if started[0] > made:
                raise RuntimeError("can't start new thread")
        original(thread)

    # as in a process that has no threads yet
    monkeypatch.setattr(session_executor, "LOOPS", session_executor.Loops())
    monkeypatch.setattr(session_executor, "CALLS", session_executor.Calls())
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(UnscoredError, match=r"^infra: .*can't start new thread"):
        run([tool_of(tool)], [(tool.__name__, {"a": 1} if tool is add else {})])


def test_an_error_without_a_score_passes_between_processes() -> None:
    for error in (UnscoredError("timeout", "too slow"), SandboxError("no disk"), SandboxError("slow", Reason.TIMEOUT)):
        error.add_note("a note")
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is type(error) and found.unscored == error.unscored and str(found) == str(error)
        assert found.args == error.args and found.__notes__ == ["a note"]


@pytest.mark.parametrize("tool", [exits, leaves])
def test_a_tool_that_exits_is_an_error_of_the_tool(tool) -> None:
    results, _ = run([tool_of(tool), tool_of(add)], [(tool.__name__, {}), ("add", {"a": 1})])
    assert results[0].fault == "error" and "SystemExit" in results[0].text and results[1].text == "2"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(
            ("(3 + 4) * 2", 14),
            ("2^10", 1024),
            ("7 // 2 % 2", 1),
            ("-3 - -5", 2),
            ("10 / 4", 2.5),
            ("sqrt(16) + pi * 0", 4),
        ),
        *(("max(1, 2, 3)", 3), ("round(2.567, 2)", 2.57), ("1e3", 1000), ("2 ** -1", 0.5)),
    ],
)
def test_the_calculator_computes(expression, value) -> None:
    assert evaluate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "__import__('os').system('id')",
            "open('/etc/passwd')",
            "().__class__",
            "[1][0]",
            "lambda: 1",
            "'a' * 9",
            "True",
        ),
        *("9**9**9**9", "10**301", "2**(10**9)", "round(5, -10**9)", "1/0", "(-8) ** 0.5", "1 +", "", "x", "sqrt(-1)"),
        *("(" * 400 + "1" + ")" * 400, "1" * 5000, "factorial(1000000)", "1e308 * 10", "round(1, 0.5)", "min()"),
    ],
)
def test_the_calculator_computes_nothing_else(expression) -> None:
    started = time.process_time()
    with pytest.raises(ValueError):
        evaluate(expression)
    assert time.process_time() - started < 1  # nothing large was computed


@given(st.text(alphabet="0123456789.+-*/%^()e ,minax", max_size=30))
def test_any_expression_has_a_value_or_none(expression) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(evaluate(expression), (int, float))


def test_calculator_and_answer_check_as_tools() -> None:
    kwargs = {"check_answer": {"create_kwargs": {"ground_truth": "72"}}}
    calls = (
        [("check_answer", {"answer": "71"})],
        [("check_answer", {"answer": "72"})],
        [("check_answer", {"answer": "70"})],
    )

    async def session():
        tools = ToolSession({"check_answer": Gsm8kAnswer({})}, SETTINGS, kwargs)
        results = [(await tools.call([FunctionCall(*one) for one in turn]))[0] for turn in calls]
        return results, await tools.close()

    results, scores = asyncio.run(session())
    assert [(one.text, one.reward) for one in results] == [("wrong", 0.0), ("right", 0.0), ("wrong", -0.05)]
    assert scores == {"check_answer": 0.0}
    assert run([Calculator({})], [("calculator", {"expression": "6 * 7"})])[0][0].text == "42"
    missing, _ = run([Gsm8kAnswer({})], [("check_answer", {"answer": "1"})])
    assert missing[0].fault == "error" and "tools_kwargs" in missing[0].text


class Search(http.server.BaseHTTPRequestHandler):
    """A retrieval server as Search-R1's."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = [
            [{"document": {"contents": f"{query}\nAll of it."}, "score": 1.0}] * asked["topk"]
            for query in asked["queries"]
        ]
        body = b"no JSON" if "broken" in asked["queries"] else json.dumps({"result": found}).encode()
        self.send_response(next((int(query) for query in asked["queries"] if query.isdigit()), 200))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_search_asks_a_server() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Search)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        tool = HttpSearch({"retrieval_service_url": url, "topk": 2, "attempts": 1})
        (found,), _ = run([tool], [("search", {"query_list": ["cats", "dogs"]})])
        with pytest.raises(UnscoredError, match=r"^infra: search .* no JSON"):
            run([tool], [("search", {"query_list": ["broken"]})])
        (refused,), _ = run([tool], [("search", {"query_list": ["422"]})])
        assert refused.fault == "error" and "HTTP 422" in refused.text  # the queries are at fault
        with pytest.raises(UnscoredError, match=r"^infra: search .* HTTP 404"):  # the address is
            run([tool], [("search", {"query_list": ["404"]})])
    finally:
        server.shutdown()
        server.server_close()
    assert "Doc 1 (Title: cats)\nAll of it." in found.text and "Doc 2" in found.text and "---" in found.text
    with pytest.raises(UnscoredError, match=r"^infra: search .*Refused"):  # the server is gone
        run([tool], [("search", {"query_list": ["cats"]})])
    with raises_with(RolloutError, "retrieval_service_url"):
        HttpSearch({})


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    return str(file)


def test_tools_of_a_yaml_file_and_of_a_python_file(tmp_path: Path) -> None:
    functions = tmp_path / "my_tools.py"
    functions.write_text(
        "from hybridrl.agents import function_tool\n\n@function_tool('shout')\ndef f(text: str) -> str:\n"
        "    '''Shout.\n\n    Args:\n        text: what.\n    '''\n    return text.upper()\n"
    )
    entry = "{type: function, function: {name: tally, description: Count., parameters: {type: object, properties: {}}}}"
    path = written(
        tmp_path,
        f"tools:\n- class_name: calculator\n- class_name: {__name__}.Stateful\n  config: {{type: native}}\n"
        f"  tool_schema: {entry}\n",
    )
    tools = load_tools(path, str(functions))
    assert [tool.name for tool in tools] == ["calculator", "tally", "shout"]
    assert tools[1].config == {"type": "native"} and load_tools(path, str(functions))[0] is tools[0]
    assert run(tools, [("shout", {"text": "hey"})])[0][0].text == "HEY"
    assert selected_tools({"tool_selection": ["shout"]}, [tool.name for tool in tools]) == ["shout"]
    close_tools(path, str(functions))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", r"must be \{tools"),
        ("tools: [", "tools.yaml"),
        ("tools:\n- config: {}", r"tools\[0\]: it has no class_name"),
        ("tools:\n- class_name: calculater", "calculater"),
        ("tools:\n- class_name: json.JSONDecoder", "not a class derived from"),
        ("tools:\n- class_name: calculator\n- class_name: calculator", "several tools are called calculator"),
        ("tools:\n- class_name: search", "retrieval_service_url"),
        ("tools:\n- class_name: calculator\n  schema: {}", "has schema"),
        ("tools:\n- class_name: calculator\n  tool_schema: {name: x}", "tool_schema must be"),
        ("tools:\n- class_name: mcp\n  config: {}", "mcp_servers_config_path=None"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text, message) -> None:
    with pytest.raises(RolloutError, match=message):
        load_tools(written(tmp_path, text), None)


SERVER = """
import io
import PIL.Image
from mcp.server.mcpserver import Image, MCPServer
server = MCPServer("demo")

@server.tool(structured_output=False)
def draws(width: int, height: int) -> list:
    "Draws."
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), "red").save(file, "PNG")
    parts = ["a picture", Image(data=file.getvalue(), format="png"), Image(data=b"damaged", format="png")]
    return parts[: 3 - width % 2]

@server.tool()
def multiply(a: int, b: int) -> int:
    "Multiply two numbers."
    return a * b

@server.tool()
def fails(why: str) -> str:
    "Fails."
    raise ValueError(why)

@server.tool()
def dies() -> str:
    "Ends the server."
    import os
    os._exit(1)

server.run()
"""


def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    (tmp_path / "server.py").write_text(SERVER)
    servers = {"mcpServers": {"demo": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}}}
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    path = written(
        tmp_path,
        "tools:\n- class_name: mcp\n  config:\n    mcp_servers_config_path: " + str(tmp_path / "servers.json") + "\n",
    )
    tools = load_tools(path, None)
    try:
        assert sorted(tool.name for tool in tools) == ["dies", "draws", "fails", "multiply"]
        calls = [("multiply", {"a": 6, "b": 7}), ("fails", {"why": "no luck"}), ("multiply", {"a": 6})]
        results, _ = run(tools, calls)
        assert [one.fault for one in results] == ["", "error", "arguments"]
        assert results[0].text == "42" and "Error executing tool fails" in results[1].text
        asked = [("draws", {"width": width, "height": 16}) for width in (17, 16)]
        assert [one.text for one in run(tools, asked)[0]] == [
            "a picture\n(image left out)",  # by a model of text
            "a picture\n(image left out)\n(image left out)",
        ]
        (draws,) = [tool for tool in tools if tool.name == "draws"]
        draws.model_reads_images = True
        response, _, _ = asyncio.run(draws.execute("", asked[0][1]))
        assert response.text == "a picture"
        assert [(one.size, one.convert("RGB").getpixel((0, 0))) for one in response.image] == [((17, 16), (255, 0, 0))]
        assert "an image cannot be read" in run(tools, asked[1:])[0][0].text
        with pytest.raises(UnscoredError, match="infra: MCP server demo: the connection has ended"):
            run(tools, [("dies", {})])  # no answer to the model: its sample would be judged without the tool
        assert run(tools, calls[:1])[0][0].text == "42"  # the next session has a new connection
    finally:
        close_tools(path, None)
    assert run(tools, [("multiply", {"a": 6, "b": 7})])[0][0].fault == "error"  # the connection has ended
    servers["mcpServers"]["demo"]["args"] = ["-c", "raise SystemExit"]
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    with pytest.raises(RolloutError, match=r"MCP server demo: (?!it did not answer)"):  # at once, and with the reason
        load_tools(path, None)


def test_an_mcp_server_has_time_to_start_while_something_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setattr("hybridrl.utils.movement.USER_STILL_S", 2.0)
    (tmp_path / "server.py").write_text(SERVER)
    busy = "import time, runpy\nend = time.time() + 5\nwhile time.time() < end: pass\n"
    busy += f"runpy.run_path({str(tmp_path / 'server.py')!r}, run_name='__main__')"
    hangs = "import time; time.sleep(1000)"
    for code, limit, fault in ((busy, None, None), (hangs, None, "nothing has moved"), (busy, 1, "limit of 1 s")):
        servers = {"mcpServers": {"demo": {"command": sys.executable, "args": ["-c", code]}}}
        (tmp_path / "servers.json").write_text(json.dumps(servers))
        config = json.dumps({"mcp_servers_config_path": str(tmp_path / "servers.json"), "start_timeout": limit})
        path = written(tmp_path, f"tools:\n- class_name: mcp\n  config: {config}\n")
        if fault is None:
            assert load_tools(path, None)
            close_tools(path, None)
        else:
            with pytest.raises(RolloutError, match=fault):
                load_tools(path, None)
