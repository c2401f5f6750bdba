"""Cost of the RL mathematics on the controller: estimators compared with one pass over the data, and growth with
rows.

    python benchmarks/algorithms.py [--rows 8192] [--width 1024] [--rounds 7] [--json FILE]

One pass is `rewards * mask`, float32 by int64: both are read once, and one float32 array is written. Groups of 8,
uids as strings, response lengths uniform in [1, width], rewards on the last token. One thread; CPU seconds of this
process, so other work on the machine does not count; the best of the rounds, which alternate. The allocator is told
to keep freed memory, because the page faults of fresh memory cost more than the arithmetic and vary.

Limits at 8192 x 1024: grpo and rloo within 5 passes, gae within 20, and time per row that does not grow. A second
table compares the softmax statistics that the engine computes with torch's own cross-entropy.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from hybridrl.algorithms import AdvantageEstimator, estimate_advantages, token_statistics

LIMITS = {"grpo": 5.0, "grpo_vectorized": 5.0, "rloo": 5.0, "rloo_vectorized": 5.0, "gae": 20.0}
GROWTH_LIMIT = 1.3  # exponent of time in rows between an eighth of the rows and all; 1 is linear, caches add a little
SOFTMAX_SIZES = ((4096, 128), (512, 32_000), (128, 152_000))  # tokens, vocabulary
CONFIG = SimpleNamespace(gamma=1.0, lam=0.95, norm_adv_by_std_in_grpo=True, gdpo_reward_keys=["a", "b"])
Batch = tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]


def keep_freed_memory() -> None:
    """glibc: serve large arrays from the heap and do not give it back (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, (1 << 31) - 1)


def make_batch(rows: int, width: int) -> Batch:
    """Everything that any estimator asks for."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, width + 1, rows)
    mask = torch.tensor((np.arange(width) < lengths[:, None]).astype(np.int64))
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), torch.tensor(lengths - 1)] = torch.tensor(rng.random(rows), dtype=torch.float32)
    dense = {
        name: torch.tensor(rng.random((rows, width)), dtype=torch.float32) for name in ("values", "sum_pi_squared")
    }
    tensors = {"token_level_rewards": rewards, "response_mask": mask, "old_log_probs": -dense["values"], **dense}
    tensors |= {"reward_baselines": torch.zeros(rows), "prompt_values": torch.zeros(rows)}
    tensors["process_rewards"] = dense["values"] - 0.5
    tensors["turn_states"] = torch.where(rewards != 0, 1, 0)
    others = {"uid": np.array([f"{i // 8:032x}" for i in range(rows)], dtype=object)}
    others |= {key: rng.random(rows).astype(object) for key in "ab"}
    return tensors, others


def best(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU seconds of each action, the least of the rounds, after one round to warm up."""
    seconds = dict.fromkeys(actions, float("inf"))
    for turn in range(rounds + 1):
        for name, action in actions.items():
            start = time.process_time()
            action()
            if turn:
                seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def estimators(rows: int, width: int, rounds: int, names: list[str]) -> dict[str, float]:
    """CPU seconds of one pass over the rewards ("pass") and of each estimator."""
    tensors, others = make_batch(rows, width)

    def run(name: str) -> Callable[[], object]:
        return lambda: estimate_advantages(name, tensors, others, CONFIG)

    one = {"pass": lambda: tensors["token_level_rewards"] * tensors["response_mask"]}
    return best({**one, **{name: run(name) for name in names}}, rounds)


def softmax(rounds: int) -> list[dict[str, float]]:
    """Forward and backward of the token statistics, milliseconds, for a tiny and a large vocabulary."""
    table = []
    for tokens, vocabulary in SOFTMAX_SIZES:
        logits = torch.randn(tokens, vocabulary, requires_grad=True)
        labels = torch.randint(vocabulary, (tokens,))

        def own(entropy: bool, x: torch.Tensor = logits, y: torch.Tensor = labels) -> None:
            sum(v.sum() for v in token_statistics(x, y, entropy=entropy).values()).backward()  # type: ignore[union-attr]

        def theirs(x: torch.Tensor = logits, y: torch.Tensor = labels) -> None:
            torch.nn.functional.cross_entropy(x, y, reduction="none").sum().backward()

        def plain(x: torch.Tensor = logits, y: torch.Tensor = labels) -> None:
            logp = x.log_softmax(-1)
            (logp.gather(-1, y[:, None]).sum() - (logp.exp() * logp).sum()).backward()

        actions = {"cross_entropy": theirs, "log_probs": lambda f=own: f(False),
                   "autograd with entropy": plain, "log_probs and entropy": lambda f=own: f(True)}  # fmt: skip
        seconds = best(actions, rounds)
        table.append({"tokens": tokens, "vocabulary": vocabulary, **{k: 1e3 * v for k, v in seconds.items()}})
    return table


def main() -> None:
    """Measure, print the tables, and end with status 1 where a figure is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7, help="times that each is measured")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    names = [e.value for e in AdvantageEstimator]
    seconds = estimators(options.rows, options.width, options.rounds, names)
    few = estimators(options.rows // 8, options.width, options.rounds, names)
    one = seconds["pass"]
    print(f"{options.rows} x {options.width}, one thread; one pass takes {1e3 * one:.1f} ms\n")
    print("| estimator | ms | passes | at most | growth with rows |\n|---|---|---|---|---|")
    missed, figures = [], {}
    for name in names:
        passes, growth = seconds[name] / one, float(np.log2(seconds[name] / few[name]) / 3)
        limit = LIMITS.get(name)
        figures[name] = {"ms": 1e3 * seconds[name], "passes": passes, "growth": growth}
        print(f"| {name} | {1e3 * seconds[name]:.1f} | {passes:.1f} | {limit or ''} | rows^{growth:.2f} |")
        if (limit and passes > limit) or growth > GROWTH_LIMIT:
            missed.append(name)
    table = softmax(options.rounds)
    print("\nSoftmax statistics, forward and backward, float32, ms:\n")
    print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
    for row in table:
        print("| " + " | ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps({"pass_ms": 1e3 * one, "estimators": figures, "softmax": table}, indent=1))
    if missed:
        sys.exit(f"figures not held: {', '.join(missed)}")


if __name__ == "__main__":
    main()
