"""Sampling by the public client, errors by name, and what clients do not show: retries, order, tokens, limits."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from raising import raises_with
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from hybridrl.errors import UserError, WorkerError
from hybridrl.tinker.client_sessions import ClientSessionTable
from hybridrl.tinker.datum_batch import loss_numbers
from hybridrl.tinker.pending_requests import Failure, RequestQueue
from hybridrl.tinker.saved_adapters import WEIGHTS, SavedAdapters, SavedState
from hybridrl.tinker.serve_command import main
from hybridrl.tinker.wire import RequestError
from hybridrl.utils.http_server import HttpRefusal

PROMPT = types.ModelInput.from_ints([20, 30, 40, 50])
ADAM = types.AdamParams(learning_rate=1e-2)


def datum(**inputs: Any) -> types.Datum:
    given = {"target_tokens": [30, 40, 50], "weights": [1.0, 1.0, 1.0]} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints([20, 30, 40]), loss_fn_inputs=given)


def post(server: Any, path: str, body: bytes | dict[str, Any], key: str = "tml-of-a-test") -> tuple[int, Any]:
    """The server's answer, by a client that knows nothing of it."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", data, {"X-API-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_samples(server: Any, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(server.model, rank=4, seed=1).result()
    for _ in range(3):
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(ADAM).result()
    path = client.save_weights_for_sampler("named").result().path
    trained, base = (
        service.create_sampling_client(model_path=path),
        service.create_sampling_client(base_model=server.model),
    )
    sampler, plain = trained.result(), base.result()
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=4, stop=[])
    first, again = (sampler.sample(PROMPT, 3, params, include_prompt_logprobs=True).result() for _ in range(2))
    texts = [sequence.tokens for sequence in first.sequences]
    assert texts == [sequence.tokens for sequence in again.sequences] and len({tuple(text) for text in texts}) == 3
    assert all(len(text) == 5 for text in texts) and {sequence.stop_reason for sequence in first.sequences} == {
        "length"
    }
    assert len({sequence.sequence_id for sequence in (*first.sequences, *again.sequences)}) == 6
    # what the sampler says of its tokens is what a forward pass of the same weights says, of training and of sampling
    whole = types.ModelInput.from_ints([*PROMPT.to_ints(), *texts[0]])
    scored = sampler.compute_logprobs(whole).result()
    assert scored[0] is None and first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    np.testing.assert_allclose(scored[1:4], first.prompt_logprobs[1:], atol=2e-5)
    np.testing.assert_allclose(scored[4:], first.sequences[0].logprobs, atol=2e-5)
    ids = whole.to_ints()
    pair = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.0] * (len(ids) - 1)},
    )
    own = client.forward([pair], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    np.testing.assert_allclose(scored[1:], own, atol=2e-5)
    assert not np.allclose(scored[1:], plain.compute_logprobs(whole).result()[1:], atol=1e-2)
    greedy = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])).result()
    top = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, top_k=1, stop=[])).result()
    assert greedy.sequences[0].tokens == top.sequences[0].tokens
    ended = sampler.sample(
        PROMPT, 1, types.SamplingParams(max_tokens=9, temperature=0.0, stop=[greedy.sequences[0].tokens[0]])
    ).result()
    assert ended.sequences[0].stop_reason == "stop" and ended.sequences[0].tokens == greedy.sequences[0].tokens[:1]


def test_a_faulty_request_is_its_clients_and_later_ones_go_on(server: Any, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(server.model, rank=2, seed=1).result()
    faults: list[tuple[types.Datum, str, dict[str, float] | None, tuple[object, ...]]] = [
        (datum(), "nonsense", None, ("loss_fn", "nonsense", "cross_entropy")),
        (datum(), "ppo", {"clip_middle": 1.0}, ("clip_middle", "clip_low_threshold")),
        (datum(), "dro", None, ("beta", "dro")),
        (datum(), "importance_sampling", None, ("logprobs", "advantages")),
        (datum(weights=[1.0]), "cross_entropy", None, ("weights", [1])),
        (datum(weights=[1.0, np.nan, 1.0]), "cross_entropy", None, ("weights", "finite")),
        (datum(target_tokens=[1, 2, 10**6]), "cross_entropy", None, ("target_tokens",)),
        (datum(target_tokens=[1, 2], weights=[1.0, 1.0]), "cross_entropy", None, ("target_tokens", [2])),
    ]
    for wrong, loss, config, facts in faults:
        with raises_with(tinker.RequestFailedError, *facts) as caught:
            client.forward_backward([wrong], loss, config).result()  # type: ignore[arg-type]
        assert caught.value.category is types.RequestErrorCategory.User
    with raises_with(tinker.RequestFailedError, "forward_backward"):
        client.optim_step(ADAM).result()
    client.forward_backward([datum()], "cross_entropy").result()
    with raises_with(tinker.RequestFailedError, "eps"):
        client.optim_step(types.AdamParams(eps=0.0)).result()
    client.optim_step(ADAM).result()
    client.save_state("a").result()
    with raises_with(tinker.RequestFailedError, "overwrite"):
        client.save_state("a").result()
    client.save_state("a", overwrite=True).result()
    with raises_with(tinker.RequestFailedError, "../b"):
        client.save_state("../b").result()


def test_what_the_server_does_not_have_is_refused_by_name(server: Any, service: tinker.ServiceClient) -> None:
    with raises_with(tinker.BadRequestError, "base_model", "other"):
        service.create_lora_training_client("other").result()
    with raises_with(tinker.BadRequestError, "lora_config.rank", 64):
        service.create_lora_training_client(server.model, rank=64).result()
    with raises_with(tinker.BadRequestError, "tinker://x/weights/y"):
        service.create_training_client_from_state("tinker://x/weights/y").result()
    with raises_with(tinker.BadRequestError, "dimuon"):
        service.create_lora_training_client(server.model, optimizer=types.DimuonOptimizerConfig()).result()
    sampler = service.create_sampling_client(base_model=server.model).result()
    with raises_with(tinker.BadRequestError, "max_tokens", 253):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=253)).result()
    with raises_with(tinker.BadRequestError, "topk_sample_logprobs"):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), topk_sample_logprobs=3).result()
    with raises_with(tinker.BadRequestError, "top_p", 0.0):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, top_p=0.0)).result()


def test_the_last_snapshots_without_a_name_are_kept(server: Any, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(server.model, rank=2, seed=1).result()
    samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(3)]  # the server keeps two
    for sampler in samplers[1:]:
        sampler.compute_logprobs(PROMPT).result()
    with raises_with(tinker.RequestFailedError, "--max-snapshots"):
        samplers[0].compute_logprobs(PROMPT).result()


def test_requests_are_computed_in_order_and_once(server: Any) -> None:
    """The second of two requests arrives first, and each of them twice."""
    _, opened = post(
        server, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0", "type": "create_session"}
    )
    session = opened["session_id"]
    lora = {"rank": 2, "seed": 1}
    create = {"session_id": session, "model_seq_id": 0, "base_model": server.model, "lora_config": lora}
    status, created = post(server, "create_model", create)
    assert status == 200 and post(server, "create_model", create)[1] == created
    assert post(server, "retrieve_future", created)[1]["model_id"] == f"{session}:train:0"
    message = messages.ForwardBackwardRequest(model_id=f"{session}:train:0", seq_id=1, loss_fn="cross_entropy")
    part = message.data.add()
    part.model_input.add().encoded_text.tokens = np.array([20, 30], np.int32).tobytes()
    for name, values in (("target_tokens", np.array([30, 40])), ("weights", np.ones(2, np.float32))):
        tensor = part.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), 1 if name == "weights" else 2
        tensor.shape.append(2)
    step = {"model_id": f"{session}:train:0", "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    _, stepped = post(server, "optim_step", step)
    assert post(server, "optim_step", step)[1] == stepped
    _, passed = post(server, "forward_backward", message.SerializeToString())
    assert post(server, "forward_backward", message.SerializeToString())[1] == passed
    for _ in range(2):  # an answer that was lost on the way
        status, answer = post(server, "retrieve_future", stepped)
        assert status == 200 and answer["metrics"]["grad_norm"] > 0
    assert post(server, "optim_step", step | {"seq_id": -1})[0] == 400
    assert post(server, f"sessions/{session}/finish", {})[0] == 200
    assert post(server, "session_heartbeat", {"session_id": session})[0] == 400
    assert post(server, "retrieve_future", stepped)[0] == 410


def test_tokens_and_bodies(server: Any) -> None:
    assert post(server, "create_session", {}, key="tml-other")[0] == 401
    assert post(server, "create_session", {})[0] == 422
    assert post(server, "create_session", b"{")[0] == 422
    assert post(server, "forward_backward", b"\xff\xff")[0] == 400
    assert post(server, "create_custom_loss", {})[0] == 404
    assert post(server, "telemetry", {"events": []})[1] == {"status": "accepted"}
    with urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=60) as answer:  # without a token
        assert json.loads(answer.read()) == {"status": "ok"}


def test_the_queue_is_bounded_joins_what_is_alike_and_fails_with_its_workers() -> None:
    async def body() -> None:
        queue = RequestQueue(most=4, most_samples=2)
        sizes: list[int] = []
        held = threading.Event()

        def batch(jobs: Any) -> Any:
            held.wait(60)
            sizes.append(len(jobs))
            return [{"job": job} for job in jobs]

        alike = [queue.accept("s", batch=batch, batch_key="k", job=number) for number in range(3)]
        other = queue.accept("s", compute=lambda: {"own": 1})
        with pytest.raises(HttpRefusal) as refused:
            queue.accept("s", compute=lambda: {})
        assert refused.value.status == 429
        for request in (alike[0], other, *alike[1:]):
            queue.submit(request)
        working = asyncio.ensure_future(queue.work())
        assert await queue.answer(alike[0].id, 0.05) is None  # try again
        held.set()
        assert [await queue.answer(request.id, 60) for request in alike] == [{"job": number} for number in range(3)]
        assert sizes == [2, 1] and await queue.answer(other.id, 60) == {"own": 1}

        def fails(error: Exception) -> Any:
            raise error

        for error, category in ((UserError("x"), "user"), (KeyError("x"), "server"), (WorkerError("x"), "server")):
            faulty = queue.accept("s", compute=lambda error=error: fails(error))
            queue.submit(faulty)
            answer = await queue.answer(faulty.id, 60)
            assert isinstance(answer, Failure) and answer.category == category and "x" in answer.message
        assert queue.broken.is_set()
        later = queue.accept("s", compute=lambda: {})
        queue.submit(later)
        assert isinstance(await queue.answer(later.id, 60), Failure)
        working.cancel()

    asyncio.run(body())


def test_sessions_are_bounded_and_end_when_silent() -> None:
    table = ClientSessionTable(most_sessions=2, most_runs=1, idle_s=0.0)
    session = table.open(None, None)
    table.open(None, None)
    with raises_with(RequestError, "--max-sessions"):
        table.open(None, None)
    table.add_run(session, 0, None)
    with raises_with(RequestError, "--max-adapters"):
        table.add_run(session, 1, None)
    time.sleep(0.01)
    assert session.id in list(table.silent())


def test_checkpoints_expire_and_are_complete(tmp_path: Path) -> None:
    saved = SavedAdapters(tmp_path)
    state = SavedState("digest", "base", 4, True, True, True, saved_at=0.0)

    def fails(folder: Path) -> None:
        folder.mkdir()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        saved.write("run", WEIGHTS, "a", state, fails, overwrite=False)
    assert not list((tmp_path / "run" / WEIGHTS).iterdir())
    expired = SavedState("digest", "base", 4, True, True, True, saved_at=0.0, expires_at=1.0)
    folder = saved.write("run", WEIGHTS, "a", expired, lambda folder: folder.mkdir(), overwrite=False)
    with raises_with(RequestError, "tinker://run/weights/a"):
        saved.find("tinker://run/weights/a")
    saved.write("run", WEIGHTS, "b", state, lambda folder: folder.mkdir(), overwrite=False)
    assert not folder.exists() and saved.find("tinker://run/weights/b")[1] == state
    for wrong in ("run/weights/b", "tinker://run/other/b", "tinker://run/weights/../b"):
        with raises_with(RequestError):
            saved.find(wrong)


def test_a_loss_of_an_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrl.algorithms.datum_losses import register_datum_loss
    from hybridrl.registry import DATUM_LOSSES

    register_datum_loss("own_loss", inputs=("scores",), config={"scale": 2.0})(lambda p, inputs, config: p)
    try:
        assert loss_numbers("own_loss", {}) == {"scale": 2.0}
        assert loss_numbers("own_loss", {"scale": 3.0}) == {"scale": 3.0}
    finally:
        DATUM_LOSSES.remove("own_loss")


def test_the_command_refuses_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = ["--tinker", "--model", str(tmp_path), "--folder", str(tmp_path / "out"), "--port", "0"]
    monkeypatch.setenv("HYBRIDRL_TINKER_TOKEN", "sesame")
    assert main(own) == 2 and "tml-" in capsys.readouterr().err
    monkeypatch.delenv("HYBRIDRL_TINKER_TOKEN")
    assert main([*own, "--host", "0.0.0.0"]) == 2 and "--no-token" in capsys.readouterr().err
    assert main([*own, "--no-token"]) == 2 and str(tmp_path) in capsys.readouterr().err  # no model
    for words in (["--model", "x"], ["--tinker"], [*own, "--max-rank", "0"]):
        with pytest.raises(SystemExit):
            main(words)
