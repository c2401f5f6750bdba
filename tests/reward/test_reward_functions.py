"""Several functions with weights, TRL's signature, and functions handed over as objects."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from raising import raises_with

from hybridrl.config import ConfigError, load_config, validate
from hybridrl.data import create_rl_dataset
from hybridrl.reward import (
    RewardError,
    RewardFunction,
    RewardPool,
    Sample,
    create_reward_manager,
    reward_settings,
)
from hybridrl.reward.function import load
from hybridrl.reward.pools import create_pool
from hybridrl.scored import Unscored

LOCK = threading.Lock()
LENGTH = "def length(solution_str, ground_truth): return len(solution_str)"
MATCH = """
def match(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "wanted": ground_truth}
"""
TRL = """
def only_a(prompts, completions, completion_ids, answer, **columns):
    contents = [completion[0]["content"] for completion in completions]
    assert [message["role"] for message, in prompts] == ["user"] * len(prompts)
    assert sorted(columns) == ["extra_info", "ground_truth", "level", "reward_model"], sorted(columns)
    return [len(ids) + level if text.startswith(letter) else None
            for text, ids, letter, level in zip(contents, completion_ids, answer, columns["level"])]
"""


def columns(*truths: str) -> dict:
    return {
        "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
        "extra_info": [{"index": i} for i in range(len(truths))],
        "raw_prompt": [[{"role": "user", "content": f"prompt {i}"}] for i in range(len(truths))],
        "answer": ["a"] * len(truths),
        "level": list(range(len(truths))),
    }


@pytest.fixture
def scored(config, tokenizer, make_batch):
    """Score responses with `reward.functions`; everything that the manager returns."""

    def score(functions: dict, texts: list[str], truths: list[str]) -> dict:
        config.reward.functions = functions
        manager = create_reward_manager(config, tokenizer)
        try:
            return manager(make_batch(texts, **columns(*truths)), return_dict=True)
        finally:
            manager.close()

    return score


def test_the_reward_is_the_weighted_sum_and_every_part_is_reported(scored, user_file):
    functions = {
        "length": {"path": user_file(LENGTH, "a.py"), "weight": -0.5},
        "match": {"path": user_file(MATCH, "b.py"), "weight": 3},
    }
    result = scored(functions, ["ab", "abc"], ["ab", "x"])
    assert result["reward_tensor"].sum(-1).tolist() == [3 * 1 - 0.5 * 2, 3 * 0 - 0.5 * 3]
    assert result["reward_extra_info"] == {
        "score": [2.0, -1.5],
        "length": [2.0, 3.0],
        "match": [1.0, 0.0],
        "match/wanted": ["ab", "x"],
    }


def test_the_parts_may_be_of_any_kind_and_score_as_samples_finish(config, user_file):
    """One sample at a time, async, and built in, each in processes of its own."""
    asynchronous = "async def wait(solution_str, ground_truth): return 10"
    config.reward.functions = {
        "length": {"path": user_file(LENGTH, "a.py")},
        "wait": {"path": user_file(asynchronous, "b.py"), "weight": 2},
        "right": {"weight": 100},
    }
    samples = [Sample("hybridrl/sort", text, "12", {}) for text in ("#### 12", "#### 2")]
    with create_pool(config.reward) as pool:
        assert pool.built_in
        submitted = [pool.submit(sample) for sample in samples]
        assert [one.score for one in pool.run(samples)] == [7 + 20 + 100, 6 + 20]
        assert [future.result(timeout=120).score for future in submitted] == [127, 26]


def test_a_sum_without_one_of_its_parts_is_unscored(scored, user_file):
    unjudged = """
from hybridrl.scored import Unscored
def f(solution_str, ground_truth): return Unscored("grading", "no judge") if solution_str == "b" else 1
"""
    functions = {"judge": {"path": user_file(unjudged, "a.py")}, "length": {"path": user_file(LENGTH, "b.py")}}
    result = scored(functions, ["ab", "b"], ["1", "2"])
    assert result["missing"] == [None, Unscored("grading", "no judge")]
    assert result["reward_tensor"].sum(-1).isnan().tolist() == [False, True]


@pytest.mark.parametrize(("on_error", "reason", "score"), [(None, "timeout", float("nan")), ("zero", None, 0.0)])
def test_a_sum_without_a_part_that_is_late(scored, user_file, config, capsys, on_error, reason, score):
    """`reward.on_error=zero` makes it 0; the score of the other part is then in no column either."""
    late = """
import time
def late(solution_str, ground_truth):
    if solution_str == "b":
        time.sleep(60)
    return 1
"""
    functions = {"late": {"path": user_file(late, "a.py")}, "length": {"path": user_file(LENGTH, "b.py"), "weight": 2}}
    config.reward.timeout_s, config.reward.on_error = 2.0, on_error
    result = scored(functions, ["ab", "b"], ["1", "2"])
    assert [one and one.reason for one in result["missing"]] == [None, reason]
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([1 + 2 * 2, score], nan_ok=True)
    assert result["reward_extra_info"]["length"] == [2, None]
    assert result["reward_extra_info"]["score"] == [5, None if on_error is None else 0.0]
    assert result["metrics"]["reward/timeouts"] == 1
    assert "took more than reward.timeout_s=2" in capsys.readouterr().err


def test_trl_functions_get_columns_and_may_not_apply(scored, user_file):
    """None leaves a part out of the sum: it is neither 0 nor an error."""
    functions = {
        "only_a": {"path": user_file(TRL, "a.py"), "weight": 2},
        "length": {"path": user_file(LENGTH, "b.py")},
    }
    result = scored(functions, ["ab", "b", "abc"], ["1", "2", "3"])
    tokens = [3, 2, 4]  # a token a character, and EOS
    assert result["reward_extra_info"]["only_a"] == [tokens[0] + 0, None, tokens[2] + 2]
    assert result["reward_tensor"].sum(-1).tolist() == [2 * 3 + 2, 1, 2 * 6 + 3]


def test_a_sample_that_no_function_applies_to_is_an_error(scored, user_file, config):
    path = user_file(TRL, "a.py")
    with raises_with(RewardError, "only_a", "sample 1"):
        scored({"only_a": {"path": path}}, ["ab", "b"], ["1", "2"])
    config.reward.custom_reward_function.path = path  # alone, it has to score everything
    with raises_with(RewardError, "only_a", "NoneType"):
        scored({}, ["ab", "b"], ["1", "2"])


def test_completions_are_text_where_prompts_are():
    """TRL's two formats."""
    text = Sample("", "four", "4", {}, prompt="2 + 2 =")
    chat = Sample("", "four", "4", {}, prompt=[{"role": "user", "content": "2 + 2 ="}])
    assert text.completion == "four" and chat.completion == [{"role": "assistant", "content": "four"}]


@pytest.mark.parametrize(
    "source",
    [
        "def f(completions, **kwargs): return [len(c) + a for c, a in zip(completions, kwargs['answer'])]",
        "def f(completions, answer): return [len(c) + a for c, a in zip(completions, answer)]",
        "def f(completions, answer=None, other=None): return [len(c) + a for c, a in zip(completions, answer)]",
        "def f(responses, answer): return [len(c) + a for c, a in zip(responses, answer)]",
        "def f(solution_str, answer): return len(solution_str) + answer",
        "def f(solution_str, answer=None, other=0): return len(solution_str) + answer + other",
        "def f(responses, answer=None): return [len(c) + a for c, a in zip(responses, answer)]",
        "def f(*, completions, prompts, answer): return [len(c) + a for c, a in zip(completions, answer)]",
        "class Judge:\n    __name__ = 'f'\n    def __call__(self, completions, answer, **_):\n"
        "        return [len(c) + a for c, a in zip(completions, answer)]\nf = Judge()",
    ],
)
def test_columns_of_the_data_reach_a_function_by_name(user_file, source):
    samples = [Sample("", "x" * i, None, {}, columns={"answer": 10 * i}) for i in range(3)]
    with RewardPool(RewardFunction(user_file(source), "f"), 1) as pool:
        assert [one.score for one in pool.run(samples)] == [0, 11, 22]


def test_an_argument_of_the_settings_hides_a_column(user_file):
    function = RewardFunction(user_file("def f(solution_str, answer=1): return answer"), "f", {"answer": 5})
    with RewardPool(function, 1) as pool:
        assert pool.run([Sample("", "x", None, {}, columns={"answer": 10})])[0].score == 5


def test_a_parameter_that_nothing_provides_is_refused_with_the_data(config, tokenizer, user_file, sort_data):
    path = user_file("def f(completions, level, **kwargs): return [1.0] * len(completions)")
    config.reward.custom_reward_function.path = path
    dataset = create_rl_dataset(sort_data / "train.parquet", config.data, tokenizer)
    manager = create_reward_manager(config, tokenizer)
    try:
        with raises_with(RewardError, "f in", "mine.py", "parameter 'level'", "columns", "data_source"):
            manager.check(dataset)
    finally:
        manager.close()
    config.reward.custom_reward_function.reward_kwargs = {"level": 3}
    manager = create_reward_manager(config, tokenizer)
    try:
        manager.check(dataset)
    finally:
        manager.close()


def test_which_function_of_a_file_is_a_part(user_file):
    path = user_file("def one(solution_str, ground_truth): return 1\ndef two(solution_str, ground_truth): return 2")
    sample = Sample("", "", "", {})
    assert load(RewardFunction(path, part="two"))(sample) == 2
    assert load(RewardFunction(path, name="one", part="two"))(sample) == 1
    with raises_with(RewardError, "compute_score", "Set reward.functions.three.name"):
        load(RewardFunction(path, part="three", key="reward.functions.three"))


# ---------------------------------------------------------------- objects


def test_a_closure_and_a_lambda_score_in_other_processes(config, tmp_path):
    bonus = {"ab": 5}

    def length(solution_str, ground_truth):
        return len(solution_str) + bonus.get(solution_str, 0)

    class Judge:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, completions, **columns):
            return [self.factor * len(completion) for completion in completions]

    rewards = {"length": length, "flat": lambda solution_str, ground_truth: 0.25, "judge": Judge(100)}
    settings = reward_settings(rewards, tmp_path / "new" / "folder", weights={"flat": 4})
    assert {name: entry["weight"] for name, entry in settings["functions"].items()} == {
        "length": 1,
        "flat": 4,
        "judge": 1,
    }
    config.reward.functions = settings["functions"]
    with create_pool(config.reward) as pool:
        outcomes = pool.run([Sample("", text, "", {}) for text in ("ab", "c")])
    assert [one.score for one in outcomes] == [2 + 5 + 1 + 200, 1 + 1 + 100]
    assert outcomes[0].extra == {"score": 208, "length": 7, "flat": 0.25, "judge": 200}


def test_settings_for_one_function_and_for_files(user_file, tmp_path):
    one = reward_settings(lambda solution_str, ground_truth: 7, tmp_path)
    path = one["custom_reward_function"]["path"]
    with RewardPool(RewardFunction(path), 1) as pool:
        assert pool.run([Sample("", "", "", {})])[0].score == 7
    file = user_file(LENGTH)
    assert reward_settings(f"{file}:length", tmp_path) == {"custom_reward_function": {"path": file, "name": "length"}}
    assert reward_settings([Path(file)], tmp_path)["functions"][Path(file).stem]["path"] == file
    several = reward_settings([f"{file}:length", "pkg://package.module"], tmp_path, weights=[1, 2])
    assert several["functions"]["length"] == {"path": file, "name": "length", "weight": 1}


@pytest.mark.parametrize(
    ("reward", "weights", "message"),
    [
        ([len, len], None, "two reward functions are called 'len'"),
        ([len, 3], None, "reward 'int' is int"),
        (3, None, "reward is int"),
        ([], None, "reward is list"),
        ([len], [1, 2], "2 weights for 1 reward functions"),
        ([len], {"other": 1}, "'other': there is no such reward function; there are len"),
        (len, [1], "single function"),
        (lambda text: (LOCK, text), None, "'reward_1' cannot be sent .*lock"),
    ],
)
def test_what_cannot_be_handed_over(tmp_path, reward, weights, message):
    with pytest.raises(RewardError, match=message):
        reward_settings(reward, tmp_path, weights)


def test_a_function_of_the_same_name_replaces_no_other(tmp_path):
    """A run in this folder may restart a process that reads the first one's file."""
    first = reward_settings(lambda solution_str: 1, tmp_path)["custom_reward_function"]["path"]
    content = Path(first).read_bytes()
    second = reward_settings(lambda solution_str: 2, tmp_path)["custom_reward_function"]["path"]
    assert first != second and Path(first).read_bytes() == content


def test_a_name_that_is_no_word_is_refused_before_anything_is_written(tmp_path):
    with raises_with(RewardError, "'../format'"):
        reward_settings({"../format": lambda solution_str: 1}, tmp_path / "rewards")
    assert not list(tmp_path.iterdir())


def test_a_file_of_an_object_that_is_gone_or_broken_is_named(tmp_path):
    path = tmp_path / "f.pkl"
    with raises_with(RewardError, "reward.custom_reward_function.path=", "f.pkl"):
        load(RewardFunction(str(path)))
    path.write_bytes(b"nothing")
    with raises_with(RewardError, "f.pkl"):
        load(RewardFunction(str(path)))


# ---------------------------------------------------------------- the configuration


def faults(*overrides: str) -> str:
    try:
        validate(load_config("ppo_trainer", list(overrides)))
    except ConfigError as error:
        return "\n".join(fault for fault in error.faults if fault.startswith("reward"))
    return ""


def test_the_settings_of_several_functions_are_checked(user_file):
    path = user_file(LENGTH)
    good = f"reward.functions.length={{path: {path}, weight: 0.5}}"
    assert faults(good) == ""
    for overrides, message in [
        ([good, "reward.functions.length.weigth=3"], "reward.functions.length.weigth: unknown key"),
        ([good, "reward.functions.length.weight=much"], "reward.functions.length.weight"),
        ([good, "reward.functions.length.weight=inf"], "must be finite"),
        ([good, f"reward.custom_reward_function.path={path}"], "both set"),
        (["reward.functions.a={path: gone.py}"], "reward.functions.a.path=gone.py: no such file"),
        (["reward.functions.a={name: f}"], "reward.functions.a.name=f without"),
        (["reward.functions.score={}"], "reward.functions.score"),
        ([f"reward.functions.a={path}"], "reward.functions.a="),
    ]:
        assert message in faults(*overrides), overrides


def test_a_syntax_error_is_found_with_the_configuration(user_file):
    path = user_file("x = 1\ndef broken(:\n")
    for key in ("custom_reward_function.path", "functions.a.path"):
        assert f"reward.{key}={path}, line 2: SyntaxError" in faults(f"reward.{key}={path}")
    manager = ["reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={path}"]
    assert "module.path=" in faults(*manager) and "line 2: SyntaxError" in faults(*manager)


def test_settings_of_a_manager_from_a_file_are_checked_with_the_configuration(user_file):
    path = user_file(
        "from dataclasses import dataclass\n"
        "from hybridrl.reward import RewardManager\n"
        "@dataclass\n"
        "class Settings:\n"
        "    limit: int = 3\n"
        "class Mine(RewardManager):\n"
        "    settings_class = Settings\n"
    )
    where = "reward.reward_manager"
    own = [f"{where}.source=importlib", f"{where}.module.path={path}", f"{where}.module.name=Mine"]
    assert faults(*own, "+reward.reward_kwargs.limit=4") == ""
    message = faults(*own, "+reward.reward_kwargs.limt=4")
    assert "reward.reward_kwargs.limt" in message and "limit" in message
    assert "reward.reward_kwargs.limit" in faults(*own, "+reward.reward_kwargs.limit=many")
    path = user_file("class Mine:\n    def read_settings(self, config):\n        pass\n")  # no manager
    assert faults(own[0], f"{where}.module.path={path}", own[2]) == ""
