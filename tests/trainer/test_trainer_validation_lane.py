"""Validation next to training: on the weights of one step, reported once, and in the order of steps."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
import ray
import torch
from raising import raises_with
from sampler_tools import PAD, WIDTH, OwnRollout, prompts_of, reward
from trainer_tools import trained
from transformers import AutoTokenizer

from hybridrl.config import load_config
from hybridrl.errors import RewardError, RolloutError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo import prepare_ppo
from hybridrl.trainer.ppo.missing import MissingPolicy
from hybridrl.trainer.ppo.samples import Samples
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.ppo.validation import validate as validate_answers
from hybridrl.trainer.ppo.validation_lane import ValidationLane
from hybridrl.utils.background import ended_by
from hybridrl.utils.termination import COPY_S

ENGINE = Path(__file__).parents[1] / "rollout" / "plain_engine.py"
STEPS = 3
SEPARATE = "trainer.v1.separate_async"
REWARD = '''
import time
from pathlib import Path

FOLDER = Path("HERE")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of early letters; validation ends once the file `go` is there."""
    deadline = time.monotonic() + 120
    while extra_info["split"] == "test" and not (FOLDER / "go").exists():
        if time.monotonic() > deadline:
            raise RuntimeError("training waits for the validation")
        time.sleep(0.02)
    if (FOLDER / f"fault_{extra_info['split']}").exists():
        raise RuntimeError("the grader is away")
    return sum(char < "m" for char in solution_str) / max(len(solution_str), 1)
'''


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@pytest.fixture
def base(micro_model: Path, sort_data: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "letters.py").write_text(REWARD.replace("HERE", str(tmp_path)))
    pandas.read_parquet(sort_data / "test.parquet")[:3].to_parquet(tmp_path / "val.parquet")
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"actor_rollout_ref.rollout.name={ENGINE}:PlainEngine",
        "actor_rollout_ref.rollout.full_determinism=True",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=1",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"data.val_files={tmp_path / 'val.parquet'}",
        f"reward.custom_reward_function.path={tmp_path / 'letters.py'}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=2",
        "data.max_prompt_length=24",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.drain=True",
        "trainer.test_freq=1",
        "trainer.dump_tokens=8",
        "trainer.logger=[file]",
        "trainer.threads_per_worker=1",
        f"trainer.total_training_steps={STEPS}",
    ]


def trainer_that(before_end: Callable[[RayPPOTrainer], None]) -> type[RayPPOTrainer]:
    """A trainer that does something when a step has been learnt, and a validation goes on beside it."""

    class Trainer(RayPPOTrainer):
        def end_validation(self) -> None:
            before_end(self)
            super().end_validation()

    return Trainer


def run(trainer: type[RayPPOTrainer], *words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_ppo, "RayPPOTrainer", trainer)
        with trained(*words):
            pass


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def order(folder: Path) -> list[tuple[str, int]]:
    """The steps and validations of a run, in the order in which they were reported."""
    return [("validation" if "timing_s/testing" in row else "step", row["step"]) for row in rows(folder)]


def validations(folder: Path) -> dict[int, dict[str, float]]:
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith("val-")}
        for row in rows(folder)
        if "timing_s/testing" in row
    }


def weights(folder: Path) -> bytes:
    (path,) = (folder / f"global_step_{STEPS}" / "actor" / "hf_model").glob("*.safetensors")
    return path.read_bytes()


BOTH = [pair for step in range(1, STEPS + 1) for pair in (("step", step), ("validation", step))]


def test_training_goes_on_beside_a_validation_of_one_version(base, tmp_path) -> None:
    """Each validation ends only after the next step was learnt; results are those of training that waits for it."""
    go, beside, waiting = tmp_path / "go", tmp_path / "beside", tmp_path / "waiting"
    unfinished: list[int | None] = []

    def let_it_end(trainer: RayPPOTrainer) -> None:
        unfinished.append(trainer.lane.step)
        go.touch()

    class Trainer(trainer_that(let_it_end)):  # type: ignore[misc]
        def validate_if_due(self) -> None:
            if self.run.is_last:
                go.touch()  # nothing is left that could go on beside it
            else:
                go.unlink(missing_ok=True)
            super().validate_if_due()

    run(Trainer, *base, f"trainer.default_local_dir={beside}")
    assert unfinished == [0, 1, 2]
    assert order(beside) == [("validation", 0), *BOTH]
    assert all("timing_s/testing_wait" in row for row in rows(beside) if "timing_s/step" in row)
    for step in range(STEPS + 1):
        samples = [json.loads(line) for line in (beside / "validation" / f"{step}.jsonl").read_text().splitlines()]
        assert {version for sample in samples for version, _ in sample["rollout"]["tokens"]["versions"]} == {step}

    go.touch()
    run(RayPPOTrainer, *base, f"{SEPARATE}.background_validation=False", f"trainer.default_local_dir={waiting}")
    assert order(waiting) == order(beside) and validations(waiting) == validations(beside)
    assert not any("timing_s/testing_wait" in row for row in rows(waiting))
    assert weights(waiting) == weights(beside)


def test_a_checkpoint_without_its_validation_is_validated_when_it_is_resumed(base, tmp_path) -> None:
    """The reward fails in step 2 while step 1 is validated; the same command goes on, and validates each step once."""
    go, fault, folder = tmp_path / "go", tmp_path / "fault_train", tmp_path / "run"
    whole = tmp_path / "whole"
    go.touch()
    run(RayPPOTrainer, *base, f"trainer.default_local_dir={whole}")

    class Failing(RayPPOTrainer):
        def end_validation(self) -> None:
            fault.touch()  # before the places of step 1 are free: one of the two groups of step 2 is not scored yet
            super().end_validation()

        def validate_if_due(self) -> None:
            if self.run.step == 1:
                go.unlink()
            super().validate_if_due()

    words = [*base, "trainer.v1.separate_async.num_warmup_batches=0.5", "data.gen_batch_size=1"]
    with raises_with(RewardError, "the grader is away"):
        run(Failing, *words, "trainer.save_freq=1", f"trainer.default_local_dir={folder}")
    assert order(folder) == [("validation", 0), ("step", 1)]
    fault.unlink()
    go.touch()
    run(RayPPOTrainer, *words, "trainer.save_freq=1", f"trainer.default_local_dir={folder}")
    assert sorted(order(folder)) == sorted([("validation", 0), *BOTH])
    assert validations(folder)[0] == validations(whole)[0]


def test_a_run_that_is_killed_after_its_validation_ended_does_not_validate_again(base, tmp_path) -> None:
    """The checkpoint of step 1 was written while the validation ran, which was reported before the run ended."""
    (tmp_path / "go").touch()
    folder = tmp_path / "run"

    class Killed(Exception):
        pass

    class Ending(RayPPOTrainer):
        def save_if_due(self) -> None:
            super().save_if_due()
            if self.run.step == 2:
                raise Killed

    words = [*base, "trainer.save_freq=3", f"trainer.default_local_dir={folder}"]

    class Early(Ending):
        def validate_if_due(self) -> None:
            super().validate_if_due()
            if self.run.step == 1:
                self.run.save(self._write)

    with pytest.raises(Killed):
        run(Early, *words)
    assert order(folder) == [("validation", 0), *BOTH[:3]]
    run(RayPPOTrainer, *words)
    assert order(folder) == [("validation", 0), *BOTH]


def test_a_validation_that_fails_ends_the_run_with_the_step_that_is_complete(base, tmp_path) -> None:
    """The next step was learnt meanwhile: it is reported and saved, and validated when the run is resumed."""
    (tmp_path / "go").touch()
    fault, folder = tmp_path / "fault_test", tmp_path / "run"

    class Failing(RayPPOTrainer):
        def validate_if_due(self) -> None:
            if self.run.step == 1:
                fault.touch()
            super().validate_if_due()

    words = [*base, "trainer.test_freq=3", "trainer.val_before_train=False", f"trainer.default_local_dir={folder}"]
    with raises_with(RewardError, "the grader is away"):
        run(Failing, *words, "trainer.test_freq=1")
    assert order(folder) == [("step", 1), ("step", 2)]
    assert (folder / "global_step_2").is_dir()
    fault.unlink()
    run(RayPPOTrainer, *words)
    assert order(folder) == [("step", 1), ("step", 2), ("validation", 2), ("step", 3), ("validation", 3)]


def test_a_validation_whose_replicas_are_all_lost_is_given_up_and_the_next_step_validated(
    base, tmp_path, capfd
) -> None:
    """Its answers could only come from the next weights."""
    go, folder = tmp_path / "go", tmp_path / "run"
    go.touch()

    class Losing(RayPPOTrainer):
        def validate_if_due(self) -> None:
            if self.run.step == 2:
                go.unlink()
            super().validate_if_due()

        def end_validation(self) -> None:
            if self.run.step == 3:
                ray.kill(self.rollout.supervisor.replicas[0].actor)
            super().end_validation()
            go.touch()

    words = [*base, "trainer.test_freq=2", "trainer.total_training_steps=4", "trainer.val_before_train=False"]
    run(Losing, *words, f"trainer.default_local_dir={folder}")
    assert [number for kind, number in order(folder) if kind == "step"] == [1, 2, 3, 4]
    # The replica that takes its place may still be starting when step 4 has been learnt: then that of step 3 is, too.
    assert [number for kind, number in order(folder) if kind == "validation"] in ([3, 4], [4])
    assert "the validation of step 2 is given up (every replica was lost)" in capfd.readouterr().err


def test_a_second_sigterm_waits_for_no_validation(base, tmp_path, capfd) -> None:
    """The step that was learnt is published and saved; the resumed run validates it."""
    go, folder = tmp_path / "go", tmp_path / "run"
    go.touch()

    class Stopped(RayPPOTrainer):
        def validate_if_due(self) -> None:
            if self.run.step == 1:
                go.unlink()
            super().validate_if_due()

        def end_validation(self) -> None:
            if self.run.step == 2:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(COPY_S[signal.SIGTERM] + 0.1)
                signal.raise_signal(signal.SIGTERM)
            super().end_validation()

    assert threading.current_thread() is threading.main_thread(), "others get no signals"
    words = [*base, f"trainer.default_local_dir={folder}"]
    run(Stopped, *words)
    assert "the validation of step 1 is given up (the run stops)" in capfd.readouterr().err
    assert order(folder) == [("validation", 0), ("step", 1), ("step", 2)]
    go.touch()
    run(RayPPOTrainer, *words)
    assert order(folder)[3:] == [("validation", 2), ("step", 3), ("validation", 3)]


def test_answers_with_tokens_of_two_versions_are_no_measurement(micro_model) -> None:
    """In one batch, or in two."""
    config = load_config("ppo_trainer", ["algorithm.adv_estimator=grpo"])

    def validated(*versions: list[int]) -> dict[str, float]:
        remaining = list(versions)

        def with_versions(answer: DataProto, prompts: DataProto) -> DataProto:
            own = remaining.pop(0)
            answer.batch["weight_versions"] = torch.tensor([[own[0]] * WIDTH, [own[-1]] * WIDTH])
            return answer

        return validate_answers(
            [prompts_of(["a", "b"], samples=1) for _ in versions],
            OwnRollout(with_versions),
            reward,  # type: ignore[arg-type]
            config.actor_rollout_ref.rollout,
            5,
            Samples(AutoTokenizer.from_pretrained(micro_model)),
            MissingPolicy(config, PAD),
        )

    assert validated([4], [4])
    for mixed in ([[4, 5]], [[4], [5]]):
        with raises_with(RolloutError, "step 5", "[4, 5]"):
            validated(*mixed)


def test_what_a_validation_raised_waits_until_it_is_checked() -> None:
    lane: ValidationLane[int] = ValidationLane()
    go = threading.Event()

    def fail() -> int:
        go.wait()
        raise RewardError("no grader")

    for _ in range(2):
        go.clear()
        lane.start(3, fail)
        assert lane.step == 3
        go.set()
        assert lane.wait() and lane.take() is None and lane.step is None
        with pytest.raises(RewardError):
            lane.check()
        lane.check()  # once
    lane.start(4, lambda: 7)
    assert lane.wait() and lane.take() == 7 and lane.take() is None
    go.clear()
    lane.start(5, fail)
    assert not lane.wait(lambda: True) and lane.step is None and lane.take() is None
    lane.start(6, lambda: 8)  # beside the one that was given up
    go.set()
    assert lane.wait() and lane.take() == 8
    lane.check()
    began, ended = threading.Event(), threading.Event()

    def requests() -> int:
        with ended_by(ended.set):
            began.set()
            assert ended.wait(60)
        return 9

    for give_up in (lambda: lane.wait(lambda: True), lane.close):
        began.clear()
        ended.clear()
        lane.start(7, requests)
        assert began.wait(60)
        give_up()
        assert ended.wait(60) and lane.take() is None
