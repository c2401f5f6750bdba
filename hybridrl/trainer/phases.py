"""Measures the wall time per phase of a step, and adds advice when a phase runs out of memory."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, time

from hybridrl.errors import is_out_of_memory
from hybridrl.utils.spans import CONTROLLER, TimedSpan, new_buffer


class PhaseTimer:
    """Measures the phases of one step.

    Args:
        advice: what to change if a phase runs out of memory, by phase.

    Attributes:
        seconds: wall time of each phase so far, by name.
    """

    def __init__(self, advice: Mapping[str, str] | None = None) -> None:
        self.advice = advice or {}
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `seconds[name]`; an out-of-memory error says what to change."""
        start, started = perf_counter(), time()
        try:
            yield
        except Exception as error:
            if name in self.advice and is_out_of_memory(error):
                error.add_note(f"The phase {name!r} ran out of memory: {self.advice[name]}.")
            raise
        finally:
            seconds = perf_counter() - start
            self.seconds[name] += seconds
            _spans.append(TimedSpan(name, CONTROLLER, started, seconds))


_spans = new_buffer()


def take_spans() -> list[TimedSpan]:
    """Return the phases of this process, of all timers and threads, since the previous call."""
    return [_spans.popleft() for _ in range(len(_spans))]
