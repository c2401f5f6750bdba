"""Single requests to weights that generate in place: turn by turn, in the order of priority, never while training."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.config import load_config
from hybridrl.engine.train_engine import create_train_engine
from hybridrl.errors import RolloutError
from hybridrl.notify import listening
from hybridrl.rollout import HFRollout
from hybridrl.rollout.client import TurnClient
from hybridrl.rollout.request import CLIENT_PRIORITY, Completion, Request
from hybridrl.rollout.rollout import InPlaceRollout
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

EOS = (5, 17, 40, 41, 42, 43)
SAMPLED = SamplingParams(True, 1.0, 1.0, -1, 12)


@pytest.fixture(scope="module")
def settings(micro_model):
    words = [f"actor_rollout_ref.model.path={micro_model}", "data.train_files=x", "data.val_files=x"]
    words += ["data.max_prompt_length=40", "data.max_response_length=60", "actor_rollout_ref.rollout.max_num_seqs=16"]
    return load_config("ppo_trainer", words).actor_rollout_ref


@pytest.fixture(scope="module")
def generate(settings):
    """Generates a batch with a real engine in this process, and notes the batches."""
    engine = create_train_engine("language_model", "fsdp2", model=settings.model, engine=settings.actor.fsdp_config)
    engine.initialize()
    return HFRollout(settings.rollout, engine=engine, eos_token_ids=EOS, pad_token_id=0).generate


@pytest.fixture(scope="module")
def model(micro_model):
    return AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).eval()


class Turns:
    """A client over `generate` that notes the requests of each call."""

    def __init__(self, generate, config) -> None:
        self.calls: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

        def noting(batch):
            self.calls.append(batch.non_tensor_batch["uid"].tolist())
            assert self.gate.wait(120)
            return generate(batch)

        self.client = TurnClient(noting, config, processes=1)
        self.client.open()


@pytest.fixture
def turns(generate, settings) -> Iterator[Turns]:
    turns = Turns(generate, settings.rollout)
    yield turns
    turns.gate.set()
    turns.client.close()


def log_probs_of(model, request: Request, tokens: list[int]) -> torch.Tensor:
    """Of each token, by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_ids + tokens])).logits[0]
    every = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0]


async def sessions_of(client, count: int, version: int) -> list[tuple[Request, Completion]]:
    """Several turns of many sessions at the same time; each prompt is all tokens before and a tool's answer."""
    answered = []

    async def session(number: int) -> None:
        ids = [6 + number, 7, 8][: 1 + number % 3]
        for turn in range(3):
            sampling = replace(SAMPLED, max_new_tokens=4 + (number + turn) % 5)
            request = Request(f"s{number}-{turn}", ids, sampling, session=f"s{number}")
            answer = await client.generate(request)
            assert answer.id == request.id and answer.versions == [(version, len(answer.token_ids))]
            answered.append((request, answer))
            ids = [*ids, *answer.token_ids, 20 + turn]

    await asyncio.gather(*(session(number) for number in range(count)))
    return answered


def check(model, answered: list[tuple[Request, Completion]], eos=EOS) -> None:
    """Tokens have the log-probabilities that they were drawn with, and end as they say."""
    reasons = set()
    for request, answer in answered:
        reasons.add(answer.finish_reason)
        assert (answer.token_ids[-1] in eos) == (answer.finish_reason == "stop")
        assert not set(answer.token_ids[:-1]) & set(eos)
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == request.sampling.max_new_tokens
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=2e-5, rtol=0
        )
    assert reasons == {"stop", "length"}


def test_sessions_are_served_turn_by_turn_in_few_calls(turns, model) -> None:
    answered = asyncio.run(sessions_of(turns.client, 12, version=-1))
    check(model, answered)
    assert len(answered) == 36 and sum(map(len, turns.calls)) == 36 and len(turns.calls) < 36


def test_a_seed_decides_the_tokens_whatever_else_is_generated(turns) -> None:
    async def ask(id: str, seed: int | None, limit: int = 12) -> list[int]:
        sampling = replace(SAMPLED, seed=seed, max_new_tokens=limit, ignore_eos=True)
        return (await turns.client.generate(Request(id, [6, 7, 8], sampling))).token_ids

    async def run() -> None:
        alone = await ask("a", 3)
        together = await asyncio.gather(ask("b", 3), ask("c", 4), ask("d", 3, limit=5), ask("e", None), ask("f", None))
        assert together[0] == alone != together[1] and together[2] == alone[:5]
        assert together[3] != together[4] and together[3] == await ask("e", None)

    asyncio.run(run())


def test_settings_that_differ_make_calls_of_their_own(turns) -> None:
    async def run() -> None:
        greedy = SamplingParams(False, 1.0, 1.0, -1, 6, ignore_eos=True)
        cold = replace(SAMPLED, temperature=1e-4, ignore_eos=True, max_new_tokens=6)
        answers = await asyncio.gather(
            *(
                turns.client.generate(Request(f"{number}", [9, 8, 7], sampling))
                for number, sampling in enumerate([greedy, cold, greedy])
            )
        )
        assert answers[0].token_ids == answers[2].token_ids == answers[1].token_ids  # nearly greedy draws the same
        assert answers[0].log_probs[0] < answers[1].log_probs[0]

    asyncio.run(run())


def test_the_lowest_priority_number_is_served_first_and_a_turn_has_a_limit(turns) -> None:
    async def run() -> None:
        turns.client.hold()
        guests = [Request(f"g{i}", [6, 7], SAMPLED, priority=CLIENT_PRIORITY) for i in range(20)]
        asked = [*guests, *(Request(f"t{i}", [6, 7], SAMPLED) for i in range(10))]
        tasks = [asyncio.ensure_future(turns.client.generate(request)) for request in asked]
        await asyncio.sleep(0.2)
        assert not turns.calls and (await turns.client.stats())["0"] == {"running": 0, "waiting": 30}
        turns.client.open()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    first, second = turns.calls
    assert first == [f"request t{i}" for i in range(10)] + [f"request g{i}" for i in range(6)]  # max_num_seqs
    assert second == [f"request g{i}" for i in range(6, 20)]


def test_requests_that_wait_are_aborted_and_those_of_a_turn_end_with_it(turns) -> None:
    async def run() -> None:
        turns.gate.clear()
        running = asyncio.ensure_future(turns.client.generate(Request("a", [6, 7], SAMPLED)))
        while not turns.calls:
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(turns.client.generate(Request("b", [6, 7], SAMPLED)))
        await asyncio.sleep(0)
        await turns.client.abort(["a", "b", "c"])
        assert await waiting == Completion("b", [], [], "abort") and not running.done()
        with pytest.raises(ValueError, match="id a is in flight"):
            await turns.client.generate(Request("a", [6], SAMPLED))
        turns.gate.set()
        assert (await running).finish_reason in ("stop", "length")
        refused = await turns.client.generate(Request("long", [6] * 100, SAMPLED))
        assert refused.finish_reason == "error" and "100" in refused.error
        filled = await turns.client.generate(Request("full", [6] * 98, replace(SAMPLED, ignore_eos=True)))
        assert filled.finish_reason == "length" and len(filled.token_ids) == 2

    asyncio.run(run())


def test_a_call_that_fails_fails_its_requests_and_closing_those_that_wait(settings) -> None:
    def broken(batch):
        raise RolloutError("the workers are gone")

    client = TurnClient(broken, settings.rollout, 1)
    events: list[tuple[str, str]] = []

    async def run() -> None:
        client.open()
        with (
            listening(lambda text, level: events.append((level, text))),
            pytest.raises(RolloutError, match="workers are gone"),
        ):
            await client.generate(Request("a", [6], SAMPLED))
        assert [(level, text) for level, text in events if "in place" in text] == [
            ("error", "generating in place failed: RolloutError('the workers are gone')")
        ]
        client.hold()
        waiting = asyncio.ensure_future(client.generate(Request("b", [6], SAMPLED)))
        await asyncio.sleep(0)
        await asyncio.to_thread(client.close)
        with pytest.raises(RolloutError, match="closed"):
            await waiting
        with pytest.raises(RolloutError, match="closed"):
            await client.generate(Request("c", [6], SAMPLED))

    asyncio.run(run())


def test_workers_in_place_serve_sessions_between_training_phases(ray_session, settings, model) -> None:
    """Two training workers; a phase of training, as the trainer marks it, lets requests wait."""
    pool = RayResourcePool([2], use_gpu=False)
    made = RayClassWithInitArgs(cls=ActorRolloutRefWorker, config=settings, role="rollout", timeout_s=600)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, threads=1)
    rollout = InPlaceRollout(group, settings.rollout)
    try:
        group.init_model()
        client = rollout.client()

        async def run() -> None:
            early = asyncio.ensure_future(client.generate(Request("early", [6, 7], SAMPLED)))
            await asyncio.sleep(0.3)
            assert not early.done()  # there is no version yet
            assert "weights_version" not in (await client.stats())["0"]
            rollout.update_weights(4)
            assert (await client.stats())["0"]["weights_version"] == 4
            assert (await early).versions[0][0] == 4
            eos = (model.config.eos_token_id,)
            answered = await sessions_of(client, 9, version=4)  # an odd number for two workers
            assert len(answered) == 27
            for request, answer in answered:
                assert (answer.token_ids[-1] in eos) == (answer.finish_reason == "stop")
                torch.testing.assert_close(
                    torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=2e-5, rtol=0
                )
            rollout.weights_will_change()
            rollout.pause()
            during = asyncio.ensure_future(client.generate(Request("during", [6, 7], SAMPLED)))
            await asyncio.sleep(0.3)
            rollout.update_weights(5)
            await asyncio.sleep(0.3)
            assert not during.done()  # an update does not undo a pause
            rollout.unpause()
            assert (await during).versions[0][0] == 5

        asyncio.run(run())
    finally:
        rollout.close()
        pool.release()
