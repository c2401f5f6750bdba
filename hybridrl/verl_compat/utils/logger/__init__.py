"""`verl.utils.logger`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hybridrl.utils.distributed import get_rank

__all__ = ["LocalLogger", "log_with_rank", "print_rank_0", "print_with_rank"]


class LocalLogger:
    """Prints the metrics of each step on one line.

    Args:
        print_to_console: whether to print at all.
    """

    def __init__(self, print_to_console: bool = True) -> None:
        self.print_to_console = print_to_console

    def flush(self) -> None:
        """Do nothing: each line is printed at once."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Print one line."""
        if self.print_to_console:
            print(" - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in data.items())]), flush=True)


def print_rank_0(message: str) -> None:
    """Print on rank 0."""
    if get_rank() == 0:
        print(message, flush=True)


def print_with_rank(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    """Print with the rank, on all ranks or on rank 0."""
    if not log_only_rank_0 or rank == 0:
        print(f"[Rank {rank}] {message}", flush=True)


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    """Log with the rank, on all ranks or on rank 0."""
    if not log_only_rank_0 or rank == 0:
        logger.log(level, "[Rank %s] %s", rank, message)
