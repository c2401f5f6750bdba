"""Log-probabilities and entropy of an output layer, forward and backward: with whole logits, and a tile of tokens and
words at a time (`model.use_fused_kernels`).

    python benchmarks/logits.py [--tokens 2048] [--vocabulary 152000] [--features 896] [--rounds 3] [--json FILE]

Each way runs in a process of its own, in bfloat16 on a GPU and in float32 on a CPU, with one thread. Memory is the
peak above inputs, weights and the gradient of the weights, which all ways need. Time is the best of the rounds. In the
backward pass the chunked way computes the logits once more: 4 matrix products of the output layer in place of 3.
`whole` is what the library does without `use_fused_kernels`; `plain` are the same formulas in PyTorch's operations and
autograd.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from hybridrl.algorithms import token_statistics
from hybridrl.algorithms.linear_statistics import linear_token_statistics
from hybridrl.utils import device

WAYS = ("plain", "whole", "chunked")


def run(way: str, tokens: int, vocabulary: int, features: int, rounds: int) -> dict[str, float]:
    """Measure one way in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    here = device.current_device()
    dtype = torch.bfloat16 if device.is_gpu() else torch.float32
    hidden = torch.randn(tokens, features, device=here, dtype=dtype, requires_grad=True)
    weight = torch.empty(vocabulary, features, device=here, dtype=dtype).normal_(std=features**-0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=here)
    before = device.memory_stats()["max_memory_allocated_gb"] + weight.numel() * weight.itemsize / device.GIB
    seconds = []
    for _ in range(rounds):
        hidden.grad = weight.grad = None
        device.synchronize()
        started = time.perf_counter()
        if way == "whole":
            logits = torch.nn.functional.linear(hidden, weight)
            found = token_statistics(logits, labels, entropy=True, inplace_backward=True)
            del logits
        elif way == "plain":
            log_p = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
            found = {
                "log_probs": log_p.gather(-1, labels[:, None])[:, 0],
                "entropy": -(log_p.exp() * log_p).sum(-1),
            }
            del log_p
        else:
            found = linear_token_statistics(hidden, weight, labels=labels, entropy=True)
        (found["log_probs"] - 0.01 * found["entropy"]).mean().backward()
        del found
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = device.memory_stats()["max_memory_allocated_gb"] - before
    return {"peak_gib": peak, "seconds": min(seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--features", type=int, default=896, help="hidden size; 896 is that of Qwen2.5-0.5B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    sizes = {name: getattr(settings, name) for name in ("tokens", "vocabulary", "features", "rounds")}
    if settings.way:
        print(json.dumps(run(settings.way, **sizes)))
        return 0
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, *options]
        found[way] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(f"{way:8s} {found[way]['peak_gib']:6.2f} GiB  {found[way]['seconds']:7.2f} s", flush=True)
    ratios = {
        peer: {name: found["chunked"][name] / found[peer][name] for name in ("peak_gib", "seconds")}
        for peer in WAYS
        if peer != "chunked"
    }
    for peer, one in ratios.items():
        print(f"chunked / {peer}: {one['peak_gib']:.2f} of the memory, {one['seconds']:.2f} of the time")
    if settings.json:
        settings.json.write_text(json.dumps({**sizes, **found, "ratios": ratios}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
