"""A run that is resumed with other settings says what changed, records it, and is not continued as another one."""

from pathlib import Path

import pytest
import yaml
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.errors import CheckpointError
from hybridrl.observe.run_folder import write_run_info
from hybridrl.trainer.settings_change import check_same_experiment, find_changes, record_changes

WORDS = [
    "actor_rollout_ref.model.path=models/a",
    "data.train_files=[data/one.parquet]",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run_info(tmp_path, load_config("ppo_trainer", WORDS))
    return tmp_path


def changes_of(folder: Path, *words: str) -> dict[str, tuple[object, object]]:
    return {
        change.key: (change.was, change.now)
        for change in find_changes(folder, load_config("ppo_trainer", [*WORDS, *words]))
    }


def test_equal_settings_are_no_change(folder: Path) -> None:
    assert changes_of(folder) == {}
    assert changes_of(folder, "trainer.resume_mode=resume_path", "trainer.resume_from_path=x") == {}


def test_changes_are_named_without_what_only_follows_them(folder: Path) -> None:
    """`rollout.n` is followed by `actor.rollout_n`, `max_response_length` by the lengths of the rollout and others."""
    lr = "actor_rollout_ref.actor.optim.lr"
    changed = changes_of(folder, "actor_rollout_ref.rollout.n=8", f"{lr}=2e-6", "data.max_response_length=64")
    assert changed == {
        "actor_rollout_ref.rollout.n": (4, 8),
        lr: (1e-6, 2e-6),
        "data.max_response_length": (512, 64),
    }


def test_a_setting_that_no_longer_follows_is_a_change(folder: Path) -> None:
    key = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    assert changes_of(folder, f"{key}=2") == {key: (8, 2)}


def test_free_mappings_are_compared(folder: Path) -> None:
    kwargs = "reward.custom_reward_function.reward_kwargs"
    assert changes_of(folder, f"+{kwargs}.limit=3") == {kwargs: ({}, {"limit": 3})}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.model.path=models/b", r"model.path was 'models/a', now 'models/b'"),
        ("data.train_files=[data/two.parquet]", r"data.train_files was \['data/one.parquet'\]"),
        ("algorithm.adv_estimator=rloo", r"adv_estimator was 'grpo', now 'rloo'"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", r"loss_mode was 'vanilla', now 'gspo'"),
    ],
)
def test_another_experiment_is_refused_with_the_remedies(folder: Path, word: str, said: str) -> None:
    changes = find_changes(folder, load_config("ppo_trainer", [*WORDS, word]))
    with pytest.raises(CheckpointError, match=said) as caught:
        check_same_experiment(folder, changes)
    for remedy in ("trainer.default_local_dir", "resume_mode=disable", "resume_mode=resume_path"):
        assert remedy in str(caught.value)


PRIME = ["algorithm.adv_estimator=prime", "roles.prime.model.path=models/a"]
TEACHERS = "distillation.teacher_models"
TEACHER = ["distillation.enabled=True", f"{TEACHERS}.one.model_path=models/t"]


@pytest.mark.parametrize(
    ("first", "now", "key", "was"),
    [
        (PRIME, [*PRIME, "roles.prime.ref_path=models/b"], "roles.prime.ref_path", "models/a"),
        ([*PRIME, "roles.prime.ref_path=models/b"], PRIME, "roles.prime.ref_path", "models/b"),
        (PRIME, [*PRIME, "roles.prime.model.path=models/b"], "roles.prime.model.path", "models/a"),
        (TEACHER, [*TEACHER, f"{TEACHERS}.one.model_path=models/u"], f"{TEACHERS}.one.model_path", "models/t"),
        (TEACHER, [*TEACHER, f"{TEACHERS}.two.model_path=models/u"], f"{TEACHERS}.two.model_path", None),
        (TEACHER, [TEACHER[0], f"{TEACHERS}.two.model_path=models/t"], f"{TEACHERS}.one.model_path", "models/t"),
        (TEACHER, [*TEACHER, "distillation.distillation_loss.loss_mode=k2"], "distillation_loss.loss_mode", "k3"),
        (TEACHER, [], "distillation.enabled", True),
    ],
)
def test_another_model_of_a_role_or_teacher_is_refused_by_its_own_key(
    tmp_path: Path, first: list[str], now: list[str], key: str, was: object
) -> None:
    write_run_info(tmp_path, load_config("ppo_trainer", [*WORDS, *first]))
    assert find_changes(tmp_path, load_config("ppo_trainer", [*WORDS, *first])) == []
    changes = find_changes(tmp_path, load_config("ppo_trainer", [*WORDS, *now]))
    assert any(change.key.endswith(key) and change.was == was for change in changes)
    with raises_with(CheckpointError, key, "now"):
        check_same_experiment(tmp_path, changes)


def test_settings_of_roles_and_teachers_are_noticed_one_by_one(tmp_path: Path) -> None:
    """Also those that come back to an earlier value, and not those that stand for the same as before."""
    write_run_info(tmp_path, load_config("ppo_trainer", [*WORDS, *PRIME, *TEACHER]))
    more = ["roles.prime.beta_train=0.2", f"{TEACHERS}.one.inference.temperature=0.5", "roles.prime.ref_path=models/a"]
    more.append(f"{TEACHERS}.one.inference.max_num_seqs=1024")
    found = {
        "roles.prime.beta_train": (0.05, 0.2),
        f"{TEACHERS}.one.inference.temperature": (None, 0.5),
    }
    changed = load_config("ppo_trainer", [*WORDS, *PRIME, *TEACHER, *more])
    changes = find_changes(tmp_path, changed)
    assert {change.key: (change.was, change.now) for change in changes} == found
    check_same_experiment(tmp_path, changes)
    record_changes(tmp_path, 2, changes)
    assert find_changes(tmp_path, changed) == []
    back = find_changes(tmp_path, load_config("ppo_trainer", [*WORDS, *PRIME, *TEACHER]))
    assert {change.key: (change.now, change.was) for change in back} == found
    off = [*WORDS, "algorithm.adv_estimator=grpo", "distillation.enabled=False", "roles.prime.beta_train=9"]
    keys = {change.key for change in find_changes(tmp_path, load_config("ppo_trainer", off))}
    assert keys == {"algorithm.adv_estimator", "distillation.enabled"}, "what takes no part is not compared"


def test_another_spelling_of_a_path_is_the_same_experiment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = [f"data.train_files={folder / 'data/one.parquet'}", "actor_rollout_ref.rollout.n=8"]
    changes = find_changes(folder, load_config("ppo_trainer", [*WORDS, *words]))
    assert len(changes) == 2
    check_same_experiment(folder, changes)


def test_each_change_is_recorded_once_next_to_the_first_settings(folder: Path) -> None:
    first = (folder / "config.yaml").read_text()
    key = "actor_rollout_ref.actor.optim.lr"
    for step, lr in ((4, "2e-6"), (7, "3e-6")):
        changed = load_config("ppo_trainer", [*WORDS, f"{key}={lr}"])
        record_changes(folder, step, find_changes(folder, changed))
        write_run_info(folder, changed, resumed=True)
        assert find_changes(folder, changed) == []
    assert (folder / "config.yaml").read_text() == first
    entries = yaml.safe_load((folder / "config_changes.yaml").read_text())
    assert [(entry["after_step"], entry["changes"]) for entry in entries] == [
        (4, {key: {"was": 1e-6, "now": 2e-6}}),
        (7, {key: {"was": 2e-6, "now": 3e-6}}),
    ]
    write_run_info(folder, changed)  # starting over
    assert not (folder / "config_changes.yaml").exists()
    assert yaml.safe_load((folder / "config.yaml").read_text())["actor_rollout_ref"]["actor"]["optim"]["lr"] == 3e-6


def test_a_run_of_another_program_is_refused(folder: Path) -> None:
    config = load_config("sft_trainer", ["model.path=models/a", "data.train_files=data/one.parquet"])
    with raises_with(CheckpointError, "main_ppo", "main_sft", "default_local_dir"):
        find_changes(folder, config)


def test_unreadable_settings_are_named(folder: Path) -> None:
    (folder / "config.yaml").write_text("a: [")
    with raises_with(CheckpointError, "config.yaml"):
        changes_of(folder)


def test_settings_that_an_earlier_version_lacked_are_no_change(folder: Path) -> None:
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    del tree["trainer"]["save_last"]
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert changes_of(folder, "trainer.save_last=false") == {}
