"""Settings of how a model is loaded that cannot act, because it is trained, or because an engine loads it."""

from __future__ import annotations

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.checks.check_run import check
from hybridrl.config.checks.consequences import consequences
from hybridrl.config.compose import compose_config


@pytest.mark.parametrize("root", ["sft_trainer", "dpo_trainer", "rm_trainer"])
def test_a_model_of_supervised_training_learns(root: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose_config(root, ["engine.forward_only=True"]).config, elsewhere=True)
    assert any(fault.startswith("engine.forward_only=True") for fault in caught.value.faults)


@pytest.mark.parametrize(("engine", "is_named"), [("vllm", True), ("sglang", True), ("hf", False), ("auto", False)])
def test_how_a_model_is_loaded_where_an_engine_reads_the_checkpoint(engine: str, is_named: bool) -> None:
    group = "actor_rollout_ref.actor.fsdp_config"
    words = [
        f"actor_rollout_ref.rollout.name={engine}",
        f"{group}.reshard_after_forward=False",
        f"{group}.model_dtype=bfloat16",
    ]
    notices = list(consequences(compose_config("generation", words).config))
    assert [f"{group}.model_dtype, {group}.reshard_after_forward" in notice for notice in notices] == [True] * is_named
