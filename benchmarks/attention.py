"""Attention over packed rows: forward and backward by each kernel that this machine has, in one run.

    python benchmarks/attention.py                  # heads of Qwen2.5 1.5B and 0.5B, 16,384 tokens
    python benchmarks/attention.py --tokens 512 --heads 4,2,16     # a CPU can run this one

* `packed`: `hybridrl.utils.varlen.by_pytorch`, the flash attention that is part of PyTorch (GPUs only).
* `flash_attn_4`: the package, where it is installed and made for the GPU.
* `one_by_one`: PyTorch's `scaled_dot_product_attention`, one sequence after the other.
* `padded`: one call of it for all sequences, padded to the longest.

The sequences are one of all tokens, four of equal length, and many of log-normal length. A GPU computes in bfloat16, a
CPU in float32. `seconds` is the median of `--times` calls after two that are not counted, and `first` the time of the
first call, in which kernels are compiled. `ratio` is the time against that of `padded`, and `error` the largest
difference from its output and gradients, relative to their norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from hybridrl.utils import device, varlen
from hybridrl.utils.varlen import PackedRows

Attend = Callable[[Tensor, Tensor, Tensor, PackedRows, float], Tensor]


def padded(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """See `varlen.varlen_attention`; padding stands at the end, where no token sees it."""
    lengths = rows.boundaries.diff().tolist()
    q, k, v = (pad_sequence(list(x.split(lengths)), batch_first=True).transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])


def kernels() -> Mapping[str, Attend]:
    """Those of this machine, first the one that others are compared with."""
    found: dict[str, Attend] = {"padded": padded, "one_by_one": varlen.one_by_one}
    if device.supports_varlen_attention():
        found["packed"] = varlen.by_pytorch
    if varlen.has_package():
        found["flash_attn_4"] = varlen.by_package
    return found


def lengths_of(tokens: int) -> dict[str, list[int]]:
    draw = torch.Generator().manual_seed(0)
    drawn = (torch.randn(4096, generator=draw) * 0.7).exp() * tokens / 40
    many: list[int] = []
    while sum(many) < tokens:
        many.append(min(max(1, int(drawn[len(many)])), tokens - sum(many)))
    return {"one": [tokens], "four": [tokens // 4] * 4, "many": many}


def both_ways(attend: Attend, tensors: list[Tensor], rows: PackedRows, upstream: Tensor) -> list[Tensor]:
    out = attend(*tensors, rows, tensors[0].shape[2] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


def measure(heads: int, groups: int, size: int, lengths: list[int], times: int) -> dict[str, dict[str, float]]:
    """Seconds, ratio and error of each kernel with these heads (of queries, of keys, their size)."""
    here, dtype = device.current_device(), torch.bfloat16 if device.is_gpu() else torch.float32
    draw = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), count, size) for count in (heads, groups, groups, heads)]
    *tensors, upstream = (torch.randn(shape, generator=draw).to(here, dtype) for shape in shapes)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(here)
    rows, found, expected = PackedRows(boundaries, max(lengths)), {}, []
    for name, attend in kernels().items():
        taken = []
        for _ in range(times + 2):
            device.synchronize()
            started = time.perf_counter()
            results = both_ways(attend, tensors, rows, upstream)
            device.synchronize()
            taken.append(time.perf_counter() - started)
        expected = expected or results
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)]
        found[name] = {"seconds": statistics.median(taken[2:]), "first": taken[0], "error": max(errors)}
    return {name: {**one, "ratio": one["seconds"] / found["padded"]["seconds"]} for name, one in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 14)
    parser.add_argument("--heads", nargs="+", default=["12,2,128", "14,2,64"], help="of queries, of keys, their size")
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there")
    settings = parser.parse_args()
    report: dict[str, object] = {"device": device.current_name(), "torch": torch.__version__}
    for heads in settings.heads:
        for name, lengths in lengths_of(settings.tokens).items():
            title = f"heads {heads}, {name} ({len(lengths)} sequences)"
            found = measure(*map(int, heads.split(",")), lengths, settings.times)
            report[title] = found
            for kernel, one in found.items():
                print(
                    f"{title}, {kernel}: " + ", ".join(f"{key} {value:.4g}" for key, value in one.items()), flush=True
                )
    if settings.json:
        settings.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
