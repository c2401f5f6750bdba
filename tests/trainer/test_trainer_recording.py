"""A run that reads the recorded batches of another: the same weights, whatever generated them, or another learner."""

import json
import shutil
from pathlib import Path

import pytest
from raising import raises_with
from trainer_tools import trained

from hybridrl.config import ConfigError, load_config, validate
from hybridrl.errors import UserError

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
    other = [f"data.train_files={tmp_path / 'other.parquet'}", f"trainer.default_local_dir={tmp_path / 'another'}"]
    shutil.copy(next(word.partition("=")[2] for word in base if "train_files" in word), tmp_path / "other.parquet")
    with pytest.raises(UserError) as caught, trained(*base, *store, *other):
        pass
    assert "skip.rollout.dump_dir" in str(caught.value) and "data.train_files" in str(caught.value)


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
