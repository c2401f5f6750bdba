"""Time of one update: what sharing prefixes and leaving out padding save, what FSDP2 costs, and dividing experts.

    python benchmarks/training.py [--case fsdp] [--case group] [--case tail] [--case experts] [--rounds 3] [--threads 1]
                                  [--json FILE]

Each case compares two ways to take the same step on the same model with random weights, turn by turn, in one process
(`experts`: in two):

* `group`: a prompt with 8 responses, each as long as the prompt. `model.share_prefixes=True` against False.
* `tail`: responses of log-normal length, whose mean is a quarter of the limit. Packed rows against a plain PyTorch loop
  whose micro-batches have the width of the batch, as with `use_remove_padding=False` in verl.
* `fsdp`: rows of one length under FSDP2 on a mesh of this process alone, against the plain module that one rank uses.
* `experts`: two ranks that divide the experts of each layer (`expert_parallel_size=2`), against two that gather all of
  them. The model is a mixture of 32 experts with 20 M parameters; the ranks have the same rows in both ways.

Else the model is a Qwen2 with 10 M parameters. It computes in float32 on a CPU and in bfloat16 on a GPU; `experts`
takes two GPUs. A step is forward, backward, clipping and AdamW. The figure of a case is the median over rounds of the
ratio of both times of a round. The losses of both ways are compared first, so that a ratio is never one of different
computations.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import Engine, MicroBatching
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.models.attention import VARLEN
from hybridrl.protocol import DataProto
from hybridrl.utils import device, distributed

VOCABULARY = 2048
LIMITS = {"experts": 1.0, "fsdp": 1.05, "group": 0.65, "tail": 0.4}


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def save_experts(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        moe_intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=2,
        max_position_embeddings=8192,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Sharded(FSDPEngine):
    """Under FSDP2, though there is one rank."""

    def _is_sharded(self) -> bool:
        return True


def make_engine(folder: Path, kind: type[FSDPEngine] = FSDPEngine, experts: int = 1, **model: Any) -> FSDPEngine:
    engine = kind(
        "language_model",
        model=ModelConfig(path=str(folder), enable_gradient_checkpointing=False, **model),
        engine=FSDPConfig(expert_parallel_size=experts),
        optim=OptimConfig(lr=1e-6),
    )
    engine.initialize()
    return engine


def batch_of(prompts: list[list[int]], responses: list[list[int]], width: int) -> DataProto:
    """Prompts padded at the left, responses at the right up to `width`."""
    left = max(map(len, prompts))
    ids = torch.zeros(len(prompts), left + width, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        place = slice(left - len(prompt), left + len(response))
        ids[row, place] = torch.tensor(prompt + response)
        attention[row, place] = 1
    mask = attention[:, left:].clone()
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": attention, "response_mask": mask, "advantages": advantages}
    )


def loss_of(log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    return -(log_probs * advantages * mask).sum() / tokens


def step_of(engine: Engine, batch: DataProto, micro: MicroBatching) -> Callable[[], float]:
    tokens = int(batch.batch["response_mask"].sum())

    def loss_fn(outputs: dict[str, torch.Tensor], part: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        fields = part.batch
        loss = loss_of(outputs["log_probs"], fields["advantages"], fields["response_mask"], tokens)
        losses.append(float(loss.detach()))
        return loss, {}

    losses: list[float] = []

    def step() -> float:
        losses.clear()
        engine.train_batch(batch, micro, loss_fn)
        return sum(losses)

    return step


def padded_step(folder: Path, batch: DataProto, rows: int) -> Callable[[], float]:
    """A plain loop over micro-batches of `rows` rows, each as wide as the batch."""
    dtype = torch.bfloat16 if device.is_gpu() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device.current_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    fields = {name: batch.batch[name].to(device.current_device()) for name in batch.batch.keys()}
    width = fields["response_mask"].shape[1]
    tokens = int(fields["response_mask"].sum())

    def step() -> float:
        total = 0.0
        for start in range(0, len(batch), rows):
            part = {name: tensor[start : start + rows] for name, tensor in fields.items()}
            positions = (part["attention_mask"].cumsum(1) - 1).clamp(min=0)
            output = model(
                input_ids=part["input_ids"],
                attention_mask=part["attention_mask"],
                position_ids=positions,
                logits_to_keep=width + 1,
                use_cache=False,
            )
            labels = part["input_ids"][:, -width:, None]
            log_probs = output.logits[:, :-1].float().log_softmax(-1).gather(-1, labels)[..., 0]
            loss = loss_of(log_probs, part["advantages"], part["response_mask"], tokens)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def group_case(folder: Path) -> tuple[Callable[[], float], Callable[[], float], dict[str, int]]:
    """The step with shared prefixes, and the one without."""
    samples, length = 8, 256 if not device.is_gpu() else 2048
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
    responses = torch.randint(VOCABULARY, (samples, length), generator=generator).tolist()
    batch = batch_of([prompt] * samples, responses, length)
    fast, slow = (step_of(make_engine(folder, share_prefixes=share), batch, MicroBatching()) for share in (True, False))
    return fast, slow, {"samples": samples, "prompt": length, "response": length}


def tail_case(folder: Path) -> tuple[Callable[[], float], Callable[[], float], dict[str, int]]:
    """The step on packed rows, and the one on rows of the batch's width."""
    rows, limit = 32, 512 if not device.is_gpu() else 4096
    generator = torch.Generator().manual_seed(0)
    # The mean of a log-normal distribution with this median and a deviation of 0.8 is a quarter of the limit.
    lengths = torch.empty(rows).log_normal_(torch.tensor(limit / 4).log().item() - 0.32, 0.8, generator=generator)
    lengths = (lengths * (limit / 4) / lengths.mean()).round().long().clamp(8, limit)
    lengths[0] = limit
    prompts = [torch.randint(VOCABULARY, (16,), generator=generator).tolist() for _ in range(rows)]
    responses = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths.tolist()]
    batch = batch_of(prompts, responses, limit)
    packed = make_engine(folder, override_config={} if device.is_gpu() else {"attn_implementation": VARLEN})
    tokens = 1 << 11 if not device.is_gpu() else 1 << 15
    fast = step_of(packed, batch, MicroBatching(max_tokens=tokens))
    slow = padded_step(folder, batch, rows=tokens // limit)
    return (
        fast,
        slow,
        {"rows": rows, "limit": limit, "mean": int(lengths.float().mean())},
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def fsdp_case(folder: Path) -> tuple[Callable[[], float], Callable[[], float], dict[str, int]]:
    """The step under FSDP2 on one rank, and the one of the plain module."""
    port = free_port()
    distributed.init_process_group(0, 1, "127.0.0.1", port, timeout_seconds=120)
    rows, length = 8, 256 if not device.is_gpu() else 2048
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (torch.randint(VOCABULARY, (rows, length), generator=generator).tolist() for _ in range(2))
    batch = batch_of(prompts, responses, length)
    sharded, plain = (
        step_of(make_engine(folder, kind), batch, MicroBatching(size=4)) for kind in (Sharded, FSDPEngine)
    )
    return sharded, plain, {"rows": rows, "prompt": length, "response": length}


def experts_rank(rank: int, port: int, folder: Path, rounds: int, threads: int) -> None:
    """One of two ranks; rank 0 writes the figures."""
    torch.set_num_threads(threads)
    if device.is_gpu():
        torch.cuda.set_device(rank)
    distributed.init_process_group(rank, 2, "127.0.0.1", port, timeout_seconds=300)
    rows, length = 8, 128 if not device.is_gpu() else 2048
    generator = torch.Generator().manual_seed(rank)
    prompts, responses = (torch.randint(VOCABULARY, (rows, length), generator=generator).tolist() for _ in range(2))
    batch = batch_of(prompts, responses, length)
    divided, gathered = (
        step_of(make_engine(folder / "experts", experts=size), batch, MicroBatching(size=2)) for size in (2, 1)
    )
    measured = compared("experts", divided, gathered, rounds)
    if rank == 0:
        sizes = {"rows": rows, "prompt": length, "response": length}
        (folder / "experts.json").write_text(json.dumps({**sizes, **measured}), encoding="utf-8")
    distributed.destroy_process_group()


def seconds(step: Callable[[], float]) -> float:
    device.synchronize()
    started = time.perf_counter()
    step()
    device.synchronize()
    return time.perf_counter() - started


def measure(case: str, folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    if case == "experts":
        save_experts(folder / "experts")
        mp.spawn(experts_rank, (free_port(), folder, rounds, threads), nprocs=2)
        measured: dict[str, Any] = json.loads((folder / "experts.json").read_text(encoding="utf-8"))
        return measured
    fast, slow, sizes = {"fsdp": fsdp_case, "group": group_case, "tail": tail_case}[case](folder)
    return {**sizes, **compared(case, fast, slow, rounds)}


def compared(case: str, fast: Callable[[], float], slow: Callable[[], float], rounds: int) -> dict[str, Any]:
    first, second = fast(), slow()  # also warms up
    tolerance = 2e-2 if device.is_gpu() else 1e-4
    if abs(first - second) > tolerance * max(1.0, abs(second)):
        raise SystemExit(f"{case}: the losses of both ways differ: {first} and {second}")
    times = [(seconds(fast), seconds(slow)) for _ in range(rounds)]
    return {
        "seconds": statistics.median(one for one, _ in times),
        "peer_seconds": statistics.median(other for _, other in times),
        "ratio": statistics.median(one / other for one, other in times),
        "limit_of_ratio": LIMITS[case],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", action="append", choices=sorted(LIMITS), help="all that the devices allow if left out"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        possible = [case for case in sorted(LIMITS) if case != "experts" or torch.cuda.device_count() != 1]
        for case in settings.case or possible:
            found[case] = one = measure(case, Path(name), settings.rounds, settings.threads)
            print(
                f"{case}: {one['seconds']:.2f} s against {one['peer_seconds']:.2f} s, ratio {one['ratio']:.2f} "
                f"(at most {LIMITS[case]})",
                flush=True,
            )
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(any(one["ratio"] > one["limit_of_ratio"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
