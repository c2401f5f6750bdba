"""Reward models and teachers in replicas of a user's engine: where they run, how they fail, what is refused.

The engine computes with transformers, one text at a time; vLLM's own is in test_trainer_rollouts_served.py.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file, save_file
from scoring_tools import as_generated, said_by, scores_of
from trainer_tools import trained

from hybridrl.config import load_config, validate
from hybridrl.config.checks.idle import check_idle
from hybridrl.config.roles import ROLES, shares_pool
from hybridrl.config.served import divide, served_reward_model, served_teachers
from hybridrl.errors import ConfigError, RolloutError
from hybridrl.forecast.ppo_run import forecast_run
from hybridrl.models.tiny import build_tiny_model
from hybridrl.trainer.ppo.served_role import check_served

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"
ENGINE = f"{Path(__file__).parent / 'reading_engine.py'}:ReadingEngine"
TEACHERS, LOSS = "distillation.teacher_models", "distillation.distillation_loss"
MODEL = "reward.reward_model"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = [tmp_path_factory.mktemp("teacher") for _ in range(2)]
    for seed, folder in enumerate(folders, start=1):
        build_tiny_model(folder, hidden=32, heads=2, kv_heads=1, seed=seed)
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def two_sources(sort_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = pd.read_parquet(sort_data / "train.parquet")
    rows["data_source"] = np.where(np.arange(len(rows)) % 3, "odd", "even")
    file = tmp_path_factory.mktemp("sources") / "train.parquet"
    rows.to_parquet(file)
    return file


def words(model: Path, data: Path, *more: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.temperature=0.8",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        *more,
    ]


def scorer(reward_model: Path, *more: str) -> list[str]:
    return [f"{MODEL}.enable=True", f"{MODEL}.model.path={reward_model}", f"{MODEL}.rollout.name={ENGINE}", *more]


def of_two(teachers: tuple[Path, Path], *more: str) -> list[str]:
    words = [
        f"reward.custom_reward_function.path={REWARD}",
        "distillation.enabled=True",
        f"{LOSS}.loss_mode=forward_kl_topk",
        f"{LOSS}.topk=5",
    ]
    for name, key, folder in (("first", "even", teachers[0]), ("second", "odd", teachers[1])):
        words += [f"{TEACHERS}.{name}.model_path={folder}", f"{TEACHERS}.{name}.key={key}"]
        words.append(f"{TEACHERS}.{name}.inference.name={ENGINE}")
    return [*words, *more]


def check_batch(batch, teachers: tuple[Path, Path]) -> None:
    for row, source in enumerate(batch.non_tensor_batch["data_source"]):
        mask = batch.batch["response_mask"][row].bool()
        path, temperature = (teachers[0], 0.8) if source == "even" else (teachers[1], 2.0)
        expected, labels = said_by(path, batch, row, temperature), batch.batch["responses"][row][mask]
        kept = {field: batch.batch[f"teacher_{field}"][row][mask] for field in ("log_probs", "topk_log_probs")}
        torch.testing.assert_close(kept["log_probs"], expected.gather(1, labels[:, None])[:, 0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept["topk_log_probs"], expected.topk(5).values, atol=1e-4, rtol=1e-4)


def test_teachers_divide_a_pool_of_their_own_and_outlive_a_replica(
    ray_session, micro_model: Path, teachers: tuple[Path, Path], two_sources: Path, tmp_path: Path, capfd
) -> None:
    """Three devices, two of which the second teacher has, and loses one of the replicas there."""
    own = of_two(
        teachers,
        f"{TEACHERS}.first.num_replicas=1",
        f"{TEACHERS}.second.num_replicas=2",
        f"{TEACHERS}.second.inference.temperature=2.0",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=3",
    )
    dies = teachers[1] / "dies"  # see reading_engine.py
    dies.touch()
    with trained(*words(micro_model, two_sources, *own, f"trainer.default_local_dir={tmp_path}")) as (trainer, result):
        group = trainer.groups["teacher"]
        assert group.world_size == 3 and not group.blocking
        assert [[replica.placement.bundle for replica in pool.replicas] for pool in group.supervisors] == [[0], [1, 2]]
        assert set(result.batch.non_tensor_batch["data_source"]) == {"even", "odd"}
        check_batch(result.batch, teachers)
        assert [pool.scheduler.rerun > 0 for pool in group.supervisors] == [False, True] and not dies.exists()
        assert group.method_seconds["compute_teacher"] > 0
    assert "requests run again" in capfd.readouterr().err


def test_models_take_turns_on_the_policys_devices(
    ray_session,
    micro_model: Path,
    micro_reward_model: Path,
    teachers: tuple[Path, Path],
    two_sources: Path,
    tmp_path: Path,
) -> None:
    """The engine refuses to read without its memory; between uses all of it is given back."""
    own = [*scorer(micro_reward_model), *of_two(teachers, f"{TEACHERS}.second.inference.temperature=2.0")]
    more = ["trainer.n_gpus_per_node=2", "trainer.dump_freq=1", f"trainer.default_local_dir={tmp_path}"]
    with trained(*words(micro_model, two_sources, *own, *more)) as (trainer, result):
        for name, models in (("teacher", 2), ("reward_model", 1)):
            group = trainer.groups[name]
            assert group.blocking and group.resource_pool is trainer.groups["actor_rollout"].resource_pool
            assert [len(pool.replicas) for pool in group.supervisors] == [2] * models
            for pool in group.supervisors:
                assert not pool.memory, "memory that was not given back"
        assert trainer.n_devices == 2
        fields = result.batch
        check_batch(fields, teachers)
        scores = scores_of(micro_reward_model, as_generated(micro_reward_model, fields.batch))
        dumped = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
        assert sorted(row["rm_scores"] for row in dumped) == pytest.approx(sorted(scores), abs=1e-5)
        assert trainer.groups["reward_model"].supervisors[0].settings.spec.max_model_len == 2 * 30 + 256


def test_a_text_that_is_too_long_is_named(
    ray_session, micro_model: Path, micro_reward_model: Path, sort_data: Path, tmp_path: Path
) -> None:
    own = scorer(micro_reward_model, f"{MODEL}.rollout.max_model_len=3")
    common = words(micro_model, sort_data / "train.parquet", *own, f"trainer.default_local_dir={tmp_path}")
    with (
        raises_with(RolloutError, "reward_model.rollout", "too long", "3 tokens", "rollout.max_model_len"),
        trained(*common),
    ):
        pass


# ---------------------------------------------------------------- before anything starts


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (["num_replicas=2"], r"first\.inference: 2 replicas of .* = 1 devices do not fit into a pool of 1 "),
        (["inference.tensor_model_parallel_size=2"], r"first\.inference: .* = 2 devices do not fit into a pool of 1 "),
        (["inference.name=null"], r"second\.inference\.name=.* and not .*first\.inference\.name: .*all teachers"),
        (["inference.name=nowhere"], r"first\.inference\.name=nowhere: unknown.*vllm"),
        (["inference.name=null", "second.inference.name=null", "inference.dtype=auto"], r"first.*dtype=auto is of"),
        (["loss_mode=jsd"], r"inference\.name=.*jsd compares whole vocabularies"),
    ],
)
def test_teachers_that_no_engine_can_serve_are_refused_by_name(
    micro_model, two_sources, teachers, own: list[str], named: str
) -> None:
    full = [
        f"{LOSS}.{word}" if "loss" in word else f"{TEACHERS}.{word}" if "second" in word else f"{TEACHERS}.first.{word}"
        for word in own
    ]
    config = load_config("ppo_trainer", words(micro_model, two_sources, *of_two(teachers), *full))
    with pytest.raises(ConfigError, match=named):
        validate(config)


def test_pools_are_divided_without_a_rest(micro_model, two_sources, teachers) -> None:
    config = load_config("ppo_trainer", words(micro_model, two_sources, *of_two(teachers)))
    one, two = served_teachers(config)
    assert divide([one, two], [4, 4], shared=False) == ([(0, 4), (4, 4)], [])
    assert divide([one, two], [2], shared=True) == ([(0, 2), (0, 2)], [])
    assert "1 of the pool's 3 devices would be idle" in divide([one, two], [3], shared=False)[1][0]
    placed = ["placement.pools={global: [1], b: [3]}", "placement.roles.teacher=b"]
    alone = load_config("ppo_trainer", words(micro_model, two_sources, *of_two(teachers), *placed))
    with pytest.raises(ConfigError, match=r"1 of the pool's 3 devices would be idle"):
        validate(alone)
    together = [*placed, "algorithm.adv_estimator=gae", "placement.roles.critic=b", f"critic.model.path={micro_model}"]
    config = load_config("ppo_trainer", words(micro_model, two_sources, *of_two(teachers), *together))
    validate(config)  # the critic has all three, and every teacher too
    assert [shares_pool(ROLES[name], config) for name in ("actor_rollout", "critic", "teacher")] == [False, True, True]


def test_the_reward_models_engine_is_checked(micro_model, micro_reward_model, sort_data, tmp_path) -> None:
    def served(*more: str):
        config = load_config("ppo_trainer", words(micro_model, sort_data / "train.parquet", *more))
        validate(config)
        return served_reward_model(config)

    check_served(served(*scorer(micro_reward_model)), on_gpu=False)
    with raises_with(RolloutError, "reward_model.rollout.name=hf", "vllm"):
        check_served(served(*scorer(micro_reward_model, f"{MODEL}.rollout.name=hf")), on_gpu=False)
    with raises_with(RolloutError, "size 16", "reward.reward_model.rollout.name"):
        check_served(served(*scorer(micro_reward_model, f"{MODEL}.rollout.name=vllm")), on_gpu=False)
    critic = tmp_path / "critic"
    save_critic(micro_reward_model, critic)
    with pytest.raises(RolloutError, match=r"head of .*critic has a bias"):
        check_served(served(*scorer(critic)), on_gpu=False)
    with pytest.raises(ConfigError, match=r"reward_model\.rollout: .* = 2 devices do not fit into a pool of 1 "):
        served(*scorer(micro_reward_model, f"{MODEL}.rollout.tensor_model_parallel_size=2"))
    idle = [f"{MODEL}.enable=True", f"{MODEL}.model.path={micro_reward_model}", f"{MODEL}.rollout.max_num_seqs=4"]
    (fault,), _ = check_idle(load_config("ppo_trainer", words(micro_model, sort_data / "train.parquet", *idle)))
    assert f"{MODEL}.rollout.max_num_seqs=4 has no effect" in fault and f"Set {MODEL}.rollout.name" in fault


def save_critic(reward_model: Path, folder: Path) -> None:
    """A classifier's folder with a bias in its head, as a saved critic has."""
    shutil.copytree(reward_model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.bias": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})


def test_memory_of_engines_is_forecast(micro_model, micro_reward_model, sort_data) -> None:
    """An engine takes its share of each device while it reads, and none of it otherwise."""
    common, total = words(micro_model, sort_data / "train.parquet", *scorer(micro_reward_model)), 2.0**30
    found = forecast_run(load_config("ppo_trainer", common), total)
    off = forecast_run(load_config("ppo_trainer", [*common, f"{MODEL}.enable=False"]), total)
    assert found.phases()["reward_model"] == pytest.approx(0.5 * total + off.phases()["gen"] - off.engine, rel=0.01)
    assert found.phases()["update_actor"] == off.phases()["update_actor"]
    kept = forecast_run(load_config("ppo_trainer", [*common, f"{MODEL}.rollout.free_cache_engine=False"]), total)
    assert kept.phases()["update_actor"] == off.phases()["update_actor"] + 0.5 * total
