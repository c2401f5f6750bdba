"""Settings that name a model, a file or code: what is missing is refused at start-up, by the setting's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config import ConfigError, load_config
from hybridrl.config.checks.check_run import check
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import ROOTS

POLICY = "actor_rollout_ref"
ROLLOUT = f"{POLICY}.rollout"
PPO = [f"{POLICY}.model.path=model", "data.train_files=train.parquet"]
GRPO = [*PPO, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"]
SFT = ["model.path=model", "data.train_files=train.parquet"]
DISTILLED = ["distillation.enabled=True", "distillation.teacher_models.a.model_path=model"]
MEGATRON = [f"{POLICY}.actor.strategy=megatron", f"{POLICY}.actor.megatron.use_dist_checkpointing=True"]
GIVEN = {
    "ppo_trainer": PPO,
    "sft_trainer": SFT,
    "dpo_trainer": SFT,
    "kto_trainer": SFT,
    "rm_trainer": SFT,
    "generation": [f"{POLICY}.model.path=model", "data.path=train.parquet", "data.output_path=o.parquet"],
    "evaluation": ["data.path=train.parquet"],
    "suite_evaluation": [f"{POLICY}.model.path=model", "data.path=train.parquet", "data.output_path=o.parquet"],
}
#: the kinds of places that must be there when a run starts
KINDS = ("model", "file", "code", "data")
PLACES = [
    (root, key, str(field.metadata["place"]))
    for root, schema in ROOTS.items()
    for key, field in declared(schema).items()
    if field.metadata.get("place") in KINDS
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data and a model folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def faults_of(root: str, words: list[str]) -> list[str]:
    """What the check of a configuration says."""
    config = load_config(root, words)  # type: ignore[call-overload]
    try:
        return check(config)  # the notices, some of which name settings that cannot act
    except ConfigError as error:
        return error.faults


@pytest.mark.parametrize(("root", "key", "kind"), PLACES)
def test_what_a_setting_names_is_looked_for_at_start_up(here: Path, root: str, key: str, kind: str) -> None:
    missing = {"model": "/does/not/exist", "file": "/does/not/exist.yaml", "code": "/does/not/exist.py"}
    value = missing.get(kind, "/does/not/exist.parquet")
    faults = faults_of(root, [*GIVEN[root], f"{key}={value}"])
    assert any(fault.startswith(f"{key}=") or f"{key}={value}" in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ([], "data.tool_config_path", "/does/not/exist.yaml"),
        ([], "data.tool_config_path", "model"),  # a folder
        ([], "data.function_tool_path", "no_such_module_of_tools"),
        ([f"{ROLLOUT}.agent.default_agent_loop=agent"], f"{ROLLOUT}.agent.function", "no_such_module:run"),
        ([f"{ROLLOUT}.agent.default_agent_loop=agent"], f"{ROLLOUT}.agent.function", "missing.py:run"),
        ([], f"{POLICY}.model.custom_chat_template", "template.jinja"),  # the text itself is the value
        ([], "reward.custom_reward_function.path", "no_such_module_of_rewards"),
        (["data.custom_cls.name=Rows"], "data.custom_cls.path", "no_such_module_of_rows"),
        (["data.sampler.class_name=Rows"], "data.sampler.class_path", "pkg://no_such_module.rows"),
        ([], f"{POLICY}.model.lora_adapter_path", "org/name"),  # adapters are read from a folder
        ([], f"{POLICY}.model.lora_adapter_path", "train.parquet"),
        ([], "reward.functions.one.path", "no_such_module_of_rewards"),
        (DISTILLED, "distillation.teacher_models.b.model_path", "/does/not/exist"),
        (["algorithm.adv_estimator=prime"], "roles.prime.ref_path", "/does/not/exist"),
        (MEGATRON, f"{POLICY}.actor.megatron.dist_checkpointing_path", "missing"),
    ],
)
def test_each_form_of_a_place_is_looked_for(here: Path, words: list[str], key: str, value: str) -> None:
    faults = faults_of("ppo_trainer", [*GRPO, *words, f"+{key}={value}" if "functions." in key else f"{key}={value}"])
    assert any(f"{key}={value}" in fault for fault in faults), faults


@pytest.mark.parametrize(
    "words",
    [
        ["data.function_tool_path=json"],
        ["reward.custom_reward_function.path=pkg://os.path", "reward.custom_reward_function.name=join"],
        ["reward.custom_reward_function.path=r.py"],
        [f"{ROLLOUT}.agent.default_agent_loop=agent", f"{ROLLOUT}.agent.function=r.py:compute_score"],
        ["data.tool_config_path=tools.yaml"],
        ["critic.model.path=/does/not/exist"],  # nothing reads it with GRPO
    ],
)
def test_what_is_there_passes(here: Path, words: list[str]) -> None:
    (here / "r.py").write_text("def compute_score(solution_str):\n    return 1.0\n")
    (here / "tools.yaml").write_text("tools: []\n")
    config = load_config("ppo_trainer", [*GRPO, *words])
    try:
        check(config)
    except ConfigError as error:
        named = [word.partition("=")[0] for word in words]
        assert not [fault for fault in error.faults if any(fault.startswith(key) for key in named)], error.faults


OUTPUTS = [
    (root, key)
    for root, schema in ROOTS.items()
    for key, field in declared(schema).items()
    if field.metadata.get("place") == "output" and not key.endswith("resume_from_path")
]


@pytest.mark.parametrize(("root", "key"), OUTPUTS)
def test_results_below_a_file_are_refused_at_start_up(here: Path, root: str, key: str) -> None:
    value = (
        "train.parquet/inside.parquet"
        if root in ("generation", "evaluation", "suite_evaluation")
        else "train.parquet/inside"
    )
    faults = faults_of(root, [*GIVEN[root], f"{key}={value}"])
    assert any(fault.startswith(f"{key}=") for fault in faults), faults


@pytest.mark.parametrize("key", [key for root, key in OUTPUTS if root == "ppo_trainer" and key.endswith("_dir")])
def test_a_folder_for_results_is_no_file(here: Path, key: str) -> None:
    faults = faults_of("ppo_trainer", [*GRPO, f"{key}=train.parquet"])
    assert any(fault.startswith(f"{key}=") for fault in faults), faults


def test_places_for_results_are_made(here: Path) -> None:
    faults = faults_of("ppo_trainer", [*GRPO, "trainer.default_local_dir=new/inside", "trainer.rollout_data_dir=model"])
    assert not [fault for fault in faults if "_dir=" in fault], faults
