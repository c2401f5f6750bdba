"""`hybridrl plan`: the table, JSON, constraints, and settings that a run accepts."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from hybridrl.config import load_config
from hybridrl.config.checks.check_run import validate
from hybridrl.config.compose import compose_config
from hybridrl.config.dotted import get_key
from hybridrl.engine.fsdp.expert_parallel import check_expert_parallel
from hybridrl.errors import ConfigError, ModelError, PlacementError, UserError
from hybridrl.plan.layout_options import layouts
from hybridrl.plan.overrides import overrides
from hybridrl.plan.plan_command import main, read_request, training_words
from hybridrl.plan.run_plan import is_tie, plans, trained_role
from hybridrl.programs import PROGRAMS
from hybridrl.trainer.ppo.role_groups import resource_pools

FACTS = json.loads(Path(__file__).with_name("public_models.json").read_text(encoding="utf-8"))
FAMILIES = ("qwen2.5-7b", "qwen3-30b-a3b", "llama3-70b", "qwen2.5-1.5b", "qwen3-4b", "llama3.1-8b")
SETTINGS = {
    "data.train_batch_size": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 8192,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of each public model."""
    folder = tmp_path_factory.mktemp("models")
    for name, facts in FACTS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def words_of(models: Path, model: str, devices: str, **more: Any) -> list[str]:
    settings = {"actor_rollout_ref.model.path": models / model, **SETTINGS, **more}
    return [f"devices={devices}", *(f"{key}={value}" for key, value in settings.items())]


def run_words(words: list[str], chosen: dict[str, str]) -> list[str]:
    own = ("devices=", "machine=", "response=", "prompt=")
    return [*(word for word in words if not word.startswith(own)), *(f"{k}={v}" for k, v in chosen.items())]


def random_words(random: Random, models: Path, data: Path) -> tuple[str, list[str]]:
    program = random.choice(["grpo", "ppo"])
    model = random.choice(FAMILIES)
    count = random.choice([64, 128, 136] if model == "llama3-70b" else [16, 24, 32, 64])
    batch = random.choice([128, 256, 1024])
    more: dict[str, Any] = {
        "data.train_files": data / "train.parquet",
        "data.train_batch_size": batch,
        "actor_rollout_ref.actor.ppo_mini_batch_size": random.choice([batch, batch // 4]),
        "data.max_prompt_length": random.choice([512, 2048]),
        "data.max_response_length": random.choice([1024, 8192, 30720]),
        "actor_rollout_ref.actor.use_kl_loss": random.choice([True, False]),
    }
    if program == "ppo":
        more["critic.model.path"] = models / random.choice(["qwen2.5-1.5b", model])
    if random.random() < 0.3:
        more["actor_rollout_ref.actor.strategy"] = random.choice(["fsdp2", "megatron"])
    if random.random() < 0.2:
        more["actor_rollout_ref.rollout.nnodes"] = random.choice([0, 1])
    device = random.choice(["H100", "H200", "B200"])
    return program, words_of(models, model, f"{count}x{device}", **more)


@pytest.mark.slow(30)
@pytest.mark.parametrize("part", range(3))
def test_a_run_accepts_the_settings_of_30_random_plans(part: int, models: Path, sort_data: Path) -> None:
    random = Random(part)
    done, kinds = 0, set()
    while done < 10:
        program, words = random_words(random, models, sort_data)
        request = read_request(program, words)
        found = plans(request, within=10.0)
        if not found:
            continue
        plan = random.choice(found)
        chosen = overrides(request, plan)
        assert not set(chosen) & request.config.set_keys, "a setting that was given stays"
        composed = compose_config("ppo_trainer", run_words(words, chosen), defaults=PROGRAMS[program].defaults)
        config: Any = composed.config
        validate(config)
        given = {key for key in request.config.set_keys if not key.startswith("placement.")}  # words of the plan alone
        assert given and all(get_key(config, key) == get_key(request.config, key) for key in given)
        spec = resource_pools(config).resource_pool_spec
        assert sum(map(sum, spec.values())) == sum(size for _, size in plan.sets) <= request.cluster.count
        done += 1
        kinds.add((plan.sharded, len(plan.sets)))
    assert len(kinds) >= 3


def test_the_table_can_be_pasted(models: Path, sort_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"data.train_files": sort_data / "train.parquet"}
    words = words_of(models, "qwen3-30b-a3b", "16xH100", **more)
    assert main(["grpo", *words, "response=3000"], "hybridrl plan") == 0
    printed = capsys.readouterr().out
    block = printed.split("settings of plan 1:\n")[1].split("\n\n")[0]
    pasted = [word for word in shlex.split(block.replace("\\\n", " ")) if word]
    config: Any = load_config("ppo_trainer", [*run_words(words, {}), *pasted])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    assert "predictions" in printed and "assumed: a mean prompt of 512 tokens" in printed
    assert "mean response" not in printed
    assert "time: " in printed and "memory: " in printed and "one machine more (24 devices)" in printed


def test_json_says_the_same(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", *words_of(models, "qwen2.5-7b", "8xH100"), "--json"], "hybridrl plan") == 0
    data = json.loads(capsys.readouterr().out)
    request = read_request("grpo", words_of(models, "qwen2.5-7b", "8xH100"))
    found = plans(request)
    assert [plan["predicted_seconds"]["step"] for plan in data["plans"]] == [plan.step_s for plan in found]
    assert data["plans"][0]["overrides"] == overrides(request, found[0])
    for plan in data["plans"]:
        assert max(plan["predicted_bytes"].values()) <= 0.9 * 80e9 * (1 + 1e-9)
        parts = {name: value for name, value in plan["predicted_seconds"].items() if name != "step"}
        assert plan["predicted_seconds"]["step"] <= sum(parts.values()) * (1 + 1e-9)


def test_settings_that_are_given_are_kept(models: Path) -> None:
    fsdp, rollout = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout"
    given = {
        "actor_rollout_ref.actor.strategy": "fsdp2",
        f"{fsdp}.ulysses_sequence_parallel_size": 2,
        f"{fsdp}.fsdp_size": 8,
        f"{fsdp}.optimizer_offload": True,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 12000,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{rollout}.tensor_model_parallel_size": 4,
        f"{rollout}.gpu_memory_utilization": 0.55,
    }
    found = plans(read_request("grpo", words_of(models, "qwen2.5-7b", "16xH100", **given)))
    assert found
    for plan in found:
        layout = plan.layouts["actor"]
        assert plan.sharded and (plan.replicas.tensor, plan.replicas.share) == (4, 0.55)
        assert (layout.context, layout.shards, layout.micro_tokens, layout.recompute) == (2, 8, 12000, 1)
        assert layout.offload >= 1


def test_experts_are_divided_as_the_user_says(models: Path) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.expert_parallel_size"
    given = {"actor_rollout_ref.actor.strategy": "fsdp2", key: 8}
    proposals = plans(read_request("grpo", words_of(models, "qwen3-30b-a3b", "64xH100", **given)))
    assert proposals
    for plan in proposals:
        assert plan.layouts["actor"].expert == 8
        assert "ep 8" in training_words(plan)


def test_experts_are_divided_where_the_run_accepts_it(models: Path, sort_data: Path) -> None:
    more = {
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "data.train_files": sort_data / "train.parquet",
    }
    words = words_of(models, "qwen3-30b-a3b", "64xH100", **more)
    request = read_request("grpo", words)
    proposals = plans(request, within=10.0)
    assert proposals[0].layouts["actor"].expert > 1, "an eighth of the bytes is gathered"
    for plan in proposals:
        composed: Any = load_config("ppo_trainer", run_words(words, overrides(request, plan)))
        policy = composed.actor_rollout_ref
        for role, engine in (("actor", policy.actor.fsdp_config), ("ref", policy.ref.fsdp_config)):
            assert engine.expert_parallel_size == plan.layouts[role].expert
            if engine.expert_parallel_size > 1:
                check_expert_parallel(policy.model, engine, plan.devices_of(role), policy.actor.optim)


def test_the_reference_follows_the_policy_unless_its_experts_are_divided_otherwise(models: Path) -> None:
    more = {"actor_rollout_ref.actor.strategy": "fsdp2", "actor_rollout_ref.actor.use_kl_loss": True}
    request = read_request("grpo", words_of(models, "qwen3-30b-a3b", "64xH100", **more))
    plan = plans(request)[0]
    key = "actor_rollout_ref.ref.fsdp_config.expert_parallel_size"
    for policy, reference, value in ((8, 8, None), (8, 1, "1"), (1, 8, "8"), (1, 1, None)):
        sizes = {"actor": policy, "ref": reference}
        changed = {role: replace(layout, expert=sizes[role]) for role, layout in plan.layouts.items()}
        assert overrides(request, replace(plan, layouts=changed)).get(key) == value


@pytest.mark.parametrize(
    "more",
    [
        {"actor_rollout_ref.actor.fsdp_config.use_torch_compile": True},
        {
            "actor_rollout_ref.actor.optim.optimizer": "AdamW8bit",
            "actor_rollout_ref.actor.optim.optimizer_impl": "torchao.optim",
        },
    ],
    ids=["compiled", "8 bits"],
)
def test_experts_stay_together_where_the_run_would_refuse(more: dict[str, Any], models: Path) -> None:
    given = {"actor_rollout_ref.actor.strategy": "fsdp2", **more}
    proposals = plans(read_request("grpo", words_of(models, "qwen3-30b-a3b", "64xH100", **given)))
    assert proposals and all(plan.layouts["actor"].expert == 1 for plan in proposals)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("devices", ["16xH100", "48xH100", "1024xH100"])
def test_sizes_of_expert_groups_are_those_that_a_run_accepts(model: str, devices: str, models: Path) -> None:
    """Every power of two up to 64 is tried with each number of ranks that share a copy of the weights.

    A plan leaves out a few sizes that a run accepts: where experts are cut within, and only some layouts of their
    weights allow it.
    """
    request = read_request("grpo", words_of(models, model, devices, **{"actor_rollout_ref.actor.strategy": "fsdp2"}))
    cluster, settings = request.cluster, request.config.actor_rollout_ref
    table = layouts(trained_role(request, "actor", True), cluster, cluster.count, True)
    assert table is not None
    proposed = set(zip(np.asarray(table.shards).tolist(), np.asarray(table.expert).tolist(), strict=True))
    experts = request.models["actor"].experts
    for shards in (cluster.count, cluster.machine):
        assert (shards, 1) in proposed
        for size in (2, 4, 8, 16, 32, 64):
            engine = replace(settings.actor.fsdp_config, fsdp_size=shards, expert_parallel_size=size)
            try:
                check_expert_parallel(settings.model, engine, cluster.count, settings.actor.optim)
            except ModelError:
                assert (shards, size) not in proposed
            else:
                assert (shards, size) in proposed or experts // size % (shards // size)


def test_generation_apart_or_not_as_the_user_says(models: Path) -> None:
    key = "actor_rollout_ref.rollout.nnodes"
    apart = plans(read_request("grpo", words_of(models, "qwen2.5-7b", "32xH100", **{key: 2})))
    shared = plans(read_request("grpo", words_of(models, "qwen2.5-7b", "32xH100", **{key: 0})))
    assert apart and all((("rollout",), 16) in plan.sets for plan in apart)
    assert shared and all(("rollout",) not in [roles for roles, _ in plan.sets] for plan in shared)


def test_ties_begin_with_the_simplest(models: Path) -> None:
    more = {"critic.model.path": models / "qwen2.5-7b", "actor_rollout_ref.actor.use_kl_loss": True}
    found = plans(read_request("ppo", words_of(models, "qwen2.5-7b", "64xH100", **more)))
    fastest = min(plan.step_s for plan in found)
    ties = [plan for plan in found if is_tie(plan, fastest)]
    assert len(ties) > 1 and found[: len(ties)] == ties
    assert [plan.complexity for plan in ties] == sorted(plan.complexity for plan in ties)


@pytest.mark.parametrize(("model", "devices"), [("qwen2.5-7b", 8), ("llama3-70b", 64), ("deepseek-v3", 512)])
def test_more_devices_are_faster_and_few_are_refused_by_what_is_enough(
    models: Path, model: str, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(models, model, f"{devices}xH100")
    request = read_request("grpo", words)
    larger = replace(request, cluster=replace(request.cluster, count=2 * devices))
    first, second = (min(plan.step_s for plan in plans(one)) for one in (request, larger))
    assert second < first
    if model != "qwen2.5-7b":
        few = words_of(models, model, "8xH100")
        assert main(["grpo", *few], "hybridrl plan") == 2
        assert "devices=8xH100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "error", "named"),
    [
        (("devices=8xH1",), PlacementError, ("H1", "H100")),
        (("response=9000", "devices=8xH100"), ConfigError, ("response=9000", "data.max_response_length=8192")),
        (("response=-1", "devices=8xH100"), ConfigError, ("response=-1",)),
        (("trainer.nnodes=3", "devices=8xH100"), PlacementError, ("trainer.nnodes=3", "devices=8xH100")),
        (("placement=split", "devices=8xH100"), PlacementError, ("placement",)),
        (("actor_rollout_ref.model.lora_rank=8", "devices=8xH100"), ConfigError, ("lora_rank",)),
        (("actor_rollout_ref.rollout.name=hf", "devices=8xH100"), ConfigError, ("rollout.name=hf", "vllm")),
        (("trainer.v1.trainer_mode=colocate_async", "devices=8xH100"), ConfigError, ("trainer_mode=colocate_async",)),
        (("data.no_such_key=1", "devices=8xH100"), ConfigError, ("data.no_such_key",)),
        ((), PlacementError, ("devices",)),
    ],
)
def test_what_cannot_be_planned_is_refused(
    models: Path, more: tuple[str, ...], error: type[UserError], named: tuple[str, ...]
) -> None:
    words = [word for word in words_of(models, "qwen2.5-7b", "") if not word.startswith("devices=")]
    with pytest.raises(error) as refused:
        read_request("grpo", [*words, *more])
    assert all(name in str(refused.value) for name in named)
