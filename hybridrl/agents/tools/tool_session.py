"""Runs the tool calls of one session: side by side, within time limits, and never to the harm of another session."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.agents.session_executor import CallTimeoutError, SessionExecutor
from hybridrl.agents.tools.tool import BaseTool, ToolResponse
from hybridrl.chat.parsers.tool_parser import FunctionCall
from hybridrl.chat.session_images import ImageReader
from hybridrl.config.schema.multi_turn import MultiTurnConfig
from hybridrl.errors import RolloutError
from hybridrl.models.vision import ImageTensors
from hybridrl.notify import notify
from hybridrl.scored import Reason, Unscored, UnscoredError, reward_number


@dataclass
class ToolResult:
    """The answer to one call.

    Attributes:
        text: what the model gets.
        reward: of this call; None: it has none.
        metrics: by name.
        fault: why the tool did not answer: "unknown", "arguments", "error", "timeout", "limit"; "" if it did.
        seconds: that the call took.
        images: patches of each image that the model gets.
    """

    text: str
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    seconds: float = 0.0
    images: list[ImageTensors] = field(default_factory=list)

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The content of the answering message: text, or parts if there are images."""
        if not self.images:
            return self.text
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in self.images]
        return parts + ([{"type": "text", "text": self.text}] if self.text else [])


class ToolSession:
    """The tools of one session.

    Args:
        tools: by name.
        settings: `rollout.multi_turn`.
        tools_kwargs: for each tool, `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs` and `release_kwargs`.
        reader: of images that tools return; None: the model reads text alone.

    Attributes:
        tools: by name.
        seconds: that its calls took.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        settings: MultiTurnConfig,
        tools_kwargs: Mapping[str, Any] | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self._reader = reader
        self.tools = tools
        self._settings = settings
        self._kwargs = tools_kwargs or {}
        self._instances: dict[str, asyncio.Task[str]] = {}
        self._executor = SessionExecutor("the tool")
        self.seconds = 0.0

    async def call(self, calls: Sequence[FunctionCall], agent_data: Any = None) -> list[ToolResult]:
        """The results of calls that the model made in one turn, in their order.

        The first `max_parallel_calls` run side by side. The others are answered with the reason why they do not run.

        Raises:
            UnscoredError: a tool raised it, which ends the session.
        """
        started = time.perf_counter()
        limit = self._settings.max_parallel_calls
        results = await asyncio.gather(*(self._timed(call, agent_data) for call in calls[:limit]))
        refusal = f"Error: not run, because at most {limit} tool call{'s' * (limit > 1)} per turn can be made"
        self.seconds += time.perf_counter() - started
        return [*results, *(ToolResult(refusal, fault="limit") for _ in calls[limit:])]

    async def close(self) -> dict[str, float | Unscored]:
        """End the session's use of its tools.

        Returns:
            The result of `calc_reward` of each tool that was used, by name; an `Unscored` if it failed.
        """
        scores: dict[str, float | Unscored] = {}
        for name, created in self._instances.items():
            if created.done() and not created.cancelled() and created.exception() is None:
                scores[name] = await self._end(self.tools[name], created.result())
        self._executor.stop()
        return scores

    async def _end(self, tool: BaseTool, instance: str) -> float | Unscored:
        """Return the result of `calc_reward`, and release the tool even if that fails."""
        score = await self._score(tool, instance)
        try:
            await self._limited(lambda: tool.release(instance, **self._row_kwargs(tool, "release_kwargs")))
        except Exception as error:
            notify(f"tool {tool.name}: ending a session's use of it failed: {error!r}", "warning", once=True)
        return score

    async def _score(self, tool: BaseTool, instance: str) -> float | Unscored:
        kwargs = self._row_kwargs(tool, "calc_reward_kwargs")
        try:
            score = await self._limited(lambda: tool.calc_reward(instance, **kwargs))
            return reward_number(score, f"calc_reward of tool {tool.name}: the result")
        except UnscoredError as error:
            return error.unscored
        except CallTimeoutError as error:
            return Unscored(Reason.TIMEOUT, f"calc_reward of tool {tool.name}: {error}")
        except Exception as error:
            return Unscored(Reason.GRADING, f"calc_reward of tool {tool.name}: {type(error).__name__}: {error}")

    def _row_kwargs(self, tool: BaseTool, name: str) -> dict[str, Any]:
        """Return an entry of the row's `tools_kwargs`; Parquet has None where only other rows have the entry."""
        return dict((self._kwargs.get(tool.name) or {}).get(name) or {})

    async def _timed(self, call: FunctionCall, agent_data: Any) -> ToolResult:
        started = time.perf_counter()
        result = await self._answer(call, agent_data)
        result.seconds = time.perf_counter() - started
        return result

    async def _answer(self, call: FunctionCall, agent_data: Any) -> ToolResult:
        tool = self.tools.get(call.name)
        if tool is None:
            names = ", ".join(self.tools) or "none"
            return self._failed(f"unknown tool {call.name!r}; choose from {names}", "unknown")
        if error := _argument_error(tool, call.arguments):
            return self._failed(error, "arguments")
        kwargs = self._row_kwargs(tool, "execute_kwargs")
        try:
            instance = await self._instance(tool)
            response, reward, metrics = await self._limited(
                lambda: tool.execute(instance, dict(call.arguments), agent_data=agent_data, **kwargs)
            )
            text = response.text if isinstance(response, ToolResponse) else str(response)
            images = await self._images(response)
        except UnscoredError:
            raise
        except CallTimeoutError as error:
            return self._failed(str(error), "timeout")
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {error}", "error")
        points = None if reward is None else reward_number(reward, f"tool {tool.name}: the reward of a call")
        return ToolResult(self._cut(text or ""), points, dict(metrics or {}), images=images)

    async def _images(self, response: Any) -> list[ImageTensors]:
        """The patches of the images that a tool returned."""
        images = (response.image if isinstance(response, ToolResponse) else None) or []
        if images and self._reader is None:
            raise RolloutError("the tool returned images, and the model reads text alone")
        return [] if self._reader is None else await self._reader.read(images)

    async def _instance(self, tool: BaseTool) -> str:
        """The id that `create` returned; parallel first calls share one."""
        if tool.name not in self._instances:
            kwargs = self._row_kwargs(tool, "create_kwargs")

            async def create() -> str:
                return str((await self._limited(lambda: tool.create(create_kwargs=kwargs)))[0])

            self._instances[tool.name] = asyncio.ensure_future(create())
        return await asyncio.shield(self._instances[tool.name])

    async def _limited(self, make: Callable[[], Any]) -> Any:
        """The result of a call of a tool.

        Raises:
            CallTimeoutError: it took longer than `tool_timeout_s`, without the time in `clock.stopped()`.
        """
        return await self._executor.run(make, self._settings.tool_timeout_s)

    def _failed(self, reason: str, fault: str) -> ToolResult:
        return ToolResult(self._cut(f"Error: {reason}"), fault=fault)

    def _cut(self, text: str) -> str:
        """Return valid Unicode text of at most `max_tool_response_length` characters, and a mark where it was cut."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        limit, side = self._settings.max_tool_response_length, self._settings.tool_response_truncate_side
        if len(text) <= limit:
            return text
        if side == "left":
            return "(truncated)..." + text[len(text) - limit :]
        if side == "right":
            return text[:limit] + "...(truncated)"
        head = limit // 2
        return text[:head] + "...(truncated)..." + text[len(text) - (limit - head) :]


def _argument_error(tool: BaseTool, arguments: Mapping[str, Any]) -> str | None:
    """Return an error that names the call's missing or unknown parameters, or None."""
    parameters = tool.tool_schema["function"]["parameters"]
    properties = parameters.get("properties", {})
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        return f"{tool.name} needs {', '.join(missing)}; the call gave {', '.join(arguments) or 'no arguments'}"
    unknown = [name for name in arguments if name not in properties]
    if unknown and not parameters.get("additionalProperties"):
        return f"{tool.name} has no parameter {', '.join(unknown)}; it has {', '.join(properties) or 'none'}"
    return None
