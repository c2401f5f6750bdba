"""A run that reads the recorded batches of another: the same weights, whatever generated them, or another learner."""

import json
import shutil
from functools import partial
from pathlib import Path

import pandas
import pytest
from raising import raises_with
from safetensors.torch import load_file, save_file
from trainer_tools import trained

from hybridrl.config import ConfigError, load_config, validate
from hybridrl.errors import UserError
from hybridrl.trainer.ppo.recording import RECORDING, check_recording, check_stored_batches, write_origin

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@pytest.fixture
def base(micro_model: Path, sort_data: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "letters.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    early = sum(char < 'm' for char in solution_str) / max(len(solution_str), 1)\n"
        f"    open({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        "    return {'score': early, 'length': len(solution_str)}\n"
    )
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={tmp_path / 'letters.py'}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.top_k=5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.dump_freq=1",
        "trainer.logger=[file]",
        f"trainer.total_training_steps={STEPS}",
    ]


def weights(folder: Path, step: int = STEPS) -> bytes:
    (path,) = (folder / f"global_step_{step}" / "actor" / "hf_model").glob("*.safetensors")
    return path.read_bytes()


def dumps(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted((folder / "rollouts").glob("*.jsonl"))]


def mismatch(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["rollout_corr/k3_kl"] for line in lines if "rollout_corr/k3_kl" in line]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_replayed_run_learns_the_same_and_generates_nothing(base, tmp_path, mode: str) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    words = [*base, f"trainer.v1.trainer_mode={mode}"]
    with trained(*words, "trainer.record=True", f"trainer.default_local_dir={first}"):
        pass
    calls = (tmp_path / "calls").read_text()
    # Other samples, if any were drawn: the seed of the data differs.
    other = ["data.shuffle=True", "data.seed=9", f"trainer.replay={first}"]
    with trained(*words, *other, f"trainer.default_local_dir={again}"):
        pass
    assert (tmp_path / "calls").read_text() == calls, "a response was scored"
    assert weights(again) == weights(first) and dumps(again) == dumps(first)
    lines = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["reward/length/mean"] > 0


def test_another_learner_reads_them_and_a_replay_resumes(base, tmp_path) -> None:
    first, other, cut = tmp_path / "first", tmp_path / "other", tmp_path / "cut"
    with trained(*base, "trainer.record=True", f"trainer.default_local_dir={first}"):
        pass
    slower = ["actor_rollout_ref.actor.optim.lr=1e-3", f"trainer.replay={first / 'recording'}"]
    with trained(*base, *slower, f"trainer.default_local_dir={other}"):
        pass
    assert weights(other) != weights(first)
    ours, theirs = mismatch(first), mismatch(other)
    assert theirs[0] == pytest.approx(ours[0]) and theirs[-1] != pytest.approx(ours[-1])
    for steps in (1, STEPS):
        words = [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={cut}"]
        with trained(*base, *slower, *words):
            pass
    assert weights(cut) == weights(other)


def test_recordings_that_cannot_be_read_are_named_at_the_start(base, tmp_path) -> None:
    first = tmp_path / "first"
    with trained(*base, "trainer.record=True", "trainer.total_training_steps=1", f"trainer.default_local_dir={first}"):
        pass
    words = [f"trainer.replay={first}", f"trainer.default_local_dir={tmp_path / 'again'}"]
    with raises_with(UserError, "step 2", "total_training_steps=1"), trained(*base, *words):
        pass
    for word, part in (
        (f"trainer.replay={tmp_path / 'gone'}", "no such folder"),
        ("trainer.record=True", "set one of the two"),
    ):
        with pytest.raises(ConfigError) as caught:
            validate(load_config("ppo_trainer", [*base, *words, word]))
        assert "trainer.replay=" in str(caught.value) and part in str(caught.value)


def steps_of(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_stored_batches_take_the_place_of_generation_until_another_learner_is_right(base, tmp_path) -> None:
    """A second run reads what the first one stored, and only steps that are not stored are generated."""
    first, again, repeated = (tmp_path / name for name in ("first", "again", "repeated"))
    store = ["skip.rollout.enable=True", f"skip.rollout.dump_dir={tmp_path / 'store'}"]
    with trained(*base, *store, "skip.rollout.steps=[1,2]", f"trainer.default_local_dir={first}"):
        pass
    calls = (tmp_path / "calls").read_text()
    with trained(*base, *store, "skip.rollout.steps=[1,2]", f"trainer.default_local_dir={again}"):
        pass
    assert len((tmp_path / "calls").read_text()) == len(calls) + 12, "the third step alone is generated and scored"
    assert steps_of(again, "critic/score/mean")[:2] == steps_of(first, "critic/score/mean")[:2]
    calls = (tmp_path / "calls").read_text()
    words = ["skip.rollout.steps=[1,2]", "skip.rollout.action=repeat", f"trainer.default_local_dir={repeated}"]
    with trained(*base, *store, *words):
        pass
    assert (tmp_path / "calls").read_text() == calls
    scores = steps_of(repeated, "critic/score/mean")
    assert scores[0] == scores[2] != scores[1]


def check_stored(base: list[str], folder: Path, *words: str) -> None:
    """Check the stored batches of a run with these settings."""
    store = ["skip.rollout.enable=True", f"skip.rollout.dump_dir={folder / 'store'}"]
    check_stored_batches(load_config("ppo_trainer", [*base, *store, *words]))


def test_stored_batches_of_other_data_another_sampling_or_another_reward_are_refused(base, tmp_path) -> None:
    """Files are compared by their contents: a moved one is the same, and an edited one is not."""
    data, code = tmp_path / "moved.parquet", tmp_path / "letters.py"
    shutil.copy(next(word.partition("=")[2] for word in base if "train_files" in word), data)
    check = partial(check_stored, base, tmp_path)
    check()
    for words in (
        [f"data.train_files={data}"],
        ["actor_rollout_ref.actor.optim.lr=1e-3"],
        ["algorithm.adv_estimator=rloo"],
        ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
        ["data.dataloader_num_workers=1"],
        ["reward.num_workers=2"],
    ):
        check(*words)
    source = code.read_text()
    code.write_text(f"# a comment\n{source}")
    check()
    code.write_text(source.replace("< 'm'", "< 'k'"))
    with raises_with(UserError, "skip.rollout.dump_dir", "reward.custom_reward_function.path"):
        check()
    code.write_text(source)
    for word, key in (
        ("actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.temperature (1.0, now 0.7)"),
        ("data.shuffle=False", "data.shuffle"),
        ("data.system_prompt=Sort.", "data.system_prompt"),
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.enable"),
        ("reward.reward_kwargs={a: 1}", "reward.reward_kwargs"),
    ):
        with raises_with(UserError, "skip.rollout.dump_dir", key):
            check(word)
    model = tmp_path / "model"
    shutil.copytree(next(word.partition("=")[2] for word in base if "model.path" in word), model)
    check(f"actor_rollout_ref.model.path={model}")
    tensors = load_file(model / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, model / "model.safetensors", metadata={"format": "pt"})
    with raises_with(UserError, "skip.rollout.dump_dir", "actor_rollout_ref.model.path"):
        check(f"actor_rollout_ref.model.path={model}")
    pandas.read_parquet(data)[:-1].to_parquet(data)
    with raises_with(UserError, "skip.rollout.dump_dir", "data.train_files"):
        check(f"data.train_files={data}")
    (origin,) = (tmp_path / "store").rglob("origin.json")
    (origin.parent / "step_00001.safetensors").touch()
    origin.unlink()
    with raises_with(UserError, "skip.rollout.dump_dir", "origin.json"):
        check()


def test_a_replay_says_which_settings_have_no_effect(base, tmp_path, capfd) -> None:
    """Another reward would give other scores, and those of the recording are used."""
    folder = tmp_path / "recorded" / RECORDING
    write_origin(folder, load_config("ppo_trainer", base))
    config = load_config("ppo_trainer", [*base, f"trainer.replay={tmp_path / 'recorded'}"])
    check_recording(config, 0)
    assert "with another" not in capfd.readouterr().err
    code = tmp_path / "letters.py"
    code.write_text(code.read_text().replace("< 'm'", "< 'k'"))
    check_recording(config, 0)
    notice = capfd.readouterr().err
    assert "trainer.replay=" in notice and "another reward.custom_reward_function.path" in notice


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["trainer.record=True"], "trainer.record"),
        (["skip.rollout.action=repeat"], "skip.rollout.steps"),
        (["skip.rollout.steps=[0]"], "skip.rollout.steps"),
        (["trainer.v1.trainer_mode=colocate_async"], "trainer.v1.trainer_mode"),
    ],
)
def test_stored_batches_that_cannot_be_used_are_refused(base, tmp_path, words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config("ppo_trainer", [*base, "skip.rollout.enable=True", *words]))
    assert "skip.rollout" in str(caught.value) and key in str(caught.value)
