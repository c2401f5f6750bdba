"""`verl.utils.debug`: timers and memory notes that need no profiler."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from hybridrl.utils.device import is_gpu, memory_stats
from hybridrl.utils.distributed import get_rank

__all__ = ["log_gpu_memory_usage", "marked_timer", "simple_timer"]


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to `timing_raw[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


@contextlib.contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Call `simple_timer`; colours and domains are for profilers, which are not supported."""
    with simple_timer(name, timing_raw):
        yield


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """Log the memory of this process's GPU on one rank, or print it without a logger; nothing without a GPU."""
    if not is_gpu() or get_rank() != rank:
        return
    text = f"{head}, " + ", ".join(f"{name}: {value:.2f}" for name, value in memory_stats().items())
    if logger is None:
        print(text)
    else:
        logger.log(level, text)
