"""The log of a session: its messages, generations and tool calls with their times, for dumps and traces."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SessionLog:
    """Written while the session runs. Loops have it as `server_manager.log`.

    Attributes:
        started: when the session began, in seconds since the epoch.
        messages: the conversation; None: the loop set none.
        events: generations and tool calls in the order in which they ended.
    """

    started: float = field(default_factory=time.time)
    messages: Sequence[Mapping[str, Any]] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    _begin: float = field(default_factory=time.perf_counter)

    def clock(self) -> float:
        """Seconds since the session began."""
        return time.perf_counter() - self._begin

    def add(self, kind: str, at: float, seconds: float | None = None, **fields: Any) -> None:
        """Add an event.

        Args:
            kind: `generate`, `tool`, or a word of your own.
            at: when it began, by `clock`.
            seconds: that it took; None: it ends now.
            fields: further fields of the event, as JSON data.
        """
        took = self.clock() - at if seconds is None else seconds
        self.events.append({"kind": kind, "at": round(at, 6), "seconds": round(took, 6), **fields})

    def record(self) -> dict[str, Any]:
        """`{started, seconds, messages, events}`."""
        messages = None if self.messages is None else without_pixels(self.messages)
        seconds = round(self.clock(), 6)
        return {"started": self.started, "seconds": seconds, "messages": messages, "events": list(self.events)}


def without_pixels(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as JSON data: of an image only that it is there."""
    stripped = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [{name: value for name, value in part.items() if name != "image"} for part in content]
        stripped.append({**message, **({"content": content} if "content" in message else {})})
    return stripped
