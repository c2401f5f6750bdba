"""Types and functions that a replica and SGLang's process share."""

import contextlib
import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Status:
    """State of SGLang that the replica needs at any time.

    Attributes:
        last_output: when (`time.monotonic`, one clock per machine) SGLang last sent something.
        gauges: `running`, `waiting`, `kv_cache_usage` of `InferenceEngine.stats`.
    """

    last_output: float
    gauges: dict[str, float] = field(default_factory=dict)


def remove(patterns: Iterable[str]) -> None:
    """Remove the files that match; the process that ends the other does so."""
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)
