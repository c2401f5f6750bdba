"""Distillation in the trainer: which teacher a row has, where teachers compute, and what is refused before a start."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from raising import raises_with
from scoring_tools import said_by
from trainer_tools import trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import load_config, validate
from hybridrl.config.checks.check_distillation import distillation_notices
from hybridrl.config.checks.idle import check_idle
from hybridrl.errors import AlgorithmError, ConfigError, DataError, ModelError
from hybridrl.forecast.ppo_run import forecast_run
from hybridrl.models.info import tokenizer_of
from hybridrl.models.tiny import build_tiny_model
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.role_groups import active_roles, resource_pools
from hybridrl.trainer.ppo.run_requirements import RunRequirements
from hybridrl.trainer.ppo.teacher_rows import add_teacher_index, check_rows, check_teachers

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"
LOSS, TEACHERS, ACTOR = "distillation.distillation_loss", "distillation.teacher_models", "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the policy's vocabulary, far from uniform: a larger one, and the policy with a sharper output."""
    folders = []
    for seed, hidden in ((1, 48), (0, 32)):
        folder = build_tiny_model(tmp_path_factory.mktemp("teacher"), hidden=hidden, heads=2, kv_heads=1, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.lm_head.weight.mul_(12)
        model.save_pretrained(folder)
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def two_sources(sort_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sorting task, every other row from another source."""
    rows = pd.read_parquet(sort_data / "train.parquet")
    rows["data_source"] = np.where(np.arange(len(rows)) % 2, "odd", "even")
    file = tmp_path_factory.mktemp("sources") / "train.parquet"
    rows.to_parquet(file)
    return file


def words(model: Path, data: Path, *more: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}",
        f"reward.custom_reward_function.path={REWARD}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.optim.override_optimizer_config.eps=1e-3",
        f"{ACTOR}.checkpoint.save_contents=[model]",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        "trainer.logger=[file]",
        "trainer.total_training_steps=1",
        "distillation.enabled=True",
        *more,
    ]


def of_two(teachers: tuple[Path, Path]) -> list[str]:
    return [
        f"{TEACHERS}.first.model_path={teachers[0]}",
        f"{TEACHERS}.first.key=even",
        f"{TEACHERS}.second.model_path={teachers[1]}",
        f"{TEACHERS}.second.key=odd",
    ]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_teachers_by_rows_with_the_policy_and_in_their_own_pool(
    ray_session, micro_model: Path, teachers: tuple[Path, Path], two_sources: Path, tmp_path: Path
) -> None:
    common = words(
        micro_model,
        two_sources,
        *of_two(teachers),
        f"{LOSS}.loss_mode=forward_kl_topk",
        f"{LOSS}.topk=5",
        f"{TEACHERS}.second.inference.temperature=2.0",
        f"{TEACHERS}.second.inference.max_num_seqs=1",
        "actor_rollout_ref.rollout.temperature=0.8",
    )
    places = {1: [], 2: ["trainer.n_gpus_per_node=2", "distillation.nnodes=1", "distillation.n_gpus_per_node=2"]}
    found = {}
    for ranks, where in places.items():
        folder = tmp_path / str(ranks)
        with trained(*common, *where, f"trainer.default_local_dir={folder}") as (trainer, result):
            assert {name: group.world_size for name, group in trainer.groups.items()} == {
                "actor_rollout": ranks,
                "teacher": ranks,
            }
        (found[ranks],) = records(folder)
        batch = result.batch
        assert set(batch.non_tensor_batch["data_source"]) == {"even", "odd"}
        for row, source in enumerate(batch.non_tensor_batch["data_source"]):
            mask = batch.batch["response_mask"][row].bool()
            path, temperature = (teachers[0], 0.8) if source == "even" else (teachers[1], 2.0)
            expected = said_by(path, batch, row, temperature)
            labels = batch.batch["responses"][row][mask]
            kept = {field: batch.batch[f"teacher_{field}"][row][mask] for field in ("log_probs", "topk_log_probs")}
            torch.testing.assert_close(
                kept["log_probs"], expected.gather(1, labels[:, None])[:, 0], atol=2e-4, rtol=1e-4
            )
            torch.testing.assert_close(kept["topk_log_probs"], expected.topk(5).values, atol=2e-4, rtol=1e-4)
    for record in found.values():
        assert record["timing_s/teacher"] > 0 and record["distillation/teacher_mass"] > 0.05
    for metric in ("actor/loss", "actor/grad_norm", "distillation/loss", "distillation/loss_max"):
        assert found[2][metric] == pytest.approx(found[1][metric], rel=1e-3), metric


@pytest.mark.slow
def test_a_student_learns_from_the_vocabulary_of_its_teacher(
    ray_session, micro_model: Path, teachers: tuple[Path, Path], sort_data: Path, tmp_path: Path
) -> None:
    """Both models in the same two processes, without any reward, and offloaded between their turns."""
    common = words(
        micro_model,
        sort_data / "train.parquet",
        f"{TEACHERS}.teacher_model.model_path={teachers[1]}",
        f"{LOSS}.loss_mode=forward_kl",
        f"{LOSS}.use_task_rewards=False",
        f"{ACTOR}.optim.lr=1e-2",
        "data.train_batch_size=16",
        f"{ACTOR}.optim.override_optimizer_config.eps=1e-8",
        "distillation.fsdp_config.param_offload=True",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=8",
        f"trainer.default_local_dir={tmp_path}",
    )
    with trained(*common) as (trainer, result):
        assert "teacher_log_probs" not in result.batch.batch.keys()  # nothing is sent
        assert set(trainer.groups) == {"actor_rollout", "teacher"}
    steps = records(tmp_path)
    assert len(steps) == 8 and "actor/pg_loss" not in steps[0]
    losses = [step["distillation/loss"] for step in steps]
    assert sum(losses[-2:]) < 0.7 * sum(losses[:2]), losses
    assert losses[0] == pytest.approx(steps[0]["actor/loss"])


# ---------------------------------------------------------------- before anything starts


def config_of(model: Path, data: Path, *more: str):
    return load_config("ppo_trainer", words(model, data, *more))


def test_roles_pools_and_needs(micro_model: Path, sort_data: Path, teachers: tuple[Path, Path]) -> None:
    teacher = f"{TEACHERS}.teacher_model.model_path={teachers[0]}"
    data = sort_data / "train.parquet"
    config = config_of(micro_model, data, teacher)
    validate(config)
    assert [spec.name for spec in active_roles(config)] == ["actor_rollout", "teacher"]
    assert resource_pools(config).mapping == {"actor_rollout": "global", "teacher": "global"}
    assert RunRequirements.of(config).teacher
    assert not RunRequirements.of(config_of(micro_model, data, teacher, f"{LOSS}.loss_mode=jsd")).teacher
    apart = config_of(micro_model, data, teacher, "distillation.nnodes=2", "distillation.n_gpus_per_node=3")
    manager = resource_pools(apart)
    assert manager.mapping["teacher"] == "teacher_pool" and manager.resource_pool_spec["teacher_pool"] == [3, 3]
    placed = config_of(micro_model, data, teacher, "placement.pools.b=[1]", "placement.roles.teacher=b")
    validate(placed)
    assert resource_pools(placed).mapping["teacher"] == "b"
    off = config_of(micro_model, data, teacher, "distillation.enabled=False")
    assert [spec.name for spec in active_roles(off)] == ["actor_rollout"] and not RunRequirements.of(off).teacher


def test_forecast_counts_all_teachers(micro_model: Path, two_sources: Path, teachers: tuple[Path, Path]) -> None:
    one = forecast_run(config_of(micro_model, two_sources, f"{TEACHERS}.a.model_path={teachers[0]}"))
    two = forecast_run(config_of(micro_model, two_sources, *of_two(teachers)))
    first, both = one.roles["teacher"], two.roles["teacher"]
    assert first is not None and both is not None and first.states == both.states == first.gradients == 0
    assert both.parameters > first.parameters and both.kept_weights > first.kept_weights
    assert two.phases()["teacher"] - one.phases()["teacher"] == both.kept_weights - first.kept_weights
    off = forecast_run(
        config_of(micro_model, two_sources, *of_two(teachers), "distillation.fsdp_config.param_offload=True")
    )
    assert off.roles["teacher"] is not None and off.roles["teacher"].kept_weights == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([], r"distillation\.enabled=True without a teacher; set distillation\.teacher_models\.NAME\.model_path"),
        ([f"{TEACHERS}.a.key=x"], r"teacher_models\.a has no model_path"),
        ([f"{TEACHERS}.a.model_path=./gone"], r"teacher_models\.a\.model_path=\./gone: no such directory"),
        ([f"{TEACHERS}.a=3"], r"teacher_models\.a=3: must be settings of a teacher"),
        (["one", f"{TEACHERS}.a.modelpath=x"], r"teacher_models\.a\.modelpath: unknown key.*model_path"),
        (["one", f"{TEACHERS}.a.inference.tempreature=1"], r"inference\.tempreature: unknown key.*temperature"),
        (["one", f"{TEACHERS}.a.inference.temperature=0"], r"inference\.temperature=0.*greater than 0"),
        (["one", f"{TEACHERS}.a.inference.max_model_len=20"], r"max_model_len=20 is less than the 30 tokens"),
        (["one", f"{TEACHERS}.a.inference.response_length=9"], r"response_length=9 and data\.max_response_length=6"),
        (["two", f"{TEACHERS}.second.key=null"], r"second\.key is not set, and there are 2 teachers"),
        (["two", f"{TEACHERS}.second.key=even"], r"2 teachers have key=even"),
        (["two", f"{LOSS}.loss_mode=reverse_kl"], r"reverse_kl compares .* it takes one teacher.*has 2; .*topk_tail"),
        (["one", f"{LOSS}.loss_mode=k1"], r"loss_mode=k1 with use_policy_gradient=False: its gradient"),
        (["one", f"{LOSS}.loss_mode=k9"], r"loss_mode=k9: unknown.*forward_kl_topk"),
        (["one", f"{LOSS}.topk=0"], r"topk=0"),
        (["one", f"{LOSS}.log_prob_min_clamp=1"], r"log_prob_min_clamp=1"),
        (
            ["one", f"{LOSS}.use_policy_gradient=True", f"{LOSS}.policy_loss_mode=dro"],
            r"policy_loss_mode=dro needs .*dro_beta, which it does not get; use vanilla",
        ),
        (
            ["one", f"{LOSS}.loss_mode=jsd", "distillation.nnodes=1"],
            r"the teacher's pool teacher_pool is not the actor's global; set distillation\.nnodes=0",
        ),
        (
            ["one", f"{LOSS}.loss_mode=jsd", f"{TEACHERS}.a.inference.dtype=bfloat16"],
            r"a\.inference\.dtype=bfloat16: .* must be .*actor\.fsdp_config\.dtype=auto",
        ),
        (
            ["one", f"{LOSS}.loss_mode=jsd", f"{ACTOR}.fsdp_config.dtype=float32"],
            r"distillation\.fsdp_config\.dtype=auto: .* must be .*actor\.fsdp_config\.dtype=float32",
        ),
        (
            [
                "one",
                f"{LOSS}.loss_mode=jsd",
                "distillation.fsdp_config.ulysses_sequence_parallel_size=2",
                "trainer.n_gpus_per_node=2",
            ],
            r"distillation\.fsdp_config\.ulysses_sequence_parallel_size=2: .* must be .*actor\.fsdp_config\.uly\S*=1",
        ),
        (
            ["one", "distillation.nnodes=1", "placement.roles.teacher=global"],
            r"placement\.roles\.teacher=global and distillation\.nnodes=1 both",
        ),
        (["one", "distillation.strategy=nowhere"], r"distillation\.strategy=nowhere: unknown"),
    ],
)
def test_what_cannot_work_is_refused_by_name(micro_model, sort_data, teachers, more, named) -> None:
    if more and more[0] in ("one", "two"):
        more = [*(of_two(teachers) if more[0] == "two" else [f"{TEACHERS}.a.model_path={teachers[0]}"]), *more[1:]]
    with pytest.raises(ConfigError, match=named) as caught:
        validate(config_of(micro_model, sort_data / "train.parquet", *more))
    assert len(caught.value.faults) == 1


def test_settings_without_effect_are_told(micro_model, sort_data, teachers) -> None:
    data, teacher = sort_data / "train.parquet", f"{TEACHERS}.a.model_path={teachers[0]}"
    verls = [
        f"{TEACHERS}.a.num_replicas=2",
        f"{TEACHERS}.a.inference.load_format=auto",
        f"{TEACHERS}.a.inference.gpu_memory_utilization=0.3",
        f"{TEACHERS}.a.key=x",
        f"{LOSS}.log_prob_min_clamp=-10",
        f"{LOSS}.topk=64",
        f"{LOSS}.clip_ratio=0.1",
        f"{LOSS}.use_task_rewards=False",
        f"{ACTOR}.use_kl_loss=True",
    ]
    config = config_of(micro_model, data, teacher, *verls)
    (told,) = distillation_notices(config)
    assert "inference.load_format" in told
    faults, notices = check_idle(config)
    assert len(faults) == 1 and faults[0].startswith(f"{ACTOR}.use_kl_loss=True has no effect")
    idle = " ".join(notices)
    assert all(f"{TEACHERS}.a.{name}=" in idle for name in ("num_replicas", "inference.gpu_memory_utilization", "key"))
    assert all(f"{LOSS}.{name}=" in idle for name in ("log_prob_min_clamp", "topk", "clip_ratio"))
    assert list(distillation_notices(config_of(micro_model, data, teacher))) == []
    (off,) = check_idle(config_of(micro_model, data, teacher, "distillation.enabled=False"))[1]
    assert "distillation.teacher_models=" in off and "distillation.enabled is False" in off


def test_a_teacher_with_other_tokens_is_refused(micro_model, sort_data, teachers, tmp_path) -> None:
    data = sort_data / "train.parquet"
    config = config_of(micro_model, data, f"{TEACHERS}.a.model_path={teachers[0]}")
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    check_teachers(config, tokenizer)
    other = build_tiny_model(tmp_path / "other", hidden=32, heads=2, kv_heads=1)
    changed = AutoTokenizer.from_pretrained(other)
    changed.add_tokens(["<|extra|>"])
    changed.save_pretrained(other)
    with pytest.raises(
        ModelError, match=r"teacher_models\.a: the tokenizer of .*other is not the policy's.*extra"
    ) as e:
        check_teachers(config_of(micro_model, data, f"{TEACHERS}.a.model_path={other}"), tokenizer)
    assert f"{TEACHERS}.a.model_path" in str(e.value) and "tokenizer_path" not in str(e.value)
    # The same tokenizer before an output layer of another size, as models of one family have.
    padded = build_tiny_model(tmp_path / "padded", hidden=32, heads=2, kv_heads=1)
    model = AutoModelForCausalLM.from_pretrained(padded)
    model.resize_token_embeddings(300)
    model.save_pretrained(padded)
    of_padded = [micro_model, data, f"{TEACHERS}.a.model_path={padded}"]
    check_teachers(config_of(*of_padded), tokenizer)
    with pytest.raises(ModelError, match=r"its output layer has 300 tokens and the policy's 264, .*topk_tail"):
        check_teachers(config_of(*of_padded, f"{LOSS}.loss_mode=jsd"), tokenizer)


def test_a_loss_with_a_pass_of_its_own_is_refused(micro_model, sort_data, teachers) -> None:
    words = [f"{LOSS}.policy_loss_mode=clip_cov", f"{LOSS}.use_policy_gradient=True"]
    config = config_of(micro_model, sort_data / "train.parquet", f"{TEACHERS}.a.model_path={teachers[0]}", *words)
    with raises_with(AlgorithmError, "policy_loss_mode=clip_cov", "use vanilla"):
        check_teachers(config, tokenizer_of(config.actor_rollout_ref.model))


def test_shared_prefixes_and_a_teachers_tokens_are_refused(micro_model, sort_data, teachers) -> None:
    config = config_of(
        micro_model,
        sort_data / "train.parquet",
        f"{TEACHERS}.a.model_path={teachers[0]}",
        f"{LOSS}.loss_mode=forward_kl_topk",
        "actor_rollout_ref.model.share_prefixes=True",
    )
    with raises_with(ModelError, "model.share_prefixes=True", "k3"):
        check_teachers(config, tokenizer_of(config.actor_rollout_ref.model))


class Rows:
    """Data with one column."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self._values = list(columns), columns

    def column(self, name: str) -> list[Any]:
        return self._values[name]


def test_rows_without_a_teacher_are_refused(micro_model, sort_data, teachers) -> None:
    config = config_of(micro_model, sort_data / "train.parquet", *of_two(teachers))
    check_rows(Rows(data_source=["odd", "even"]), config)
    with raises_with(DataError, "data_source"):
        check_rows(Rows(data_source=["odd", "none", "both"]), config)
    with raises_with(DataError, "teacher_key=data_source"):
        check_rows(Rows(source=["odd"]), config)
    alone = config_of(micro_model, sort_data / "train.parquet", f"{TEACHERS}.a.model_path={teachers[0]}")
    check_rows(Rows(source=["odd"]), alone)
    batch = DataProto.from_dict(
        tensors={"responses": torch.zeros(3, 2)},
        non_tensors={"data_source": np.array(["odd", "even", "odd"], dtype=object)},
    )
    add_teacher_index(batch, alone)
    assert "teacher_index" not in batch.batch.keys()
    add_teacher_index(batch, config)
    assert batch.batch["teacher_index"].tolist() == [1, 0, 1]
    batch.non_tensor_batch["data_source"][2] = "none"
    with raises_with(DataError, "data_source"):
        add_teacher_index(batch, config)
