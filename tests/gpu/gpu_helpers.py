"""What the files of these tests share: batches, times, free memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from hybridrl.protocol import DataProto
from hybridrl.utils import device


def batch_of(lengths: list[tuple[int, int]], vocabulary: int, seed: int = 0) -> DataProto:
    """Rows of random tokens with these lengths of prompt and response, and advantages."""
    generator = torch.Generator().manual_seed(seed)
    prompt, response = (max(length) for length in zip(*lengths, strict=True))
    ids = torch.randint(10, vocabulary, (len(lengths), prompt + response), generator=generator)
    attention = torch.zeros_like(ids)
    for row, (before, after) in enumerate(lengths):
        attention[row, prompt - before : prompt + after] = 1
    mask = attention[:, prompt:].clone()
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "responses": ids[:, prompt:].clone(),
            "response_mask": mask,
            "advantages": torch.randn(mask.shape, generator=generator),
        },
        meta_info={"batch_num_tokens": int(mask.sum())},
    )


def lognormal(rows: int, mean: int, limit: int, seed: int = 0) -> list[tuple[int, int]]:
    """Lengths as responses have them: many short ones, few long ones; prompts of up to 256 tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, generator=generator) * 0.8 - 0.32).exp() * mean
    prompts = torch.randint(64, 257, (rows,), generator=generator)
    return [(int(p), int(n)) for p, n in zip(prompts, drawn.clamp(8, limit), strict=True)]


def check_errors(found: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Log-probabilities in bfloat16 are as near to those in float32 as a peer's; returns mean errors, for figures.

    Logits have 8 bits in bfloat16, so two ways to compute them differ by some hundredths, and by what the sums before
    them rounded.
    """
    error, other = (found - exact).abs(), (peer - exact).abs()
    means = {"error_mean": float(error.mean()), "peer_error_mean": float(other.mean())}
    assert means["error_mean"] < 1.2 * means["peer_error_mean"] + 1e-4, means
    assert float(error.max()) < 2 * float(other.max()), (float(error.max()), float(other.max()))
    assert means["peer_error_mean"] < 0.03, means
    return means


def seconds(call: Callable[[], Any], times: int = 3) -> float:
    """The median time of a call, after a first one that is not counted."""
    call()
    taken = []
    for _ in range(times):
        device.synchronize()
        started = time.perf_counter()
        call()
        device.synchronize()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[times // 2]


def free_gib() -> float:
    device.empty_cache()
    return device.memory_stats()["free_gb"]


def peak_gib() -> float:
    return device.memory_stats()["max_memory_allocated_gb"]


def bf16_flops() -> float:
    """What this GPU multiplies in a second, measured on one large product."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, times=10)
