"""Selective checkpointing and tiled MLPs: the same gradients, and less of what they save."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import TEMPERATURE, make_batch, make_engine, make_fields, policy_loss, weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.config.schema.model import ModelConfig, TiledMLPConfig
from hybridrl.engine import MicroBatching
from hybridrl.engine.fsdp import activations
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.errors import ModelError
from hybridrl.forecast.meta_tensors import LiveBytes

FIELDS = make_fields()
SELECTIVE = {"recompute_granularity": "selective"}
PLAIN = {"optimizer": "SGD", "lr": 1.0, "lr_warmup_steps": 0, "lr_scheduler_type": "constant", "clip_grad": 1e9}


def after_a_step(path: Path, **model: Any) -> dict[str, torch.Tensor]:
    engine = make_engine(path, optim=PLAIN, model=model)
    engine.train_batch(make_batch(FIELDS), MicroBatching(size=5), policy_loss, TEMPERATURE, entropy=True)
    return weights(engine)


def test_gradients_with_tiled_mlps(micro_model: Path) -> None:
    expected = after_a_step(micro_model)
    for checkpointing in (True, False):
        tiles = {"tiled_mlp": TiledMLPConfig(enabled=True, num_shards=3)}
        tiled = after_a_step(micro_model, enable_gradient_checkpointing=checkpointing, **tiles)
        for name, tensor in expected.items():
            torch.testing.assert_close(tiled[name], tensor, atol=1e-6, rtol=1e-5)


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_less_again_and_keeps_less_than_none(micro_model: Path) -> None:
    """In the backward pass of a layer, none of its products and attention, and all of its norms."""
    products, attention, norms = "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::rsqrt"
    layers, kept, again, gradients = 2, {}, {}, {}
    settings = {
        "off": {"enable_gradient_checkpointing": False},
        "selective": {"recompute_granularity": "selective"},
        "offloaded": {"recompute_granularity": "selective", "enable_activation_offload": True},
        "full": {},
    }
    for name, model in settings.items():
        engine: Any = make_engine(micro_model, optim=PLAIN, model=model)
        engine.module.train()
        # The embedding's output, which the first layer starts from, is no result of a layer.
        hidden = engine.module.get_input_embeddings()(torch.arange(40)[None]).detach().requires_grad_()
        with LiveBytes() as held:
            held.ignore(hidden, *engine.module.parameters(), *engine.module.buffers())
            loss = engine.module(inputs_embeds=hidden, use_cache=False).logits.float().sum()
        kept[name] = held.live
        with Operations() as counted:
            loss.backward()
        again[name] = counted.seen
        gradients[name] = {key: parameter.grad for key, parameter in engine.module.model.layers.named_parameters()}
    for name in ("selective", "offloaded", "full"):
        assert all(torch.equal(gradients[name][key], grad) for key, grad in gradients["off"].items()), name
        assert again[name][norms] == again["off"][norms] + 2 * layers
    assert again["selective"][products] == again["off"][products] < again["full"][products]
    assert again["off"][attention] == again["selective"][attention] == 0 < again["full"][attention] == layers
    assert kept["full"] < kept["selective"] < 0.8 * kept["off"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("flex_attention", True),
        ("flash_attn_3::fwd", True),
        ("aten::_scaled_dot_product_efficient_attention", True),
        ("transformers::grouped_mm_fallback", True),
        ("aten::bmm", False),
        ("aten::silu", False),
    ],
)
def test_selective_checkpointing_knows_kernels_by_their_names(name: str, kept: bool) -> None:
    class Operation:
        def name(self) -> str:
            return name

    assert (activations.recompute_policy(None, Operation()) == CheckpointPolicy.MUST_SAVE) is kept


def test_an_mlp_gets_a_tile_at_a_time(micro_model: Path) -> None:
    engine: Any = make_engine(micro_model, model={"tiled_mlp": TiledMLPConfig(enabled=True, num_shards=3)})
    seen: list[int] = []
    for layer in engine.module.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0]))
    batch = make_batch(FIELDS)
    engine.infer(batch, MicroBatching(size=12), TEMPERATURE)
    layers = len(engine.module.model.layers)
    real = int(FIELDS["attention_mask"].sum() - FIELDS["attention_mask"][5].sum())
    assert len(seen) % (3 * layers) == 0 and real * layers <= sum(seen) <= 2 * real * layers


def test_layers_whose_mlp_is_not_tiled_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Qwen3MoeConfig(
        vocab_size=263, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        mlp_only_layers=[0],
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    make_engine(tmp_path, model={"tiled_mlp": TiledMLPConfig(enabled=True)})
    assert "model.tiled_mlp.enabled=True acts on 1 of 3 layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "engine", "named"),
    [
        (
            {"enable_activation_offload": True, "enable_gradient_checkpointing": False},
            {},
            "enable_gradient_checkpointing",
        ),
        ({"tiled_mlp": TiledMLPConfig(enabled=True)}, {"use_torch_compile": True}, "use_torch_compile"),
        ({**SELECTIVE, "enable_gradient_checkpointing": False}, {}, "enable_gradient_checkpointing"),
        ({**SELECTIVE, "tiled_mlp": TiledMLPConfig(enabled=True)}, {}, r"tiled_mlp\.enabled"),
        (SELECTIVE, {"use_torch_compile": True}, "use_torch_compile"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    model: dict[str, Any], engine: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        FSDPEngine.check(ModelConfig(path="x", **model), FSDPConfig(**engine), ranks=1)
