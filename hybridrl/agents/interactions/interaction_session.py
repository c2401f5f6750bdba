"""The simulated user of one session, within time limits and apart from all other sessions."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.agents.interactions.interaction import BaseInteraction
from hybridrl.agents.session_executor import CallTimeoutError, SessionExecutor
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.scored import Reason, UnscoredError, reward_number


@dataclass(frozen=True)
class UserReply:
    """A user's answer; see `BaseInteraction.generate_response`."""

    ended: bool
    content: str | list[dict[str, Any]]
    score: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the answer, without images."""
        parts = [{"text": self.content}] if isinstance(self.content, str) else self.content
        return "".join(str(part.get("text", "")) for part in parts)


class InteractionSession:
    """The conversation with a user. What the user raises ends the session without a score.

    Args:
        interaction: the user.
        kwargs: the row's `interaction_kwargs`.
        timeout_s: of each call.
    """

    def __init__(self, interaction: BaseInteraction, kwargs: Mapping[str, Any], timeout_s: float) -> None:
        self._interaction = interaction
        self._kwargs = {name: value for name, value in kwargs.items() if name != "name"}
        self._timeout_s = timeout_s
        self._executor = SessionExecutor("the simulated user")
        self._id: Any = None

    @property
    def name(self) -> str:
        """The user's name."""
        return self._interaction.name

    async def reply(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Return the user's answer to the model's last turn."""
        if self._id is None:
            self._id = await self._call(lambda: self._interaction.start_interaction(None, **self._kwargs))
        turns, name = [dict(message) for message in messages], self._id
        returned = await self._call(lambda: self._interaction.generate_response(name, turns, **self._kwargs))
        if not isinstance(returned, tuple) or len(returned) != 4 or not isinstance(returned[1], str | list):
            raise RolloutError(
                f"generate_response of {self.name} returned {returned!r}, and must return (should_terminate, response, "
                "score, extra)"
            )
        ended, content, score, extra = returned
        if score is not None:
            score = reward_number(score, f"generate_response of {self.name}: the score")
        return UserReply(bool(ended), content, score, dict(extra or {}))

    async def score(self) -> float | None:
        """Return `calculate_score` of the conversation; None if the model never got to the user.

        Raises:
            UnscoredError: it failed.
        """
        if self._id is None:
            return None
        try:
            score = await self._ending(self._interaction.calculate_score)
        except (UnscoredError, CallTimeoutError):
            raise
        except Exception as error:
            problem = f"calculate_score of {self.name}: {type(error).__name__}: {error}"
            raise UnscoredError(Reason.GRADING, problem) from error
        return reward_number(score, f"calculate_score of {self.name}: the result")

    async def close(self) -> None:
        """End the conversation; what this raises is reported and has no other effect."""
        try:
            if self._id is not None:
                await self._ending(self._interaction.finalize_interaction)
        except Exception as error:
            notify(f"ending a conversation with {self.name} failed: {error!r}", "warning", once=True)
        finally:
            self._executor.stop()

    async def _ending(self, method: Callable[..., Any]) -> Any:
        """Call one of the methods whose arguments verl's base class and verl's own users write differently."""
        arguments = (self._id,) if inspect.signature(method).parameters else ()
        return await self._call(lambda: method(*arguments))

    async def _call(self, make: Callable[[], Any]) -> Any:
        return await self._executor.run(make, self._timeout_s)
