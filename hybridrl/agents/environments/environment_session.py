"""The environment of one session: its calls within time limits, apart from all other sessions."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.agents.environments.environment import Action, Step, first_step, step_of
from hybridrl.agents.environments.load_environments import EnvironmentEntry
from hybridrl.agents.session_executor import SessionExecutor
from hybridrl.notify import notify


class EnvironmentSession:
    """An episode.

    An exception of the environment leaves `reset` and `step` as it is, and a call that takes too long is a
    `CallTimeoutError`: either ends this session without a score.

    Args:
        entry: makes the environment.
        timeout_s: of each call.

    Attributes:
        seconds: that calls took.
    """

    def __init__(self, entry: EnvironmentEntry, timeout_s: float) -> None:
        self._entry = entry
        self._timeout_s = timeout_s
        self._executor = SessionExecutor("the environment")
        self._environment: Any = None
        self.seconds = 0.0

    async def reset(self, row: Mapping[str, Any]) -> Step:
        """Make the environment and begin the episode."""

        def make() -> Any:
            self._environment = self._entry.cls(**self._entry.config)
            return self._environment.reset(row)

        return first_step(await self._timed(make))

    async def step(self, action: Action) -> Step:
        """The environment's answer to a turn."""
        return step_of(await self._timed(lambda: self._environment.step(action)))

    async def close(self) -> None:
        """End the episode; what this raises is reported and has no other effect."""
        close = getattr(self._environment, "close", None)
        try:
            if close is not None:
                await self._executor.run(close, self._timeout_s)
        except Exception as error:
            notify(f"ending an episode of {type(self._environment).__name__} failed: {error!r}", "warning", once=True)
        finally:
            self._executor.stop()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Descriptions of the tools that the environment declares."""
        return list(getattr(self._environment, "tools", ()) or ())

    @property
    def gives_rewards(self) -> bool:
        """Whether the rewards of the steps are the score."""
        return bool(getattr(self._environment, "gives_rewards", True))

    async def _timed(self, make: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return await self._executor.run(make, self._timeout_s)
        finally:
            self.seconds += time.perf_counter() - started
