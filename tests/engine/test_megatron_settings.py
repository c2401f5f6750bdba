"""Settings of an engine on Megatron-core: layouts and overrides that are refused, and what they make of the kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron_models import tiny_config
from raising import raises_with

from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine.megatron import build
from hybridrl.engine.megatron.attention_backend import AttentionVariables
from hybridrl.engine.megatron.engine import MegatronEngine
from hybridrl.engine.megatron.mapping import family_of
from hybridrl.engine.megatron.parallel import ParallelSizes, import_parallel_state
from hybridrl.errors import ModelError
from hybridrl.utils import device


def test_a_change_of_kernels_reaches_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reuses the backend of its last call, and looks at the environment again when told to."""
    attention: Any = ModuleType("transformer_engine.pytorch.attention")
    attention._attention_backends = {"backend_selection_requires_update": False}
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    first, second = AttentionVariables(), AttentionVariables()
    with first.activate():
        os.environ["NVTE_FLASH_ATTN"] = "0"
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    for variables, changes, value in ((second, False, "1"), (first, True, "0")):
        attention._attention_backends["backend_selection_requires_update"] = False
        with variables.activate():
            assert attention._attention_backends["backend_selection_requires_update"] == changes
            assert os.environ["NVTE_FLASH_ATTN"] == value


@pytest.mark.parametrize(("dtype", "packs"), [(torch.float32, False), (torch.bfloat16, True)])
def test_transformer_engine_packs_in_half_precision_only(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: Any, packs: bool
) -> None:
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "has_transformer_engine", lambda: True)
    engine: Any = MegatronEngine("language_model", ModelConfig(path=str(tiny_model)), MegatronConfig())
    engine.dtype, engine.config = dtype, None
    assert engine.may_pack() == packs
    assert ("use_remove_padding" in capsys.readouterr().err) != packs


def test_layouts_that_do_not_fit_are_refused_with_those_that_do() -> None:
    model_fields = {"num_attention_heads": 8, "num_query_groups": 4, "num_layers": 12}
    for sizes, world, pattern in (
        (ParallelSizes(tp=8, etp=8), 8, r"tensor_model_parallel_size=8.*4 heads of keys and values.*1, 2, 4"),
        (ParallelSizes(pp=5), 5, r"pipeline_model_parallel_size=5.*12 layers.*1, 2, 3, 4, 6, 12"),
        (ParallelSizes(pp=2, vpp=4), 2, r"virtual_pipeline_model_parallel_size=4.*1, 2, 3, 6"),
        (ParallelSizes(vpp=2), 2, r"virtual_pipeline_model_parallel_size=2 needs pipeline_model_parallel_size"),
        (ParallelSizes(ep=2), 2, r"no experts"),
    ):
        with pytest.raises(ModelError, match=pattern):
            sizes.check(world, model_fields)
    experts = {**model_fields, "num_moe_experts": 6}
    for sizes, world, pattern in (
        (ParallelSizes(ep=4), 4, r"expert_model_parallel_size=4.*6 experts.*1, 2, 3, 6"),
        (ParallelSizes(ep=6), 4, r"4 ranks of a pipeline stage.*1, 2"),
        (ParallelSizes(tp=2, etp=1), 2, r"expert_tensor_parallel_size=1 differs"),
    ):
        with pytest.raises(ModelError, match=pattern):
            sizes.check(world, experts)
    counted = {f"account_for_{part}_in_pipeline_split": True for part in ("embedding", "loss")}
    ParallelSizes(pp=8).check(8, {**model_fields, "num_layers": 94, **counted})
    for sizes, pattern in (
        (ParallelSizes(pp=8), r"^pipeline_model_parallel_size=8: 94 layers do not.*1, 2, 47, 94$"),
        (ParallelSizes(pp=2, vpp=3), r"virtual_pipeline_model_parallel_size=3 with pipeline_model_parallel_size=2"),
    ):
        with pytest.raises(ModelError, match=pattern):
            sizes.check(8, {**model_fields, "num_layers": 94})
    with raises_with(ModelError, "94 layers", "account_for_embedding_in_pipeline_split"):
        ParallelSizes(pp=8).check(
            8, {**model_fields, "num_layers": 94, "account_for_embedding_in_pipeline_split": True}
        )
    ParallelSizes(tp=2, pp=2, vpp=3, etp=2).check(8, model_fields)
    ParallelSizes(tp=2, ep=2, etp=1).check(4, experts)


def settings_of(case: str = "qwen2", here: bool = True, recompute: bool = False, **overrides: Any) -> Any:
    """Megatron-core's settings of a tiny model on one rank, as the engine makes them."""
    import_parallel_state()
    config = tiny_config(case)
    plan = build.blueprint(family_of(config), config, "language_model", overrides, recompute, here)
    return build.transformer_config(plan, ParallelSizes(), True, torch.float32)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"num_layers": 2}, r"num_layers=2.*4.*model\.override_config"),
        ({"case": "qwen3-moe", "moe_router_topk": 1}, r"moe_router_topk=1.*model\.override_config"),
        ({"case": "qwen3-moe", "moe_router_load_balancing_type": "sinkhorn"}, "load_balancing_type='sinkhorn'"),
        ({"params_dtype": "bfloat16"}, r"params_dtype='bfloat16'.*'float32'.*megatron\.dtype"),
        ({"deallocate_pipeline_outputs": True}, r"deallocate_pipeline_outputs=True.*False"),
        ({"hidden_dropout": 0.1}, r"hidden_dropout=0\.1.*0\.0"),
        ({"softmax_type": "off-by-one"}, r"softmax_type='off-by-one'.*vanilla"),
        ({"recompute_modules": ["mlp"]}, r"recompute_modules=\['mlp'\].*recompute_granularity=selective.*None"),
        ({"recompute_modules": ["mlp"], "recompute": True}, r"recompute_modules=\['mlp'\]"),
    ],
)
def test_overrides_that_contradict_the_model_or_the_engine_are_refused(overrides: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        settings_of(**overrides)


def test_overrides_that_agree_with_the_model_and_the_engine_are_accepted() -> None:
    same = {"num_layers": 4, "params_dtype": "float32", "deallocate_pipeline_outputs": False, "hidden_dropout": 0.0}
    found = settings_of(**same, context_parallel_size=1, init_method_std=0.5, softmax_type="vanilla")
    assert (found.num_layers, found.params_dtype, found.init_method_std) == (4, torch.float32, 0.5)
    assert settings_of("qwen3-moe", moe_router_dtype="fp64").moe_router_dtype == "fp64"
    assert list(settings_of("mistral-window", window_size=[4, 0]).window_size) == [4, 0]


def test_the_granularity_of_another_engine_is_refused(micro_model: Path) -> None:
    model = ModelConfig(path=str(micro_model), recompute_granularity="selective")
    with raises_with(ModelError, "model.recompute_granularity=selective", "override_transformer_config"):
        MegatronEngine.check(model, MegatronConfig(), ranks=1)


def test_what_is_recomputed_is_what_the_user_says() -> None:
    found = settings_of(recompute=True, recompute_modules=["core_attn"])  # verl's default
    assert (found.recompute_granularity, found.recompute_method, found.recompute_num_layers) == ("full", "uniform", 1)
    found = settings_of(recompute=True, recompute_method="block", recompute_num_layers=2)
    assert (found.recompute_granularity, found.recompute_method, found.recompute_num_layers) == ("full", "block", 2)
    found = settings_of(recompute=True, recompute_granularity="selective", recompute_modules=["mlp"])
    assert (found.recompute_granularity, found.recompute_modules) == ("selective", ["mlp"])


def test_a_process_without_the_devices_of_the_ranks_does_not_judge_by_its_own(capfd: Any) -> None:
    for overrides in (
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"], "case": "qwen3-moe"},
        {"softmax_type": "off-by-one"},
        {"attention_backend": "flash"},
        {"bf16": True, "deallocate_pipeline_outputs": True},
    ):
        settings_of(**overrides, here=False)
    assert "attention_backend" not in capfd.readouterr().err
    settings_of(attention_backend="flash", cp_comm_type="a2a")
    said = capfd.readouterr().err
    assert "attention_backend=flash" in said and "cp_comm_type=a2a" in said
    with raises_with(ModelError, "num_layers=2"):
        settings_of(num_layers=2, here=False)
