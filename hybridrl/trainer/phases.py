"""Measures the wall time per phase of a step, and adds advice when a phase runs out of memory."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

_OUT_OF_MEMORY = re.compile(r"out.of.memory|OutOfMemory|MemoryError|Cannot allocate memory", re.IGNORECASE)


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
        start = perf_counter()
        try:
            yield
        except Exception as error:
            if name in self.advice and _OUT_OF_MEMORY.search(str(error)):
                error.add_note(f"The phase {name!r} ran out of memory: {self.advice[name]}.")
            raise
        finally:
            self.seconds[name] += perf_counter() - start
