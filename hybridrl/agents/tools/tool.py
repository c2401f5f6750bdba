"""The interface of a tool: a description for the model, and code that runs when the model calls it."""

import inspect
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, overload

from hybridrl.agents.session_executor import in_thread
from hybridrl.config.schema.multi_turn import MultiTurnConfig
from hybridrl.errors import RolloutError
from hybridrl.scored import Scored, Unscored

F = TypeVar("F", bound=Callable[..., Any])

#: where `function_tool` leaves the tool on the function
_MARK = "__hybridrl_tool__"


@dataclass
class ToolResponse:
    """The result that a tool returns to the model.

    Attributes:
        text: the result; None is an empty one.
        image: PIL images, which the model sees before the text; it must read images.
        video: verl's field for videos, which are not supported.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.video:
            raise RolloutError("a tool returned video, which is not supported; return text and images")
        if self.image is not None and not isinstance(self.image, list):
            raise RolloutError(f"a tool returned image={type(self.image).__name__}; return a list of images")


class BaseTool:
    """A tool with a state per session. Derive from it, and name the class in `multi_turn.tool_config_path`.

    All calls of one session run in one event loop, in a thread that no other session has: a tool that blocks or hangs
    delays no other session. One object serves all sessions of a process, so what they share has to be safe for threads;
    each process that runs sessions (`rollout.agent.num_workers`) makes its own.

    Args:
        config: the entry `config` of the tool's YAML entry.
        tool_schema: the entry `tool_schema`: the description that the model gets, in OpenAI's format. None takes
            `get_openai_tool_schema`.

    Attributes:
        config_names: the entries that `config` may have; None: any, which the tool reads as it likes.
        name: how the model calls it.
        tool_schema: the description, a plain dict.
        model_reads_images: whether images of a response can be shown to the policy; set before sessions begin.
    """

    config_names: ClassVar[Sequence[str] | None] = None
    model_reads_images = False

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema: dict[str, Any] = {}
        self.tool_schema = checked_schema(tool_schema or self.get_openai_tool_schema(), type(self).__name__)
        self.name: str = self.tool_schema["function"]["name"]

    def get_openai_tool_schema(self) -> Any:
        """The description of the tool in OpenAI's format, where the YAML entry gives none."""
        return self.tool_schema

    def check_settings(self, settings: MultiTurnConfig) -> None:
        """Refuse settings of `rollout.multi_turn` that the tool cannot work with; called once, at start-up.

        Raises:
            RolloutError: names the setting, its value and what is allowed.
        """

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a session's use of the tool, before its first call.

        Args:
            kwargs: `create_kwargs`, from the row's column `tools_kwargs` (or that entry of `extra_info`).

        Returns:
            The id that the other methods get, and a response that is not used.
        """
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Answer one call.

        Args:
            parameters: the arguments that the model gave.
            kwargs: `agent_data`, the state of the session.

        Returns:
            The response, the reward of this call (None: it has none), and metrics by name.

        Raises:
            UnscoredError: the session cannot be judged any more, and ends. Other exceptions are answers to the model.
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | Scored | Unscored:
        """The reward of the tool's state when the session has ended; reward functions get it by the tool's name.

        With an `Unscored`, or where it raises (`grading`) or takes too long (`timeout`), the session has no score.
        """
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """The session has ended."""

    def close(self) -> None:
        """The run has ended."""


class FunctionTool(BaseTool):
    """A Python function as a tool. Functions that are not async run in a thread.

    Args:
        function: its arguments are those of the model.
        tool_schema: see `BaseTool`.
    """

    def __init__(self, function: Callable[..., Any], tool_schema: Any) -> None:
        super().__init__({}, tool_schema)
        self.function = function

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the function with the model's arguments."""
        inspect.signature(self.function).bind(**parameters)  # the message of a TypeError is for the model
        if inspect.iscoroutinefunction(self.function):
            return as_result(await self.function(**parameters))
        return as_result(await in_thread(lambda: self.function(**parameters)))


@overload
def function_tool(name: F) -> F: ...
@overload
def function_tool(name: str | None = None, *, schema: Any = None) -> Callable[[F], F]: ...


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Decorator: a typed Python function is a tool, once `multi_turn.function_tool_path` names its file.

    The description that the model gets is made of the function's name, its type hints and its docstring, which needs a
    summary and a section `Args:` with a line per parameter. The function returns text, anything else that becomes text
    (dicts become JSON), or a tuple `(result, reward)` or `(result, reward, metrics)`.

    Args:
        name: how the model calls the tool; None: the function's name.
        schema: a description in OpenAI's format instead of the derived one.

    Raises:
        RolloutError: no description can be derived.
    """
    if callable(name):
        return function_tool()(name)

    def mark(function: F) -> F:
        tool_schema = schema if schema is not None else _derived_schema(function, name or function.__name__)
        setattr(function, _MARK, FunctionTool(function, tool_schema))
        return function

    return mark


def tool_of(value: Any) -> FunctionTool | None:
    """The tool that `function_tool` made of a function, or None."""
    tool = getattr(value, _MARK, None)
    return tool if isinstance(tool, FunctionTool) else None


def checked_schema(schema: Any, owner: str) -> dict[str, Any]:
    """A description in OpenAI's format as a plain dict.

    Args:
        schema: a mapping, or an object with pydantic's `model_dump`.
        owner: the tool, for messages.

    Raises:
        RolloutError: it is not one.
    """
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RolloutError(
            f"tool {owner}: its tool_schema must be {{type: function, function: {{name: ..., description: ..., "
            f"parameters: {{type: object, properties: {{...}}}}}}}}, and not {schema!r}"
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
        raise RolloutError(f"tool {owner}: parameters of its tool_schema must be a JSON schema of type object")
    whole: dict[str, Any] = json.loads(json.dumps({"type": "function", "function": dict(function)}, default=dict))
    whole["function"].setdefault("description", "")
    whole["function"]["parameters"] = json.loads(json.dumps(parameters, default=dict))
    return whole


def as_result(value: Any) -> tuple[ToolResponse, Any, dict[str, Any]]:
    """Convert a function's return value to that of `BaseTool.execute`: (response, reward, metrics).

    `ToolSession` checks the reward.

    Raises:
        TypeError: a tuple of another length.
    """
    if not isinstance(value, tuple):
        return _response(value), None, {}
    if not 1 <= len(value) <= 3:
        raise TypeError(f"the tool returned a tuple of {len(value)}; return (result, reward, metrics) or less")
    reward = None if len(value) < 2 else value[1]
    return _response(value[0]), reward, dict(value[2] or {}) if len(value) == 3 else {}


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, (dict, list)):
        return ToolResponse(json.dumps(value, ensure_ascii=False, default=str))
    return ToolResponse("" if value is None else str(value))


def _derived_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.kind in variadic for parameter in inspect.signature(function).parameters.values()):
        raise RolloutError(f"function tool {name}: name every parameter; *args and **kwargs cannot be described")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # the errors of transformers have no common base
        raise RolloutError(
            f"function tool {name}: no description can be made of it ({error}). Give every parameter a type hint, and "
            "the docstring a summary and a line per parameter under 'Args:'; or pass schema="
        ) from error
    schema["function"]["name"] = name
    schema["function"].pop("return", None)
    return schema
