"""The trace of a sample, and the interface of a tracing service."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hybridrl.observe.jsonl import plain
from hybridrl.registry import TRACES
from hybridrl.utils.entry_metadata import TraceMetadata

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Span:
    """A part of a session.

    Attributes:
        name: `generate`, the name of a tool, or the kind of an event of a loop.
        kind: `generate`, `tool`, `step`, or a loop's own word.
        started: in seconds since the epoch.
        inputs, outputs, attributes: as JSON data.
        failure: what went wrong; "": nothing.
    """

    name: str
    kind: str
    started: float
    seconds: float
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class SampleTrace:
    """One sample: the whole of it, and its parts in the order in which they began."""

    whole: Span
    parts: tuple[Span, ...] = ()


class TraceBackend(Protocol):
    """A service. `__init__(project, experiment, folder)` connects; `folder` is the run's."""

    def send(self, trace: SampleTrace) -> None:
        """Store a trace."""

    def close(self) -> None:
        """Send what is pending."""


def register_trace_backend(name: str, *, packages: tuple[str, ...] = (), install: str = "") -> Callable[[T], T]:
    """Class decorator: `rollout.trace.backend=NAME` uses this `TraceBackend`.

    Args:
        packages: that it needs, which is checked at start-up.
        install: how to install them, for the message.
    """

    def add(cls: T) -> T:
        TRACES.add(name, cls, TraceMetadata(packages=packages, install=install))
        return cls

    return add


def trace_of(row: Mapping[str, Any], now: float, token2text: bool, attributes: Mapping[str, Any]) -> SampleTrace:
    """The trace of a sample.

    Args:
        row: a sample as a dump has it (docs/observe.md): `input`, `output`, `score`, `uid`, `rollout`.
        now: the time of a sample without times, in seconds since the epoch.
        token2text: add the texts of tokens.
        attributes: further attributes.
    """
    rollout = dict(row.get("rollout") or {})
    tokens, events, messages = (rollout.pop(name, None) for name in ("tokens", "events", "messages"))
    started, seconds = rollout.pop("started", now), rollout.pop("seconds", 0.0)
    turns = _turns(tokens or {})
    inputs: dict[str, Any] = {"prompt_ids": (tokens or {}).get("prompt_ids")}
    outputs = {"response_ids": (tokens or {}).get("ids"), "response_mask": (tokens or {}).get("mask")}
    outputs["score"] = row.get("score")
    if token2text:
        inputs["prompt_text"], outputs["response_text"] = row.get("input"), row.get("output")
    if messages is not None:
        outputs["messages"] = messages
    parts, generated = [], 0
    generations = [event for event in events or () if event["kind"] == "generate"]
    for event in events or ():
        part = {name: value for name, value in event.items() if name not in ("kind", "at", "seconds")}
        begin, took, name, failure = started + event["at"], event["seconds"], event["kind"], part.pop("fault", "")
        span_inputs, span_outputs = {}, {}
        if event["kind"] == "generate":
            span_inputs = {"prompt_tokens": part.pop("prompt_tokens", None)}
            if len(turns) == len(generations):  # else a part of what was generated is not in this row
                start, end = turns[generated]
                span_outputs = {"token_ids": (tokens or {})["ids"][start:end]}
                if token2text:
                    span_outputs["text"] = "".join((tokens or {})["texts"][start:end])
            generated += 1
        elif event["kind"] == "tool":
            name = str(part.pop("name", "tool"))
            span_inputs, span_outputs = (
                {"arguments": part.pop("arguments", None)},
                {"response": part.pop("response", None)},
            )
        else:
            span_outputs, part = part, {}
        parts.append(
            Span(name, event["kind"], begin, took, plain(span_inputs), plain(span_outputs), plain(part), failure or "")
        )
    attributes = plain({**attributes, "uid": row.get("uid"), "data_source": row.get("data_source"), **rollout})
    return SampleTrace(
        Span("rollout", "session", started, seconds, plain(inputs), plain(outputs), attributes),
        tuple(sorted(parts, key=lambda part: part.started)),
    )


def _turns(tokens: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the (start, end) of each of the model's turns, as token positions in the response."""
    turns: list[tuple[int, int]] = []
    for place, own in enumerate(tokens.get("mask") or ()):
        if own and turns and turns[-1][1] == place:
            turns[-1] = (turns[-1][0], place + 1)
        elif own:
            turns.append((place, place + 1))
    return turns


def local_store(folder: Path) -> str:
    """The address of the database that a run's folder holds for MLflow."""
    return f"sqlite:///{folder.resolve() / 'mlflow.db'}"
