"""The table of roles: what stands in it, and a model of the test's own as one more row."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from trainer_tools import trained

from hybridrl.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig, load_config, validate
from hybridrl.config.checks.check_algorithm import check_full_kl
from hybridrl.config.roles import phases_per_token
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.errors import ConfigError
from hybridrl.forecast import role_models
from hybridrl.forecast.engine_models import forecast_engine
from hybridrl.forecast.ppo_run import changes_that_fit
from hybridrl.forecast.sizes import Workload
from hybridrl.trainer.ppo.memory import memory_advice
from hybridrl.trainer.ppo.role_groups import (
    ROLES,
    Pass,
    Role,
    RoleSpec,
    Update,
    active_roles,
    register_role,
    resource_pools,
)
from hybridrl.trainer.ppo.run_ppo import run_ppo
from hybridrl.utils.user_code import load_module

FILE = Path(__file__).parent / "scorer_role.py"  # a user's file, as `external_lib` names it


@pytest.fixture
def scorer() -> Iterator[Any]:
    """The user's module; the table has its row."""
    module = load_module(str(FILE), "external_lib")
    yield module
    del ROLES["scorer"], sys.modules[module.__name__]


def config_of(*words: str):
    return load_config("ppo_trainer", ["algorithm.adv_estimator=gae", *words])


def test_roles_take_part_where_they_are_needed_and_live_where_they_are_placed() -> None:
    assert [spec.name for spec in active_roles(config_of())] == ["actor_rollout", "critic"]
    config = config_of("actor_rollout_ref.actor.use_kl_loss=True", "critic.enable=False")
    assert [spec.name for spec in active_roles(config)] == ["actor_rollout", "ref"]
    assert resource_pools(config).mapping == {"actor_rollout": "global", "ref": "global"}
    apart = config_of(
        "actor_rollout_ref.actor.use_kl_loss=True",
        "placement.pools={a: [1], b: [2]}",
        "placement.roles={actor_rollout_ref: a, critic: b, ref: b}",
    )
    manager = resource_pools(apart)
    assert manager.mapping == {"actor_rollout": "a", "ref": "b", "critic": "b"}
    assert manager.mapping[Role.RefPolicy] == "b" and Role.ActorRollout == "actor_rollout"  # verl's names


def test_phases_are_those_of_the_table(scorer) -> None:
    assert phases_per_token() == (
        *("ref", "teacher", "values", "process_rewards", "scorer", "adv"),
        *("update_actor", "update_critic", "update_prime"),
    )
    assert "lower data.train_batch_size" in memory_advice()["scorer"]
    assert {"gen", "update_weights", "old_log_prob", "ref", "values", "update_actor"} <= memory_advice().keys()
    with raises_with(ValueError, "'scorer'"):
        register_role(scorer.SCORER)


def test_a_role_whose_file_is_loaded_by_path_and_by_module_is_one(scorer) -> None:
    again = importlib.import_module(FILE.stem)  # loading by path put its folder on `sys.path`
    try:
        assert ROLES["scorer"] is again.SCORER is not scorer.SCORER
    finally:
        del sys.modules[FILE.stem]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["roles.umpire.seed=1"], r"roles\.umpire.*actor_rollout, ref, .*critic, .*scorer"),
        (["roles.scorer.seed=1", "roles.scorer.sed=1"], r"roles\.scorer\.sed.*seed, vocabulary"),
        (["roles.scorer.vocabulary=9"], r"roles\.scorer\.seed is missing"),
        (["roles.scorer.seed=x"], r"roles\.scorer\.seed='x'"),
        (["roles.ref.seed=1"], r"roles\.ref: .*actor_rollout_ref\.ref"),
        (
            ["roles.scorer.seed=1", "placement.roles.scoer=global"],
            r"placement\.roles\.scoer.*critic, .*scorer",
        ),
    ],
)
def test_settings_of_a_role_that_cannot_work_are_refused(scorer, words, named) -> None:
    with pytest.raises(ConfigError, match=named):
        validate(config_of(*words))


@dataclass
class UmpireSettings:
    """A model that learns, with the library's groups and without a default for its seed."""

    seed: int
    ppo_mini_batch_size: int = 256
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    rollout_n: int = 1
    strategy: str = "fsdp2"
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: FSDPConfig = field(default_factory=FSDPConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("ppo_mini_batch_size=3", r"train_batch_size=1024 is not a multiple of roles\.umpire\.ppo_mini_batch_size=3"),
        ("rollout_n=2", r"roles\.umpire\.rollout_n=2 and actor_rollout_ref\.rollout\.n=1"),
        (
            "{use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 9}",
            r"roles\.umpire\.ppo_max_token_len_per_gpu=9 is less",
        ),
        ("{strategy: nowhere, engine: {strategy: nowhere}}", r"roles\.umpire\.strategy=nowhere: unknown; .* fsdp2"),
        ("model.path=./gone", r"roles\.umpire\.model\.path=\./gone"),
        ("engine.forward_only=true", r"roles\.umpire\.engine\.forward_only=True: roles\.umpire is trained"),
        (
            "optim.optimizer_impl=nowhere.optim",
            r"roles\.umpire\.optim\.optimizer_impl=nowhere\.optim: the package nowhere is not installed",
        ),
        ("checkpoint.save_contents=[hf_model]", r"roles\.umpire\.checkpoint\.load_contents has model"),
        ("optim.lr=-1", r"roles\.umpire\.optim\.lr=-1"),
    ],
)
def test_a_role_that_learns_is_checked_like_the_critic(micro_model, sort_data, monkeypatch, word, named) -> None:
    update = Update("update_umpire", "update_umpire", fields=())
    spec = dataclasses.replace(
        ROLES["critic"],
        name="umpire",
        path="",
        settings=UmpireSettings,
        placement=("actor_rollout_ref",),
        update=update,
    )
    spec = dataclasses.replace(spec, needed=lambda config: "umpire" in config.roles, saved="umpire")
    monkeypatch.setitem(ROLES, "umpire", spec)
    common = [f"actor_rollout_ref.model.path={micro_model}", f"data.train_files={sort_data / 'train.parquet'}"]
    own = f"roles.umpire={word}" if word.startswith("{") else f"roles.umpire.{word}"
    settings = [own, "roles.umpire.seed=1"]
    if "model" not in word.split("=")[0]:
        settings.append(f"roles.umpire.model.path={micro_model}")
    validate(config_of(*common, "roles.umpire.seed=1", f"roles.umpire.model.path={micro_model}"))
    with pytest.raises(ConfigError, match=named) as caught:
        validate(config_of(*common, *settings))
    assert len(caught.value.faults) == 1


def test_the_check_of_full_kl_asks_the_row_of_the_reference_where_it_runs(monkeypatch) -> None:
    config = config_of("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=full")
    assert list(check_full_kl(config)) == []
    monkeypatch.setitem(ROLES, "ref", dataclasses.replace(ROLES["ref"], own_pool=lambda config: [1]))
    (fault,) = check_full_kl(config)
    assert "the reference's pool ref_pool is not the actor's global" in fault


@pytest.mark.parametrize("learns", [True, False])
def test_a_run_that_does_not_fit_is_told_keys_of_a_role_of_ones_own(tiny_model, monkeypatch, learns) -> None:
    """They are found by the types of its groups, whatever their names; a frozen role has no optimizer."""

    def forecast(part, config, ranks):
        micro = MicroBatching(1, None)
        work = Workload(100, 200, 1, micro if learns else None, micro)
        optim = part.optim if learns else None
        return forecast_engine("language_model", part.strategy, part.model, part.engine, optim, ranks, work)

    spec = RoleSpec(
        name="umpire",
        worker=None,
        needed=lambda config: "umpire" in config.roles,
        placement=("actor_rollout_ref",),
        mesh="umpire",
        settings=UmpireSettings,
        passes=(Pass("umpire", "compute_umpire"),),
        update=Update("update_umpire", "update_umpire", fields=()) if learns else None,
    )
    monkeypatch.setitem(ROLES, "umpire", spec)
    monkeypatch.setattr(role_models, "ROLE_FORECASTS", dict(role_models.ROLE_FORECASTS))
    role_models.forecasts_role("umpire")(forecast)
    config = config_of(
        f"actor_rollout_ref.model.path={tiny_model}",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=100",
        "data.max_response_length=200",
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "trainer.n_gpus_per_node=2",
        "roles.umpire.seed=1",
        f"roles.umpire.model.path={tiny_model}",
    )
    changes, _ = changes_that_fit(config, 1.0)
    own = {key.removeprefix("roles.umpire.") for key, _ in changes if key.startswith("roles.umpire.")}
    assert ("engine.offload_policy" if learns else "engine.param_offload") in own
    assert learns or not any(name.startswith("optim") for name in own)


def test_external_lib_registers_roles_before_workers_start(micro_model, sort_data, tmp_path) -> None:
    module = tmp_path / "own_role.py"
    module.write_text(
        "import dataclasses\n"
        "from hybridrl.trainer.ppo.role_groups import ROLES\n"
        "@dataclasses.dataclass\n"
        "class Settings:\n"
        "    x: int\n"
        "def needed(config):\n"
        "    raise LookupError('asked for ' + str(config.roles))\n"
        "ROLES['own'] = dataclasses.replace(ROLES['ref'], name='own', needed=needed, settings=Settings)\n"
    )
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"actor_rollout_ref.model.external_lib={module}",
        f"data.train_files={sort_data / 'train.parquet'}",
    ]
    try:
        with raises_with(LookupError, "asked for", "'own'", "'x': 1"):
            run_ppo(config_of(*words, "roles.own.x=1"))
    finally:
        ROLES.pop("own", None)


def test_a_second_frozen_model_is_one_more_row(scorer, ray_session, micro_model, sort_data, tmp_path: Path) -> None:
    reward = tmp_path / "letters.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(char < 'm' for char in solution_str) / max(len(solution_str), 1)\n"
    )
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={reward}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "placement.pools={policy: [1], judges: [2]}",
        "placement.roles={actor_rollout_ref: policy, scorer: judges}",
        "roles.scorer.seed=7",
        f"actor_rollout_ref.model.external_lib={FILE}",
    ]
    validate(load_config("ppo_trainer", words))
    with trained(*words) as (trainer, result):
        assert {name: group.world_size for name, group in trainer.groups.items()} == {"actor_rollout": 1, "scorer": 2}
    fields = result.batch.batch
    mask = fields["response_mask"].bool()
    expected = torch.where(mask, scorer.frozen_model(scorer.ScorerSettings(seed=7))(fields["responses"])[..., 0], 0.0)
    torch.testing.assert_close(torch.where(mask, fields["scorer_values"], 0.0), expected)
    texts = trainer.tokenizer.batch_decode(
        [row[keep].tolist() for row, keep in zip(fields["responses"], mask, strict=True)], skip_special_tokens=True
    )
    own = torch.tensor([sum(char < "m" for char in text) / max(len(text), 1) for text in texts])
    scores = own + 0.5 * expected.sum(1)
    torch.testing.assert_close(fields["token_level_rewards"].sum(1), scores, atol=1e-5, rtol=1e-5)
    groups = scores.view(4, 3)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(fields["advantages"][:, 0], advantages.flatten(), atol=1e-4, rtol=1e-4)
    (record,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert record["scorer/score/mean"] == pytest.approx(0.5 * expected.sum(1).mean().item(), abs=1e-5)
    assert record["timing_s/scorer"] > 0 and record["timing_per_token_ms/scorer"] > 0
    for phase in ("gen", "update_actor"):
        assert 0.1 < record[f"perf/memory_gb/{phase}"] < 100
    assert record["perf/max_memory_allocated_gb"] >= record["perf/memory_gb/update_actor"] * 0.99
    assert record["perf/max_memory_reserved_gb"] > 0.1 and record["perf/cpu_memory_used_gb"] > 0.1
    saved = tmp_path / "run" / "global_step_1"
    assert (saved / "actor").is_dir() and not (saved / "scorer").exists()
