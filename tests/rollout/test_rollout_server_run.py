"""The OpenAI server in a run: its health and metrics, Prometheus and Grafana, and where it listens."""

import contextlib
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from plain_engine import PlainEngine
from raising import raises_with
from server_stage import Stage

from hybridrl.config import ModelConfig, PrometheusConfig, RolloutConfig, load_config
from hybridrl.rollout import RolloutError
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.select import check_server_packages
from hybridrl.serve import (
    Listener,
    make_server,
    new_token,
    node_address,
    write_scrape_config,
)

REPOSITORY = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------ health, metrics, Prometheus, Grafana


def scraped(stage: Stage) -> str:
    status, text, _ = stage.open(f"{stage.root}/metrics")
    assert status == 200
    return text


def test_health_is_open_and_tells_the_fault(stage: Stage) -> None:
    assert stage.open(f"{stage.root}/health")[0] == 200
    stage.fault = "replica 1 does not answer"
    status, body, _ = stage.open(f"{stage.root}/health")
    stage.fault = None
    assert (status, body) == (503, {"status": "replica 1 does not answer"})


def test_metrics_count_what_was_generated(stage: Stage) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def value(name: str) -> float:
        samples = [s for family in text_string_to_metric_families(scraped(stage)) for s in family.samples]
        (found,) = [sample for sample in samples if sample.name == name]
        assert found.labels == {"replica": "0"}
        return found.value

    before, prompts = value("hybridrl_generated_tokens_total"), value("hybridrl_prompt_tokens_total")
    stage.client.completions.create(model="tiny", prompt="abcd", max_tokens=9, n=2, extra_body={"ignore_eos": True})
    assert value("hybridrl_generated_tokens_total") - before == 18
    assert value("hybridrl_prompt_tokens_total") - prompts == 8
    assert value("hybridrl_weights_version") == 3


def test_every_metric_of_the_dashboard_is_one_that_is_given(stage: Stage) -> None:
    dashboard = json.loads((REPOSITORY / "configs" / "grafana" / "hybridrl.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = set(re.findall(r"hybridrl_\w+", " ".join([*queries, json.dumps(dashboard["templating"])])))
    given = set(re.findall(r"^(hybridrl_\w+)\{", scraped(stage), re.M))
    assert given == {
        "hybridrl_generated_tokens_total",
        "hybridrl_prompt_tokens_total",
        "hybridrl_prefix_cache_queries_total",
        "hybridrl_prefix_cache_hits_total",
        "hybridrl_requests_running",
        "hybridrl_requests_waiting",
        "hybridrl_kv_cache_usage_ratio",
        "hybridrl_weights_version",
        "hybridrl_weight_update_seconds",
        "hybridrl_replica_restarts_total",
    }
    of_a_pool = {"hybridrl_requests_in_flight", "hybridrl_requests_queued"}  # see test_rollout_pool_server.py
    assert asked == given | of_a_pool
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["title"] for panel in dashboard["panels"])


def test_prometheus_is_told_where_to_scrape(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a listener in Prometheus' place, that notes what it is asked."""
    asked = []
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                asked.append(connection.recv(4096).decode().splitlines()[0])
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    file = tmp_path / "made" / "prometheus.yml"
    where = "actor_rollout_ref.rollout.prometheus"
    words = ["actor_rollout_ref.model.path=org/name", f"{where}.enable=true", f"{where}.file={file}"]
    settings = load_config("ppo_trainer", [*words, f"{where}.port={listener.getsockname()[1]}"])
    config = settings.actor_rollout_ref.rollout.prometheus
    assert write_scrape_config(config, [stage.listener.address]) == file
    assert asked == ["POST /-/reload HTTP/1.1"]
    (job,) = yaml.safe_load(file.read_text())["scrape_configs"]
    (static,) = job["static_configs"]
    assert static["labels"] == {"model_name": "org/name"}
    assert "hybridrl_requests_running" in stage.open(f"http://{static['targets'][0]}/metrics")[1]

    whole = yaml.safe_load(file.read_text())
    whole["scrape_configs"].insert(0, {"job_name": "ray", "static_configs": []})
    file.write_text(yaml.safe_dump(whole | {"alerting": {}}))
    write_scrape_config(config, ["10.0.0.1:1", "10.0.0.2:2"])
    renewed = yaml.safe_load(file.read_text())
    assert [job["job_name"] for job in renewed["scrape_configs"]] == ["ray", "hybridrl"]
    assert renewed["scrape_configs"][1]["static_configs"][0]["targets"] == ["10.0.0.1:1", "10.0.0.2:2"]
    assert "alerting" in renewed
    listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves `accept` waiting, and answering
    listener.close()

    capsys.readouterr()
    write_scrape_config(config, ["10.0.0.1:1"])
    assert f"127.0.0.1:{config.port}" in capsys.readouterr().err, "no Prometheus is a notice, not an error"
    assert write_scrape_config(PrometheusConfig(file=str(file)), []) is None
    file.write_text("- a list")
    with raises_with(RolloutError, "prometheus.file="):
        write_scrape_config(config, ["10.0.0.1:1"])


def test_the_example_of_a_scrape_configuration_names_the_metrics_path(repository: Path) -> None:
    example = yaml.safe_load((repository / "configs" / "grafana" / "prometheus.yml").read_text())
    (job,) = example["scrape_configs"]
    assert job["job_name"] == "hybridrl" and job["metrics_path"] == "/metrics"


# ------------------------------------------------------------------ where it listens


@pytest.mark.usefixtures("forked_children")
def test_a_server_made_from_the_configuration(
    micro_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    repository: Path,
) -> None:
    """In a thread of its own; the access file is what a client needs (docs/generation.md), for its owner alone."""
    rollout = RolloutConfig(prompt_length=20, response_length=12)
    rollout.prometheus.served_model_name = "policy"
    engine = PlainEngine.of(micro_model, max_model_len=32)
    started = threading.Event()

    class Late:
        """Starts its engine on the server's loop."""

        async def generate(self, request: Request) -> Completion:
            if not started.is_set():
                await engine.start()
                started.set()
            return await engine.generate(request)

        async def abort(self, ids: Any) -> None:
            await engine.abort(ids)

        async def stats(self) -> dict[str, Any]:
            return {}

        async def health(self) -> None:
            return None

    server, access = make_server(rollout, ModelConfig(path=str(micro_model)), Late())
    assert server.listener.host == node_address()
    server.start()
    server.wait_ready()
    try:
        path = access.write(tmp_path)
        assert path.stat().st_mode & 0o777 == 0o600
        found = json.loads(path.read_text())
        client = openai.OpenAI(base_url=found["base_url"], api_key=found["api_key"])
        answer = client.completions.create(model=found["model"], prompt="ab", max_tokens=3)
        assert answer.model == "policy" and answer.choices[0].token_ids  # type: ignore[attr-defined]
        page = (repository / "docs" / "generation.md").read_text()
        (snippet,) = re.findall(r"```python run\n(.*?)```", page, re.DOTALL)
        monkeypatch.chdir(tmp_path)
        exec(compile(snippet, "docs/generation.md", "exec"), {})
        assert "[" in capsys.readouterr().out
        with pytest.raises(openai.BadRequestError, match="the limit is 32"):
            client.completions.create(model="policy", prompt="ab", max_tokens=31)
    finally:
        server.stop()
    with pytest.raises(OSError):
        socket.create_connection((server.listener.host, server.listener.port), timeout=5).close()


def test_taken_ports_foreign_hosts_and_missing_tokens(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_with(RolloutError, f"server.port={stage.listener.port}", "127.0.0.1"):
        Listener("127.0.0.1", stage.listener.port)
    with raises_with(RolloutError, "server.host=192.0.2.7"):
        Listener("192.0.2.7")
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with raises_with(RolloutError, "MY_TOKEN"):
        new_token("MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "mine")
    assert new_token("MY_TOKEN") == "mine"
    assert new_token() != new_token() and len(new_token()) > 30


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_server_packages()
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with raises_with(RolloutError, "need uvicorn", "scripts/install.sh"):
        check_server_packages()
