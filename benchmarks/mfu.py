"""Model FLOPs utilization of a policy update on one GPU, ours and TRL's, in one run.

    python benchmarks/mfu.py                         # 0.5 B and 1.5 B at 4,096 and 16,384 tokens, bfloat16
    python benchmarks/mfu.py --models 0.5b --tokens 4096 --ways full full_liger trl trl_liger
    python benchmarks/mfu.py --models tiny --tokens 64 --batch-tokens 512      # a CPU can run this one

Each measurement is one update of a model with random weights in the shape of Qwen2.5: forward, backward, clipping and
AdamW, on responses of a given length with prompts of an eighth of it that no two rows share, `--batch-tokens` tokens in
all, `--micro-tokens` of them in a micro-batch (or one row). Both sides keep master weights and the optimizer's state in
float32, and use the attention that they choose themselves or that of `--attention`.

* `full`: this library with its defaults, so every layer is computed again in the backward pass.
* `selective`, `none`: with `model.recompute_granularity=selective`, and without gradient checkpointing.
* `..._liger`, `..._compiled`, `..._fused`: with `model.use_liger`, `fsdp_config.use_torch_compile` and
  `model.use_fused_kernels`.
* `trl`: the training loop of TRL's GRPOTrainer (`beta=0`), with gradient checkpointing and bf16, whose generation is
  replaced by the same rows. `trl_liger` is the same with `use_liger_kernel=True`. TRL also computes the entropy of
  every token, as it always does; ours does not.

Ways whose package is missing are left out.

`mfu` counts FLOPs as the library's metrics do (`hybridrl.models.work`: attention over whole squares), `mfu_causal` only
the half of attention that a causal model needs. Neither counts what gradient checkpointing computes again. Both are
divided by the data sheet's peak for the device (`device.peak_tflops`); `matmul_tflops` is what a product of
8,192 x 8,192 reaches here. `peak_gib` is the most memory that tensors took, and `forecast_gib` what the library's
forecast says.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching, create_train_engine
from hybridrl.forecast.engine_models import forecast_engine
from hybridrl.forecast.sizes import Workload
from hybridrl.models.work import training_flops, work_of
from hybridrl.protocol import DataProto
from hybridrl.utils import device

SHAPES: Mapping[str, Mapping[str, int]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCABULARY = {"0.5b": 151936, "1.5b": 151936, "tiny": 512}
NO_CHECKPOINTS = {"enable_gradient_checkpointing": False}
#: settings of `model` and of `fsdp_config`
OURS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "full": ({}, {}),
    "full_liger": ({"use_liger": True}, {}),
    "full_compiled": ({}, {"use_torch_compile": True}),
    "selective": ({"recompute_granularity": "selective"}, {}),
    "none": (NO_CHECKPOINTS, {}),
    "none_liger": ({**NO_CHECKPOINTS, "use_liger": True}, {}),
    "none_compiled": (NO_CHECKPOINTS, {"use_torch_compile": True}),
    "none_fused": ({**NO_CHECKPOINTS, "use_fused_kernels": True}, {}),
    "none_liger_fused": ({**NO_CHECKPOINTS, "use_liger": True, "use_fused_kernels": True}, {}),
}
WAYS = [*OURS, "trl", "trl_liger"]
#: packages that are not always there, and a part of the names of the ways that need them
PACKAGES = {"trl": "trl", "liger_kernel": "liger"}


def save_model(folder: Path, name: str, tokens: int) -> PreTrainedConfig:
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[name],
        vocab_size=VOCABULARY[name],
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    with device.current_device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return config


def rows_of(count: int, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Prompts and responses without padding, and an advantage per row."""
    draw = torch.Generator().manual_seed(0)
    prompt = tokens // 8
    ids = torch.randint(10, vocabulary, (count, tokens), generator=draw)
    return {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "advantages": torch.randn(count, generator=draw),
    }


def clipped_loss(log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """PPO's clipped surrogate on-policy, where the old log-probabilities are those of the pass itself."""
    ratio = (log_probs - log_probs.detach()).exp()
    shares = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(shares * mask).sum() / tokens


def our_settings(folder: Path, way: str, settings: argparse.Namespace) -> tuple[ModelConfig, FSDPConfig]:
    model, engine = OURS[way]
    override = {} if settings.attention is None else {"attn_implementation": settings.attention}
    return ModelConfig(path=str(folder), override_config=override, **model), FSDPConfig(**engine)


def our_forecast(folder: Path, rows: dict[str, torch.Tensor], way: str, settings: argparse.Namespace) -> float:
    """GiB that `hybridrl forecast` expects of such an update."""
    prompt, response = (rows[name].shape[1] for name in ("prompts", "responses"))
    micro = MicroBatching(max_tokens=max(settings.micro_tokens, prompt + response))
    work = Workload(prompt, response, len(rows["prompts"]), micro, None, entropy=False)
    found = forecast_engine(
        "language_model", "fsdp2", *our_settings(folder, way, settings), OptimConfig(lr=1e-6), 1, work
    )
    return 0.0 if found is None else found.update / device.GIB


def our_step(folder: Path, rows: dict[str, torch.Tensor], way: str, settings: argparse.Namespace) -> Callable[[], Any]:
    model, settings_of_engine = our_settings(folder, way, settings)
    optim = OptimConfig(lr=1e-6)
    engine = create_train_engine("language_model", "fsdp2", model=model, engine=settings_of_engine, optim=optim)
    engine.initialize()
    ids = torch.cat([rows["prompts"], rows["responses"]], 1)
    mask = torch.ones_like(rows["responses"])
    batch = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": mask,
            "advantages": rows["advantages"][:, None].expand(mask.shape).contiguous(),
        }
    )
    tokens = mask.numel()

    def loss_fn(outputs: dict[str, torch.Tensor], part: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        fields = part.batch
        return clipped_loss(outputs["log_probs"], fields["advantages"], fields["response_mask"], tokens), {}

    micro = MicroBatching(max_tokens=max(settings.micro_tokens, ids.shape[1]))
    return lambda: engine.train_batch(batch, micro, loss_fn)


def trl_seconds(folder: Path, rows: dict[str, torch.Tensor], settings: argparse.Namespace, liger: bool) -> list[float]:
    """Seconds of each step of TRL's loop; the first one is not counted."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    here, times = device.current_device(), []
    count, width = rows["responses"].shape
    per_pass = min(count, max(1, settings.micro_tokens // (rows["prompts"].shape[1] + width)))

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            device.synchronize()
            times.append(time.perf_counter())

    class Given(GRPOTrainer):
        """Trains on given rows in place of generated ones."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            found = {"prompt_ids": rows["prompts"], "completion_ids": rows["responses"]}
            found |= {name.replace("ids", "mask"): torch.ones_like(ids) for name, ids in found.items()}
            found |= {"advantages": rows["advantages"], "num_items_in_batch": torch.tensor(count * width)}
            return {name: tensor.to(here) for name, tensor in found.items()}

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=count // per_pass,
        num_generations=2,
        max_completion_length=width,
        max_steps=settings.steps + 1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=device.is_gpu(),
        use_cpu=not device.is_gpu(),
        gradient_checkpointing=True,
        use_liger_kernel=liger,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=settings.attention),
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["0"] * count * (settings.steps + 1)}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), pad_token="0", eos_token="1"),
        callbacks=[Clock()],
    )
    trainer.train()
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _tokenizer() -> Any:
    """Of two words: TRL asks for a tokenizer, and nothing is tokenized."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"0": 0, "1": 1}, unk_token="0"))


def seconds_of(step: Callable[[], Any], steps: int) -> list[float]:
    step()  # warms up
    times = []
    for _ in range(steps):
        device.synchronize()
        started = time.perf_counter()
        step()
        device.synchronize()
        times.append(time.perf_counter() - started)
    return times


def matmul_tflops() -> float | None:
    if not device.is_gpu():
        return None
    size = 8192
    left, right = (torch.randn(size, size, device=device.current_device(), dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / statistics.median(seconds_of(lambda: left @ right, 10)) / 1e12


def measure(folder: Path, config: PreTrainedConfig, title: str, settings: argparse.Namespace) -> dict[str, Any]:
    tokens = config.max_position_embeddings
    count = max(2, settings.batch_tokens // tokens)
    rows = rows_of(count, tokens, config.vocab_size)
    lengths, predicted = [tokens] * count, rows["responses"].numel()
    flops = training_flops(config, lengths, predicted)
    causal = 6.0 * (predicted * config.hidden_size * config.vocab_size + sum(map(work_of(config).of, lengths)))
    assert flops is not None
    peak = device.peak_tflops(device.current_name())

    def trl(liger: bool) -> list[float]:
        return trl_seconds(folder, rows, settings, liger)

    def ours(name: str) -> list[float]:
        return seconds_of(our_step(folder, rows, name, settings), settings.steps)

    ways: dict[str, Callable[[], list[float]]] = {name: functools.partial(ours, name) for name in OURS}
    ways |= {"trl": lambda: trl(False), "trl_liger": lambda: trl(True)}
    ways = {name: ways[name] for name in settings.ways}
    found: dict[str, Any] = {"rows": count}
    for name, way in ways.items():
        gc.collect()
        device.empty_cache()
        device.reset_peak_memory()
        try:
            taken = statistics.median(way())
        except torch.OutOfMemoryError as error:
            found[name] = {"error": str(error).splitlines()[0]}
            continue
        one = {
            "seconds": taken,
            "tokens_per_s": count * tokens / taken,
            "peak_gib": device.memory_stats()["max_memory_allocated_gb"],
        }
        if peak is not None:
            one |= {"mfu": flops / taken / peak / 1e12, "mfu_causal": causal / taken / peak / 1e12}
        if name in OURS:
            one["forecast_gib"] = our_forecast(folder, rows, name, settings)
        found[name] = {key: float(f"{value:.4g}") for key, value in one.items()}
        print(f"{title}, {name}: {found[name]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384], help="tokens of a row, with its prompt")
    parser.add_argument("--batch-tokens", type=int, default=1 << 16, help="tokens of an update")
    parser.add_argument("--micro-tokens", type=int, default=1 << 14, help="tokens of a micro-batch, at least one row")
    parser.add_argument("--attention", help="attn_implementation of transformers, such as flash_attention_4")
    parser.add_argument("--steps", type=int, default=3, help="updates that are timed, after one that is not")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[way for way in WAYS if "_" not in way])
    parser.add_argument("--json", type=Path, help="write the figures there")
    settings = parser.parse_args()
    for package, part in PACKAGES.items():
        missing = [way for way in settings.ways if part in way] if importlib.util.find_spec(package) is None else []
        if missing:
            print(f"{package} is not installed, so these are left out: {', '.join(missing)}", file=sys.stderr)
            settings.ways = [way for way in settings.ways if way not in missing]
    report: dict[str, Any] = {
        "device": device.current_name(),
        "torch": torch.__version__,
        "peak_tflops": device.peak_tflops(device.current_name()),
        "matmul_tflops": matmul_tflops(),
    }
    for model, tokens in itertools.product(settings.models, settings.tokens):
        with tempfile.TemporaryDirectory() as name:
            config = save_model(Path(name), model, tokens)
            report[f"{model}_{tokens}"] = measure(Path(name), config, f"{model} at {tokens} tokens", settings)
        if settings.json:
            settings.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
