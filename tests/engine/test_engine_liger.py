"""`model.use_liger`: which modules get Liger's kernels. What they compute, `tests/gpu/test_gpu_kernels.py` compares."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import make_engine
from raising import raises_with
from transformers import AutoModel, AutoModelForCausalLM, DogeConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.errors import ModelError
from hybridrl.models.liger import apply_liger, check_liger
from hybridrl.models.value import ValueModel

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def liger() -> None:
    pytest.importorskip("liger_kernel", reason="Liger is not installed: bash scripts/install.sh auto liger")


@pytest.fixture
def own_rotary_embeddings(liger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process get transformers' own functions again."""
    for module in (modeling_qwen2, modeling_qwen3):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)


def kernel_names(module: torch.nn.Module) -> dict[str, str]:
    """Where a forward method was replaced, its name by the module's."""
    return {
        name: part.forward.__qualname__
        for name, part in module.named_modules()
        if "forward" in vars(part) and "Liger" in getattr(part.forward, "__qualname__", "")
    }


@pytest.mark.parametrize(("config_class", "per_layer"), [(Qwen2Config, 3), (Qwen3Config, 5)])
def test_norms_and_mlps_of_this_model_and_of_no_other(own_rotary_embeddings, config_class, per_layer: int) -> None:
    config = config_class(**SMALL)
    module = AutoModelForCausalLM.from_config(config)
    names = list(module.state_dict())
    apply_liger(module, config)
    replaced = kernel_names(module)
    assert len(replaced) == 2 * per_layer + 1 and replaced["model.norm"] == "LigerRMSNorm.forward"
    assert replaced["model.layers.1.mlp"].startswith("LigerSwiGLU")
    assert module.forward.__func__ is type(module).forward  # the output layer and its logits are transformers' own
    assert list(module.state_dict()) == names
    other = AutoModelForCausalLM.from_config(config)
    assert not kernel_names(other)
    assert {type(part) for part in other.modules()} == {type(part) for part in module.modules()}


def test_a_value_model_leaves_transformers_classes_as_they_were(own_rotary_embeddings: None) -> None:
    """A value model is not of transformers; its backbone is."""
    config = Qwen2Config(**SMALL)
    before = {name: value for name, value in vars(modeling_qwen2).items() if inspect.isclass(value)}
    module = ValueModel(AutoModel.from_config(config), config)
    apply_liger(module, config)
    assert kernel_names(module)["model.norm"] == "LigerRMSNorm.forward"
    after = vars(modeling_qwen2)
    assert {name for name, value in before.items() if after[name] is not value} == set()


def test_a_family_without_kernels_is_refused(liger: None) -> None:
    with raises_with(ModelError, "use_liger=True", "family doge", "qwen2", "use_liger=False"):
        check_liger(DogeConfig())
    check_liger(Qwen3MoeConfig())


def test_a_cpu_computes_as_without_it_and_says_so(micro_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(micro_model, model={"use_liger": True})
    assert not kernel_names(engine.module)  # type: ignore[attr-defined]
    assert "model.use_liger has no effect on cpu" in capsys.readouterr().err


def test_it_is_not_combined_with_the_compiler() -> None:
    from hybridrl.config.schema.engine import FSDPConfig
    from hybridrl.config.schema.model import ModelConfig

    with raises_with(ModelError, "use_liger=True", "fsdp_config.use_torch_compile=True"):
        FSDPEngine.check(ModelConfig(path="x", use_liger=True), FSDPConfig(use_torch_compile=True), 1)
