"""The memory that an engine takes, against what a step allocates when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import make_engine, policy_loss, value_loss
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.forecast import LiveBytes, Workload, peak_of
from hybridrl.engine.fsdp.forecast import forecast
from hybridrl.protocol import DataProto

PROMPT, RESPONSE, ROWS = 60, 90, 6
MICRO = MicroBatching(max_tokens=320)  # two sequences
WORK = Workload(PROMPT, RESPONSE, ROWS, MICRO, MICRO)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose activations, logits and states are of similar size."""
    folder = tmp_path_factory.mktemp("wide_model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2000,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def full_batch() -> DataProto:
    ids = torch.randint(10, 200, (ROWS, PROMPT + RESPONSE))
    ones = torch.ones_like(ids)
    values = torch.randn(ROWS, RESPONSE)
    fields = {"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, PROMPT:].clone()}
    return DataProto.from_dict(
        {**fields, "advantages": values, "returns": values.clone()}, meta_info={"batch_num_tokens": ROWS * RESPONSE}
    )


def state_of(engine: Any) -> list[torch.Tensor]:
    masters = engine._masters.tensors() if engine._masters else []
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [*engine.module.parameters(), *masters, *(value for value in states if isinstance(value, torch.Tensor))]


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
    made: Any = make_engine(wide_model, kind, model=model, **engine)
    language = kind == "language_model"
    batch, loss = full_batch(), policy_loss if language else value_loss

    def step() -> None:
        made.train_batch(batch, MICRO, loss, 1.0, entropy=language)

    step()  # makes the optimizer's state
    existing = state_of(made)
    held = sum(tensor.nbytes for tensor in existing)
    update = held + peak_of(step, *existing)
    outputs = ("log_probs", "entropy") if language else ("values",)
    infer = held + peak_of(lambda: made.infer(batch, MICRO, 1.0, outputs), *existing)
    found = forecast(kind, made.model_config, made.engine_config, made.optim_config, 1, WORK)
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
