"""Router replay: what a pass recorded is what an update uses, in whatever layout and order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import TEMPERATURE, make_batch, make_engine, make_fields, policy_loss
from raising import raises_with
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    JambaConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp.routing import check_routing
from hybridrl.errors import ModelError
from hybridrl.protocol import DataProto

FIELDS = make_fields()
ROUTED = "routed_experts"
PACKED = {"override_config": {"attn_implementation": "hybridrl_varlen"}}
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
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {
    **SIZES,
    **LATENT,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,  # as many groups as experts per token
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, head_dim=8, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=24),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(**DEEPSEEK),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("routed")
    for name, config in CONFIGS.items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.mul_(4)
        model.save_pretrained(folder / name)
    return {name: folder / name for name in CONFIGS}


def engine_of(path: Path, **settings: Any) -> Any:
    return make_engine(path, optim=SGD, model={**PACKED, "enable_gradient_checkpointing": False, **settings})


def with_routing(experts: torch.Tensor, rows: list[int] | None = None) -> DataProto:
    rows = list(range(len(experts))) if rows is None else rows
    return make_batch({name: tensor[rows] for name, tensor in {**FIELDS, ROUTED: experts}.items()})


def trained(engine: Any, batch: DataProto, micro: MicroBatching) -> dict[str, torch.Tensor]:
    engine.train_batch(batch, micro, policy_loss, TEMPERATURE)
    return {name: tensor.clone() for name, tensor in engine.model_state.exported.whole_tensors()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=3e-5, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_recorded_are_the_experts_of_each_token(models: dict[str, Path], name: str) -> None:
    """Against the indices that the routers of transformers return, row by row; a replay of them changes nothing."""
    plain: Any = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    returned: list[torch.Tensor] = []
    for part in plain.modules():
        if type(part).__name__.lower().endswith("topkrouter"):
            part.register_forward_hook(lambda module, arguments, output: returned.append(output[2]))
    padded = engine_of(models[name])
    padded.packed = False
    packed = engine_of(models[name])
    found = []
    for engine in (packed, padded):
        got = engine.infer(make_batch(FIELDS), MicroBatching(size=5), TEMPERATURE, ("log_probs", ROUTED))
        found.append(got)
        for row, attention in enumerate(FIELDS["attention_mask"].bool()):
            used, rest = got[ROUTED][row][attention].long(), got[ROUTED][row][~attention]
            assert not rest.any()
            if not FIELDS["response_mask"][row].any():
                assert not used.any()
                continue
            returned.clear()
            with torch.no_grad():
                plain(input_ids=FIELDS["input_ids"][row][attention][None])
            assert torch.equal(used.sort(-1).values, torch.stack(returned, 1).sort(-1).values)
    torch.testing.assert_close(found[0]["log_probs"], found[1]["log_probs"], atol=2e-5, rtol=1e-4)
    again = packed.infer(with_routing(found[0][ROUTED]), MicroBatching(size=5), TEMPERATURE, ("log_probs",))
    assert torch.equal(again["log_probs"], found[0]["log_probs"])
    without = trained(engine_of(models[name]), make_batch(FIELDS), MicroBatching(size=5))
    assert_same(trained(packed, with_routing(found[0][ROUTED]), MicroBatching(size=5)), without)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_uses_the_given_experts(models: dict[str, Path], name: str, checkpointing: bool) -> None:
    """Against the same choices forced on the plain model; packing, micro-batches and order of rows change nothing."""
    generator = torch.Generator().manual_seed(3)
    layers = 3 if name == "qwen3_moe" else 2
    count = 4 if name == "qwen3_moe" else 8
    noise = torch.rand(*FIELDS["input_ids"].shape, layers, count, generator=generator)
    experts = noise.topk(2, dim=-1).indices.to(torch.uint8)
    rows = torch.randperm(len(experts), generator=generator).tolist()
    natural = trained(engine_of(models[name]), make_batch(FIELDS), MicroBatching(size=5))
    results = []
    for packed, micro, order in ((True, 5, None), (False, 3, rows), (True, 1, rows[::-1])):
        engine = engine_of(models[name], enable_gradient_checkpointing=checkpointing)
        engine.packed = packed
        results.append(trained(engine, with_routing(experts, order), MicroBatching(size=micro)))
    for other in results[1:]:
        assert_same(other, results[0])
    router = next(key for key in natural if key.endswith("gate.weight"))
    assert float((natural[router] - results[0][router]).abs().max()) > 1e-3
    assert_same(forced_step(models[name], experts), results[0])


def forced_step(path: Path, experts: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step of SGD with gates written out: softmax or sigmoid of the logits at the given experts, normalised."""
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config, row = plain.config, {"now": 0}
    routers = [part for part in plain.modules() if type(part).__name__.lower().endswith("topkrouter")]

    def forced(layer: int, router: Any) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> Any:
            logits = output[0].float()
            chosen = experts[row["now"]][FIELDS["attention_mask"][row["now"]].bool()][:, layer].long()
            scores = logits.softmax(-1) if config.model_type == "qwen3_moe" else logits.sigmoid()
            gates = scores.gather(-1, chosen)
            gates = gates / gates.sum(-1, keepdim=True) * getattr(config, "routed_scaling_factor", 1.0)
            return output[0], gates, chosen

        return router.register_forward_hook(hook)

    for layer, router in enumerate(routers):
        forced(layer, router)
    mask = FIELDS["response_mask"]
    loss = torch.zeros(())
    for row["now"] in range(len(mask)):
        one, attention = row["now"], FIELDS["attention_mask"][row["now"]].bool()
        if not mask[one].any():
            continue
        ids = FIELDS["input_ids"][one]
        logits = (plain(input_ids=ids[attention][None]).logits[0] / TEMPERATURE).log_softmax(-1)
        start = int(attention[: -mask.shape[1]].sum()) - 1
        for column in mask[one].nonzero()[:, 0].tolist():
            log_prob = logits[start + column, ids[-mask.shape[1] + column]]
            loss = loss - log_prob * FIELDS["advantages"][one, column] / mask.sum()
    loss.backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    return {name: tensor.detach() for name, tensor in plain.state_dict().items()}


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_replay_lowers_the_mismatch_with_other_numerics(models: dict[str, Path], name: str) -> None:
    """The k3 estimate of the KL from a model in bfloat16 to one in float32, with the experts of the former."""
    low = make_engine(models[name], model={"use_remove_padding": False}, dtype="bfloat16", forward_only=True)
    micro, mask = MicroBatching(size=5), FIELDS["response_mask"].bool()
    sampler = low.infer(make_batch(FIELDS), micro, TEMPERATURE, ("log_probs", ROUTED))
    trainer, divergence = engine_of(models[name]), []
    for batch in (make_batch(FIELDS), with_routing(sampler[ROUTED])):
        log_rho = (trainer.infer(batch, micro, TEMPERATURE)["log_probs"] - sampler["log_probs"])[mask]
        divergence.append(float((log_rho.exp() - 1 - log_rho).mean()))
    assert divergence[1] < 0.5 * divergence[0]


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_routers_that_would_give_replayed_experts_no_weight_are_refused(tmp_path: Path, method: str) -> None:
    settings = {**DEEPSEEK, "topk_method": method}
    AutoModelForCausalLM.from_config(DeepseekV2Config(**settings)).save_pretrained(tmp_path)
    if method == "greedy":
        check_routing(ModelConfig(path=str(tmp_path)), FSDPConfig())
    else:
        with raises_with(ModelError, "topk_method=group_limited_greedy"):
            check_routing(ModelConfig(path=str(tmp_path)), FSDPConfig())


@pytest.mark.parametrize(
    ("config", "router"),
    [
        (JambaConfig(**SIZES, num_experts=4, num_experts_per_tok=2, use_mamba_kernels=False), "Linear"),
        (PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), "PhimoeTopKRouter"),
    ],
    ids=["jamba", "phimoe"],
)
def test_routers_that_choose_in_another_way_are_refused_before_the_weights_are_read(
    tmp_path: Path, config: Any, router: str
) -> None:
    config.save_pretrained(tmp_path)
    with raises_with(ModelError, router, "choose 2", "4 experts", "torch.topk"):
        check_routing(ModelConfig(path=str(tmp_path)), FSDPConfig())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_routers_that_can_be_replayed_pass_the_check(tmp_path: Path, config: Any) -> None:
    config.save_pretrained(tmp_path)
    check_routing(ModelConfig(path=str(tmp_path)), FSDPConfig())
