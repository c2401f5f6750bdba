"""The managers besides `naive`, `batch` and `dapo`: components, limits of a service, scores of a service."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raising import raises_with
from small_tokenizers import made

from hybridrl.algorithms.algorithm_registry import estimate_advantages
from hybridrl.errors import AlgorithmError
from hybridrl.reward import RewardError, RewardFunction, RewardPool, Sample, create_reward_manager
from hybridrl.reward.factory import check_reward
from hybridrl.reward.managers.steps import steps_of
from hybridrl.reward.scorers import Rate, RateLimited
from hybridrl.scored import Reason


@pytest.fixture
def manager_for(config, tokenizer):
    """A manager by its name, closed after the test."""
    made = []

    def make(name, path=None, **reward):
        config.reward.reward_manager.name = name
        config.reward.custom_reward_function.path = path
        for key, value in reward.items():
            setattr(config.reward, key, value)
        made.append(create_reward_manager(config, tokenizer))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def sorts(*truths):
    return {
        "data_source": ["hybridrl/sort"] * len(truths),
        "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
        "raw_prompt": [[{"role": "user", "content": f"Sort {truth}"}] for truth in truths],
    }


def test_prime_scores_in_processes_and_calls_the_score_accuracy(manager_for, make_batch, user_file):
    path = user_file("def compute_score(solution_str, ground_truth): return {'score': len(solution_str) / 2}")
    found = manager_for("prime", path)(make_batch(["ab", "abc"], **sorts("1", "2")), return_dict=True)
    assert found["reward_extra_info"] == {"acc": [1.0, 1.5], "score": [1.0, 1.5]}
    number = user_file("def compute_score(solution_str, ground_truth): return len(solution_str) / 2", "number.py")
    found = manager_for("prime", number)(make_batch(["ab", "abc"], **sorts("1", "2")), return_dict=True)
    assert found["reward_extra_info"] == {"acc": [1.0, 1.5]}
    either = "def compute_score(solution_str, ground_truth):\n    half = len(solution_str) / 2\n"
    either = user_file(either + "    return half if half > 1 else {'score': half, 'kind': 1}", "either.py")
    found = manager_for("prime", either)(make_batch(["ab", "abc"], **sorts("1", "2")), return_dict=True)
    assert found["reward_extra_info"] == {"acc": [1.0, 1.5], "score": [1.0, 1.5], "kind": [1, None]}


def test_gdpo_tells_which_component_is_missing(manager_for, make_batch, user_file, config):
    config.algorithm.gdpo_reward_keys = ["right", "format"]
    parts = "def compute_score(solution_str, ground_truth): return {'score': 3.0, 'right': 1.0, 'format': 2}"
    found = manager_for("gdpo", user_file(parts))(make_batch(["ab"], **sorts("1")), return_dict=True)
    assert found["reward_extra_info"]["right"] == [1.0] and found["reward_tensor"].sum() == 3.0
    lacking = user_file(parts.replace(", 'format': 2", ""), "lacking.py")
    with raises_with(RewardError, "format=None"):
        manager_for("gdpo", lacking)(make_batch(["ab"], **sorts("1")))
    config.algorithm.gdpo_reward_keys = []
    with raises_with(RewardError, "algorithm.gdpo_reward_keys"):
        manager_for("gdpo")


def test_gdpo_checks_only_what_the_function_returned(manager_for, make_batch, user_file, config):
    config.algorithm.gdpo_reward_keys = ["right", "format"]
    config.reward.timeout_s = 1.0
    fails = """
    import time
    def compute_score(solution_str, ground_truth):
        time.sleep(60 if ground_truth == "slow" else 0)
        return {"score": 3.0, "right": 1.0, "format": 2}
    """
    columns = sorts("slow", "1", "2") | {"trajectory_reward": [None, None, 0.5]}
    manager = manager_for("gdpo", user_file(fails), on_error="zero", max_error_rate=1.0)
    found = manager(make_batch(["ab"] * 3, **columns), return_dict=True)
    assert found["reward_tensor"].sum(dim=-1).tolist() == [0.0, 3.0, 0.5]
    assert found["reward_extra_info"]["right"] == [0.0, 1.0, None] and found["missing"] == [None] * 3
    assert found["reward_extra_info"]["format"] == [0.0, 2, None]


def test_gdpo_takes_the_components_that_sessions_bring_along(manager_for, make_batch, user_file, config):
    """A session in two rows that brings a reward and its components; beside it, samples that the function scores."""
    config.algorithm.gdpo_reward_keys = ["right", "format"]
    config.algorithm.adv_estimator = "gdpo"
    parts = "def compute_score(solution_str, ground_truth): return {'score': 3.0, 'right': 1.0, 'format': 2}"
    columns = sorts("1", "1", "2", "3") | {
        "trajectory_reward": [0.5, 2.0, None, None],
        "right": [None, 4.0, None, None],
        "format": [0.5, 0.25, None, None],
        "session_id": ["one", "one", "two", "three"],
        "trajectory_index": [0, 1, 0, 0],
    }
    batch = make_batch(["ab", "a", "ab", "ab"], **columns)
    batch.non_tensor_batch["uid"] = np.array(["same"] * 4, dtype=object)
    found = manager_for("gdpo", user_file(parts))(batch, return_dict=True)
    info = found["reward_extra_info"]
    assert info["right"] == [None, 4.0, 1.0, 1.0] and info["format"] == [0.5, 0.25, 2, 2]
    others = batch.non_tensor_batch | {name: np.array(values, dtype=object) for name, values in info.items()}
    tensors = {"token_level_rewards": found["reward_tensor"], "response_mask": batch.batch["response_mask"]}
    advantages, _ = estimate_advantages("gdpo", tensors, others, config.algorithm)
    totals = np.array([[4.0, 1.0, 1.0], [0.75, 2.0, 2.0]])
    centred = totals - totals.mean(1, keepdims=True)
    wanted = (centred / (centred.std(1, ddof=1, keepdims=True) + 1e-6)).sum(0)
    tokens = batch.batch["response_mask"].sum(1).numpy()
    counts = np.array([tokens[0] + tokens[1], tokens[2], tokens[3]])
    mean = (wanted * counts).sum() / counts.sum()
    scale = np.sqrt((counts * (wanted - mean) ** 2).sum() / (counts.sum() - 1) + 1e-8)
    assert advantages[:, 0].tolist() == pytest.approx(((wanted - mean) / scale)[[0, 0, 1, 2]], abs=1e-3)

    info["right"] = [None, None, 1.0, 1.0]
    others |= {"right": np.array(info["right"], dtype=object)}
    with raises_with(AlgorithmError, "'right'", "missing", "rows [0]", "Scored.extra"):
        estimate_advantages("gdpo", tensors, others, config.algorithm)


class Clock:
    """A time that passes as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 10)), min_size=1, max_size=40),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(10, 30),
)
def test_within_any_minute_no_more_begin_than_allowed(asked, requests, tokens):
    clock, begun = Clock(), []
    rate = Rate(requests, tokens, clock)
    for pause, size in asked:
        clock.now += pause
        waits = 0
        while wait_s := rate.wait_s(size):
            clock.now += wait_s
            waits += 1
        assert waits <= len(asked)
        begun.append((clock.now, size))
    for start, _ in begun:
        window = [size for when, size in begun if start <= when < start + 60 - 1e-6]
        assert requests is None or len(window) <= requests
        assert tokens is None or sum(window) <= tokens


def test_a_limit_of_a_minute_is_used_up_and_then_waited_for():
    clock = Clock()
    rate = Rate(2, None, clock)
    assert (rate.wait_s(1), rate.wait_s(1)) == (0.0, 0.0)
    clock.now = 20.0
    assert rate.wait_s(1) == pytest.approx(40.0)
    clock.now = 60.0
    assert rate.wait_s(1) == 0.0


COUNTING = """
import asyncio
running = most = 0

async def compute_score(solution_str, ground_truth):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.05)
    running -= 1
    return {"score": float(most)}
"""


def test_never_more_at_once_than_allowed(manager_for, make_batch, user_file):
    batch = make_batch(["1"] * 12, **sorts(*["1"] * 12))
    free = manager_for("naive", user_file(COUNTING))(batch)
    limited = manager_for("rate_limited", user_file(COUNTING), reward_kwargs={"max_concurrent": 3})(batch)
    assert free.max() > 3 and limited.max() == 3


def test_requests_wait_for_the_next_minute_and_those_that_wait_can_be_given_up(user_file):
    path = user_file("def compute_score(solution_str, ground_truth): return 1.0")
    pool = RateLimited(RewardPool(RewardFunction(path), 1), Rate(2, None, Clock()), 8)
    try:
        futures = [pool.submit(Sample("", "x", "", {})) for _ in range(4)]
        assert [future.result(120).score for future in futures[:2]] == [1.0, 1.0]
        assert not any(future.done() for future in futures[2:]) and futures[2].cancel()
    finally:
        pool.close()
    with pytest.raises(RewardError, match="closed"):
        futures[3].result(60)


def test_limits_that_nothing_could_keep_are_refused(manager_for, user_file):
    with raises_with(RewardError, "max_tpm=100"):
        manager_for("rate_limited", reward_kwargs={"max_tpm": 100})
    with raises_with(RewardError, "max_rps"):
        manager_for("rate_limited", reward_kwargs={"max_rps": 100})
    batched = user_file("def compute_reward(responses, ground_truths): return [1.0] * len(responses)")
    with pytest.raises(RewardError, match="takes a whole batch"):
        manager_for("rate_limited", batched, reward_kwargs={}).check()


class Scores(BaseHTTPRequestHandler):
    """A service whose scores are the lengths of the responses, after as many failures as it is told to have."""

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append(body["samples"])
            server.tokens.append(self.headers.get("Authorization"))
            failing, server.failing = server.failing, server.failing - 1
        if failing > 0:
            self.send_error(500)
            return
        data = json.dumps({"scores": [server.score(sample) for sample in body["samples"]]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


@contextlib.contextmanager
def service(score=lambda sample: len(sample["solution_str"]), failing=0):
    with ThreadingHTTPServer(("127.0.0.1", 0), Scores) as server:
        server.score, server.failing, server.asked, server.tokens = score, failing, [], []
        server.lock, server.url = threading.Lock(), f"http://127.0.0.1:{server.server_port}/scores"
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            yield server
        finally:
            server.shutdown()


def test_a_service_scores(manager_for, make_batch, config, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "open sesame")
    texts = ["a" * number for number in range(1, 9)]
    with service(failing=1) as server:
        kwargs = {"url": server.url, "batch_size": 4, "token_env": "MY_TOKEN"}
        manager = manager_for("remote", reward_kwargs=kwargs)
        check_reward(config)
        found = manager(make_batch(texts, **sorts(*texts)), return_dict=True)
    assert found["reward_tensor"].sum(dim=-1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert set(server.tokens) == {"Bearer open sesame"} and max(map(len, server.asked)) == 4
    sample = next(one for samples in server.asked for one in samples if one["solution_str"] == "aa")
    assert sample["ground_truth"] == "aa" and sample["data_source"] == "hybridrl/sort"
    assert sample["prompt"] == [{"role": "user", "content": "Sort aa"}]


def test_a_service_may_give_unscored_and_one_that_fails_gives_none(manager_for, make_batch):
    def score(sample):
        answers = {
            "a": {"score": 2.0, "why": "short", "unscored": None},
            "b": {"unscored": "timeout", "detail": "slow"},
            "c": {"unscored": "odd"},
        }
        return answers[sample["solution_str"]]

    with service(score) as server:
        manager = manager_for("remote", reward_kwargs={"url": server.url, "attempts": 1})
        found = manager(make_batch(["a", "b", "c"], **sorts("1", "2", "3")), return_dict=True)
        reasons = [one and one.reason for one in found["missing"]]
        assert reasons == [None, Reason.TIMEOUT, Reason.GRADING]
        assert found["reward_extra_info"]["why"][0] == "short" and found["reward_tensor"][0].sum() == 2.0
    found = manager(make_batch(["a"], **sorts("1")), return_dict=True)
    assert found["missing"][0].reason is Reason.INFRA and math.isnan(found["reward_tensor"].sum())
    with service(lambda sample: "high") as server:
        manager = manager_for("remote", reward_kwargs={"url": server.url})
        with pytest.raises(RewardError, match="a score must be a number"):
            manager(make_batch(["a"], **sorts("1")))


def test_the_wait_for_a_service_is_not_the_time_of_a_sample(manager_for, make_batch):
    """Six samples of a second each, one after the other, within a limit of four seconds."""

    def score(sample):
        time.sleep(1.0)
        return 1.0

    with service(score) as server:
        kwargs = {"url": server.url, "attempts": 1, "max_concurrent": 1, "batch_size": 1}
        manager = manager_for("remote", reward_kwargs=kwargs, timeout_s=4.0)
        found = manager(make_batch(["a"] * 6, **sorts(*"123456")), return_dict=True)
    assert found["missing"] == [None] * 6 and found["reward_tensor"].sum() == 6.0


def test_what_contradicts_a_service_is_refused(manager_for, user_file):
    path = user_file("def compute_score(solution_str, ground_truth): return 1.0")
    with pytest.raises(RewardError, match="remove the other"):
        manager_for("remote", path, reward_kwargs={"url": "http://127.0.0.1:1/scores"})
    with raises_with(RewardError, "http://HOST"):
        manager_for("remote", reward_kwargs={"url": "somewhere"})


def test_without_a_service_functions_run_in_processes(manager_for, make_batch):
    assert manager_for("remote")(make_batch(["#### 12"], **sorts("12"))).sum() == 1.0


def test_a_function_of_one_sample_may_take_the_prompt(manager_for, make_batch, user_file):
    path = user_file("def compute_score(solution_str, prompt): return float(len(prompt[-1]['content']))")
    assert manager_for("naive", path)(make_batch(["x"], **sorts("123"))).sum() == len("Sort 123")


def test_samples_that_finish_one_by_one_are_asked_for_one_by_one(manager_for, make_batch):
    """The service answers the first before the second is submitted: events order it, not time."""
    with service() as server:
        manager = manager_for("remote", reward_kwargs={"url": server.url})
        batch = make_batch(["a", "ab"], **sorts("1", "2"))
        first = manager.submit(batch[:1])[0].result(120)
        assert first.score == 1.0 and len(server.asked) == 1
        assert manager.submit(batch[1:])[0].result(120).score == 2.0


STEPPED = """
def compute_score(solution_str, ground_truth):
    return {"score": 5.0, "step_scores": [float(score) for score in ground_truth.split()]}
"""


def test_scores_of_steps_stand_where_steps_end(manager_for, make_batch, user_file):
    texts = ["ab;c;;def", "abc", "a;b", "x;y"]
    manager = manager_for("steps", user_file(STEPPED), reward_kwargs={"separator": ";", "weight": 0.5})
    batch = make_batch(texts, **sorts("1 2 3", "4", "1 2 3", "1 2"))
    batch.batch["response_mask"][3] = torch.tensor([1, 0, 0, 1, *[0] * 6])  # a tool wrote the separator and y
    found = manager(batch, return_dict=True)
    assert [one and one.reason for one in found["missing"]] == [None, None, Reason.GRADING, None]
    assert "3 step_scores for 2 steps" in found["missing"][2].detail
    # characters are tokens here: "ab;", "c;;", "def", and then the end of the sequence with the score of the response
    expected = {0: {2: 0.5, 5: 1.0, 8: 1.5, 9: 5.0}, 1: {2: 2.0, 3: 5.0}, 3: {0: 1.5, 3: 5.0}}
    for row, places in expected.items():
        rewards = found["reward_tensor"][row]
        assert {place: rewards[place].item() for place in rewards.nonzero()[:, 0].tolist()} == places
    assert found["reward_extra_info"]["step_scores"][0] == [1.0, 2.0, 3.0]


TOKENIZERS = {kind: made(kind) for kind in ("bytes", "words")}


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_step_ends_with_the_first_tokens_that_hold_its_text(manager_for, kind, cleans):
    manager, tokenizer = manager_for("steps", reward_kwargs={"separator": "b"}), TOKENIZERS[kind]
    manager.tokenizer, tokenizer.clean_up_tokenization_spaces = tokenizer, cleans

    @settings(max_examples=30)
    @given(text=st.text("ab; .é世", min_size=1, max_size=25), special=st.integers(0, 25))
    @example(text=";bb . b", special=3)
    def check(text, special):
        ids = tokenizer("a " + text, add_special_tokens=False)["input_ids"]
        ids.insert(special % (len(ids) + 1), tokenizer.eos_token_id)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        prefixes = [tokenizer.decode(ids[: count + 1], skip_special_tokens=True) for count in range(len(ids))]
        wanted, end = [], 0
        for step in steps_of(whole, "b"):
            end += len(step)
            wanted.append(next(n for n, prefix in enumerate(prefixes) if prefix.startswith(whole[:end])))
        assert manager.places(ids, [1] * len(ids)) == wanted

    check()


@given(st.text("ab;", max_size=20))
def test_steps_joined_are_the_text(text):
    steps = steps_of(text, ";")
    assert "".join(steps) == text and len(steps) >= 1
    assert all(step.strip(";") for step in steps[1:])
