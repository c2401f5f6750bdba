"""The engine computes what transformers computes, for architectures that differ in everything it could trip over."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_helpers import (
    SIZES,
    TEMPERATURE,
    make_batch,
    make_engine,
    make_fields,
    plain_outputs,
    policy_loss,
    value_loss,
)

from hybridrl.engine import MicroBatching
from hybridrl.models.loading import load_language_model
from hybridrl.models.model_config import load_model_config
from hybridrl.models.stored import named_tensors, open_language_model
from hybridrl.models.value import load_value_model, open_value_model
from hybridrl.registry import import_external_lib

FIELDS = make_fields()
GROUPED = {**SIZES, "num_key_value_heads": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    # Heads wider than hidden / heads, norms on queries and keys.
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    # Soft caps on logits and attention, an attention window shorter than the rows, tied embeddings.
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, sliding_window=6, final_logit_softcapping=3.0),
    # Scaled logits.
    "cohere": CohereConfig(**GROUPED, logit_scale=0.3),
    # Learned positions, dropout in the configuration, other names and layouts of everything.
    "gpt2": GPT2Config(vocab_size=210, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "phi": PhiConfig(**SIZES, partial_rotary_factor=0.5),
    # Positions come from the attention mask unless they are given.
    "opt": OPTConfig(
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, ffn_dim=48, word_embed_proj_dim=32
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
    # Latent attention; the router adds a buffer to its scores that belongs to the checkpoint.
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def architecture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    for parameter in model.parameters():
        parameter.data.mul_(3)  # far from a uniform distribution, so that a cap or a scale that is left out shows
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data.normal_()
    model.save_pretrained(folder)
    return folder


def test_log_probs_and_a_step(architecture: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(architecture, dtype=torch.float32).eval()
    with torch.no_grad():
        log_probs, entropies = plain_outputs(plain, FIELDS)
    engine = make_engine(architecture, optim={"lr_warmup_steps": 0})
    stored = load_file(architecture / "model.safetensors")
    exported = dict(engine.export_weights())
    assert exported.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in exported.items())
    assert engine.weight_bytes() == sum(tensor.nbytes for tensor in exported.values())
    assert sum(t.numel() for t in exported.values()) >= sum(p.numel() for p in plain.parameters())
    batch = make_batch(FIELDS)
    got = engine.infer(batch, MicroBatching(size=5), TEMPERATURE, ("log_probs", "entropy"))
    torch.testing.assert_close(got["log_probs"], log_probs, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got["entropy"], entropies, atol=2e-5, rtol=1e-4)
    losses = [
        engine.train_batch(batch, MicroBatching(size=5), policy_loss, TEMPERATURE)["loss"].value for _ in range(3)
    ]
    assert losses[2] < losses[0]


def test_value_model(architecture: Path) -> None:
    engine = make_engine(architecture, "value_model", optim={"lr": 1e-3, "lr_warmup_steps": 0})
    batch = make_batch(FIELDS)
    losses = [engine.train_batch(batch, MicroBatching(size=5), value_loss)["loss"].value for _ in range(4)]
    assert losses[3] < losses[0]
    whole = engine.infer(batch, MicroBatching(), outputs=("values",))["values"]
    torch.testing.assert_close(
        engine.infer(batch, MicroBatching(size=1), outputs=("values",))["values"], whole, atol=1e-5, rtol=1e-4
    )


def test_weights_read_by_layers(architecture: Path) -> None:
    """Reading one layer after the other gives what loading the whole model gives, computed buffers too."""
    config = load_model_config(architecture)
    for read, load in ((open_language_model, load_language_model), (open_value_model, load_value_model)):
        whole = dict(named_tensors(load(architecture, config, "auto")))
        stored = read(architecture, config, "auto")
        assert all(t.is_meta for name, t in stored.module.named_parameters() if not name.startswith("score"))
        found = list(stored.tensors())
        assert sorted(name for name, _ in found) == sorted(whole)
        for name, tensor in found:
            assert tensor.dtype is whole[name].dtype, name
            assert torch.equal(tensor, whole[name]), name


def test_the_model_of_the_page(repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """docs/models.md: a family that transformers does not have, which scales its logits."""
    page = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n# my_model\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_model.py").write_text(source)
    import_external_lib(str(tmp_path / "my_model.py"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("my_model", **GROUPED, logit_scale=0.25))
    model.save_pretrained(tmp_path / "model")
    assert type(model).__name__ == "MyForCausalLM" and model.config.logit_scale == 0.25
    engine = make_engine(tmp_path / "model", model={"use_fused_kernels": True})
    found = engine.infer(make_batch(FIELDS), MicroBatching(size=4), TEMPERATURE)["log_probs"]
    assert "use_fused_kernels has no effect" not in capfd.readouterr().err
    with torch.no_grad():
        torch.testing.assert_close(found, plain_outputs(model, FIELDS)[0], atol=2e-5, rtol=1e-4)
    engine.train_batch(make_batch(FIELDS), MicroBatching(size=4), policy_loss, TEMPERATURE)
