"""Intervals of time that the timeline of a run shows."""

from collections import deque
from typing import NamedTuple

CONTROLLER = -1
#: How many are kept until they are taken; a program that never takes them loses the oldest.
LIMIT = 20_000


class TimedSpan(NamedTuple):
    """Something that took time.

    Attributes:
        name: a phase of the controller, or `<role>/<method>`.
        rank: of the worker group, or `CONTROLLER`.
        started: time of day, in seconds.
        seconds: how long it took.
    """

    name: str
    rank: int
    started: float
    seconds: float


def new_buffer() -> "deque[TimedSpan]":
    """Return an empty collection that keeps the newest spans."""
    return deque(maxlen=LIMIT)
