"""The memory that an engine takes, against what a step allocates when it is run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import make_engine, policy_loss, value_loss
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.offload import plain_parts
from hybridrl.forecast.fsdp_rank import forecast
from hybridrl.forecast.meta_tensors import LiveBytes, peak_of
from hybridrl.forecast.sizes import Workload
from hybridrl.protocol import DataProto
from hybridrl.utils import device

PROMPT, RESPONSE, ROWS = 60, 90, 6
MICRO = MicroBatching(max_tokens=320)  # two sequences
WORK = Workload(PROMPT, RESPONSE, ROWS, MICRO, MICRO)


# Activations, logits and states are of similar size.
SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
# PyTorch's fused attention on a CPU takes values of the size of keys only, here 16 per head.
FAMILIES: dict[str, Any] = {
    "qwen2": Qwen2Config(**SIZES),
    "deep": Qwen2Config(**{**SIZES, "num_hidden_layers": 12}),
    "gemma2": Gemma2Config(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=64, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def wide_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of a family, by its name."""

    @functools.cache
    def folder_of(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def wide_model(wide_models: Callable[[str], Path]) -> Path:
    return wide_models("qwen2")


def full_batch() -> DataProto:
    ids = torch.randint(10, 200, (ROWS, PROMPT + RESPONSE))
    ones = torch.ones_like(ids)
    values = torch.randn(ROWS, RESPONSE)
    fields = {"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, PROMPT:].clone()}
    return DataProto.from_dict(
        {**fields, "advantages": values, "returns": values.clone()}, meta_info={"batch_num_tokens": ROWS * RESPONSE}
    )


class Elsewhere(device.Transfer):
    """Copies to and from main memory, which a GPU's memory does not hold; `counted` should not count it either."""

    counted: LiveBytes
    hosts: set[int]

    def __init__(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pairs = list(copies)
        super().__init__(pairs)
        for target, source in pairs:
            if id(source) not in self.hosts:  # it leaves the device
                self.hosts.add(id(target))
                self.counted.live -= target.nbytes
                weakref.finalize(target, self.freed, id(target), target.nbytes).atexit = False

    @classmethod
    def freed(cls, host: int, size: int) -> None:
        cls.hosts.remove(host)
        cls.counted.live += size


def state_of(engine: Any) -> list[torch.Tensor]:
    masters = engine.model_state.masters.tensors() if engine.model_state.masters else []
    states = [value for state in engine.model_state.optimizer.state.values() for value in state.values()]
    parts = [part for value in states if isinstance(value, torch.Tensor) for part in plain_parts(value)]
    return [*engine.module.parameters(), *masters, *parts]


@pytest.mark.parametrize(
    ("kind", "model", "engine"),
    [
        ("language_model", {"enable_gradient_checkpointing": True}, {}),
        ("language_model", {"enable_gradient_checkpointing": False}, {}),
        ("language_model", {"recompute_granularity": "selective"}, {}),
        ("language_model", {"enable_gradient_checkpointing": False}, {"dtype": "bfloat16"}),
        ("language_model", {"enable_gradient_checkpointing": True, "use_fused_kernels": True}, {"dtype": "bfloat16"}),
        ("value_model", {"enable_gradient_checkpointing": True}, {}),
        ("language_model", {"lora_rank": 4}, {}),
        ("language_model", {"lora_rank": 4, "load_in_4bit": True}, {}),
        ("language_model", {"lora_rank": 4, "load_in_4bit": True}, {"dtype": "bfloat16"}),
        ("value_model", {"lora_rank": 4, "enable_gradient_checkpointing": False}, {"dtype": "bfloat16"}),
    ],
)
def test_a_step_takes_what_was_forecast(
    wide_model: Path, kind: str, model: dict[str, Any], engine: dict[str, Any]
) -> None:
    check_forecast(wide_model, kind, model, engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "deepseek_v3"])
def test_a_step_of_other_families_takes_what_was_forecast(
    wide_models: Callable[[str], Path], family: str, dtype: str
) -> None:
    for model in ({}, {"enable_gradient_checkpointing": False}):
        check_forecast(wide_models(family), "language_model", model, {"dtype": dtype})


@pytest.mark.parametrize("model", [{}, {"enable_gradient_checkpointing": False}], ids=str)
def test_a_step_with_moments_in_8_bits_takes_what_was_forecast(wide_model: Path, model: dict[str, Any]) -> None:
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    optim = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}
    check_forecast(wide_model, "language_model", model, {}, optim)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_with_offloaded_inputs_takes_what_was_forecast(
    wide_models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Of twelve layers, ten fewer inputs are on the device."""
    found, measured = [], []
    for offload in (False, True):
        settings = {"enable_activation_offload": offload, "use_fused_kernels": fused}
        # Adam's step would take more than the backward pass.
        made: Any = make_engine(wide_models("deep"), model=settings, optim={"optimizer": "SGD"})
        made.train_batch(full_batch(), MICRO, policy_loss, 1.0, entropy=True)
        counted = LiveBytes()
        counted.ignore(*state_of(made))
        for part in made.module.modules():
            if offload and hasattr(part, "_gradient_checkpointing_func"):
                kept = {"counted": counted, "hosts": set()}
                part._gradient_checkpointing_func.func.transfer = type("Here", (Elsewhere,), kept)
        with counted:
            made.train_batch(full_batch(), MICRO, policy_loss, 1.0, entropy=True)
        measured.append(counted.peak)
        one = forecast("language_model", made.model_config, made.engine_config, made.optim_config, 1, WORK)
        found.append(one.gradients + one.activations + one.logits)
    inputs = 2 * (PROMPT + RESPONSE) * SIZES["hidden_size"] * 4  # bytes of one layer's
    assert found == pytest.approx(measured, rel=0.1)
    assert found[0] - found[1] == pytest.approx(measured[0] - measured[1], abs=1.1 * inputs)
    assert 8 * inputs <= found[0] - found[1] <= 10 * inputs


TREE = MicroBatching(max_tokens=PROMPT + ROWS * RESPONSE)
SHARED = Workload(PROMPT, RESPONSE, ROWS, TREE, TREE, samples=ROWS)


@pytest.mark.parametrize(("family", "fused"), [("qwen2", False), ("qwen2", True), ("qwen3_moe", False)])
def test_rows_of_one_prompt_take_what_was_forecast(
    wide_models: Callable[[str], Path], family: str, fused: bool
) -> None:
    """All six are in one micro-batch, where four are without sharing."""
    batch = full_batch()
    batch.batch["input_ids"][:, :PROMPT] = batch.batch["input_ids"][0, :PROMPT]
    path, model = wide_models(family), {"use_fused_kernels": fused}
    check_forecast(path, "language_model", model, {}, batch=batch, work=SHARED)
    together, apart = (
        forecast("language_model", ModelConfig(str(path), share_prefixes=one), FSDPConfig(), OptimConfig(), 1, SHARED)
        for one in (None, False)
    )
    assert together.pass_activations > 1.3 * apart.pass_activations


def check_forecast(
    path: Path,
    kind: str,
    model: dict[str, Any],
    engine: dict[str, Any],
    optim: dict[str, Any] | None = None,
    batch: DataProto | None = None,
    work: Workload = WORK,
) -> None:
    made: Any = make_engine(path, kind, model=model, optim=optim, **engine)
    language = kind == "language_model"
    batch, loss = batch or full_batch(), policy_loss if language else value_loss
    micro = work.update
    assert micro is not None

    def step() -> None:
        made.train_batch(batch, micro, loss, 1.0, entropy=language)

    step()  # makes the optimizer's state
    existing = state_of(made)
    held = sum(tensor.nbytes for tensor in existing)
    update = held + peak_of(step, *existing)
    outputs = ("log_probs", "entropy") if language else ("values",)
    infer = held + peak_of(lambda: made.infer(batch, micro, 1.0, outputs), *existing)
    found = forecast(kind, made.model_config, made.engine_config, made.optim_config, 1, work)
    assert found.weights + found.masters + found.states == pytest.approx(held, rel=0.01)
    assert found.resident == found.weights + found.masters + found.states
    assert found.update == pytest.approx(update, rel=0.1)
    assert found.without_gradients == pytest.approx(infer, rel=0.1)


def of(model: Path, ranks: int = 1, work: Workload = WORK, optim: dict[str, Any] | None = None, **engine: Any) -> Any:
    settings = ModelConfig(path=str(model))
    return forecast("language_model", settings, FSDPConfig(**engine), OptimConfig(**(optim or {})), ranks, work)


def test_what_settings_change(wide_model: Path) -> None:
    one, two = of(wide_model), of(wide_model, ranks=2)
    count = sum(parameter.numel() for parameter in Qwen2ForCausalLM.from_pretrained(wide_model).parameters())
    assert (one.weights, one.gradients, one.masters) == (4 * count, 4 * count, 0)
    assert one.states == pytest.approx(8 * count, rel=0.01) and one.gathered == 0
    assert (two.weights, two.gradients) == (2 * count, 2 * count) and two.states == pytest.approx(4 * count, rel=0.01)
    assert two.activations == one.activations and two.gathered > 0
    assert of(wide_model, ranks=4, fsdp_size=2).weights == two.weights
    kept = of(wide_model, ranks=2, reshard_after_forward=False)
    assert kept.gathered > two.gathered
    host = of(wide_model, ranks=2, offload_policy=True)
    assert host.weights == host.states == host.gradients == 0 and host.gathered == two.gathered
    offloaded = of(wide_model, param_offload=True, optimizer_offload=True)
    assert offloaded.resident == 0 and offloaded.update == one.update
    assert of(wide_model, optim={"optimizer": "SGD"}).states == 0
    # Two ranks that share sequences have the rows of both, half of the tokens of each.
    split = Workload(PROMPT, RESPONSE, 2, MicroBatching(size=4), MicroBatching(size=4))
    shared = of(wide_model, work=split, ranks=2, ulysses_sequence_parallel_size=2)
    assert shared.activations == pytest.approx(of(wide_model, work=split, ranks=2).activations, rel=0.05)
    double = of(wide_model, work=Workload(PROMPT, RESPONSE, ROWS, MicroBatching(size=4), MICRO))
    assert double.activations == pytest.approx(2 * one.activations, rel=0.05)
    assert double.pass_activations == one.pass_activations
    chunked = of(wide_model, entropy_from_logits_with_chunking=True, entropy_from_logits_chunk_size=8)
    assert chunked.logits < one.logits and chunked.activations == one.activations


def test_bytes_in_use_are_counted_until_they_are_freed() -> None:
    with LiveBytes() as counted:
        first = torch.ones(1000)
        view = first.view(10, 100)
        second = first + 1
        del first, second
        assert counted.live == 4000  # the view keeps the first
        del view
        third = torch.ones(100, device="meta")
    assert (counted.live, counted.peak, third.numel()) == (400, 8000, 100)
