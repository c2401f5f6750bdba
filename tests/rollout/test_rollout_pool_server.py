"""A pool of replicas served over HTTP, all together and each by itself."""

import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from plain_engine import SLOW
from pool_tools import ENGINE
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.errors import RolloutError
from hybridrl.rollout import start_replicas
from hybridrl.rollout.client import PoolClient
from hybridrl.serve import make_server, start_rollout
from hybridrl.single_controller import RayResourcePool


@pytest.mark.usefixtures("forked_children")
def test_a_router_serves_the_pool_and_waits_while_its_memory_is_lent(pool) -> None:
    """The trainer's order: release, resume weights, new weights, resume the cache; requests keep their tokens."""
    spec, restarts = pool.settings.spec, pool.restarts
    server, access = make_server(spec.config, spec.model, PoolClient(pool))
    server.start()
    server.wait_ready()
    root = access.url.removesuffix("/v1")
    client = openai.OpenAI(base_url=access.url, api_key=access.token, max_retries=0)

    def ask(number: int):
        return client.completions.create(
            model=access.model,
            prompt=[SLOW, 7 + number, 8],
            max_tokens=100,
            extra_body={"ignore_eos": True, "session_id": f"episode {number // 2}"},
        )

    try:
        with ThreadPoolExecutor(8) as threads:
            early = [threads.submit(ask, number) for number in range(4)]
            while sum(replica["running"] for replica in pool.statistics().values()) < 4:
                assert not any(future.done() for future in early)
            pool.release()
            late = [threads.submit(ask, number) for number in range(4, 8)]
            pool.resume(["weights"])
            pool.update_weights(pool.version + 1)
            pool.resume(["kv_cache"])
            answers = [future.result(120) for future in (*early, *late)]
        for answer in answers:
            (choice,) = answer.choices
            assert choice.finish_reason == "length" and len(choice.token_ids) == 100
            assert sum(tokens for _, tokens in choice.weights_versions) == 100
            assert choice.weights_versions[-1][0] == answer.weights_version == pool.version
        assert pool.restarts == restarts, "no replica generated without its memory"
        with urllib.request.urlopen(f"{root}/metrics") as page:
            text = page.read().decode()
        for replica in ("0", "1"):
            assert f'hybridrl_weights_version{{replica="{replica}"}} {float(pool.version)}' in text
            assert f'hybridrl_replica_restarts_total{{replica="{replica}"}}' in text
            assert f'hybridrl_requests_in_flight{{replica="{replica}"}} 0.0' in text
        assert 'hybridrl_requests_queued{replica="pool"} 0.0' in text
        assert urllib.request.urlopen(f"{root}/health").status == 200
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another").models.list()
    finally:
        server.stop()


@pytest.mark.usefixtures("forked_children")
def test_a_rollout_is_served_until_it_is_closed(slots, micro_model, tmp_path: Path) -> None:
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        "actor_rollout_ref.rollout.prompt_length=16",
        "actor_rollout_ref.rollout.response_length=16",
        "actor_rollout_ref.rollout.server.enable=true",
        "actor_rollout_ref.rollout.server.host=127.0.0.1",
    ]
    config = load_config("ppo_trainer", overrides=words).actor_rollout_ref
    config.rollout.name = f"{Path(__file__).with_name('plain_engine.py')}:PlainEngine"  # workers have another path
    own = RayResourcePool([1], use_gpu=False)
    try:
        rollout = start_rollout(config, None, own, log_folder=tmp_path / "logs")
        try:
            access = json.loads((tmp_path / "server.json").read_text())
            assert set(access) == {"base_url", "api_key", "model"}
            client = openai.OpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0)
            answer = client.completions.create(model=access["model"], prompt=[6, 7, 8], max_tokens=5)
            assert answer.weights_version == 0 and answer.choices[0].token_ids
        finally:
            rollout.close()
    finally:
        own.release()
    assert not (tmp_path / "server.json").exists()
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_taken_port_is_told_before_an_engine_is_started(slots, micro_model, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [
            f"actor_rollout_ref.model.path={micro_model}",
            "actor_rollout_ref.rollout.prompt_length=16",
            "actor_rollout_ref.rollout.response_length=16",
            "actor_rollout_ref.rollout.server.enable=true",
            "actor_rollout_ref.rollout.server.host=127.0.0.1",
            f"actor_rollout_ref.rollout.server.port={taken.getsockname()[1]}",
        ]
        config = load_config("ppo_trainer", overrides=words).actor_rollout_ref
        config.rollout.name = ENGINE
        own = RayResourcePool([1], use_gpu=False)
        try:
            with pytest.raises(RolloutError, match=r"server\.port=\d+ on 127\.0\.0\.1 is taken"):
                start_rollout(config, None, own, log_folder=tmp_path)
        finally:
            own.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["server", "prometheus"])
def test_a_rollout_that_would_be_served_is_not_started_without_a_server(micro_model, setting: str) -> None:
    words = [f"actor_rollout_ref.model.path={micro_model}", f"actor_rollout_ref.rollout.{setting}.enable=true"]
    config = load_config("ppo_trainer", overrides=words).actor_rollout_ref
    with raises_with(RolloutError, "hybridrl.serve.start_rollout"):
        start_replicas.start_rollout(config, None)
