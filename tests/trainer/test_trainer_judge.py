"""A judge that the run serves: its words against transformers' in each place it may run, and what is refused.

The engine computes with transformers, one text at a time; vLLM's own is in test_trainer_rollouts_served.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from judge_tools import PARSE, TEMPLATE, check_judgements
from raising import raises_with
from trainer_tools import lent, trained

from hybridrl.config import load_config, validate
from hybridrl.config.checks.check_judge import SERVED_FIELDS
from hybridrl.config.served import QUESTION_CHARACTERS, served_judge
from hybridrl.errors import ConfigError, ModelError, RewardError, RolloutError
from hybridrl.forecast.ppo_run import forecast_run
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.reward import create_reward_manager
from hybridrl.reward.judge import TEMPLATE as QUESTION
from hybridrl.trainer.ppo.role_groups import active_roles
from hybridrl.trainer.ppo.served_judge import check_judge_model, judges_of
from hybridrl.trainer.ppo.served_role import check_served

ENGINE = f"{Path(__file__).parent / 'reading_engine.py'}:ReadingEngine"
MODEL = "reward.reward_model"
JUDGE = f"{MODEL}.judge"


@pytest.fixture
def words(micro_model: Path, sort_data: Path, tmp_path: Path) -> list[str]:
    """A run whose judge the plain engine serves, with a template and a function of the user's."""
    (tmp_path / "question.txt").write_text(TEMPLATE)
    (tmp_path / "read.py").write_text(PARSE)
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"data.val_files={sort_data / 'test.parquet'}",
        "data.val_max_samples=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "algorithm.missing.max_share=1",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "trainer.dump_freq=1",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"{MODEL}.enable=True",
        f"{MODEL}.model.path={micro_model}",
        f"{MODEL}.rollout.name={ENGINE}",
        f"{JUDGE}.enable=True",
        f"{JUDGE}.template={tmp_path / 'question.txt'}",
        f"{JUDGE}.parse.path={tmp_path / 'read.py'}",
        f"{JUDGE}.system_prompt=Be fair.",
        f"{JUDGE}.max_tokens=8",
    ]


def test_a_judge_in_a_pool_of_its_own_and_a_function_make_the_reward(
    ray_session, words: list[str], micro_model: Path, tmp_path: Path
) -> None:
    """Answers that cannot be read give no scores: their samples are generated again."""
    (tmp_path / "letters.py").write_text("def compute_score(solution_str):\n    return float(len(solution_str))\n")
    own = [
        f"{MODEL}.enable_resource_pool=True",
        f"{MODEL}.nnodes=1",
        f"{MODEL}.n_gpus_per_node=2",
        f"{MODEL}.weight=0.5",
        f"reward.custom_reward_function.path={tmp_path / 'letters.py'}",
    ]
    with trained(*words, *own) as (trainer, _):
        group = trainer.groups["judge"]
        assert group.world_size == 2 and not group.blocking and len(group.supervisors[0].replicas) == 2
        assert "reward_model" not in trainer.groups and group.method_seconds["answer"] > 0
    for kind in ("rollouts", "validation"):
        rows = check_judgements(tmp_path / "run" / kind / "1.jsonl", micro_model)
        sums = [len(row["output"]) + 0.5 * row["judge"] for row in rows]
        assert [row["score"] for row in rows] == pytest.approx(sums)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if "actor/pg_loss" in line]
    assert record["missing/grading"] > 0 and record["missing/refilled"] > 0
    assert record["reward/judge/mean"] > 0 and record["timing_s/reward_sample/max"] > 0


def test_a_judge_takes_turns_with_the_policys_engine(
    ray_session, words: list[str], micro_model: Path, tmp_path: Path
) -> None:
    """The engine refuses to answer without its memory, which it has only while a batch is scored."""
    more = [f"actor_rollout_ref.rollout.name={ENGINE}", f"{JUDGE}.system_prompt=null", f"{MODEL}.weight=2"]
    with trained(*words, *more) as (trainer, result):
        group = trainer.groups["judge"]
        assert group.blocking and group.resource_pool is trainer.groups["actor_rollout"].resource_pool
        assert not group.supervisors[0].memory, "memory that was not given back"
        assert lent(trainer, result.batch) == 1
    rows = check_judgements(tmp_path / "run" / "rollouts" / "1.jsonl", micro_model, system=None)
    assert [row["score"] for row in rows] == pytest.approx([2 * row["judge"] for row in rows])


def test_a_question_that_is_too_long_is_unscored(ray_session, words: list[str]) -> None:
    own = [
        f"{MODEL}.rollout.max_model_len=9",
        "algorithm.missing.infra=raise",
        "data.val_files=[]",
        "data.val_max_samples=-1",
        "trainer.test_freq=-1",
    ]
    named = r"too long.*may have 9 tokens \(reward\.reward_model\.rollout\.max_model_len"
    with pytest.raises(RewardError, match=named), trained(*words, *own):
        pass


# ---------------------------------------------------------------- before anything starts


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ([f"{JUDGE}.url=http://host:1/v1"], r"judge\.enable=True and .*judge\.url=http://host:1/v1: .*set one"),
        ([f"{MODEL}.rollout.name=null"], r"judge\.enable=True without .*rollout\.name; set it .*vllm or sglang"),
        ([f"{JUDGE}.model=big"], r"judge\.model=big has no effect, because .*judge\.url is not set"),
        ([f"{JUDGE}.max_concurrent=3"], r"judge\.max_concurrent=3 has no effect"),
        ([f"{JUDGE}.extra_body={{stop: x}}"], r"judge\.extra_body\.stop=x: .*takes top_p, top_k, seed, chat_template"),
        ([f"{JUDGE}.extra_body={{top_p: 0.9}}"], r"extra_body\.top_p has no effect with temperature=0"),
        ([f"{JUDGE}.extra_body={{top_p: 2}}", f"{JUDGE}.temperature=1"], r"extra_body\.top_p=2: must lie in"),
        ([f"{JUDGE}.extra_body={{chat_template_kwargs: 2}}"], r"chat_template_kwargs=2: must be a mapping"),
        ([f"{MODEL}.max_length=9"], r"max_length=9 has no effect, because .*judge\.enable is True"),
        ([f"{MODEL}.rollout.max_model_len=8"], r"max_model_len=8 leaves no room .*judge\.max_tokens=8"),
        ([f"{MODEL}.model.path=./gone"], r"reward_model\.model\.path=\./gone"),
        ([f"{MODEL}.enable_resource_pool=True"], r"reward_model\.nnodes; set it"),
        ([f"{MODEL}.rollout.tensor_model_parallel_size=2"], r"= 2 devices do not fit into a pool of 1 "),
        (["reward.reward_manager.name=session"], r"judge\.enable=True has no effect, because .*name=session"),
        (
            [f"{JUDGE}.enable=False"],
            r"judge\.template=.*judge\.max_tokens=.* have no effect, because .*judge\.enable is False",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(words: list[str], own: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        validate(load_config("ppo_trainer", [*words, *own]))


def test_models_and_engines_that_cannot_judge_are_refused(words, micro_model, micro_reward_model) -> None:
    def config(*own: str):
        found = load_config("ppo_trainer", [*words, *own])
        validate(found)
        return found

    check_judge_model(config())
    check_served(served_judge(config()), on_gpu=False)
    with raises_with(ModelError, "Qwen2ForSequenceClassification", "judge.enable=False"):
        check_judge_model(config(f"{MODEL}.model.path={micro_reward_model}"))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    with raises_with(ModelError, "system_prompt"):
        check_judge_model(config(f'{MODEL}.model.custom_chat_template="{refuses}"'))
    with raises_with(RolloutError, "rollout.name=hf", "vllm"):
        check_served(served_judge(config(f"{MODEL}.rollout.name=hf")), on_gpu=False)
    with raises_with(RolloutError, "size 16", "reward.reward_model.rollout.name=sglang"):
        check_served(served_judge(config(f"{MODEL}.rollout.name=vllm")), on_gpu=False)


def test_a_manager_that_would_not_ask_the_judge_is_refused(words, micro_model, tmp_path) -> None:
    (tmp_path / "manager.py").write_text(
        "from hybridrl.reward import RewardManager\nfrom hybridrl.reward.scorers import NoFunction\n"
        "class Mine(RewardManager):\n"
        "    @classmethod\n    def create_pool(cls, config, num_workers=None):\n        return NoFunction()\n"
    )
    where = "reward.reward_manager"
    own = [f"{where}.source=importlib", f"{where}.module.path={tmp_path / 'manager.py'}", f"{where}.module.name=Mine"]
    tokenizer, found = load_tokenizer(micro_model), []
    for more in ([], ["reward.reward_manager.name=rate_limited"]):
        found += judges_of(create_reward_manager(load_config("ppo_trainer", [*words, *more]), tokenizer))
    assert len(found) == 2
    with pytest.raises(RewardError, match=r"reward manager Mine scores without .* nobody would ask the judge"):
        judges_of(create_reward_manager(load_config("ppo_trainer", [*words, *own]), tokenizer))


def test_lengths_roles_and_memory_of_a_judge(words: list[str]) -> None:
    """Its engine takes its share of a device while answers are scored, and none of it otherwise."""
    config, total = load_config("ppo_trainer", words), 2.0**30
    assert [spec.name for spec in active_roles(config)] == ["actor_rollout", "judge"]
    (model,) = served_judge(config)
    assert model.needs == 2 * 30 + 256 + len(TEMPLATE) + len("Be fair.") + 8
    assert len(QUESTION) <= QUESTION_CHARACTERS
    found = forecast_run(config, total)
    off = forecast_run(load_config("ppo_trainer", [*words[:-8], f"{MODEL}.enable=False"]), total)
    assert found.phases()["reward"] == pytest.approx(0.5 * total + off.phases()["gen"] - off.engine, rel=0.01)
    assert found.phases()["update_actor"] == off.phases()["update_actor"]


def test_the_documented_fields_are_those_that_are_taken(words: list[str]) -> None:
    fields: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "seed": 3, "chat_template_kwargs": {"enable_thinking": False}}
    assert sorted(fields) == sorted(SERVED_FIELDS)
    given = "{top_p: 0.9, top_k: 5, seed: 3, chat_template_kwargs: {enable_thinking: false}}"
    template = "{{ messages }}{{ enable_thinking }}"
    own = [f"{JUDGE}.temperature=0.7", f"{JUDGE}.extra_body={given}"]
    validate(load_config("ppo_trainer", [*words, *own, f'{MODEL}.model.custom_chat_template="{template}"']))
    with raises_with(ConfigError, "chat_template_kwargs.enable_thinking=False"):
        validate(load_config("ppo_trainer", [*words, *own]))
