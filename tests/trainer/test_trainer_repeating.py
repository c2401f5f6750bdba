"""A rank of several runs out of memory: the run begins again from its last checkpoint, with smaller micro-batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_sft import configured, conversations, records  # noqa: F401 (a fixture)

from hybridrl.checkpoint import verify
from hybridrl.config import load_config
from hybridrl.config.dotted import set_key
from hybridrl.config.roles import ROLES, part_of
from hybridrl.config.teachers import teachers_of
from hybridrl.errors import MicroBatchError, WorkerUserError
from hybridrl.trainer.ppo.run_ppo import run_ppo
from hybridrl.trainer.repeating import settings_to_repeat
from hybridrl.trainer.run import TrainingRun
from hybridrl.trainer.supervised.run_supervised import run_supervised

pytestmark = pytest.mark.usefixtures("ray_session")

KEY = "data.max_token_len_per_gpu"
ACTOR = "actor_rollout_ref.actor"
REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"
# In the workers: within the update after so many others, rank 1 runs out of memory in the backward pass of its last
# layer, as often as there are files `fail_<number>`.
SHORT_OF_MEMORY = """
from pathlib import Path

import torch

from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.utils import distributed

AFTER = {after}
initialize = FSDPEngine.initialize


def planted(self):
    initialize(self)
    if distributed.get_rank() == 1 and self.model_state.optimizer is not None:
        self.module.model.layers[-1].register_full_backward_hook(lambda *_: fail(self))


def fail(engine):
    left = sorted(Path(__file__).parent.glob("fail_*"))
    if engine.model_state.schedule.last_epoch == AFTER and left:
        left[0].unlink()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


if FSDPEngine.initialize.__name__ == "initialize":
    FSDPEngine.initialize = planted
"""


def plant(folder: Path, after: int, times: int = 1) -> Path:
    for number in range(times):
        (folder / f"fail_{number}").touch()
    (folder / "short_of_memory.py").write_text(SHORT_OF_MEMORY.format(after=after))
    return folder / "short_of_memory.py"


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    verify(checkpoint)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        found |= {f"{file.relative_to(checkpoint)}:{name}": tensor for name, tensor in load_file(file).items()}
    assert found
    return found


def assert_same(one: Path, other: Path) -> None:
    expected, found = state(one), state(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_steps_since_the_last_checkpoint_are_repeated(
    micro_model: Path,
    conversations: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Bit for bit as in a run that goes on from that checkpoint with the smaller micro-batches."""
    words = ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.resume_mode=disable"]

    def settings(name: str, *more: str) -> Any:
        return configured(micro_model, conversations, tmp_path / name, 2, *words, *more)

    lib = plant(tmp_path, after=3)
    outcome = run_supervised(settings("fails", f"model.external_lib={lib}"))
    assert (outcome.step, outcome.checkpoint) == (4, tmp_path / "fails" / "global_step_4")
    told = capfd.readouterr().err
    (notice,) = [line for line in told.splitlines() if "begins again" in line]
    found = re.search(rf"step 4: rank 1 .* sequences with (\d+) tokens.*global_step_2 with {KEY}=(\d+)", notice)
    assert found is not None and int(found[2]) == int(found[1]) // 2
    assert [record["training/global_step"] for record in records(tmp_path / "fails")] == [1, 2, 3, 4]
    start = tmp_path / "fails" / "global_step_2"
    more = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}", f"{KEY}={found[2]}"]
    run_supervised(settings("smaller", *more))
    assert_same(tmp_path / "smaller" / "global_step_4", tmp_path / "fails" / "global_step_4")
    assert KEY in (tmp_path / "fails" / "config_changes.yaml").read_text()


def test_complete_steps_without_a_checkpoint_are_not_thrown_away(
    micro_model: Path,
    conversations: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    lib = plant(tmp_path, after=1)
    words = ["trainer.total_training_steps=3", "trainer.save_freq=-1", f"model.external_lib={lib}"]
    with pytest.raises(WorkerUserError, match=rf"rank 1 ran out of memory.*set {KEY}=\d+") as raised:
        run_supervised(configured(micro_model, conversations, tmp_path / "run", 2, *words))
    assert any("1 steps before have no checkpoint" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    "key",
    [
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "critic.forward_max_token_len_per_gpu",
        "reward.reward_model.forward_max_token_len_per_gpu",
        "roles.prime.ppo_max_token_len_per_gpu",
        "distillation.teacher_models.teacher_model.inference.max_num_batched_tokens",
    ],
)
def test_the_setting_of_each_model_is_one_that_its_role_reads(key: str) -> None:
    config = load_config("ppo_trainer", [])
    set_key(config, key, 4711)
    where, _, name = key.rpartition(".")
    if where == "roles.prime":
        assert getattr(ROLES["prime"].settings_of(config), name) == 4711
    elif where.startswith("distillation"):
        (teacher,) = teachers_of(config).teachers
        assert f"{teacher.where}.inference.{name}" == key and teacher.settings.inference.max_num_batched_tokens == 4711
    else:
        assert getattr(part_of(config, where), name) == 4711


def test_a_run_is_not_repeated_for_ever(micro_model: Path, conversations: Path, tmp_path: Path) -> None:  # noqa: F811
    """A limit that is set already is not set again, and none below one sequence of full length."""
    config = configured(micro_model, conversations, tmp_path, 2)
    run = TrainingRun(config, config.trainer, 4, identity={})

    def repeated(config: Any, longest: int, tokens: int, ranks: int = 1, by_tokens: bool = True, key: str = KEY) -> Any:
        error = WorkerUserError("rank 1 ran out of memory")
        error.__cause__ = MicroBatchError("rank 1 ran out of memory", key, tokens, ranks, by_tokens)
        return settings_to_repeat(config, longest, run, error)

    again = repeated(config, longest=50, tokens=81)
    assert again.data.max_token_len_per_gpu == 50 and config.data.max_token_len_per_gpu > 81
    assert repeated(config, longest=50, tokens=81, ranks=2).data.max_token_len_per_gpu == 40
    assert repeated(config, longest=50, tokens=61, by_tokens=False).data.max_token_len_per_gpu == 30
    for settings, options in (
        (again, {"longest": 50, "tokens": 81}),
        (config, {"longest": 50, "tokens": 50}),
        (config, {"longest": 5, "tokens": 50, "key": ""}),
    ):
        with pytest.raises(WorkerUserError, match="rank 1 ran out"):
            repeated(settings, **options)


@pytest.mark.slow
def test_a_grpo_run_that_fails_in_its_first_step_begins_again(
    micro_model: Path, sort_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice, with half as many tokens each time; a budget stays as large as one sequence."""
    lib = plant(tmp_path, after=0, times=2)
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"actor_rollout_ref.model.external_lib={lib}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={REWARD}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.model.share_prefixes=False",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=7",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.use_dynamic_bsz=True",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.threads_per_worker=1",
        "trainer.logger=[file]",
        "trainer.report=False",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    outcome = run_ppo(load_config("ppo_trainer", words))
    assert outcome.step == 2
    notices = [line for line in capfd.readouterr().err.splitlines() if "begins again" in line]
    budgets = [int(line.rpartition(f"its beginning with {key}=")[2]) for line in notices]
    assert len(budgets) == 2 and 31 <= budgets[1] <= 0.6 * budgets[0]
    steps = [record["training/global_step"] for record in records(tmp_path / "run")]
    assert steps == [1, 2] and not list(tmp_path.glob("fail_*"))
