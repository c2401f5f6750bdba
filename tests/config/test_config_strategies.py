"""The strategy of a role decides which group of settings its training engine reads; the others are named as unread."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import field, make_dataclass
from pathlib import Path

import pytest
from raising import raises_with

from hybridrl.config import FSDPConfig, MegatronConfig, load_config, validate
from hybridrl.config.compose import compose_config
from hybridrl.config.entry_settings import engine_settings
from hybridrl.config.roles import ROLES, RoleSpec
from hybridrl.errors import ConfigError
from hybridrl.registry import import_external_lib

POLICY = "actor_rollout_ref"
CODE = """
    from dataclasses import dataclass
    from hybridrl.config import MegatronConfig
    from hybridrl.engine.fsdp.engine import FSDPEngine
    from hybridrl.engine.train_engine import register_train_engine

    @dataclass
    class Layout(MegatronConfig):
        my_stages: int = 2

    @register_train_engine("own_parallel", settings=Layout)
    class Parallel(FSDPEngine):
        pass

    @dataclass
    class Depth:
        my_depth: int = 3

    @register_train_engine("own_sharded", settings=Depth)
    class Sharded(FSDPEngine):
        pass

    @register_train_engine("own_plain")
    class Plain(FSDPEngine):
        pass
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Registered names last as long as the process: one module for all tests."""
    folder = tmp_path_factory.mktemp("strategies")
    (folder / "own_strategies_of_a_test.py").write_text(textwrap.dedent(CODE))
    sys.path.insert(0, str(folder))
    return "own_strategies_of_a_test"


def ppo(module: str, strategy: str, *words: str):
    return compose_config(
        "ppo_trainer", [f"{POLICY}.model.external_lib={module}", f"{POLICY}.actor.strategy={strategy}", *words]
    )


@pytest.mark.parametrize(
    ("strategy", "kind", "name"),
    [
        ("fsdp2", FSDPConfig, "fsdp_config"),
        ("own_plain", FSDPConfig, "fsdp_config"),
        ("own_sharded", FSDPConfig, "fsdp_config"),
        ("own_parallel", MegatronConfig, "megatron"),
    ],
)
def test_an_engine_gets_the_group_that_its_settings_derive_from(module, strategy, kind, name) -> None:
    config = ppo(module, strategy).config
    actor, critic = config.actor_rollout_ref.actor, config.critic
    settings = engine_settings(actor, module)
    assert settings is getattr(actor, name) and type(settings) is kind and settings.strategy == strategy
    assert engine_settings(config.actor_rollout_ref.ref) is getattr(config.actor_rollout_ref.ref, name)
    assert engine_settings(critic) is {"fsdp_config": critic.fsdp, "megatron": critic.megatron}[name]
    fine_tuning = load_config("sft_trainer", [f"model.external_lib={module}", f"engine.strategy={strategy}"])
    assert engine_settings(fine_tuning.engine) is fine_tuning.engine and isinstance(fine_tuning.engine, kind)


def test_own_settings_are_in_the_group_that_the_engine_reads(module) -> None:
    config = ppo(module, "own_parallel", f"{POLICY}.actor.megatron.my_stages=4").config
    assert engine_settings(config.actor_rollout_ref.actor).my_stages == 4
    assert config.actor_rollout_ref.ref.megatron.my_stages == 2
    for group in ("fsdp_config.my_stages", "megatron.my_depth", "megatron.tensor_parallel_size"):
        with raises_with(ConfigError, f"{POLICY}.actor.{group}", "unknown key"):
            ppo(module, "own_parallel", f"{POLICY}.actor.{group}=4")
    with raises_with(ConfigError, "tensor_model_parallel_size"):
        ppo(module, "fsdp2", f"{POLICY}.actor.megatron.tensor_parallel_size=4")
    engine = ["engine.strategy=own_parallel", "engine.my_stages=4", "engine.tensor_model_parallel_size=2"]
    settings = load_config("sft_trainer", [f"model.external_lib={module}", *engine]).engine
    assert (settings.my_stages, settings.tensor_model_parallel_size) == (4, 2)


def test_a_role_without_the_group_of_its_engine_is_refused(module) -> None:
    actor = ppo(module, "own_parallel").config.actor_rollout_ref.actor
    with raises_with(ConfigError, "own_parallel", "MegatronConfig", "FSDPConfig"):
        engine_settings(actor.fsdp_config)


@pytest.mark.parametrize(
    ("strategy", "unread", "read"),
    [
        ("fsdp2", "megatron.param_offload=true", "fsdp_config.param_offload=true"),
        ("fsdp2", "megatron.override_ddp_config.x=1", "fsdp_config.seed=3"),
        ("fsdp2", "megatron.router_replay.mode=R2", "fsdp_config.seed=3"),
        ("fsdp2", "optim.muon_momentum=0.5", "optim.lr=1"),
        ("own_parallel", "fsdp_config.param_offload=true", "megatron.param_offload=true"),
        ("own_parallel", "fsdp_config.fsdp_size=2", "megatron.tensor_model_parallel_size=2"),
    ],
)
def test_settings_of_another_engine_pass_with_one_notice(module, strategy, unread, read) -> None:
    actor = f"{POLICY}.actor"
    notices = ppo(module, strategy, f"{actor}.{unread}", f"{actor}.{read}").notices
    (notice,) = [notice for notice in notices if f"{actor}.strategy={strategy}" in notice]
    assert f"{actor}.{unread.split('=')[0]} (command line)" in notice and read.split("=")[0] not in notice


def test_fine_tuning_has_the_settings_of_all_engines_in_one_group(module) -> None:
    words = [f"model.external_lib={module}", "engine.param_offload=true", "engine.dtype=float32"]
    both = ["engine.fsdp_size=1", "engine.context_parallel_size=2"]
    for strategy, unread in (("fsdp2", both[1]), ("own_parallel", both[0])):
        composed = compose_config("sft_trainer", [*words, *both, f"engine.strategy={strategy}"])
        (notice,) = composed.notices
        assert f"engine.strategy={strategy}" in notice and unread.split("=")[0] in notice
        assert "param_offload" not in notice


def test_what_an_engine_lacks_is_refused_only_where_it_is_chosen(module) -> None:
    asked = f"{POLICY}.actor.megatron.router_replay.mode=R2"
    assert any(asked.split("=")[0] in notice for notice in ppo(module, "fsdp2", asked).notices)
    with raises_with(ConfigError, "router_replay.mode='R2'", "router replay"):
        ppo(module, "own_parallel", asked)
    with raises_with(ConfigError, "optim.lr_warmup_init=", "zero"):
        ppo(module, "own_parallel", f"{POLICY}.actor.optim.lr_warmup_init=1e-6")


def test_the_reference_has_the_layout_of_the_actor_unless_it_is_set(module) -> None:
    megatron = f"{POLICY}.actor.megatron"
    words = [f"{megatron}.tensor_model_parallel_size=2", f"{megatron}.override_transformer_config.num_moe_experts=4"]
    ref = ppo(module, "own_parallel", *words, f"{POLICY}.ref.megatron.pipeline_model_parallel_size=2").config
    ref = ref.actor_rollout_ref.ref.megatron
    assert (ref.tensor_model_parallel_size, ref.pipeline_model_parallel_size, ref.forward_only) == (2, 2, True)
    assert ref.override_transformer_config == {"num_moe_experts": 4}


def test_names_of_megatrons_optimizer_settings_lead_to_ours(module, tmp_path: Path) -> None:
    optim = f"{POLICY}.actor.optim"
    config = ppo(module, "own_parallel", f"{optim}.lr_decay_style=cosine", f"{optim}.lr_decay_steps=50").config
    found = config.actor_rollout_ref.actor.optim
    assert (found.lr_scheduler_type, found.total_training_steps) == ("cosine", 50)
    config = ppo(module, "own_parallel", f"{optim}.optimizer=adam").config
    assert config.actor_rollout_ref.actor.optim.optimizer == "AdamW"
    with raises_with(ConfigError, "lr_decay_style='inverse_square_root'", "cosine"):
        ppo(module, "own_parallel", f"{optim}.lr_decay_style=inverse_square_root")


@pytest.mark.parametrize(
    "words",
    [
        ["model_engine=megatron"],
        [f"actor@{POLICY}.actor=megatron_actor", f"ref@{POLICY}.ref=megatron_ref", "critic=megatron_critic"],
        ["model_engine=dp", f"{POLICY}.actor.strategy=megatron"],
    ],
)
def test_verls_choice_of_an_engine_sets_the_strategy_of_every_role(words) -> None:
    config = load_config("ppo_trainer", words)
    roles = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    assert [role.strategy for role in roles] == ["megatron"] * 3
    assert [role.megatron.strategy for role in roles] == ["megatron"] * 3


def test_verls_choice_of_an_engine_for_fine_tuning_sets_its_strategy() -> None:
    words = ["engine=megatron", "optim=megatron", "engine.tensor_model_parallel_size=2"]
    engine = load_config("sft_trainer", words).engine
    assert (engine.strategy, engine.tensor_model_parallel_size) == ("megatron", 2)


def test_verls_base_for_megatron_may_be_named_and_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "ppo_megatron_trainer"
    for words, strategy, others in (
        ([], "megatron", ["megatron", "megatron"]),
        (["model_engine=dp"], "fsdp2", ["fsdp2", "fsdp2"]),
        ([f"{POLICY}.actor.strategy=fsdp2"], "fsdp2", ["megatron", "megatron"]),
    ):
        config = load_config("ppo_trainer", words, "config", name)
        roles = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
        assert [role.strategy for role in roles] == [strategy, *others]
    config = load_config("ppo_trainer", ["model_engine=megatron", f"{POLICY}.actor.strategy=fsdp2"])
    assert (config.actor_rollout_ref.ref.strategy, config.critic.strategy) == ("megatron", "megatron")
    (tmp_path / "mine.yaml").write_text(f"defaults: [{name}, _self_]\ntrainer: {{nnodes: 2}}\n")
    config = load_config("ppo_trainer", [], ".", "mine")
    assert (config.critic.strategy, config.trainer.nnodes) == ("megatron", 2)
    (tmp_path / "plain.yaml").write_text("model_engine: megatron\n")
    assert load_config("ppo_trainer", [], ".", "plain").actor_rollout_ref.actor.strategy == "megatron"


def prime(module: str, *words: str):
    own = [f"roles.prime.{word}" for word in words]
    composed = compose_config("ppo_trainer", [f"{POLICY}.model.external_lib={module}", *own])
    import_external_lib(module)
    return composed, ROLES["prime"].settings_of(composed.config)


def test_a_role_with_settings_of_its_own_has_the_same_choice_of_engines(module) -> None:
    for strategy, kind, words in (
        ("own_sharded", FSDPConfig, {"fsdp_config.my_depth": 7}),
        ("own_parallel", MegatronConfig, {"megatron.my_stages": 4, "megatron.tensor_model_parallel_size": 2}),
    ):
        _, settings = prime(module, f"strategy={strategy}", *(f"{name}={value}" for name, value in words.items()))
        found = engine_settings(settings)
        assert type(found) is kind and found.strategy == settings.strategy == strategy
        for name, value in words.items():
            assert found[name.split(".")[1]] == value
        frozen = found.changed(forward_only=True)
        assert frozen.forward_only and not found.forward_only and frozen.own is found.own is not None
    for strategy, word, named in (
        ("own_sharded", "fsdp_config.my_depht=7", r"roles\.prime\.fsdp_config\.my_depht: unknown key.*my_depth"),
        ("own_sharded", "fsdp_config.my_depth=x", r"roles\.prime\.fsdp_config\.my_depth='x'"),
        ("own_sharded", "megatron.my_depth=7", r"roles\.prime\.megatron\.my_depth: unknown key"),
        ("fsdp2", "fsdp_config.my_depth=7", r"roles\.prime\.fsdp_config\.my_depth: unknown key.*fsdp_size"),
        ("own_plain", "fsdp_config=7", r"roles\.prime\.fsdp_config=7: a group"),
    ):
        with pytest.raises(ConfigError, match=named) as caught:
            prime(module, f"strategy={strategy}", word)
        assert len(caught.value.faults) == 1


def test_settings_of_another_engine_pass_with_a_notice_in_such_a_role_too(module) -> None:
    composed, _ = prime(module, "strategy=megatron", "fsdp_config.fsdp_size=2", "megatron.param_offload=true")
    (notice,) = [notice for notice in composed.notices if "roles.prime.strategy=megatron" in notice]
    assert "roles.prime.fsdp_config.fsdp_size (command line)" in notice and "param_offload" not in notice


def test_a_role_that_lacks_the_group_of_its_engine_is_refused_before_the_run(module, monkeypatch) -> None:
    engine = field(default_factory=lambda: FSDPConfig(forward_only=True))
    keys = [("strategy", str, "fsdp2"), ("use_dynamic_bsz", bool, True), ("max_token_len_per_gpu", int, 1 << 20)]
    narrow = RoleSpec(
        name="narrow",
        worker=None,
        settings=make_dataclass("Narrow", [*keys, ("engine", FSDPConfig, engine)]),
        needed=lambda config: "narrow" in config.roles,
        placement=("actor_rollout_ref",),
        mesh="narrow",
    )
    monkeypatch.setitem(ROLES, "narrow", narrow)
    words = [f"{POLICY}.model.external_lib={module}", "roles.narrow.strategy=own_parallel"]
    with pytest.raises(ConfigError) as caught:
        validate(load_config("ppo_trainer", words))
    (fault,) = [fault for fault in caught.value.faults if "narrow" in fault]
    assert "roles.narrow.strategy=own_parallel" in fault and "MegatronConfig" in fault
