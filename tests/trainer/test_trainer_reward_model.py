"""Training with a reward model: its scores against transformers' on the dumped texts, in each place it may run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.util import placement_group_table
from scoring_tools import as_generated, scores_of
from trainer_tools import lent, trained
from transformers import AutoModelForTokenClassification, AutoTokenizer

from hybridrl.config import load_config, validate
from hybridrl.errors import ConfigError, ModelError
from hybridrl.forecast.ppo_run import forecast_run
from hybridrl.reward.response_steps import steps_of
from hybridrl.trainer.ppo.memory import memory_advice

MODEL = "reward.reward_model"
TEMPLATE = "{% for one in messages %}{{ '[' + one['role'] + '] ' + one['content'] + '<|im_end|>' }}{% endfor %}"


def words(micro_model: Path, sort_data: Path, reward_model: Path, folder: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"data.val_files={sort_data / 'test.parquet'}",
        "data.val_max_samples=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "trainer.dump_freq=1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder}",
        f"{MODEL}.enable=True",
        f"{MODEL}.model.path={reward_model}",
    ]


def dumped(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / kind / "1.jsonl").read_text().splitlines()]


def rendered(reward_model: Path, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    """The dumped conversations in `TEMPLATE`."""
    tokenizer, found = AutoTokenizer.from_pretrained(reward_model), []
    for row in rows:
        question = re.fullmatch(r"user\n(.*)\nassistant\n", row["input"], re.DOTALL)
        assert question is not None
        text = f"[user] {question[1]}<|im_end|>[assistant] {row['output']}<|im_end|>"
        found.append(tokenizer(text, return_tensors="pt")["input_ids"][0])
    return found


def placed() -> set[str]:
    """The placement groups on Ray."""
    return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}


def test_a_reward_model_alone_scores_in_the_policys_processes(
    ray_session, micro_model, micro_reward_model, sort_data, tmp_path: Path
) -> None:
    """Its scores exist when groups are filtered: without them all would be alike, and none trained on."""
    before = placed()
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"]
    common = words(micro_model, sort_data, micro_reward_model, tmp_path)
    own = [f"{MODEL}.weight=2", f"{MODEL}.fsdp_config.param_offload=True"]
    own.append(f'{MODEL}.model.custom_chat_template="{TEMPLATE}"')
    with trained(*common, *filtering, *own) as (trainer, result):
        assert trainer.groups["reward_model"].resource_pool is trainer.groups["actor_rollout"].resource_pool
        assert lent(trainer, result.batch) == 1
    for kind in ("rollouts", "validation"):
        rows = dumped(tmp_path, kind)
        scores = scores_of(micro_reward_model, rendered(micro_reward_model, rows))
        assert [row["rm_scores"] for row in rows] == pytest.approx(scores, abs=1e-5)
        assert [row["score"] for row in rows] == pytest.approx([2 * score for score in scores], abs=2e-5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if "actor/pg_loss" in line]
    assert record["timing_s/reward_model"] > 0 and record["perf/memory_gb/reward_model"] > 0
    mean = sum(row["rm_scores"] for row in dumped(tmp_path, "rollouts")) / 12
    assert record["reward/rm_scores/mean"] == pytest.approx(mean, abs=1e-5)
    assert not (tmp_path / "global_step_1" / "reward_model").exists()
    assert placed() == before


def test_two_ranks_of_its_own_pool_score_the_same_and_a_function_adds_to_it(
    ray_session, micro_model, micro_reward_model, sort_data, tmp_path: Path
) -> None:
    function = tmp_path / "letters.py"
    function.write_text("def compute_score(solution_str):\n    return float(len(solution_str))\n")
    own = [
        f"{MODEL}.enable_resource_pool=True",
        f"{MODEL}.nnodes=1",
        f"{MODEL}.n_gpus_per_node=2",
        f"{MODEL}.micro_batch_size_per_gpu=2",
        f"{MODEL}.weight=0.5",
        f"reward.custom_reward_function.path={function}",
    ]
    with trained(*words(micro_model, sort_data, micro_reward_model, tmp_path), *own) as (trainer, result):
        assert trainer.groups["reward_model"].world_size == 2 and trainer.groups["actor_rollout"].world_size == 1
        assert lent(trainer, result.batch) == 0
    rows, fields = dumped(tmp_path, "rollouts"), result.batch.batch
    scores = scores_of(micro_reward_model, as_generated(micro_reward_model, fields))
    assert [row["rm_scores"] for row in rows] == pytest.approx(scores, abs=1e-5)
    sums = [0.5 * score + len(row["output"]) for score, row in zip(scores, rows, strict=True)]
    assert [row["score"] for row in rows] == pytest.approx(sums, abs=1e-5)
    last = fields["response_mask"].cumsum(1).argmax(1)
    assert (fields["token_level_scores"] != 0).nonzero()[:, 1].tolist() == last.tolist()


def test_a_classifier_of_steps_pays_each_step_on_two_ranks(ray_session, micro_model, sort_data, tmp_path: Path) -> None:
    """Its scores are transformers' probabilities behind each mark. Steps end where random bytes are no characters."""
    folder, separator = tmp_path / "steps", "\N{REPLACEMENT CHARACTER}"
    model = AutoModelForTokenClassification.from_pretrained(micro_model, num_labels=2, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(5))
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(micro_model)
    tokenizer.save_pretrained(folder)
    own = [
        f"{MODEL}.steps.enable=True",
        f"{MODEL}.steps.separator='{separator}'",
        f"{MODEL}.steps.mark=+",
        f"{MODEL}.weight=2",
        "data.max_response_length=16",
        "trainer.n_gpus_per_node=2",
        "algorithm.adv_estimator=reinforce_plus_plus",
    ]
    with trained(*words(micro_model, sort_data, folder, tmp_path), *own) as (_, result):
        scores, mask = result.batch.batch["token_level_scores"], result.batch.batch["response_mask"]
    for kind in ("rollouts", "validation"):
        rows = dumped(tmp_path, kind)
        for row in rows:
            text, places = re.sub(r"(^|\n)(user|assistant)(?=\n)", r"\1<|im_start|>\2", row["input"]), []
            text = re.sub(r"\n(?=<\|im_start\|>)", "<|im_end|>\n", text)
            for step in steps_of(row["output"], separator):
                text += step.rstrip(separator) + "+"
                places.append(len(tokenizer(text)["input_ids"]) - 1)
            with torch.no_grad():
                said = model(**tokenizer(text, return_tensors="pt")).logits[0, places].softmax(-1)[:, 1]
            assert row["rm_step_scores"] == pytest.approx(said.tolist(), abs=1e-5)
            assert row["score"] == pytest.approx(2 * said.sum().item(), abs=1e-4)
        assert max(len(row["rm_step_scores"]) for row in rows) > 1
    rewarded = (scores != 0) & mask.bool()
    assert torch.equal(rewarded, scores != 0) and (rewarded.sum(1) > 1).any()


def test_a_model_that_writes_is_refused_and_nothing_is_left_on_ray(
    ray_session, micro_model, sort_data, tmp_path: Path
) -> None:
    before = placed()
    common = words(micro_model, sort_data, micro_model, tmp_path)
    named = r"reward_model\.model\.path=.*Qwen2ForCausalLM generates text"
    with pytest.raises(ModelError, match=named), trained(*common):
        pass
    assert placed() == before


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([f"{MODEL}.model.path=./gone"], rf"{MODEL}\.model\.path=\./gone"),
        ([f"{MODEL}.enable_resource_pool=True"], rf"{MODEL}\.nnodes; set it"),
        (
            [f"{MODEL}.enable_resource_pool=True", f"{MODEL}.nnodes=1", "placement.roles.reward_model=global"],
            r"placement\.roles\.reward_model=global both",
        ),
        (
            [f"{MODEL}.combine=only", "reward.functions.a.path=FILE"],
            rf"reward\.functions=.* has no effect.* [Ss]et {MODEL}\.combine=sum",
        ),
        ([f"{MODEL}.weight=inf"], rf"{MODEL}\.weight=inf"),
        ([f"{MODEL}.model.lora_rank=4"], r"is frozen and read without an adapter"),
        ([f"{MODEL}.strategy=nowhere"], rf"{MODEL}\.strategy=.*nowhere"),
        ([f"{MODEL}.steps.mark=x"], rf"{MODEL}\.steps\.mark=x has no effect.* [Ss]et .*steps\.enable=True"),
        ([f"{MODEL}.steps.enable=True", f"{MODEL}.steps.separator=''"], r"steps\.separator is empty"),
        ([f"{MODEL}.steps.enable=True", f"{MODEL}.max_length=9"], r"max_length=9 with .*would have no score"),
        ([f"{MODEL}.steps.enable=True", f"{MODEL}.rollout.name=vllm"], r"rollout\.name=vllm with .*whole responses"),
        ([f"{MODEL}.steps.enable=True", f"{MODEL}.strategy=megatron"], r"strategy=megatron with .*set it to .*fsdp2"),
        (
            [f"{MODEL}.steps.enable=True", f"{MODEL}.judge.url=http://h/v1"],
            r"steps\.enable=True .*no effect, because .*judge\.url=http",
        ),
        ([f"{MODEL}.fsdp_config.forward_only=False"], rf"{MODEL} is frozen"),
        (
            [f"{MODEL}.use_dynamic_bsz=True", f"{MODEL}.forward_max_token_len_per_gpu=9"],
            r"=9 is less than one sequence",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    micro_model, micro_reward_model, sort_data, tmp_path, extra, named
) -> None:
    common = words(micro_model, sort_data, micro_reward_model, tmp_path)
    with pytest.raises(ConfigError, match=named):
        validate(load_config("ppo_trainer", [*common, *(word.replace("FILE", __file__) for word in extra)]))


def test_verls_keys_mean_the_same(micro_model, micro_reward_model, sort_data, tmp_path, capsys) -> None:
    common = words(micro_model, sort_data, micro_reward_model, tmp_path)[:-2]
    old = [
        "reward_model.enable=True",
        f"reward_model.model.path={micro_reward_model}",
        "reward_model.micro_batch_size=4",
    ]
    old += ["reward_model.model.input_tokenizer=null", "reward_model.model.fsdp_config.param_offload=True"]
    new = [f"{MODEL}.enable=True", f"{MODEL}.model_path={micro_reward_model}", f"{MODEL}.rollout.name=vllm"]
    new += [f"{MODEL}.rollout.prompt_length=1024", f"{MODEL}.rollout.skip_tokenizer_init=False"]
    for given in (old, new):
        config = load_config("ppo_trainer", [*common, *given])
        validate(config)
        part = config.reward.reward_model
        assert part.enable and part.model.path == str(micro_reward_model) and not config.reward.runs_functions
        if given is old:
            assert part.micro_batch_size_per_gpu == 4 and part.fsdp_config.param_offload
    told = capsys.readouterr().err
    assert part.rollout.name == "vllm" and f"{MODEL}.rollout.name" not in told
    assert f"{MODEL}.rollout.prompt_length" in told and "an engine that serves the reward model" in told


def test_memory_of_a_reward_model_is_forecast(micro_model, micro_reward_model, sort_data, tmp_path) -> None:
    config = load_config("ppo_trainer", words(micro_model, sort_data, micro_reward_model, tmp_path))
    found = forecast_run(config)
    model = found.roles["reward_model"]
    assert model is not None
    bigger = sum(one.resident for one in found.roles.values() if one is not None)
    assert found.phases()["reward_model"] > bigger > model.resident > 0
    assert "reward.reward_model.micro_batch_size_per_gpu" in memory_advice()["reward_model"]
