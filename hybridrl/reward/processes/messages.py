"""Messages between the pool and its processes.

Samples go to a process pickled. What comes back is JSON of a fixed form, checked on arrival
(`hybridrl.processes.untrusted_results`): a reward function cannot have the run execute anything.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import dataclasses
import json
import pickle
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.processes.frames import MalformedMessage
from hybridrl.processes.untrusted_results import Result, is_number
from hybridrl.reward.signature import RewardCall


@dataclass(frozen=True)
class Ready:
    """The function has been loaded.

    Attributes:
        how: how it is called.
        is_async: it takes any number of samples at once.
        label: its name and file.
        pid: the process that it runs in.
    """

    how: RewardCall
    is_async: bool
    label: str
    pid: int


@dataclass(frozen=True)
class Failed:
    """The function cannot be loaded, and why."""

    message: str


@dataclass(frozen=True)
class JobResults:
    """The results of one job: one per sample; a job that failed as a whole has a single one.

    Attributes:
        number: the job's.
        results: its results.
        seconds: how long the call took.
    """

    number: int
    results: list[Result]
    seconds: float


Message = Ready | Failed | list[JobResults]


def encode(message: Message) -> bytes:
    """Return a message to the pool as bytes."""
    if isinstance(message, Ready):
        return json.dumps({"ready": dataclasses.asdict(message)}).encode()
    if isinstance(message, Failed):
        return json.dumps({"failed": message.message}).encode()
    answers = [[job.number, job.seconds, [result.plain() for result in job.results]] for job in message]
    return json.dumps({"answers": answers}).encode()


def decode(data: bytes) -> Message:
    """Return the message that a process sent.

    Raises:
        MalformedMessage: it is none.
    """
    try:
        fields = json.loads(data)
        if "ready" in fields:
            return _ready(fields["ready"])
        if "failed" in fields:
            return Failed(str(fields["failed"]))
        return [_answer(*fields["answers"][number]) for number in range(len(fields["answers"]))]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}") from None


def _ready(fields: dict[str, Any]) -> Ready:
    how = fields["how"]
    if how["form"] not in ("sample", "batch"):
        raise ValueError(f"form {how['form']!r}")
    names = ("arguments", "columns", "optional", "with_default", "positional", "guessed", "truths")
    lists: dict[str, Any] = {name: tuple(map(str, how[name])) for name in names}
    lists["renamed"] = tuple((str(argument), str(parameter)) for argument, parameter in how["renamed"])
    flags = {name: bool(how[name]) for name in ("all_columns", "may_abstain")}
    call = RewardCall(how["form"], **(lists | flags))
    return Ready(call, bool(fields["is_async"]), str(fields["label"]), int(fields["pid"]))


def _answer(number: Any, seconds: Any, results: Any) -> JobResults:
    if not isinstance(number, int) or not is_number(seconds) or not isinstance(results, list) or not results:
        raise ValueError("an answer without number, seconds or results")
    return JobResults(number, [Result.of_plain(*result) for result in results], float(seconds))


def pickled(value: Any, label: str) -> bytes:
    """Return a value as it is sent to a process.

    Args:
        value: what to send.
        label: the reward function, for the message.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # a user's object may raise anything
        raise RewardError(
            f"{label} runs in a process of its own, and its arguments cannot be sent there ({error}). Data sources, "
            "ground truths, extra_info, columns and reward_kwargs must be plain values: numbers, text, lists, dicts."
        ) from error
