"""Packed rows: the same results as one row per sequence, and only for models in which sequences stay apart."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_helpers import SIZES, TEMPERATURE, make_batch, make_engine, make_fields, policy_loss, related, weights
from raising import raises_with

from hybridrl.engine import MicroBatching
from hybridrl.errors import ModelError
from hybridrl.models import attention
from hybridrl.utils import varlen
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()
PACKED = {"override_config": {"attn_implementation": attention.VARLEN}}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 16},
    # A window shorter than the rows, in all layers and in every other one.
    "Mistral": {**GROUPED, "sliding_window": 6},
    "Qwen2": {**GROUPED, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "GPTNeoX": SIZES,
    "Phi": {**SIZES, "partial_rotary_factor": 0.5},
    # Heads of a size that the kernel does not take as it is.
    "Qwen3 with heads of 20": {**GROUPED, "head_dim": 20},
    "Gemma": {**GROUPED, "head_dim": 8},
    "Qwen3Moe": {**GROUPED, **EXPERTS, "head_dim": 8, "decoder_sparse_step": 1},
    # A window that only the mask has, in one of two layers.
    "Qwen2Moe": {
        **{**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24},
        **{"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    },
    # Values of another size than queries and keys.
    "DeepseekV3": {**SIZES, **LATENT, **ROUTED, "first_k_dense_replace": 1},
}
# One full and one recurrent layer.
HYBRID = {
    **GROUPED,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def config_of(name: str, **settings: Any) -> PreTrainedConfig:
    return getattr(transformers, f"{name.split()[0]}Config")(**settings)


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.save_pretrained(folder)
    return folder


def gradients(engine: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Those of the next step, before they are clipped; the step is not taken."""
    found: dict[str, torch.Tensor] = {}
    engine.apply_gradients = lambda norm: found.update(
        {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    )
    engine.train_batch(batch, MicroBatching(size=5), policy_loss, TEMPERATURE)
    del engine.apply_gradients
    return found


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_equal_aligned_ones(name: str, tmp_path: Path) -> None:
    model = saved(config_of(name, **MODELS[name]), tmp_path / "model")
    optim = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-4}}
    aligned: Any = make_engine(model, optim=optim, model={"share_prefixes": False})
    packed: Any = make_engine(model, optim=optim, model={**PACKED, "enable_gradient_checkpointing": name != "Llama"})
    assert packed.packed and not aligned.packed
    batch = make_batch(FIELDS)
    for micro in (MicroBatching(size=5), MicroBatching(max_tokens=60)):
        found, expected = (
            engine.infer(batch, micro, TEMPERATURE, ("log_probs", "entropy")) for engine in (packed, aligned)
        )
        for output, tensor in expected.items():
            torch.testing.assert_close(found[output], tensor, atol=1e-5, rtol=0)
    found, expected = (gradients(engine, batch) for engine in (packed, aligned))
    assert found.keys() == expected.keys()
    for parameter, tensor in expected.items():
        off = float((found[parameter] - tensor).norm())
        assert off <= 1e-5 * float(tensor.norm()) + 1e-7, parameter
    for _ in range(2):
        found, expected = (
            merge_metrics([engine.train_batch(batch, MicroBatching(size=5), policy_loss, TEMPERATURE)])
            for engine in (packed, aligned)
        )
        for metric in ("loss", "grad_norm"):
            assert float(found[metric].value) == pytest.approx(float(expected[metric].value), rel=1e-3, abs=1e-5)
    after = weights(aligned)
    for key, tensor in weights(packed).items():
        torch.testing.assert_close(tensor, after[key], atol=1e-3, rtol=1e-3)
    ids = FIELDS["input_ids"][:3]
    with torch.no_grad():  # generation in place: padded rows, as with any other attention
        logits = [
            e.module(input_ids=ids, attention_mask=FIELDS["attention_mask"][:3]).logits for e in (packed, aligned)
        ]
    real = FIELDS["attention_mask"][:3].bool()
    torch.testing.assert_close(logits[0][real], logits[1][real], atol=2e-2, rtol=2e-2)


def test_a_window_that_only_the_mask_has_in_every_layer(tmp_path: Path) -> None:
    """Experts of Phi-MoE are drawn in an update, so log-probabilities are compared."""
    settings = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    model, batch = saved(config_of("Phimoe", **settings), tmp_path / "model"), make_batch(related(FIELDS))
    aligned, *others = (
        make_engine(model, model=one).infer(batch, MicroBatching(size=5), TEMPERATURE)["log_probs"]
        for one in ({"share_prefixes": False}, PACKED, {"share_prefixes": True})
    )
    for found in others:
        torch.testing.assert_close(found, aligned, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["Qwen3 with heads of 20", "DeepseekV3"])
def test_the_kernel_gets_heads_of_one_size_that_it_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel in PyTorch takes multiples of 8 only, with the scale of the true size."""
    settings = MODELS[name]
    true_size = settings.get("head_dim") or settings["qk_rope_head_dim"] + settings["qk_nope_head_dim"]
    found = []

    def recorded(*arguments: Any) -> torch.Tensor:
        found.append(({tensor.shape[-1] for tensor in arguments[:3]}, arguments[4]))
        return attend(*arguments)

    attend = varlen.one_by_one
    monkeypatch.setattr(varlen, "one_by_one", recorded)
    engine = make_engine(saved(config_of(name, **settings), tmp_path / "model"), model=PACKED)
    engine.infer(make_batch(FIELDS), MicroBatching(size=5), TEMPERATURE)
    assert found
    for sizes, scale in found:
        assert sizes == {-(-true_size // 8) * 8}
        assert scale == pytest.approx(true_size**-0.5)


def test_a_packed_row_needs_no_mask(micro_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of a row of 16,384 tokens would take 268 MB."""
    engine: Any = make_engine(micro_model, model=PACKED)
    monkeypatch.setattr(attention, "sdpa_mask", lambda **_: pytest.fail("a mask was made"))
    engine.infer(make_batch(FIELDS), MicroBatching(size=5), TEMPERATURE)


def test_a_model_that_hides_the_boundaries_is_refused(micro_model: Path) -> None:
    engine: Any = make_engine(micro_model, model=PACKED)
    for layer in engine.module.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, f=forward, **kwargs: f(
            *args, **{name: value for name, value in kwargs.items() if not name.startswith("cu_seq")}
        )
    with raises_with(ModelError, "Qwen2Attention", "model.use_remove_padding=False"):
        engine.infer(make_batch(FIELDS), MicroBatching(size=5), TEMPERATURE)


@pytest.mark.parametrize(("share", "key"), [(False, "use_remove_padding"), (True, "share_prefixes")])
def test_a_mask_that_a_layer_makes_is_refused(share: bool, key: str, micro_model: Path) -> None:
    """Attention by boundaries or along paths does not read it."""
    engine: Any = make_engine(micro_model, model={"share_prefixes": True} if share else PACKED)
    for layer in engine.module.model.layers:
        layer.self_attn.forward = functools.partial(with_mask, layer.self_attn.forward)
    with raises_with(ModelError, "Qwen2Attention", f"model.{key}=False"):
        engine.infer(make_batch(FIELDS), MicroBatching(size=5), TEMPERATURE)


def with_mask(forward: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **given: Any) -> Any:
    """An attention layer's pass in which no token sees the one before it."""
    ones = torch.ones(hidden_states.shape[1], hidden_states.shape[1], dtype=torch.bool)
    own = (ones.tril() & ~(ones.tril(-1) & ones.triu(-1)))[None, None]
    return forward(hidden_states, attention_mask=own, **given)


def test_recurrent_layers_mix_packed_sequences_so_they_are_aligned(tmp_path: Path) -> None:
    model = saved(config_of("Qwen3_5Text", **HYBRID), tmp_path / "model")
    engine: Any = make_engine(model, model=PACKED)
    assert not engine.packed
    batch = make_batch(FIELDS)
    alone = engine.infer(batch, MicroBatching(size=1), TEMPERATURE)["log_probs"]
    together = engine.infer(batch, MicroBatching(size=5), TEMPERATURE)["log_probs"]
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)
    engine.packed = True  # what the check prevents
    mixed = engine.infer(batch, MicroBatching(size=5), TEMPERATURE)["log_probs"]
    assert (mixed - alone).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Qwen2", {}, None),
        ("Llama", {}, None),
        ("Qwen3Moe", {}, None),
        ("Gemma3Text", {}, None),
        ("Gemma2", {}, None),
        ("Qwen3Next", {}, "linear_attention"),
        ("Qwen3_5Text", {}, "linear_attention"),
        ("Mamba2", {}, "linear_attention"),
        ("FalconH1", {}, "hybrid"),
        ("GraniteMoeHybrid", {}, "linear_attention"),
        ("Lfm2", {}, "conv_L_cache"),
        ("RecurrentGemma", {}, "lru_width"),
        ("Llama4Text", {}, "chunked_attention"),
        ("Rwkv", {}, "recurrent layers"),
        ("CLIPVision", {}, "not a plain causal language model"),
    ],
)
def test_which_models_may_be_packed(name: str, settings: dict[str, Any], reason: str | None) -> None:
    found = attention.packing_unsupported_reason(config_of(name, **settings))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Qwen2", {}, None),
        ("DeepseekV3", {}, None),
        ("Gemma2", {}, "attn_logit_softcapping"),
        ("GptOss", {}, "_supports_sdpa"),
        ("Falcon", {}, "_supports_attention_backend"),
        ("Llama", {"head_dim": 512}, "not 512"),
        ("Gemma4Text", {}, "not 512"),
    ],
)
def test_which_models_the_kernel_in_pytorch_fits(name: str, settings: dict[str, Any], reason: str | None) -> None:
    found = attention.varlen_unsupported_reason(config_of(name, **settings))
    assert found is None if reason is None else reason in str(found)


def test_attention_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrl.utils import device

    qwen, gemma, mistral = config_of("Qwen2"), config_of("Gemma2"), config_of("Mistral", sliding_window=8)
    bloom, gpt_oss, gemma_4 = config_of("Bloom"), config_of("GptOss"), config_of("Gemma4Text")
    assert attention.attention_implementation(qwen, {}) == "sdpa"  # on a CPU
    assert attention.attention_implementation(qwen, {"attn_implementation": "eager"}) == "eager"
    monkeypatch.setattr(device, "supports_varlen_attention", lambda: True)
    assert attention.attention_implementation(qwen, {}) == attention.VARLEN
    assert attention.attention_implementation(gemma, {}) == "sdpa"
    monkeypatch.setattr(device, "flash_attention", lambda: "flash_attention_2")
    assert attention.attention_implementation(qwen, {}) == "flash_attention_2"
    assert attention.attention_implementation(gemma, {}) == "flash_attention_2"
    # flash attention reads no window of a mask
    assert attention.attention_implementation(mistral, {}) == attention.VARLEN
    assert attention.attention_implementation(bloom, {}) == "eager"
    assert attention.attention_implementation(gpt_oss, {}) == "eager"  # it is for other kernels only
    assert attention.attention_implementation(gemma_4, {}) == "sdpa"  # heads of 512
    assert attention.attention_implementation(config_of("Llama4Text"), {}) == "sdpa"
    assert attention.attention_implementation(config_of("Llama", head_dim=512), {}) == "sdpa"
    assert attention.attention_implementation(config_of("Qwen2_5_VL"), {}) == "flash_attention_2"
