"""The interface of environments: `reset` begins an episode, `step` answers a turn with observation and reward."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hybridrl.chat.parsers.tool_parser import Call, FunctionCall
from hybridrl.chat.turns import answers_of
from hybridrl.errors import RolloutError
from hybridrl.registry import ENVIRONMENTS
from hybridrl.scored import Scored, Unscored, UnscoredError
from hybridrl.utils.entry_metadata import EntryMetadata

T = TypeVar("T", bound=type)

#: text, which becomes a message of the user; messages; or None: nothing is said
Observation = str | Sequence[Mapping[str, Any]] | None


class Action(str):
    """The text of a turn of the model, without special tokens.

    Attributes:
        calls: the tool calls in it, where the environment declares tools, in their order.
        token_ids: the tokens of the turn.
    """

    calls: tuple[Call, ...]
    token_ids: tuple[int, ...]

    def __new__(cls, text: str, calls: Sequence[Call] = (), token_ids: Sequence[int] = ()) -> "Action":
        action = super().__new__(cls, text)
        action.calls, action.token_ids = tuple(calls), tuple(token_ids)
        return action

    def answers(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """The messages that answer `calls`, for an observation.

        Args:
            texts: one per call.
        """
        return answers_of(list(zip(self.template_calls, texts, strict=True)))

    @property
    def template_calls(self) -> list[FunctionCall]:
        """`calls` as the chat template gets them: one that cannot be read has no name of the model's choice."""
        return [call if isinstance(call, FunctionCall) else FunctionCall("invalid_call", {}) for call in self.calls]


@dataclass
class Step:
    """The answer of an environment.

    Attributes:
        observation: text, messages or None.
        reward: of the turn; None counts as 0. An `Unscored` ends the session without a score.
        done: the episode is over; then the observation is not shown.
        extra: values for the columns of the sample; those of later steps replace earlier ones of the same name.
        state: identifies the situation before the model's next turn, for estimators that compare turns in the same
            situation (`gigpo`); None takes the observation.
    """

    observation: Observation = None
    reward: float | Scored | Unscored | None = None
    done: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None

    @property
    def points(self) -> float:
        """The reward as a number, once it was checked."""
        return self.reward if isinstance(self.reward, float) else 0.0


class Environment:
    """An episode per object. Any class with these methods is one; deriving from this class gives their defaults.

    Methods may be `async` or not. They run in a thread of the session, so an environment that blocks or hangs delays no
    other session.

    Args:
        config: the entry `config` of its YAML entry.

    Attributes:
        tools: descriptions of the tools that the model may call, in OpenAI's format. They may be set in `reset`.
        gives_rewards: the rewards of the steps are the score. False: the reward function scores the session, and what
            steps give is added to that.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    gives_rewards: bool = True

    def __init__(self, **config: Any) -> None:
        self.config = config

    @classmethod
    def start(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Called once in each process that runs sessions, before its first one, for example to start a server.

        With worker processes (`rollout.agent.num_workers`), the controller calls it and `stop` once at start-up, so
        that mistakes are found early.

        Returns:
            The arguments of each object.
        """
        return config

    @classmethod
    def stop(cls, config: dict[str, Any]) -> None:
        """No further session runs in this process.

        Args:
            config: what `start` returned.
        """

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin the episode.

        Args:
            row: every column of the data, `env_kwargs` (`{}` where the data have none), and `seed`, which all samples
                of a prompt share and which is the same again in a run that was resumed.

        Returns:
            The observation that the model's prompt ends with, or a `Step` with `observation`, `extra` and `state`. Text
            is added to the last message of the user; messages follow those of the row.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    def step(self, action: Action) -> Any:
        """Answer a turn of the model.

        Returns:
            A `Step`, or (observation, reward, done), or (observation, reward, done, extra).
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def close(self) -> Any:
        """The session has ended, however it did."""


def register_environment(name: str) -> Callable[[T], T]:
    """Class decorator: `class_name: NAME` in `agent.environment_config_path`, or a row's `env_kwargs.name`."""

    def add(environment: T) -> T:
        ENVIRONMENTS.add(name, environment, EntryMetadata())
        return environment

    return add


def step_of(result: Any) -> Step:
    """Convert the result of `step` into a `Step`.

    Raises:
        RolloutError: it is something else, or its reward is not a finite number.
        UnscoredError: its reward is an `Unscored`.
    """
    if isinstance(result, tuple) and len(result) in (3, 4):
        observation, reward, done, *extra = result
        result = Step(observation, reward, bool(done), dict(extra[0] or {}) if extra else {})
    if not isinstance(result, Step):
        raise RolloutError(
            f"step returned {result!r}, and must return a Step, or (observation, reward, done), or (observation, "
            "reward, done, extra)"
        )
    messages_of(result.observation)
    if isinstance(result.reward, Unscored):
        raise UnscoredError(result.reward.reason, result.reward.detail)
    if isinstance(result.reward, Scored):
        result = replace(result, reward=result.reward.reward, extra={**result.extra, **result.reward.extra})
    if result.reward is not None:
        result.reward = float(result.reward)
        if not math.isfinite(result.reward):
            raise RolloutError(f"step returned the reward {result.reward}; it must be finite")
    return result


def first_step(result: Any) -> Step:
    """Convert the result of `reset` into a `Step`.

    Raises:
        RolloutError: it is neither an observation nor such a `Step`.
    """
    step = result if isinstance(result, Step) else Step(result)
    messages_of(step.observation)
    if step.done or step.reward is not None:
        raise RolloutError("reset returned a Step with a reward or with done=True, before the model's first turn")
    return step


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys() and value["role"] != "assistant"


def messages_of(observation: Observation) -> list[dict[str, Any]]:
    """An observation as messages.

    Raises:
        RolloutError: it is not one.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": str(observation)}]
    if isinstance(observation, Sequence) and all(map(_is_message, observation)):
        return [dict(message) for message in observation if isinstance(message, Mapping)]
    raise RolloutError(
        f"an environment's observation is {observation!r}; it must be text, None, or messages {{role, content}} of "
        "others than the assistant"
    )
