"""What the tests of reward processes share."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from hybridrl.reward.processes.outcome import Outcome


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False


def scores(outcomes: Sequence[Outcome]) -> list[float | None]:
    """The scores; None where there is no score, which must then be a reason and no number."""
    assert all(math.isnan(one.score) == (one.unscored is not None) for one in outcomes)
    return [None if one.unscored is not None else one.score for one in outcomes]


def gone_within(pid: int, seconds: float) -> bool:
    """Wait until a process has ended; returns whether it has."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)
