"""Tools that come with the library: a calculator, a check of GSM8K answers, and search over HTTP."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hybridrl.agents.session_executor import in_thread
from hybridrl.agents.tools.tool import BaseTool, ToolResponse
from hybridrl.errors import RolloutError
from hybridrl.registry import TOOLS
from hybridrl.reward.score.gsm8k import compute_score
from hybridrl.scored import UnscoredError
from hybridrl.utils import clock
from hybridrl.utils.entry_metadata import EntryMetadata
from hybridrl.utils.json_client import JsonClient, ServiceError, is_address

T = TypeVar("T", bound="type[BaseTool]")

_MAX_EXPRESSION = 1000  # characters
_MAX_NUMBER = 1e300
_MAX_INTEGER = 10**300


def _rounded(value: int | float, digits: int | float = 0) -> int | float:
    """`round`, which would compute powers of ten of any size."""
    if digits != int(digits) or abs(digits) > 300:
        raise ValueError("round takes a number of digits from -300 to 300")
    return round(value, int(digits))


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan")},
    **{"floor": math.floor, "ceil": math.ceil, "abs": abs, "round": _rounded, "min": min, "max": max},
}
_NAMES = {"pi": math.pi, "e": math.e}


def register_tool(name: str) -> Callable[[T], T]:
    """Class decorator: `class_name: NAME` in `multi_turn.tool_config_path` is this tool."""

    def add(tool: T) -> T:
        TOOLS.add(name, tool, EntryMetadata())
        return tool

    return add


def evaluate(expression: str) -> int | float:
    """The value of an arithmetic expression: numbers, + - * / // % ** (or ^), brackets, and functions such as sqrt.

    No code is run: the expression is parsed, and only these parts of it are computed. Numbers are below 1e300.

    Raises:
        ValueError: it is not one, or has no value.
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_EXPRESSION} are computed")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, TypeError) as error:
        raise ValueError(str(error)) from None
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp):
        x, y = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(x, y))
        if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](x, y))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _FUNCTIONS:
            return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
        raise ValueError(f"there is no function {node.func.id!r}; there are {', '.join(_FUNCTIONS)}")
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    """Compute a power, unless it would be too large."""
    if base and abs(exponent) * math.log10(max(abs(base), 1e-300)) > 300:
        raise OverflowError("the result is too large")
    power = base**exponent
    if isinstance(power, complex):
        raise ValueError("the result is not a real number")
    return power


def _bounded(value: int | float) -> int | float:
    limit = _MAX_INTEGER if isinstance(value, int) else _MAX_NUMBER
    if not (isinstance(value, int) or math.isfinite(value)) or abs(value) > limit:
        raise OverflowError("the result is too large")
    return value


def _schema(name: str, description: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@register_tool("calculator")
class Calculator(BaseTool):
    """Computes an arithmetic expression; see `evaluate`."""

    config_names = ()

    def get_openai_tool_schema(self) -> Any:
        """The description for the model."""
        parameter = {"type": "string", "description": "an arithmetic expression such as (3 + 4) * 2"}
        return _schema("calculator", "Compute an arithmetic expression.", expression=parameter)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """The value of `expression`."""
        number = evaluate(str(parameters["expression"]))
        return (
            ToolResponse(str(int(number)) if float(number).is_integer() and abs(number) < 1e15 else str(number)),
            None,
            {},
        )


@register_tool("gsm8k_answer")
class Gsm8kAnswer(BaseTool):
    """Tells the model whether its answer to a GSM8K question is right.

    The ground truth is `create_kwargs.ground_truth` of the row. A call that repeats an answer, or makes a right one
    wrong, costs `config.penalty` (0.05). `calc_reward` is the score of the last answer.
    """

    config_names = ("penalty",)

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._penalty = float(config.get("penalty", 0.05))
        self._states: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> Any:
        """The description for the model."""
        parameter = {"type": "string", "description": "the answer, a number"}
        return _schema("check_answer", "Check an answer to the question before giving it.", answer=parameter)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Keep the row's ground truth."""
        truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        if truth is None:
            raise RolloutError(
                f"the row has no ground truth for {self.name}; add the column tools_kwargs = "
                f"{{{self.name}: {{create_kwargs: {{ground_truth: ...}}}}}}"
            )
        name, response = await super().create(instance_id)
        self._states[name] = {"truth": str(truth), "score": 0.0, "answers": set()}
        return name, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Whether `answer` is right."""
        state, answer = self._states[instance_id], str(parameters["answer"]).strip()
        score = float(compute_score(f"#### {answer.removeprefix('####').strip()}", state["truth"]))
        worse = answer in state["answers"] or score < state["score"]
        state["score"], _ = score, state["answers"].add(answer)
        return ToolResponse("right" if score else "wrong"), -self._penalty if worse else 0.0, {"acc": score}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last answer."""
        return float(self._states[instance_id]["score"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the session."""
        self._states.pop(instance_id, None)


@register_tool("search")
class HttpSearch(BaseTool):
    """Searches through a retrieval server that answers `POST {"queries": [...], "topk": n, "return_scores": true}`.

    That is the interface of Search-R1's servers: the answer is `{"result": [[{"document": {"contents": ...}}, ...]]}`,
    one list per query. Further fields of a document are left out.

    Config: `retrieval_service_url`, `topk` (3), `timeout` (30 s), `attempts` (4). A request that fails is sent again. A
    session whose search fails has no score: that the server is down or busy is no answer to the model. That it
    refuses the queries (HTTP 400, 422) is one. The time of a search does not count against `tool_timeout_s`.
    """

    config_names = ("retrieval_service_url", "topk", "timeout", "attempts")

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        url, self._topk = config.get("retrieval_service_url"), int(config.get("topk", 3))
        self._timeout = float(config.get("timeout", 30.0))
        if not isinstance(url, str) or not is_address(url):
            raise RolloutError(
                "search needs config.retrieval_service_url, an address that begins with http:// or https://"
            )
        self._client = JsonClient(url, attempts=int(config.get("attempts", 4)))

    def get_openai_tool_schema(self) -> Any:
        """The description for the model."""
        parameter = {"type": "array", "items": {"type": "string"}, "description": "one or more queries"}
        return _schema("search", "Search for documents.", query_list=parameter)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """The documents that were found, by query."""
        queries = next(iter(parameters.values()), None)
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ValueError("give a list of queries, each of them text")
        documents = await in_thread(lambda: self._ask(queries))
        return ToolResponse("\n---\n".join(map(_passages, documents))), None, {"queries": len(queries)}

    def _ask(self, queries: list[str]) -> list[Any]:
        body = {"queries": queries, "topk": self._topk, "return_scores": True}
        try:
            with clock.stopped():
                answer = self._client.post(body, self._timeout, _fault_of)
        except ServiceError as error:
            if error.status in _BAD_REQUEST:  # the model may ask otherwise
                raise ValueError(f"search {error}") from error
            raise UnscoredError(error.reason, f"search {error}") from error
        return list(answer["result"])


_BAD_REQUEST = (400, 422)


def _fault_of(answer: Mapping[str, Any]) -> str | None:
    return None if isinstance(answer.get("result"), list) else "an answer without a list 'result'"


def _passages(documents: Any) -> str:
    """The numbered texts of the documents for one query."""
    texts = []
    for number, entry in enumerate(documents if isinstance(documents, list) else ()):
        document = entry.get("document", entry) if isinstance(entry, Mapping) else entry
        text = document.get("contents", "") if isinstance(document, Mapping) else document
        title, _, rest = str(text).partition("\n")
        texts.append(
            f"Doc {number + 1} (Title: {title.strip()})\n{rest.strip()}" if rest else f"Doc {number + 1}: {title}"
        )
    return "\n\n".join(texts) or "No documents were found."
