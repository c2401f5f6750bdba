"""SGLang as an engine of replicas, the real one. Three starts: in a replica's Ray actor, with two processes, and of a
mixture of experts.

It lives in an environment of its own (`bash scripts/install.sh cpu sglang`); scripts/test.sh runs this file there. What
needs no SGLang is in test_rollout_sglang_settings.py.
"""

import asyncio
import contextlib
import glob
import importlib.util
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import forked_processes
import numpy as np
import psutil
import pytest
import ray
import torch
from raising import raises_with
from sglang_senders import buckets_of, perturbed, shards_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridrl.config import ModelConfig, RolloutConfig, load_config
from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.engine.train_engine import MicroBatching, create_train_engine
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.protocol import DataProto
from hybridrl.rollout import HFRollout, RolloutError
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.inference_engine import EngineBrokenError, EngineSpec, create_inference_engine
from hybridrl.rollout.replicas.replica_actor import Replica
from hybridrl.rollout.request import Completion, PrefillRequest, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.trajectory import Trajectory

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="runs in the SGLang environment"),
    pytest.mark.slow,
    pytest.mark.timeout(600),  # SGLang starts in 13 s, and in two minutes where ten other processes want the cores
]

EOS = (2, *range(30, 60))  # the model's own and enough others that responses end at different lengths
MAX_LEN = 256
START_S = 500


@pytest.fixture(scope="module")
def model_dir(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with larger weights: its distributions are far from uniform, and greedy responses wander."""
    import shutil

    folder = tmp_path_factory.mktemp("sglang") / "model"
    shutil.copytree(tiny_model, folder)
    perturbed(tiny_model, seed=0).save_pretrained(folder)
    return folder


def spec_of(model_dir: Path, **rollout) -> EngineSpec:
    config = RolloutConfig(prompt_length=128, response_length=128, max_model_len=MAX_LEN, max_num_seqs=32, **rollout)
    return EngineSpec(config, ModelConfig(path=str(model_dir)), EOS, pad_token_id=0, load_weights=True)


def sampled(**changes) -> SamplingParams:
    base = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "ignore_eos": True}
    return SamplingParams(**(base | changes))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(6, 260, length).tolist()


def expected_log_probs(
    model, prompt_ids: list[int], tokens: list[int], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> list[float]:
    """Of each token, from the model's logits: one row and one token at a time, in double precision."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0].double() / temperature
    found = []
    for step, token in enumerate(tokens):
        probs = torch.softmax(logits[len(prompt_ids) + step - 1], -1)
        order = probs.argsort(descending=True).tolist()
        kept, mass = [], 0.0
        for candidate in order[: top_k or None]:
            if mass >= top_p:
                break
            kept.append(candidate)
            mass += float(probs[candidate])
        assert token in kept
        found.append(math.log(float(probs[token]) / sum(float(probs[candidate]) for candidate in kept)))
    return found


def assert_log_probs(model, prompt_ids: list[int], answer: Completion, **settings) -> None:
    assert len(answer.log_probs) == len(answer.token_ids) > 0
    expected = expected_log_probs(model, prompt_ids, answer.token_ids, **settings)
    assert answer.log_probs == pytest.approx(expected, abs=1e-5)


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_until_gone(processes: Sequence[psutil.Process], limit_s: float = 30) -> None:
    def alive() -> list[psutil.Process]:
        return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    deadline = time.monotonic() + limit_s
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive()


# ---------------------------------------------------------------- in a replica's Ray actor


class RemoteReplica:
    """A replica's actor, called like the object."""

    def __init__(self, spec: EngineSpec) -> None:
        actor = ray.remote(Replica).options(num_cpus=1, max_concurrency=1000)
        self.handle = actor.remote("sglang", spec, {})
        self.info = self.call("start", limit=START_S)

    def call(self, method: str, *arguments, limit: float = 120):
        return ray.get(getattr(self.handle, method).remote(*arguments), timeout=limit)

    def generate(self, *requests: Request) -> list[Completion]:
        """All at once; answers in their order."""
        return ray.get([self.handle.generate.remote(request) for request in requests], timeout=120)

    def one(self, prompt_ids: list[int], sampling: SamplingParams) -> Completion:
        (answer,) = self.generate(Request(f"one-{time.monotonic_ns()}", prompt_ids, sampling))
        return answer


@pytest.fixture(scope="module")
def replica(started_engines, model_dir) -> Iterator[RemoteReplica]:
    with started_engines():
        remote = RemoteReplica(spec_of(model_dir))
    yield remote
    with contextlib.suppress(ray.exceptions.RayError):
        remote.call("close")
    ray.kill(remote.handle)


@pytest.fixture(scope="module")
def reference(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def hf_rollout(model_dir) -> HFRollout:
    """The rollout that generates with the training weights, on the same model."""
    config = load_config(
        "ppo_trainer",
        [f"actor_rollout_ref.model.path={model_dir}", "data.train_files=x", "data.val_files=x"],
    ).actor_rollout_ref
    engine = create_train_engine("language_model", "fsdp2", model=config.model, engine=config.actor.fsdp_config)
    engine.initialize()
    return HFRollout(config.rollout, engine, EOS, pad_token_id=0, tokenizer=load_tokenizer(model_dir))


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_k": 5}, {"temperature": 1.3, "top_p": 0.6}], ids=str
)
def test_log_probs_are_those_of_the_sampled_distribution(replica, reference, settings) -> None:
    requests = [Request(f"{index}", prompt(3 + 5 * index), sampled(**settings)) for index in range(12)]
    answers = replica.generate(*requests)
    for request, answer in zip(requests, answers, strict=True):
        assert (answer.id, answer.finish_reason, len(answer.token_ids)) == (request.id, "length", 24)
        assert answer.versions == [(0, 24)]
        assert_log_probs(reference, request.prompt_ids, answer, **settings)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ignore_eos": True},
        {"ignore_eos": True, "max_new_tokens": 5},
        {"ignore_eos": True, "stop": ["a", "Q7", " "]},
    ],
    ids=["eos", "ignore_eos", "limit", "stop"],
)
def test_greedy_responses_are_those_of_the_hf_rollout(replica, hf_rollout, settings) -> None:
    lengths = [1, 4, 9, 16, 27, 33, 48, 64]
    width = max(lengths)
    ids, mask = np.zeros((8, width), dtype=np.int64), np.zeros((8, width), dtype=np.int64)
    for row, length in enumerate(lengths):
        ids[row, width - length :], mask[row, width - length :] = prompt(length), 1
    batch = DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy((mask.cumsum(1) - 1).clip(0)),
        },
        non_tensors={"uid": np.array([str(row) for row in range(8)], dtype=object)},
    )
    batch.meta_info = {"do_sample": False, "max_new_tokens": 40, "ignore_eos": False, **settings}
    expected = hf_rollout.generate(batch)
    sampling = SamplingParams.from_meta(hf_rollout.config, batch.meta_info)
    answers = replica.generate(*[Request(f"g{length}", prompt(length), sampling) for length in lengths])
    ends = set()
    for row, answer in enumerate(answers):
        length = int(expected.batch["response_mask"][row].sum())
        assert answer.token_ids == expected.batch["responses"][row, :length].tolist()
        assert answer.log_probs == pytest.approx(expected.batch["rollout_log_probs"][row, :length].tolist(), abs=1e-5)
        ends.add((answer.finish_reason, length))
    if "stop" in settings or not settings:
        assert len(ends) > 2 and "stop" in {reason for reason, _ in ends}
    else:
        assert ends == {("length", settings.get("max_new_tokens", 40))}


def test_a_response_ends_at_the_engines_length(replica) -> None:
    fits, cut, last = (
        replica.one(prompt(length), sampled(max_new_tokens=limit))
        for length, limit in ((MAX_LEN - 100, 100), (MAX_LEN - 100, 120), (MAX_LEN - 1, 120))
    )
    assert [len(answer.token_ids) for answer in (fits, cut, last)] == [100, 100, 1]
    assert {answer.finish_reason for answer in (fits, cut, last)} == {"length"}


def test_a_refused_request_is_an_answer_and_the_engine_goes_on(replica) -> None:
    too_long, empty, wrong, good = replica.generate(
        Request("long", prompt(MAX_LEN), sampled()),
        Request("empty", [], sampled()),
        Request("wrong", [5, 100_000], sampled()),  # no such token
        Request("good", prompt(7), sampled()),
    )
    assert [answer.finish_reason for answer in (too_long, empty, wrong)] == ["error"] * 3
    assert f"a prompt of {MAX_LEN} tokens" in too_long.error
    assert "beyond the model's 264" in wrong.error
    assert (good.finish_reason, len(good.token_ids)) == ("length", 24)


@pytest.mark.parametrize(("first", "top"), [(1, 0), (9, 5)])
def test_what_a_teacher_reads(replica, reference, first: int, top: int) -> None:
    """Log-probabilities of a prompt's own tokens and of the likeliest, also behind a cached prefix."""
    ids = prompt(40)
    for text in (ids, ids + prompt(30, seed=1)):
        (answer,) = replica.generate(Request(f"read{len(text)}", text, sampled(), prefill=PrefillRequest(first, top)))
        assert (answer.finish_reason, answer.token_ids) == ("stop", [])
        assert_read(reference, text, answer, first, top)
    (wrong,) = replica.generate(Request("wrong", prompt(MAX_LEN), sampled(), prefill=PrefillRequest()))
    assert wrong.finish_reason == "error" and f"a prompt of {MAX_LEN} tokens" in wrong.error


def assert_read(model, text: list[int], answer: Completion, first: int, top: int, temperature: float = 1.0) -> None:
    with torch.no_grad():
        every = (model(torch.tensor([text])).logits[0, first - 1 : -1].double() / temperature).log_softmax(-1)
    own = every.gather(1, torch.tensor(text[first:])[:, None])[:, 0]
    np.testing.assert_allclose(answer.prompt_logprobs.log_probs, own, atol=1e-4)
    assert (
        answer.prompt_logprobs.top_ids.shape == answer.prompt_logprobs.top_log_probs.shape == (len(text) - first, top)
    )
    np.testing.assert_allclose(answer.prompt_logprobs.top_log_probs, every.topk(top).values, atol=1e-4)
    np.testing.assert_allclose(
        every.gather(1, torch.tensor(answer.prompt_logprobs.top_ids)), every.topk(top).values, atol=1e-4
    )


def test_abort_hands_out_what_there_is_and_leaves_the_others(replica, reference) -> None:
    requests = [Request(name, prompt(9, seed=3), sampled(max_new_tokens=200)) for name in ("x1", "x10", "x2")]
    replica.call("submit", requests)
    deadline = time.monotonic() + 60
    while replica.call("stats")["running"] < 3:
        assert time.monotonic() < deadline
    replica.call("abort", ["x1"])  # whose name the second begins with
    answers: dict[str, Completion] = {}
    while len(answers) < 3 and time.monotonic() < deadline:
        answers |= {answer.id: answer.lists() for answer in replica.call("collect", 5)}
    assert answers["x1"].finish_reason == "abort"
    assert len(answers["x1"].token_ids) < 200
    if answers["x1"].token_ids:
        assert_log_probs(reference, requests[0].prompt_ids, answers["x1"])
    assert {(answers[name].finish_reason, len(answers[name].token_ids)) for name in ("x10", "x2")} == {("length", 200)}


def test_counters_and_silence(replica) -> None:
    before = replica.call("stats")
    for _ in range(2):
        replica.one(prompt(60, seed=9), sampled(max_new_tokens=10))
    deadline = time.monotonic() + 60
    while (after := replica.call("stats"))["running"]:
        assert time.monotonic() < deadline
    assert after["generated_tokens"] - before["generated_tokens"] == 20
    assert after["prompt_tokens"] - before["prompt_tokens"] == 120
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == 59  # all but the token that is computed
    assert after["prefix_cache_queries"] - before["prefix_cache_queries"] == 120
    assert (after["running"], after["waiting"]) == (0, 0)
    health = replica.call("health")
    assert (health.in_flight, health.silent_s) == (0, 0)


def test_new_weights_replace_the_old_ones_everywhere(replica, reference, tiny_model) -> None:
    """A request goes on under them, and what the prefix cache knew is forgotten."""
    shared = prompt(50, seed=4)
    assert_log_probs(reference, shared, replica.one(shared, sampled()))
    assert replica.one(shared, sampled()).cached_tokens > 0
    deadline = time.monotonic() + 60
    while replica.call("stats")["running"]:  # told four times a second: still of the requests before
        assert time.monotonic() < deadline
    replica.call("submit", [Request("over", prompt(6, seed=5), sampled(max_new_tokens=200))])
    while not replica.call("stats")["running"]:
        assert time.monotonic() < deadline
    replica.call("pause")
    replica.call("begin_update")
    buckets_of(tiny_model, 1, lambda bucket: replica.call("load_bucket", bucket))
    replica.call("end_update", 7)
    replica.call("unpause")
    new = perturbed(tiny_model, seed=1)
    answer = replica.one(shared, sampled())
    assert answer.cached_tokens == 0
    assert answer.versions == [(7, 24)]
    assert_log_probs(new, shared, answer)
    (over,) = replica.call("collect", 60)
    assert len(over.token_ids) == 200
    assert over.versions[-1][0] == 7
    first = sum(count for version, count in over.versions if version == 0)
    assert 0 < first < 200
    context = prompt(6, seed=5)
    early = replace(over, token_ids=over.token_ids[:first], log_probs=over.log_probs[:first])
    late = replace(over, token_ids=over.token_ids[first:], log_probs=over.log_probs[first:])
    assert_log_probs(reference, context, early)
    assert_log_probs(new, [*context, *early.token_ids], late)


def test_nothing_outlives_a_killed_replica(replica) -> None:
    """The last test of the replica."""
    processes, segments = family(replica.info.pid), set(glob.glob("/dev/shm/sgl*"))
    assert len(processes) >= 3 and segments
    os.kill(replica.info.pid, signal.SIGKILL)
    wait_until_gone(processes)
    assert len(set(glob.glob("/dev/shm/sgl*")) & segments) < len(segments)


# ---------------------------------------------------------------- two processes, without Ray


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that is not in the main thread, as in a Ray actor."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture
def forked_engine(ray_session, monkeypatch) -> None:
    """The processes of an engine that a test starts itself are forked, as those of a replica are (tests/README.md)."""
    monkeypatch.setattr(sys, "executable", os.environ[forked_processes.ENGINES])


@pytest.mark.usefixtures("forked_engine")
@pytest.mark.parametrize(("family", "processes"), [("qwen2", 1), ("qwen3", 2)])
def test_scores_are_those_of_transformers(loop, tmp_path, family: str, processes: int) -> None:
    """Texts of all lengths at once, also as long as the engine takes; the head has no bias, and SGLang's has one."""

    def run(coroutine, limit: float = 120):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(limit)

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1, "pad_token_id": 0, "eos_token_id": 2}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **sizes, **heads)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    model.save_pretrained(tmp_path)
    spec = replace(spec_of(tmp_path, tensor_model_parallel_size=processes), task="score")
    engine = create_inference_engine("sglang", spec)
    engine.check(spec.config, spec.model, on_gpu=False)
    engine.check_scoring(spec.model)
    run(engine.start(), START_S)
    try:
        texts = [prompt(length, seed) for seed in range(3) for length in (1, 7, 40, 41, MAX_LEN)]
        with torch.no_grad():
            expected = [float(model(torch.tensor([text])).logits[0, 0]) for text in texts]
        assert max(expected) - min(expected) > 0.1

        async def answers() -> list[Completion]:
            requests = [Request(f"s{n}", text, sampled(), prefill=PrefillRequest()) for n, text in enumerate(texts)]
            return await asyncio.gather(*(engine.read(one) for one in requests))

        for _ in range(2):  # the second time from what the engine keeps
            found = run(answers())
            assert [one.prompt_logprobs.score for one in found] == pytest.approx(expected, abs=1e-4)
        wrong = run(engine.read(Request("long", prompt(MAX_LEN + 1), sampled(), prefill=PrefillRequest())))
        assert wrong.finish_reason == "error" and f"it has to be 1 to {MAX_LEN}" in str(wrong.error)
    finally:
        run(engine.close())


def test_two_processes_from_start_to_end(loop, model_dir, tiny_model, reference) -> None:
    """One engine with a tensor-parallel size of 2, whose logits are divided as a teacher's: generates, reads, takes
    weights, is stuck, loses a process, is closed.
    """

    def run(coroutine, limit: float = 120):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(limit)

    spec = replace(spec_of(model_dir, tensor_model_parallel_size=2), logits_temperature=0.5)
    before = set(psutil.Process().children(recursive=True))
    segments = set(glob.glob("/dev/shm/sgl*"))
    engine = create_inference_engine("sglang", spec)
    engine.check(spec.config, spec.model, on_gpu=False)
    run(engine.start(), START_S)
    started = [one for one in psutil.Process().children(recursive=True) if one not in before]
    schedulers = [one for one in started if "sglang::scheduler" in " ".join(one.cmdline())]
    assert len(schedulers) == 2

    cold = {"temperature": 0.5}
    assert_log_probs(reference, prompt(12), run(engine.generate(Request("a", prompt(12), sampled()))), **cold)
    read = run(engine.read(Request("r", prompt(40), sampled(), prefill=PrefillRequest(9, 5))))
    assert_read(reference, prompt(40), read, 9, 5, **cold)
    run(engine.begin_update())
    buckets_of(tiny_model, 2, lambda bucket: run(engine.load_bucket(bucket)), buckets=2)
    run(engine.end_update())
    answer = run(engine.generate(Request("b", prompt(12), sampled())))
    assert_log_probs(perturbed(tiny_model, 2), prompt(12), answer, **cold)

    run(engine.begin_update())
    shards_of(tiny_model, 3, engine, run)
    answer = run(engine.generate(Request("s", prompt(12), sampled())))
    assert_log_probs(perturbed(tiny_model, 3), prompt(12), answer, **cold)

    for scheduler in schedulers:
        scheduler.suspend()
    waiting = asyncio.run_coroutine_threadsafe(engine.generate(Request("c", prompt(12), sampled())), loop)
    time.sleep(1)
    heard = engine.last_progress()
    time.sleep(1)
    assert engine.last_progress() == heard
    assert not waiting.done()
    for scheduler in schedulers:
        scheduler.resume()
    assert waiting.result(120).finish_reason == "length"
    deadline = time.monotonic() + 60
    while engine.last_progress() == heard:
        assert time.monotonic() < deadline
        time.sleep(0.05)

    waiting = asyncio.run_coroutine_threadsafe(
        engine.generate(Request("d", prompt(12), sampled(max_new_tokens=240))), loop
    )
    schedulers[1].kill()
    with pytest.raises(EngineBrokenError, match="SGLang's process ended"):
        waiting.result(120)
    with pytest.raises(EngineBrokenError, match="SGLang's process ended"):
        run(engine.generate(Request("e", prompt(12), sampled())))
    run(engine.close())
    wait_until_gone(started, limit_s=1)
    assert set(glob.glob("/dev/shm/sgl*")) <= segments


@pytest.fixture(scope="module")
def routed_model(tmp_path_factory) -> Path:
    """A mixture of experts where it matters which experts a token uses."""
    folder = tmp_path_factory.mktemp("routed")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "moe_intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=264, **sizes, **heads, **experts))
    for parameter in model.model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("forked_engine")
def test_recorded_experts_bring_the_trainer_closer_to_the_sampler(loop, routed_model) -> None:
    """The k3 estimate of the KL from SGLang in float32 to a trainer in bfloat16, with and without replay."""

    def run(coroutine, limit: float = 120):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(limit)

    spec = replace(spec_of(routed_model, max_num_batched_tokens=64), records_routing=True)
    engine = create_inference_engine("sglang", spec)
    engine.check_routing(spec.config, spec.model, on_gpu=False)
    run(engine.start(), START_S)
    try:
        long = prompt(120)  # longer than a chunk
        asked = [Request("first", long, sampled(max_new_tokens=8), routing=True)]
        answers = [run(engine.generate(asked[0]))]
        lengths = (100, 70, *range(9, 25))
        asked += [Request(f"r{n}", long[:n], sampled(max_new_tokens=120), routing=True) for n in lengths]
        waiting = [asyncio.run_coroutine_threadsafe(engine.generate(one), loop) for one in asked[1:3]]
        answers += [one.result(120) for one in waiting]
        # One after the other, so that the same tokens are sampled however busy the machine is.
        answers += [run(engine.generate(one)) for one in asked[3:]]
        plain = run(engine.generate(Request("plain", long, sampled(max_new_tokens=4))))
    finally:
        run(engine.close())
    assert plain.routed_experts is None
    assert answers[1].cached_tokens > 60  # their experts are those of the first request
    for request, answer in zip(asked, answers, strict=True):
        tokens = len(request.prompt_ids) + len(answer.token_ids)
        assert answer.routed_experts.shape == (tokens - 1, 2, 2) and answer.routed_experts.dtype == np.uint8
        answer.versions.append((0, len(answer.token_ids)))
    rows = zip(asked, answers, strict=True)
    batch = batch_of([Trajectory.single_turn(one.prompt_ids, answer, one.id, 0) for one, answer in rows], 0)
    mask, divergence = batch.batch["response_mask"].bool(), []
    for dtype, left_out in (("float32", ""), ("bfloat16", ""), ("bfloat16", "routed_experts")):
        trainer = create_train_engine("language_model", "fsdp2", model=spec.model, engine=FSDPConfig(dtype=dtype))
        trainer.initialize()
        given = batch.select(batch_keys=[name for name in batch.batch.keys() if name != left_out])
        computed = trainer.infer(given, MicroBatching(size=8), sampled().temperature, outputs=("log_probs",))
        log_rho = (computed["log_probs"] - batch.batch["rollout_log_probs"])[mask]
        divergence.append(float((log_rho.exp() - 1 - log_rho).mean()))
    exact, replayed, free = divergence
    assert exact < 1e-8 and replayed < 0.5 * free


@pytest.mark.usefixtures("forked_engine")
def test_a_start_that_fails_says_why(loop, model_dir) -> None:
    spec = spec_of(model_dir)
    spec.config.engine_kwargs.sglang["no_such_argument"] = 1
    engine = create_inference_engine("sglang", spec)
    with raises_with(RolloutError, "no_such_argument"):
        asyncio.run_coroutine_threadsafe(engine.start(), loop).result(START_S)
