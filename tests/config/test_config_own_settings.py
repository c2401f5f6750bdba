"""What a user's module registers can be chosen, and its settings are settings like every other."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import textwrap

import pytest
from raising import raises_with

from hybridrl.agents.loop import AgentLoopBase, register
from hybridrl.algorithms.algorithm_registry import reads_whole_sequences
from hybridrl.config import load_config, to_yaml, validate
from hybridrl.errors import ConfigError, UserError
from hybridrl.registry import (
    ADV_ESTIMATORS,
    AGENT_LOOPS,
    INFERENCE_ENGINES,
    OBJECTIVES,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    TRAIN_ENGINES,
)

POLICY = "actor_rollout_ref"
CODE = """
    from dataclasses import dataclass
    from hybridrl.algorithms import Tokens, outcome_estimator, policy_loss
    from hybridrl.config import key
    from hybridrl.engine.fsdp.engine import FSDPEngine
    from hybridrl.engine.train_engine import register_train_engine

    @dataclass(frozen=True)
    class LossSettings:
        my_beta: float = key(0.5, "weight of the square", gt=0)
        my_mode: str = key("square", "its form", choices=("square", "cube"))

    @policy_loss("own_loss", settings=LossSettings, needs=("ref_log_prob",))
    def own_loss(tokens: Tokens, settings: LossSettings):
        return -tokens.advantages * tokens.log_prob * settings.my_beta, {}

    @dataclass(frozen=True)
    class EstimatorSettings:
        my_coef: float = 1.0

    @outcome_estimator("own_estimator", compares_samples=True, needs=("values",), settings=EstimatorSettings)
    def own_estimator(scores, groups, settings: EstimatorSettings):
        return settings.my_coef * (scores - groups.mean(scores))

    @dataclass(frozen=True)
    class EngineSettings:
        my_depth: int = 3

    @register_train_engine("own_engine", settings=EngineSettings)
    class OwnEngine(FSDPEngine):
        pass
"""


@pytest.fixture(scope="module")
def own_module(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Registered names last as long as the process: one module for all tests."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_things_of_a_test.py").write_text(textwrap.dedent(CODE))
    sys.path.insert(0, str(folder))
    return "own_things_of_a_test"


def words(module: str) -> list[str]:
    return [
        f"{POLICY}.model.external_lib={module}",
        f"{POLICY}.actor.policy_loss.loss_mode=own_loss",
        "algorithm.adv_estimator=own_estimator",
    ]


def faults_of(words: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(load_config("ppo_trainer", words))
    return caught.value.faults


def test_own_settings_are_typed_and_stand_in_the_group_of_their_name(own_module) -> None:
    given = [
        f"+{POLICY}.actor.policy_loss.my_beta=1",
        "algorithm.my_coef='0.25'",
        f"{POLICY}.actor.strategy=own_engine",
    ]
    config = load_config("ppo_trainer", [*words(own_module), *given, f"{POLICY}.actor.fsdp_config.my_depth=7"])
    loss = config.actor_rollout_ref.actor.policy_loss
    assert (loss.my_beta, loss["my_mode"], config.algorithm.get("my_coef")) == (1.0, "square", 0.25)
    assert isinstance(loss.my_beta, float) and "my_beta" in loss and "my_beta" in list(loss.keys())
    assert config.actor_rollout_ref.actor.fsdp_config.my_depth == 7
    assert config.actor_rollout_ref.ref.fsdp_config.my_depth == 3  # the reference follows the actor's strategy
    again = pickle.loads(pickle.dumps(config))
    assert again.actor_rollout_ref.actor.policy_loss.my_beta == 1.0 and again == config
    with pytest.raises(AttributeError, match="nothing"):
        _ = loss.nothing


def test_a_configuration_with_own_settings_is_read_back(own_module, tmp_path) -> None:
    config = load_config("ppo_trainer", [*words(own_module), "algorithm.my_coef=0.25"])
    (tmp_path / "kept.yaml").write_text(to_yaml(config))
    again = load_config("ppo_trainer", config_dir=tmp_path, config_name="kept")
    assert again.algorithm.my_coef == 0.25 and again == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (f"{POLICY}.actor.policy_loss.my_bta=1", (f"{POLICY}.actor.policy_loss.my_bta", "unknown", "my_beta")),
        (f"{POLICY}.actor.policy_loss.my_beta=0", (f"{POLICY}.actor.policy_loss.my_beta=0", "greater than 0")),
        (f"{POLICY}.actor.policy_loss.my_beta=big", (f"{POLICY}.actor.policy_loss.my_beta='big'", "a number")),
        (f"{POLICY}.actor.policy_loss.my_mode=line", ("my_mode='line'", "square, cube")),
        ("algorithm.my_coeff=1", ("algorithm.my_coeff", "unknown", "algorithm.my_coef")),
        ("algorithm.gama=1", ("algorithm.gama", "unknown", "algorithm.gamma")),
        (f"{POLICY}.actor.fsdp_config.my_depth=1", (f"{POLICY}.actor.fsdp_config.my_depth", "unknown")),
    ],
)
def test_own_settings_are_checked_like_every_other(own_module, change, named) -> None:
    (fault,) = faults_of([*words(own_module), change])
    assert all(part in fault for part in named)


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("algorithm.adv_estimator", "algorithm.my_coef=1"),
        (f"{POLICY}.actor.policy_loss.loss_mode", f"{POLICY}.actor.policy_loss.my_beta=1"),
        (f"{POLICY}.actor.strategy", f"{POLICY}.actor.fsdp_config.my_depth=1"),
        (f"{POLICY}.rollout.name", f"{POLICY}.rollout.engine_kwargs.my_pause=1"),
    ],
)
def test_a_wrong_name_is_the_fault_and_not_the_settings_of_what_was_meant(own_module, key, setting) -> None:
    for name, said in (
        ("own_los", "unknown"),
        (f"{own_module}:own_los", f"{own_module} defines no own_los. It defines LossSettings, own_loss"),
        ("no_such_module_x:own_loss", "a module that can be imported"),
    ):
        (fault,) = faults_of([f"{POLICY}.model.external_lib={own_module}", f"{key}={name}", setting])
        assert fault.startswith(f"{key}={name}: ") and said in fault


def test_a_module_that_cannot_be_imported_is_the_fault_and_not_its_settings(tmp_path) -> None:
    file = tmp_path / "broken_of_a_test.py"
    file.write_text("1 / 0\n")
    loss = f"{POLICY}.actor.policy_loss"
    (fault,) = faults_of([f"{loss}.loss_mode={file}:own_loss", f"{loss}.my_beta=1"])
    assert fault.startswith(f"{loss}.loss_mode={file}:own_loss: fails to import: ZeroDivisionError")
    assert f"{file}, line 1" in fault


def test_a_choice_that_is_no_entry_is_no_wrong_name() -> None:
    (fault,) = faults_of([f"{POLICY}.rollout.name=auto", f"{POLICY}.rollout.engine_kwargs.vlm.seed=1"])
    assert fault.startswith(f"{POLICY}.rollout.engine_kwargs.vlm") and "unknown key" in fault


def test_a_similar_setting_is_suggested_once(own_module) -> None:
    (fault,) = faults_of([*words(own_module), f"{POLICY}.actor.policy_loss.my_bta=1"])
    assert fault.count(f"{POLICY}.actor.policy_loss.my_beta") == 1


def test_a_wrong_strategy_that_other_roles_follow_is_reported_once(own_module) -> None:
    for name in ("nothing", f"{own_module}:Nothing"):
        found = [fault for fault in faults_of([f"{POLICY}.actor.strategy={name}"]) if "strategy=" in fault]
        assert len(found) == 1 and found[0].startswith(f"{POLICY}.actor.strategy={name}: ")
    found = faults_of([f"{POLICY}.actor.strategy=nothing", "critic.strategy=other"])
    assert {fault.split(":")[0] for fault in found} >= {f"{POLICY}.actor.strategy=nothing", "critic.strategy=other"}


LOSS = """
    from dataclasses import dataclass
    from hybridrl.algorithms import Tokens, policy_loss

    @dataclass(frozen=True)
    class LossSettings:
        my_beta: float = 0.5

    @policy_loss("{name}", settings=LossSettings, needs=("ref_log_prob",), whole_sequences=True)
    def {name}(tokens: Tokens, settings: LossSettings):
        return -tokens.advantages * tokens.total(tokens.log_prob) * settings.my_beta, {{}}
"""


@pytest.mark.parametrize("order", ["path_first", "location_first", "module_first"])
def test_a_file_that_is_loaded_by_path_and_by_module_is_one(order, tmp_path, monkeypatch) -> None:
    name = f"loss_of_{order}"
    (tmp_path / f"file_of_{order}.py").write_text(textwrap.dedent(LOSS).format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    module, file = f"file_of_{order}", tmp_path / f"file_of_{order}.py"
    if order == "location_first":
        POLICY_LOSSES.get(f"{module}:{name}")
    if order == "module_first":
        importlib.import_module(module)
    loss = f"{POLICY}.actor.policy_loss"
    given = [f"{POLICY}.model.external_lib={file}", f"{loss}.my_beta=2"]
    for chosen in (f"{module}:{name}", f"{file}:{name}", name):
        config = load_config("ppo_trainer", [*given, f"{loss}.loss_mode={chosen}"])
        assert config.actor_rollout_ref.actor.policy_loss.my_beta == 2.0 and config.use_reference
        assert POLICY_LOSSES.get(chosen) is POLICY_LOSSES.get(name)
        assert reads_whole_sequences(chosen, config)
    with pytest.raises(UserError, match=rf"\b{name}\b") as caught:
        POLICY_LOSSES.get("unheard_of")
    assert module not in str(caught.value)  # the places it was loaded from are no further names


def test_two_files_cannot_register_one_name(tmp_path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one_name.py").write_text(textwrap.dedent(LOSS).format(name="loss_of_two"))
    both = f"{POLICY}.model.external_lib='{tmp_path}/a/one_name.py,{tmp_path}/b/one_name.py'"
    assert any("'loss_of_two' is registered already" in fault for fault in faults_of([both]))


def test_a_setting_of_something_that_is_not_chosen_is_unknown(own_module) -> None:
    load_config("ppo_trainer", words(own_module))
    for change in (f"{POLICY}.actor.policy_loss.my_beta=1", "algorithm.my_coef=1"):
        (fault,) = faults_of([change])
        assert "unknown key" in fault and change.split("=")[0] in fault


def test_facts_of_own_code_count_in_every_check(own_module) -> None:
    config = load_config("ppo_trainer", words(own_module))
    assert config.use_critic and config.use_reference
    found = " ".join(faults_of([*words(own_module), "critic.enable=False"]))
    assert "rollout.n=1" in found and "adv_estimator=own_estimator needs values" in found


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("algorithm.adv_estimator", ADV_ESTIMATORS),
        (f"{POLICY}.actor.policy_loss.loss_mode", POLICY_LOSSES),
        (f"{POLICY}.actor.strategy", TRAIN_ENGINES),
        (f"{POLICY}.rollout.name", INFERENCE_ENGINES),
        ("reward.reward_manager.name", REWARD_MANAGERS),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(own_module, key, registry) -> None:
    for words_ in ([], [f"{POLICY}.model.external_lib={own_module}"]):
        found = [fault for fault in faults_of([*words_, f"{key}=nothing"]) if fault.startswith(f"{key}=nothing")]
        assert len(found) == 1 and all(name in found[0] for name in registry.names())
    for name in (f"{own_module}:Nothing", "no_such_module_x:Thing"):
        (fault,) = [fault for fault in faults_of([f"{key}={name}"]) if fault.startswith(f"{key}=")]
        assert name.split(":")[0] in fault


def test_a_name_may_say_where_it_is(own_module) -> None:
    given = [f"algorithm.adv_estimator={own_module}:own_estimator", "algorithm.my_coef=2"]
    config = load_config("ppo_trainer", given)
    assert config.algorithm.my_coef == 2.0 and config.use_critic


@pytest.mark.slow(10)
def test_facts_read_from_the_source_are_those_of_the_entries() -> None:
    """In a process of its own, where nothing was imported before. Classes and functions are known after the import."""
    registries = (ADV_ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS, INFERENCE_ENGINES, TRAIN_ENGINES, OBJECTIVES)
    names = [key for key, value in vars(sys.modules["hybridrl.registry"]).items() if value in registries]
    assert len(names) == len(registries)
    code = f"""
        import sys
        from dataclasses import fields
        from hybridrl.registry import {", ".join(names)}
        registries = ({", ".join(names)})
        read = [{{name: registry.metadata(name) for name in registry.names()}} for registry in registries]
        assert all(read) and not {{"torch", "ray", "transformers"}} & set(sys.modules)
        for registry, facts in zip(registries, read, strict=True):
            for name in facts:
                registry.get(name)
                for field in fields(facts[name]):
                    before, after = getattr(facts[name], field.name), getattr(registry.metadata(name), field.name)
                    assert before == after or (callable(after) and before == field.default), (name, field.name)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)


def test_a_name_that_is_taken_is_refused(own_module) -> None:
    for registry in (ADV_ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS, INFERENCE_ENGINES, TRAIN_ENGINES):
        name = registry.names()[0]
        with raises_with(registry.error, f"'{name}'"):
            registry.add(name, type("Other", (), {"__module__": "elsewhere"}), registry.metadata(name))


def test_tools_need_a_loop_that_does_more_than_answer() -> None:
    @register("answers_of_a_test", only_answers=True)
    class Answers(AgentLoopBase):
        pass

    rollout = "actor_rollout_ref.rollout"
    try:
        for loop, wrong in (
            ("null", True),
            ("single_turn_agent", True),
            ("answers_of_a_test", True),
            ("tool_agent", False),
            ("elsewhere", False),
        ):
            words = [f"{rollout}.multi_turn.tool_config_path=x.yaml", f"{rollout}.agent.default_agent_loop={loop}"]
            with pytest.raises(ConfigError) as caught:
                validate(load_config("ppo_trainer", words))
            found = [one for one in caught.value.faults if "without a loop that calls tools" in one]
            assert bool(found) is wrong, loop
    finally:
        AGENT_LOOPS.remove("answers_of_a_test")
