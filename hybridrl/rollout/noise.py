"""Sampling noise that is keyed by sample, not by process.

Each response draws its uniforms from a stream keyed by (seed, step, purpose, prompt, sample index). How a batch is
split over ranks, ordered or padded therefore changes nothing, and a resumed run draws what the uninterrupted one would
have drawn.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from hybridrl.protocol.names import ATTEMPT

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def purpose_of(meta: Mapping[str, Any]) -> str:
    """Return the purpose of a batch for `stream_keys`; a further attempt at a sample draws other noise."""
    attempt = int(meta.get(ATTEMPT, 0))
    return ("validate" if meta.get("validate", False) else "train") + (f" attempt {attempt}" if attempt else "")


def stream_keys(seed: int, step: int, purpose: str, uids: Sequence[str], samples: Sequence[int]) -> np.ndarray:
    """One 64-bit key per row, [B] uint64.

    Args:
        seed: the run's sampling seed (`rollout.seed`).
        step: the training step.
        purpose: "train", "validate", ...: streams of different purposes are independent.
        uids: the prompt's uid, one per row.
        samples: which of the prompt's samples the row is.
    """
    keys = [
        blake2b(f"{seed}/{step}/{purpose}/{uid}/{sample}".encode(), digest_size=8).digest()
        for uid, sample in zip(uids, samples, strict=True)
    ]
    return np.frombuffer(b"".join(keys), dtype="<u8").astype(np.uint64)


def uniforms(keys: np.ndarray, length: int) -> np.ndarray:
    """Uniforms in [0, 1), [B, length] float64: SplitMix64 (Steele et al., 2014) at counters 1..length of each key."""
    with np.errstate(over="ignore"):
        state = keys[:, None] + _GOLDEN * np.arange(1, length + 1, dtype=np.uint64)[None, :]
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
