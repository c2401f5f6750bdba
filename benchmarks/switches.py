"""What each switch of an update costs and saves: step time and peak memory, relative to the defaults, in one run.

    python benchmarks/switches.py [--rounds 2] [--threads 1] [--only WORD ...] [--json FILE]

The example is an update on a prompt of 64 tokens with 8 responses of log-normal length (mean 128, limit 256). The
model is a Qwen2 with 4 M parameters, most of them in its vocabulary of 32,768; its weights are random, and one process
has `strategy=fsdp2`. The defaults are those of the configuration: gradient checkpointing of whole layers, micro-batches
of 8 sequences; but `model.share_prefixes=False`, so that every line but its own computes the same rows. Each line
changes one setting.

* time: the median over rounds of the ratio of a step to one with the defaults next to it. A step is forward, backward,
  clipping and AdamW.
* update: what an update takes in addition to weights and optimizer state, at its peak, gradients included. On a CPU,
  the bytes of all tensors are counted; on a GPU, it is what PyTorch's allocator reports. A dash: what an offload moves
  stays in the same memory on a CPU, and weights are loaded during the step on a GPU.
* between: weights and optimizer state on the device between updates, computed (`hybridrl forecast`).

A second table is computed for 8 ranks that share the weights, without a step: `held` is what an update has besides
activations and logits (weights, master weights, gradients, optimizer state, gathered layers and buffers), in GiB and
relative to the defaults, and `between` as above. A last line compares how long a save keeps training waiting with
`checkpoint.async_save` and without.

`--only` measures the lines whose names contain one of the words. `use_remove_padding` is left out on a CPU, whose
attention does not pack rows. The loss of each line is compared with that of the defaults first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from training import batch_of, seconds, step_of
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig, TiledMLPConfig
from hybridrl.engine import Engine, MicroBatching, create_train_engine
from hybridrl.forecast.engine_models import forecast_engine
from hybridrl.forecast.meta_tensors import peak_of
from hybridrl.forecast.sizes import Forecast, Workload
from hybridrl.protocol import DataProto
from hybridrl.utils import device

PROMPTS, SAMPLES, PROMPT, LIMIT, MEAN, VOCABULARY = 1, 8, 64, 256, 128, 32768
MICRO = MicroBatching(size=8)
RANKS = 8  # of the second table


@dataclass(frozen=True)
class Line:
    """Settings that differ from the defaults: of the model, of the engine, and of micro-batches."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    micro: MicroBatching = MICRO
    optim: dict[str, Any] = field(default_factory=dict)
    offloads: bool = False
    needs_gpu: bool = False
    tolerance: float = 1e-3  # of the loss on a CPU
    counted: bool = True  # whether a CPU can count the bytes of its tensors


DEFAULTS = Line("defaults")
HALF = {"dtype": "bfloat16", "model_dtype": "bfloat16"}
EIGHT_BIT = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}
LINES = (
    Line("model.use_remove_padding=False", {"use_remove_padding": False}, needs_gpu=True),
    Line("model.use_fused_kernels=True", {"use_fused_kernels": True}),
    Line("model.enable_gradient_checkpointing=False", {"enable_gradient_checkpointing": False}),
    Line("model.recompute_granularity=selective", {"recompute_granularity": "selective"}),
    Line("model.enable_activation_offload=True", {"enable_activation_offload": True}, offloads=True),
    Line("model.tiled_mlp.enabled=True", {"tiled_mlp": TiledMLPConfig(enabled=True)}),
    Line("use_dynamic_bsz=True, 512 tokens", micro=MicroBatching(max_tokens=512)),
    Line("optimizer_offload=True", engine={"optimizer_offload": True}, offloads=True),
    Line("param_offload=True, optimizer_offload=True", engine={"param_offload": True, "optimizer_offload": True},
         offloads=True),
    Line("model.share_prefixes=True", {"share_prefixes": True}),
    Line("use_torch_compile=True", engine={"use_torch_compile": True}, counted=False),
    Line("dtype=bfloat16", engine={"dtype": "bfloat16"}, tolerance=2e-2),
    Line("dtype=bfloat16, model_dtype=bfloat16", engine=HALF, tolerance=2e-2),
    Line("optim.optimizer=AdamW8bit", optim=EIGHT_BIT),
)  # fmt: skip
SHARDED = (
    DEFAULTS,
    Line("fsdp_size=2", engine={"fsdp_size": 2}),
    Line("reshard_after_forward=False", engine={"reshard_after_forward": False}),
    Line("offload_policy=True", engine={"offload_policy": True}),
    Line("dtype=bfloat16", engine={"dtype": "bfloat16"}),
    Line("dtype=bfloat16, model_dtype=bfloat16", engine=HALF),
    Line("optim.optimizer=AdamW8bit", optim=EIGHT_BIT),
    Line("optimizer_offload=True", engine={"optimizer_offload": True}),
    Line("param_offload=True, optimizer_offload=True", engine={"param_offload": True, "optimizer_offload": True}),
)


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def example() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    rows = PROMPTS * SAMPLES
    lengths = torch.empty(rows).log_normal_(torch.tensor(MEAN).log().item() - 0.32, 0.8, generator=generator)
    lengths = (lengths * MEAN / lengths.mean()).round().long().clamp(8, LIMIT)
    lengths[0] = LIMIT

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
        return drawn

    prompts = [prompt for prompt in (tokens(PROMPT) for _ in range(PROMPTS)) for _ in range(SAMPLES)]
    return batch_of(prompts, [tokens(count) for count in lengths.tolist()], LIMIT)


def engine_of(folder: Path, line: Line) -> Engine:
    model = ModelConfig(path=str(folder), **{"share_prefixes": False, **line.model})
    engine = create_train_engine(
        "language_model",
        "fsdp2",
        model=model,
        engine=FSDPConfig(**line.engine),
        optim=OptimConfig(lr=1e-6, **line.optim),
    )
    engine.initialize()
    return engine


def between_updates(folder: Path, line: Line) -> int:
    """Bytes of weights and optimizer state that stay on the device."""
    return forecast(folder, line, 1).resident


def forecast(folder: Path, line: Line, ranks: int) -> Forecast:
    work = Workload(PROMPT, LIMIT, PROMPTS * SAMPLES, line.micro, None)
    model = ModelConfig(path=str(folder), **{"share_prefixes": False, **line.model})
    optim = OptimConfig(lr=1e-6, **line.optim)
    found: Forecast = forecast_engine("language_model", "fsdp2", model, FSDPConfig(**line.engine), optim, ranks, work)
    return found


def over_ranks(folder: Path) -> list[dict[str, Any]]:
    """The second table."""
    found: list[dict[str, Any]] = []
    for line in SHARDED:
        one = forecast(folder, line, RANKS)
        held = one.update - one.activations - one.logits
        found.append({"name": line.name, "held": held, "between": one.resident})
        relative = {name: found[-1][name] / found[0][name] for name in ("held", "between")}
        print(f"{line.name:<44} held {relative['held']:.2f}  between {relative['between']:.2f}", flush=True)
    print(f"defaults on {RANKS} ranks: {found[0]['held'] / 2**20:.1f} and {found[0]['between'] / 2**20:.1f} MiB")
    return found


def waiting_for_saves(folder: Path, rounds: int) -> dict[str, Any]:
    """How long training waits for the copy of a save in the background, relative to the whole save."""
    engine = engine_of(folder, DEFAULTS)
    step_of(engine, example(), MICRO)()
    contents = ["model", "optimizer", "extra"]
    ratios = []
    for number in range(rounds):
        whole = seconds(lambda number=number: engine.save(folder / f"save_{number}", contents))  # type: ignore[misc]
        copied = seconds(lambda: engine.copy_state(contents))  # type: ignore[attr-defined]
        ratios.append(copied / whole)
    ratio = statistics.median(ratios)
    print(f"checkpoint.async_save=True: training waits {ratio:.2f} of the time of a save")
    return {"name": "checkpoint.async_save=True", "waits": ratio}


def peak_of_update(step: Callable[[], float], line: Line) -> int | None:
    """Bytes that a step adds to what is there before; None if they cannot be told from main memory."""
    if device.is_gpu():
        if line.engine:  # weights and states are loaded during the step
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    return None if line.offloads or not line.counted else peak_of(step)


def measured(folder: Path, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    batch = example()
    first = engine_of(folder, DEFAULTS)
    default = step_of(first, batch, DEFAULTS.micro)
    expected = default()
    kept, peak = between_updates(folder, DEFAULTS), peak_of_update(default, DEFAULTS)
    assert peak is not None
    found: list[dict[str, Any]] = [{"name": DEFAULTS.name, "time": 1.0, "update": 1.0, "between": 1.0}]
    show(found[0])
    for line in LINES:
        if (line.needs_gpu and not device.is_gpu()) or not any(word in line.name for word in only or [""]):
            continue
        engine = engine_of(folder, line)
        step = step_of(engine, batch, line.micro)
        loss = step()
        # The learning rate is too small for the few steps of the defaults between to matter.
        if abs(loss - expected) > (2e-2 if device.is_gpu() else line.tolerance) * max(1.0, abs(expected)):
            raise SystemExit(f"{line.name}: the loss is {loss}, and that of the defaults {expected}")
        own = peak_of_update(step, line)
        times = [seconds(step) / seconds(default) for _ in range(rounds)]
        found.append(
            {
                "name": line.name,
                "time": statistics.median(times),
                "update": None if own is None else own / peak,
                "between": between_updates(folder, line) / kept if line.engine or line.optim else 1.0,
            }
        )
        show(found[-1])
        del engine, step
    print(f"defaults: the update takes {peak / 2**20:.0f} MiB, weights and optimizer state {kept / 2**20:.0f} MiB")
    return found


def show(one: dict[str, Any]) -> None:
    update = "-" if one["update"] is None else f"{one['update']:.2f}"
    print(f"{one['name']:<44} time {one['time']:.2f}  update {update:>4}  between {one['between']:.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="lines to measure; default: all")
    parser.add_argument("--json", type=Path, help="write the figures there")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        found = measured(Path(name), settings.rounds, settings.only)
        sharded = over_ranks(Path(name))
        save = waiting_for_saves(Path(name), settings.rounds)
    if settings.json:
        settings.json.write_text(
            json.dumps({"one": found, "sharded": sharded, "save": save}, indent=2) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
