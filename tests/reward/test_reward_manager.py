"""Managers of rewards: where scores stand, what is adjusted, and which results are refused."""

from __future__ import annotations

import math

import pytest
import torch
from raising import raises_with

from hybridrl.data import create_rl_dataset
from hybridrl.protocol import object_array
from hybridrl.protocol.names import TRAJECTORY_REWARD
from hybridrl.reward import (
    RewardError,
    RewardManager,
    check_reward,
    create_reward_manager,
    get_reward_manager_cls,
    register,
)
from hybridrl.reward.factory import ask
from hybridrl.scored import Unscored

LENGTHS_FILE = """
def compute_score(solution_str, ground_truth):
    return {"score": len(solution_str), "text": solution_str}
"""


@pytest.fixture
def manager_for(config, tokenizer):
    """A manager of the configuration, closed after the test."""
    made = []

    def make(path=None, **reward):
        config.reward.custom_reward_function.path = path
        for name, value in reward.items():
            setattr(config.reward, name, value)
        made.append(create_reward_manager(config, tokenizer))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def sort_columns(*truths):
    return {
        "data_source": ["hybridrl/sort"] * len(truths),
        "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
        "extra_info": [{"index": i} for i in range(len(truths))],
        "uid": [f"0-{i}" for i in range(len(truths))],
        "raw_prompt": [[{"role": "user", "content": f"Sort: number {i}"}] for i in range(len(truths))],
    }


def test_the_score_stands_on_the_last_token_of_each_response(manager_for, make_batch):
    batch = make_batch(["#### 12", "#### 21 ", "12"], width=12, **sort_columns("12", "21", "12"))
    result = manager_for()(batch, return_dict=True)
    lengths = batch.batch["response_mask"].sum(-1)
    expected = torch.zeros(3, 12)
    expected[0, lengths[0] - 1] = expected[1, lengths[1] - 1] = 1.0
    assert torch.equal(result["reward_tensor"], expected) and result["reward_tensor"].dtype == torch.float32
    assert result["reward_extra_info"] == {"acc": [1.0, 1.0, 0.0]}
    assert result["metrics"]["reward/timeouts"] == 0.0
    assert torch.equal(manager_for()(batch), expected)


def test_padding_and_special_tokens_are_not_part_of_the_text(manager_for, make_batch, user_file, tokenizer):
    batch = make_batch(["ab", "a longer text"], **sort_columns("1", "2"))
    batch.batch["responses"][0, 5:] = tokenizer("z")["input_ids"][0]  # rubbish beyond the end
    result = manager_for(user_file(LENGTHS_FILE))(batch, return_dict=True)
    assert result["reward_extra_info"]["text"] == ["ab", "a longer text"]


def test_rows_that_are_scored_as_they_finish_get_what_the_batch_gets(manager_for, make_batch, config):
    """Each row in a batch of its own, as the last finish first; the length penalty applies to each."""
    batch = make_batch(["#### 12", "#### 21 ", "12"], width=12, **sort_columns("12", "21", "12"))
    overlong = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}
    config.reward.reward_manager.name = "dapo"
    manager = manager_for(reward_kwargs={"max_resp_len": 5, "overlong_buffer_cfg": overlong})
    expected = manager(batch, return_dict=True)
    futures = {row: manager.submit(batch[row : row + 1])[0] for row in (2, 0, 1)}
    found = manager.collect(batch, [futures[row].result(timeout=120) for row in range(3)])
    assert torch.equal(found["reward_tensor"], expected["reward_tensor"]) and (found["reward_tensor"] < 0).any()
    assert found["reward_extra_info"] == expected["reward_extra_info"]
    batch.non_tensor_batch["data_source"][1] = "unknown"
    with pytest.raises(RewardError, match="unknown"):
        manager.submit(batch)


def test_a_session_in_several_rows_is_adjusted_once(manager_for, make_batch, config):
    """The rows before a session's last keep the reward that they brought along."""
    sessions = {"uid": ["a"] * 3, "session_id": ["s", "s", "t"], "trajectory_index": [0, 1, 0]}
    given = {"trajectory_reward": [0.0, None, 0.5]}
    columns = sort_columns("12", "12", "12") | sessions | given
    batch = make_batch(["#### 21 ", "#### 12", "#### 12"], width=12, **columns)
    overlong = {"enable": True, "len": 4, "penalty_factor": 1.0}
    config.reward.reward_manager.name = "dapo"
    manager = manager_for(reward_kwargs={"max_resp_len": 5, "overlong_buffer_cfg": overlong})
    rewards = manager(batch)
    assert rewards.sum(dim=-1).tolist() == [0.0, 0.0, -0.5]  # the penalty of 5 tokens is (5 - 1) / 4
    early = [future.result(timeout=120) for future in manager.submit(batch)]
    assert torch.equal(manager.collect(batch, early)["reward_tensor"], rewards)


def test_a_submitted_row_that_fails_is_named(manager_for, make_batch, user_file):
    batch = make_batch(["1", "2"], **sort_columns("1", "2"))
    path = user_file("def f(solution_str, ground_truth): return 1 / (int(ground_truth) - 2)")
    good, bad = manager_for(path).submit(batch)
    assert good.result(timeout=120).score == -1.0
    with pytest.raises(RewardError, match=r"sample 1 \(data source 'hybridrl/sort', uid '0-1'(.|\n)*ZeroDivisionError"):
        bad.result(timeout=120)


def test_a_manager_that_scores_batches_cannot_score_rows_as_they_finish(config, tokenizer, make_batch):
    class Whole(RewardManager):
        def score_batch(self, samples, name):
            return []

    manager = Whole(config, tokenizer, create_reward_manager(config, tokenizer).pool)
    with raises_with(RewardError, "score_batch"):
        manager.submit(make_batch(["1"], **sort_columns("1")))


def test_rewards_that_trajectories_brought_are_kept_and_not_asked_for(manager_for, make_batch, user_file):
    batch = make_batch(["ab", "abc", "abcd"], **sort_columns("1", "2", "3"))
    batch.non_tensor_batch[TRAJECTORY_REWARD] = object_array([None, 0.25, None])
    manager = manager_for(user_file(LENGTHS_FILE))
    expected = [2.0, 0.25, 4.0]
    result = manager(batch, return_dict=True)
    assert result["reward_tensor"].sum(dim=-1).tolist() == expected
    assert result["reward_extra_info"]["text"] == ["ab", None, "abcd"]
    assert [future.result(timeout=120).score for future in manager.submit(batch)] == expected
    columns = sort_columns("1")
    columns["reward_model"] = [None]
    given = make_batch(["ab"], **columns)  # the built-in scorer could not score it
    given.non_tensor_batch[TRAJECTORY_REWARD] = object_array([1.0])
    assert manager_for()(given).sum() == 1.0


def test_the_score_stands_on_the_last_generated_token_where_tools_answer(manager_for, make_batch, user_file):
    """Tool tokens are masked in training; and a hole says nothing of the length."""
    batch = make_batch(["abcdef"], width=9, **sort_columns("1"))
    batch.batch["response_mask"][0] = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0, 0])  # the seventh token is a tool's, too
    manager = manager_for(user_file(LENGTHS_FILE))
    assert manager(batch).nonzero().tolist() == [[0, 4]] and manager(batch).sum() == 6
    batch = batch.select(batch_keys=["responses", "response_mask"])
    assert manager(batch).nonzero().tolist() == [[0, 4]] and manager(batch).sum() == 5


def test_without_attention_mask_the_response_mask_tells_the_end(manager_for, make_batch):
    batch = make_batch(["#### 12"], width=12, **sort_columns("12"))
    batch = batch.select(batch_keys=["responses", "response_mask"])
    assert manager_for()(batch).nonzero().tolist() == [[0, int(batch.batch["response_mask"].sum()) - 1]]


def test_a_batch_that_ray_handed_over_read_only_is_not_written(manager_for, make_batch):
    batch = make_batch(["#### 12"], **sort_columns("12"))
    before = {name: tensor.clone() for name, tensor in batch.batch.items()}
    manager_for()(batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in batch.batch.items())


def test_a_dataset_without_data_source_works_with_a_custom_function(manager_for, make_batch, user_file):
    path = user_file(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if (data_source, ground_truth, extra_info.get('index')) == (None, None, None) else 0.0"
    )
    assert manager_for(path)(make_batch(["x", "y"])).sum() == 2.0


def test_another_column_may_choose_the_scorer(manager_for, make_batch, config):
    columns = sort_columns("12")
    columns["kind"] = columns.pop("data_source")
    config.data.reward_fn_key = "kind"
    assert manager_for()(make_batch(["#### 12"], **columns)).sum() == 1.0


def test_built_in_scorers_refuse_what_they_do_not_know(manager_for, make_batch):
    columns = sort_columns("12")
    columns["data_source"] = ["my/data"]
    with raises_with(RewardError, "'my/data'", "'data_source'"):
        manager_for()(make_batch(["x"], **columns))
    columns = sort_columns("12")
    del columns["reward_model"]
    with raises_with(RewardError, "'hybridrl/sort'"):
        manager_for()(make_batch(["x"], **columns))


def test_an_error_names_data_source_uid_and_prompt(manager_for, make_batch, user_file):
    path = user_file("def compute_score(solution_str, ground_truth): return 1 / (len(solution_str) - 2)")
    batch = make_batch(["a", "bb", "ccc"], **sort_columns("1", "2", "3"))
    message = r"sample 1 \(data source 'hybridrl/sort', uid '0-1', prompt 'Sort: number 1'\)(.|\n)*ZeroDivisionError"
    with pytest.raises(RewardError, match=message):
        manager_for(path)(batch)


@pytest.mark.parametrize("on_error", [None, "zero"])
def test_a_hang_is_unscored_unless_zero_is_asked_for(manager_for, make_batch, user_file, capsys, on_error):
    path = user_file(
        """
        import time
        def compute_score(solution_str, ground_truth):
            if solution_str == "hang":
                time.sleep(1000)
            return {"score": 1.0, "acc": True, "note": "ok"}
        """
    )
    result = manager_for(path, timeout_s=2.0, on_error=on_error)(
        make_batch(["a", "hang", "c"], **sort_columns("1", "2", "3")), return_dict=True
    )
    score = None if on_error is None else 0
    assert math.isnan(result["reward_tensor"].sum()) == (on_error is None)
    assert result["reward_tensor"].nan_to_num(nan=9.0).sum(-1).tolist() == [1.0, 9.0 if score is None else 0.0, 1.0]
    assert [one and one.reason for one in result["missing"]] == [None, "timeout" if on_error is None else None, None]
    assert result["reward_extra_info"] == {
        "score": [1, score, 1],
        "acc": [True, score, True],
        "note": ["ok", None, "ok"],
    }
    assert result["metrics"]["reward/timeouts"] == 1.0 and "uid '0-1'" in capsys.readouterr().err


def test_a_function_may_give_scores_or_say_why_not(manager_for, make_batch, user_file):
    path = user_file(
        """
        from hybridrl.scored import Unscored, UnscoredError, Reason, Scored
        def compute_score(solution_str, ground_truth):
            if solution_str == "raises":
                raise UnscoredError(Reason.TIMEOUT, "the judge")
            if solution_str == "none":
                return Unscored("infra", "no disk")
            return Scored(0.5, {"acc": 1}) if solution_str == "good" else Scored(2)
        """
    )
    manager = manager_for(path)
    batch = make_batch(["good", "none", "raises", "plain"], **sort_columns(*"1234"))
    for result in (
        manager(batch, return_dict=True),
        manager.collect(batch, [future.result(timeout=120) for future in manager.submit(batch)]),
    ):
        assert result["reward_tensor"].sum(-1).nan_to_num(nan=9.0).tolist() == [0.5, 9.0, 9.0, 2.0]
        assert result["missing"] == [None, Unscored("infra", "no disk"), Unscored("timeout", "the judge"), None]
        assert result["failed"] == [False] * 4 and result["metrics"]["reward/errors"] == 0
        assert result["reward_extra_info"] == {"score": [0.5, None, None, 2.0], "acc": [1, None, None, None]}
    path = user_file(
        """
        from hybridrl.scored import Unscored, Scored
        def compute_reward(responses, ground_truths):
            return [Unscored("dropped") if r == "x" else Scored(1) for r in responses]
        """
    )
    result = manager_for(path)(make_batch(["a", "x"], **sort_columns("1", "2")), return_dict=True)
    assert result["missing"] == [None, Unscored("dropped")]


def test_a_row_may_bring_along_why_it_has_no_reward(manager_for, make_batch, user_file):
    batch = make_batch(["ab", "abc"], **sort_columns("1", "2"))
    batch.non_tensor_batch[TRAJECTORY_REWARD] = object_array([Unscored("infra"), 1.5])
    result = manager_for(user_file(LENGTHS_FILE))(batch, return_dict=True)
    assert result["missing"] == [Unscored("infra"), None] and result["reward_tensor"][1].sum() == 1.5
    assert result["reward_tensor"][0].sum().isnan()


@pytest.mark.parametrize("name", ["uid", "data_source"])
def test_a_dict_must_not_replace_a_column_of_the_batch(manager_for, make_batch, user_file, name):
    path = user_file(f"def compute_score(solution_str, ground_truth): return {{'score': 1, {name!r}: 'x'}}")
    with raises_with(RewardError, "mine.py", f"key '{name}'", "column"):
        manager_for(path)(make_batch(["a"], **sort_columns("1")), return_dict=True)


def test_names_that_some_samples_lack_are_none_and_reported_once(manager_for, make_batch, user_file, capsys):
    path = user_file(
        """
        def compute_score(solution_str, ground_truth):
            return {"score": 1, "letters": 1} if solution_str == "a" else {"score": 0}
        """
    )
    manager = manager_for(path)
    for _ in range(2):
        result = manager(make_batch(["b", "a"], **sort_columns("1", "2")), return_dict=True)
        assert result["reward_extra_info"] == {"score": [0, 1], "letters": [None, 1]}
    assert capsys.readouterr().err.count("'letters' for 1 of 2") == 1


@pytest.mark.parametrize("manager", ["naive", "batch", "dapo"])
def test_a_batched_function_serves_every_manager(manager_for, make_batch, user_file, config, manager):
    config.reward.reward_manager.name = manager
    path = user_file("def compute_reward(responses, ground_truths): return [len(r) for r in responses]")
    assert manager_for(path)(make_batch(["a", "bbb"], **sort_columns("1", "2"))).sum(-1).tolist() == [1.0, 3.0]


def test_the_batch_manager_settles_what_names_do_not(manager_for, make_batch, user_file, config):
    config.reward.reward_manager.name = "batch"
    path = user_file("def mine(a, b, c, d, /): return [len(b)] * len(b)")
    assert manager_for(path)(make_batch(["a", "b"], **sort_columns("1", "2"))).sum(-1).tolist() == [2.0, 2.0]


def test_dapo_penalty_is_the_formula_of_the_paper(manager_for, make_batch, user_file, config):
    """Eq. 13 with L_max = 10 and L_cache = 4: 0 up to 6 tokens, then ((L_max - L_cache) - L) / L_cache, -1 at 10."""
    config.reward.reward_manager.name = "dapo"
    path = user_file("def compute_score(solution_str, ground_truth): return 1")
    buffer = {"enable": True, "len": 4, "penalty_factor": 2.0, "log": True}
    manager = manager_for(path, reward_kwargs={"max_resp_len": 10, "overlong_buffer_cfg": buffer})
    texts = ["a" * (length - 1) for length in range(2, 11)]  # EOS is a token, too
    result = manager(make_batch(texts, **sort_columns(*texts)), return_dict=True)
    expected = [0.0 if length <= 6 else 2.0 * ((10 - 4) - length) / 4 for length in range(2, 11)]
    assert result["reward_extra_info"]["overlong_reward"] == expected and expected[-1] == -2.0
    assert result["reward_extra_info"]["overlong"] == [length > 6 for length in range(2, 11)]
    assert result["reward_tensor"].sum(-1).tolist() == [1 + penalty for penalty in expected]
    assert result["reward_extra_info"]["acc"] == [1.0] * 9


def test_dapo_without_a_buffer_is_naive(manager_for, make_batch, user_file, config):
    config.reward.reward_manager.name = "dapo"
    path = user_file("def compute_score(solution_str, ground_truth): return 1")
    assert manager_for(path)(make_batch(["a" * 15], **sort_columns("1"))).sum() == 1.0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("naive", {"max_resp_len": 3}, r"reward.reward_kwargs has max_resp_len.*RewardManager has no settings"),
        ("dapo", {"length": 3}, r"reward_kwargs.length.*max_resp_len, overlong_buffer_cfg"),
        ("dapo", {"overlong_buffer_cfg": {"enabled": True}}, r"overlong_buffer_cfg.enabled: .*enable, len"),
        ("dapo", {"overlong_buffer_cfg": {"enable": True}}, r"overlong_buffer_cfg.len=None"),
        ("dapo", {"overlong_buffer_cfg": {"enable": True, "len": 17}}, r"overlong_buffer_cfg.len=17.* 16 "),
    ],
)
def test_settings_of_managers_are_checked(manager_for, config, name, settings, message):
    config.reward.reward_manager.name = name
    with pytest.raises(RewardError, match=message):
        manager_for(reward_kwargs=settings)


def test_registry():
    known = "batch, dapo, gdpo, naive, prime, rate_limited, remote, session, steps"
    with raises_with(RewardError, "reward_manager.name", "'magic'", known):
        get_reward_manager_cls("magic")
    with raises_with(RewardError, "'naive'"):
        register("naive")(type("Other", (RewardManager,), {"__module__": "x"}))


def test_a_manager_out_of_a_file(manager_for, make_batch, user_file, config):
    path = user_file(
        """
        from hybridrl.reward import RewardManager
        class Halved(RewardManager):
            def adjust(self, score, extra, sample, length):
                return score / 2, {**extra, "length": length}
        class Unrelated: ...
        """
    )
    settings = config.reward.reward_manager
    settings.source, settings.module.path, settings.module.name = "importlib", path, "Halved"
    result = manager_for()(make_batch(["#### 12"], **sort_columns("12")), return_dict=True)
    assert result["reward_tensor"].sum() == 0.5 and result["reward_extra_info"]["length"] == [5]
    for name, file, message in [
        ("Unrelated", path, "name=Unrelated.*RewardManager"),
        ("None", path, "name=None"),
        ("Halved", path + "x", "neither|no such file|must end in .py|fails to import"),
        (None, path, "needs reward.reward_manager.module.path and"),
    ]:
        settings.module.name, settings.module.path = name, file
        with pytest.raises(RewardError, match=message):
            manager_for()


VERLS = """
from hybridrl.reward import RewardManager

class Legacy:  # verl.workers.reward_manager
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"): ...
    def __call__(self, data, return_dict=False): ...

class Loop(RewardManager):  # verl.experimental.reward_loop
    async def run_single(self, data): ...

class Built(RewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None): ...

class Narrow(RewardManager):
    def __call__(self, data): ...
"""


def test_a_manager_as_in_verl_is_refused_at_the_start(user_file, config):
    """Nothing here would call what it defines, or it would be called otherwise."""
    settings = config.reward.reward_manager
    settings.source, settings.module.path = "importlib", user_file(VERLS)
    for name, said in [
        ("Legacy", r"name=Legacy.*derive.*hybridrl.reward.RewardManager.*adjust.*score_batch"),
        ("Loop", r"name=Loop.*run_single.*score_batch"),
        ("Built", r"name=Built.*constructor.*num_examine.*config, tokenizer, pool"),
        ("Narrow", r"name=Narrow.*__call__.*return_dict"),
    ]:
        settings.module.name = name
        with pytest.raises(RewardError, match=said):
            check_reward(config)
    settings.source, settings.name = "register", f"{settings.module.path}:Legacy"
    with raises_with(RewardError, "Legacy", "hybridrl.reward.RewardManager"):
        check_reward(config)


def test_what_a_manager_returns_is_checked(make_batch):
    batch = make_batch(["a", "b"])
    shape = batch.batch["responses"].shape
    found = ask(lambda data, return_dict: {"reward_tensor": torch.zeros(shape)}, batch)
    assert found["metrics"] == {} and found["reward_extra_info"] == {}, "as verl's managers return it"
    for result, said in [
        (torch.zeros(shape), "return_dict=True.*'reward_tensor'"),
        ({"reward_extra_info": {}}, "reward_extra_info for return_dict=True.*'reward_tensor'"),
        ({"reward_tensor": torch.zeros(2)}, r"shape \[2\]"),
        ({"reward_tensor": [0.0, 1.0]}, "type list"),
        ({"reward_tensor": torch.zeros(shape), "failed": [None]}, "1 values of 'failed' for 2"),
        ({"reward_tensor": torch.full(shape, math.nan), "failed": [True, False]}, r"in rows \[1\]"),
        ({"reward_tensor": torch.full(shape, -math.inf)}, r"in rows \[0, 1\]"),
        ({"reward_tensor": torch.full(shape, math.nan), "missing": [None, Unscored("infra")]}, r"in rows \[0\]"),
        ({"reward_tensor": torch.zeros(shape), "reward_extra_info": {"acc": [1]}}, "1 values of 'acc' for 2"),
    ]:
        with pytest.raises(RewardError, match=said):
            ask(lambda data, return_dict, result=result: result, batch)


ADJUSTS = """
from hybridrl.reward import RewardManager

class Adjusts(RewardManager):
    def adjust(self, score, extra, sample, length):
        return {value}, extra
"""


@pytest.mark.parametrize("value", ["float('nan')", "None", "'1'", "1e39"])
@pytest.mark.parametrize("early", [False, True])
def test_a_score_that_adjust_spoils_is_refused_by_name(make_batch, user_file, config, tokenizer, value, early):
    config.reward.reward_manager.source = "importlib"
    config.reward.reward_manager.module.path = user_file(ADJUSTS.format(value=value), "manager.py")
    config.reward.reward_manager.module.name = "Adjusts"
    config.reward.custom_reward_function.path = user_file("def compute_score(solution_str): return 0.0")
    manager = create_reward_manager(config, tokenizer)
    batch = make_batch(["a"])
    try:
        with raises_with(RewardError, "Adjusts.adjust"):
            [future.result() for future in manager.submit(batch)] if early else ask(manager, batch)
    finally:
        manager.close()


def test_a_manager_checks_itself_and_the_data(manager_for, user_file, tokenizer, sort_data, config):
    import pyarrow.parquet

    path = user_file("", "rows.parquet")
    prompt = [{"role": "user", "content": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": prompt}]), path)
    good = create_rl_dataset(sort_data / "train.parquet", config.data, tokenizer)
    bad = create_rl_dataset(path, config.data, tokenizer)
    manager_for().check(good, None)
    with raises_with(RewardError, "rows.parquet", "row 0"):
        manager_for().check(good, bad)
    manager_for(user_file(LENGTHS_FILE)).check(good, bad)
    with raises_with(RewardError, "not_there"):
        manager_for(user_file("import not_there")).check()


FAULTY = """
def compute_score(solution_str, ground_truth):
    {fault} if solution_str == "bad" else None
    return {{"score": 2, "letters": len(solution_str)}}
"""


@pytest.mark.parametrize("fault", ["1 / 0", "__import__('os')._exit(3)", "(_ for _ in ()).throw(SystemExit)"])
@pytest.mark.parametrize("on_error", ["zero", "drop", "refill"])
def test_a_sample_that_fails_scores_0_or_has_unscored_and_is_told(
    manager_for, make_batch, user_file, on_error, fault, capsys
):
    manager = manager_for(user_file(FAULTY.format(fault=fault)), on_error=on_error, max_error_rate=0.25)
    result = manager(make_batch(["a", "bad", "c", "d"], **sort_columns(*"1234")), return_dict=True)
    scores, zero = result["reward_tensor"].sum(-1), on_error == "zero"
    assert scores[[0, 2, 3]].tolist() == [2, 2, 2] and (scores[1] == 0 if zero else scores[1].isnan())
    assert result["failed"] == [False, True, False, False]
    reason = None if zero else "infra" if "_exit" in fault else "grading"
    assert [one and one.reason for one in result["missing"]] == [None, reason, None, None]
    assert result["reward_extra_info"] == {"score": [2, 0 if zero else None, 2, 2], "letters": [1, None, 1, 1]}
    assert result["metrics"]["reward/errors"] == 1
    told = capsys.readouterr().err
    assert "1 of 4 samples" in told and "uid '0-1'" in told and f"reward.on_error={on_error}" in told
    with pytest.raises(RewardError, match=r"2 of 4 samples, more than reward.max_error_rate=0.25(.|\n)*uid '0-0'"):
        manager(make_batch(["bad", "bad", "c", "d"], **sort_columns(*"1234")))


def test_rows_of_a_batched_function_fail_alone(manager_for, make_batch, user_file):
    path = user_file(
        "def compute_reward(responses, ground_truths): return [None if r == 'x' else 1 for r in responses]"
    )
    batch = make_batch(["a", "x"], **sort_columns("1", "2"))
    with raises_with(RewardError, "NoneType", "response 1", 2):
        manager_for(path)(batch)
    result = manager_for(path, on_error="zero", max_error_rate=0.5)(batch, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1, 0] and result["failed"] == [False, True]


def test_a_function_that_does_not_load_or_hangs_ends_the_run_whatever_on_error_says(manager_for, make_batch, user_file):
    batch = make_batch(["a"], **sort_columns("1"))
    with raises_with(RewardError, "not_there"):
        manager_for(user_file("import not_there"), on_error="zero", max_error_rate=1.0)(batch)


def test_a_number_is_called_acc_only_while_it_tells_right_from_wrong(manager_for, make_batch, user_file):
    path = user_file("def compute_score(solution_str, ground_truth): return {'a': 1, 'b': 0}.get(solution_str, 0.5)")
    manager = manager_for(path)
    for texts, expected in [
        (["a", "b"], {"acc": [1.0, 0.0]}),
        (["a", "c"], {"score": [1.0, 0.5]}),
        (["a", "b"], {"score": [1.0, 0.0]}),  # a name does not change back
    ]:
        assert manager(make_batch(texts, **sort_columns("1", "2")), return_dict=True)["reward_extra_info"] == expected


def test_verls_extra_information_of_a_session(manager_for, make_batch, user_file):
    path = user_file(
        """
        def compute_score(solution_str, ground_truth, extra_info):
            return {"score": 1, "seen": [extra_info["num_turns"], extra_info["rollout_reward_scores"]]}
        """
    )

    def seen(**columns):
        batch = make_batch(["a"], **{**sort_columns("1"), **{name: [value] for name, value in columns.items()}})
        return manager_for(path)(batch, return_dict=True)["reward_extra_info"]["seen"]

    assert seen() == [[2, {}]]  # verl counts the prompt and the response
    assert seen(__num_turns__=6, reward_scores={"search": [0.5]}) == [[6, {"search": [0.5]}]]
    assert seen(session_id="s", turn_rewards=[1.0, 2.0]) == [[None, {"user_turn_rewards": [1.0, 2.0]}]]


def test_rewards_of_turns_are_added_at_their_tokens(manager_for, make_batch) -> None:
    """To the score of a function, and to one that the session brought along, whose column is then the sum."""
    batch = make_batch(["#### 12", "#### 21 ", "12"], width=12, **sort_columns("12", "21", "12"))
    batch.batch["turn_level_rewards"] = torch.zeros(3, 12)
    batch.batch["turn_level_rewards"][:, 1] = torch.tensor([0.5, 0.25, 0.125])
    batch.non_tensor_batch[TRAJECTORY_REWARD] = object_array([None, 2.0, 0.0])
    plain = batch.batch["turn_level_rewards"] * 0
    plain[torch.arange(3), batch.batch["response_mask"].sum(-1) - 1] = torch.tensor([1.0, 2.0, 0.0])
    result = manager_for()(batch, return_dict=True)
    assert torch.equal(result["reward_tensor"], plain + batch.batch["turn_level_rewards"])
    assert result["reward_extra_info"] == {"score": [1.0, 2.25, 0.125]}


def test_sessions_that_bring_no_score_along_are_refused_where_no_function_runs(manager_for, make_batch, config) -> None:
    config.reward.reward_manager.name = "session"
    batch = make_batch(["1", "2"], width=12, **sort_columns("12", "21"))
    batch.non_tensor_batch[TRAJECTORY_REWARD] = object_array([0.5, None])
    manager = manager_for()
    with pytest.raises(RewardError, match="1 samples brought no reward along"):
        manager(batch)
    batch.non_tensor_batch[TRAJECTORY_REWARD] = object_array([0.5, 1.0])
    assert manager(batch).sum(-1).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("right", "columns"),
    [
        ("{'score': 1.0, 'acc': True}", {"score": [1.0, 0.0, 1.0], "acc": [True, 0.0, True]}),
        ("{'score': 1.0, 'letters': 2}", {"score": [1.0, 0.0, 1.0], "letters": [2, None, 2]}),
        ("{'score': 2.0, 'acc': 1}", {"score": [2.0, 0.0, 2.0], "acc": [1, 0.0, 1]}),
    ],
)
def test_a_number_beside_dicts_is_their_score(manager_for, make_batch, user_file, right, columns):
    """The mean of the scores counted right answers alone, and the accuracy wrong ones alone."""
    source = f"def compute_score(solution_str, ground_truth):\n    return {right} if ground_truth == '1' else 0.0\n"
    manager = manager_for(user_file(source))
    batch = make_batch(["1", "2", "3"], reward_model=[{"ground_truth": text} for text in "121"])
    assert manager(batch, return_dict=True)["reward_extra_info"] == columns
