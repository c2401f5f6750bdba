"""The load-balancing loss of routers: against transformers' own loss, and what must not change it.

`test_engine_distributed.py` compares two ranks with one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    TEMPERATURE,
    make_batch,
    make_engine,
    make_fields,
    plain_outputs,
    policy_loss,
    related,
    value_loss,
)
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with
from transformers import AutoModelForCausalLM, DogeConfig, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.router_loss import RouterLoss
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.errors import ModelError
from hybridrl.models.routers import load_balancing
from hybridrl.registry import TRAIN_ENGINES
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()
COEFFICIENT = 0.5
PACKED = {"override_config": {"attn_implementation": "hybridrl_varlen"}, "enable_gradient_checkpointing": False}
SGD = {
    "optimizer": "SGD",
    "lr": 0.5,
    "lr_warmup_steps": 0,
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "clip_grad": 1e3,
}
SIZES = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, head_dim=8, mlp_only_layers=[1]),
    "qwen2_moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=24),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
}


def saved(name: str, factor: float, folder: Path) -> Path:
    """A model with weights that are this much larger, so that routers have a preference."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        parameter.data.mul_(factor)
    model.save_pretrained(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With a factor of 4, float32 itself would be ten times less exact than what `assert_close` allows."""
    folder = tmp_path_factory.mktemp("routed")
    return {name: saved(name, 2, folder) for name in CONFIGS}


def plain_step(
    path: Path, micro_batches: list[list[int]], fields: dict[str, torch.Tensor] = FIELDS
) -> tuple[dict[str, torch.Tensor], float]:
    """The weights after one step of SGD on the policy loss and transformers' own router loss, and that loss."""
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mask = fields["response_mask"]
    log_probs, _ = plain_outputs(plain, fields)
    loss = -(log_probs * fields["advantages"] * mask).sum() / mask.sum()
    used = [row for rows in micro_batches for row in rows]
    total, balance = int(fields["attention_mask"][used].sum()), torch.zeros(())
    for rows in micro_batches:
        attention = fields["attention_mask"][rows]
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        out = plain(
            input_ids=fields["input_ids"][rows],
            attention_mask=attention,
            position_ids=positions,
            output_router_logits=True,
        )
        balance = balance + out.aux_loss * int(attention.sum()) / total
    (loss + COEFFICIENT * balance).backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    return {name: p.detach() for name, p in plain.named_parameters()}, balance.item()


def step(engine: Any, batch: Any, micro: MicroBatching, loss: Any = policy_loss) -> dict[str, float]:
    """The metrics of one step."""
    own = engine.train_batch(batch, micro, loss, TEMPERATURE)
    return {name: float(metric.value) for name, metric in merge_metrics([own]).items()}


def assert_close(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    got = dict(engine.model_state.exported.whole_tensors())
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=3e-5, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


MODES: dict[str, dict[str, Any]] = {
    "padded": {"enable_gradient_checkpointing": False},
    "packed": PACKED,
    "fused": {**PACKED, "use_fused_kernels": True},
    "checkpointed": {**PACKED, "enable_gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [*(("qwen3_moe", mode) for mode in MODES), ("qwen2_moe", "packed"), ("mixtral", "packed"), ("gpt_oss", "padded")],
)
def test_an_update_adds_the_router_loss_of_transformers(models: dict[str, Path], name: str, mode: str) -> None:
    engine: Any = make_engine(models[name], optim=SGD, model=MODES[mode], router_aux_loss_coef=COEFFICIENT)
    assert engine.packed == (mode != "padded")
    batch, micro = make_batch(FIELDS), MicroBatching(size=4)
    groups = engine.plan_batch(batch, micro).groups
    assert len(groups) > 1
    expected, balance = plain_step(models[name], groups)
    metrics = step(engine, batch, micro)
    assert metrics["router_aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert balance > CONFIGS[name].num_experts_per_tok
    assert_close(engine, expected)


@pytest.mark.parametrize(("name", "recompute"), [("qwen3_moe", False), ("mixtral", True)])
def test_a_shared_token_counts_once_for_each_of_its_rows(models: dict[str, Path], name: str, recompute: bool) -> None:
    fields = related(FIELDS)
    settings = {"share_prefixes": True, "enable_gradient_checkpointing": recompute}
    engine: Any = make_engine(models[name], optim=SGD, model=settings, router_aux_loss_coef=COEFFICIENT)
    batch, micro = make_batch(fields), MicroBatching(size=6)
    groups = engine.plan_batch(batch, micro).groups
    assert len(groups) > 1
    expected, balance = plain_step(models[name], groups, fields)
    metrics = step(engine, batch, micro)
    assert metrics["shared_prefix_frac"] > 0.3
    assert metrics["router_aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert_close(engine, expected)


def test_a_value_model_has_the_loss_of_its_backbone(models: dict[str, Path]) -> None:
    path = models["mixtral"]
    engine: Any = make_engine(path, "value_model", optim=SGD, model=PACKED, router_aux_loss_coef=COEFFICIENT)
    batch, micro = make_batch(FIELDS), MicroBatching(size=4)
    _, balance = plain_step(path, engine.plan_batch(batch, micro).groups)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters() if name.endswith("gate.weight")}
    assert step(engine, batch, micro, value_loss)["router_aux_loss"] == pytest.approx(balance, rel=1e-5)
    moved = dict(engine.module.named_parameters())
    assert before and all(not torch.equal(moved[name], old) for name, old in before.items())


def test_a_router_that_records_other_logits_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    """Doge records scores of two sets of keys per token."""
    DogeConfig(**SIZES, is_moe=True, num_experts=16, num_experts_per_tok=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"router_aux_loss_coef=0\.5: DogeCDMoE records logits \[.*\] for 3 tokens"):
        TRAIN_ENGINES.get("fsdp2").check(ModelConfig(path=str(tmp_path)), FSDPConfig(router_aux_loss_coef=0.5), 1)


def test_routers_that_record_something_else_are_refused_by_name(models: dict[str, Path]) -> None:
    """Doge records scores of two sets of keys per token."""
    loss = RouterLoss(AutoModelForCausalLM.from_pretrained(models["mixtral"]), COEFFICIENT, 2)
    loss.router_logits = [torch.zeros(8, 4)]
    origins = torch.arange(4)
    layout = MicroBatchLayout(origins[None], origins[None], origins, origins, None, origins=origins)
    with raises_with(ModelError, "router_aux_loss_coef=0.5", "8 rows", "4 tokens"):
        loss.share(layout)


def test_the_loss_alone_balances_the_experts(tmp_path: Path) -> None:
    uneven = saved("qwen3_moe", 4, tmp_path)
    batch, micro = make_batch({**FIELDS, "advantages": torch.zeros_like(FIELDS["advantages"])}), MicroBatching(size=12)
    gentle = {**SGD, "lr": 0.05}
    without: Any = make_engine(uneven, optim=gentle, model=PACKED)
    assert not {name for name in step(without, batch, micro) if "router" in name}
    engine: Any = make_engine(uneven, optim=gentle, model=PACKED, router_aux_loss_coef=COEFFICIENT)
    found = [step(engine, batch, micro) for _ in range(12)]
    assert found[-1]["router_aux_loss"] < found[0]["router_aux_loss"] - 0.01
    assert found[-1]["router_load_max"] < found[0]["router_load_max"]
    assert found[0]["loss"] == 0.0 and found[0]["grad_norm"] > 0.0


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(0, 5))
def test_load_balancing_equals_a_count_by_hand_and_ignores_padding(seed: int, top_k: int, padding: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(7 + padding, 5, generator=generator) for _ in range(2)]
    real = torch.ones(7 + padding, dtype=torch.bool)
    real[torch.randperm(len(real), generator=generator)[:padding]] = False
    loss, load = load_balancing(logits, real, top_k)
    rows = [layer[token].double().softmax(0).tolist() for layer in logits for token in real.nonzero()[:, 0].tolist()]
    chosen = [sorted(range(5), key=lambda e, r=row: -r[e])[:top_k] for row in rows]
    expected = 0.0
    for expert in range(5):
        count = sum(expert in choice for choice in chosen)
        expected += 5 * count / len(rows) * sum(row[expert] for row in rows) / len(rows)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert load.sum(1).tolist() == [7.0 * top_k] * 2
    of_transformers = load_balancing_loss_func(tuple(logits), 5, top_k, real.long())
    torch.testing.assert_close(loss, of_transformers)


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ({}, {}, r"router_aux_loss_coef=0\.5: transformers defines no such loss for qwen2 "),
        ({}, {"forward_only": True}, "is not trained"),
        ({}, {"use_torch_compile": True}, "use_torch_compile"),
        (
            {"override_config": {"output_router_logits": True}},
            {"router_aux_loss_coef": 0.0},
            r"override_config\.output_router_logits=True has no effect.*fsdp_config\.router_aux_loss_coef",
        ),
        ({"override_config": {"router_aux_loss_coef": 0.1}}, {}, r"override_config\.router_aux_loss_coef=0\.1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    micro_model: Path, model: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    settings = FSDPConfig(**{"router_aux_loss_coef": COEFFICIENT, **engine})
    with pytest.raises(ModelError, match=message):
        TRAIN_ENGINES.get("fsdp2").check(ModelConfig(path=str(micro_model), **model), settings, 2)


def test_megatron_refuses_what_would_ask_for_the_loss(micro_model: Path) -> None:
    model = ModelConfig(path=str(micro_model), override_config={"output_router_logits": True})
    with raises_with(ModelError, "output_router_logits=True", "strategy=megatron"):
        TRAIN_ENGINES.get("megatron").check(model, MegatronConfig(), 1)
