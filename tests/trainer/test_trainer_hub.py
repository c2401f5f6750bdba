"""A trained model goes to a hub: a server that answers as the hub's API does, and the hub's own client."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from raising import raises_with

from hybridrl.config import ConfigError, load_config, validate
from hybridrl.config.schema.trainer import HubConfig
from hybridrl.errors import UserError
from hybridrl.notify import listening
from hybridrl.programs import ProgramResult
from hybridrl.trainer.api import TrainingResult
from hybridrl.trainer.hub_upload import open_repository, upload_result

TOKEN = "hf_of_this_test"


class Hub:
    """Repositories by name: whether each is private, and the files of its branches."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.private: dict[str, bool] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.refuses = False


def handler_of(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.headers["Authorization"] != f"Bearer {TOKEN}" or hub.refuses:
                return self.reply(401, {"error": "Invalid credentials"})
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:3] == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.private.setdefault(name, asked.get("private") or asked.get("visibility") == "private")
                return self.reply(200, {"url": f"{hub.address}/{name}", "name": name})
            name, action, branch = "/".join(parts[2:4]), parts[4], parts[-1]
            if name not in hub.private:
                return self.reply(404, {"error": "Repository not found"})
            if action == "branch":
                hub.files.setdefault((name, branch), {})
                return self.reply(200, {})
            if action == "preupload":
                files = json.loads(body)["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                return self.reply(200, {"files": modes})
            for line in body.decode().splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    content = base64.b64decode(item["value"]["content"])
                    hub.files.setdefault((name, branch), {})[item["value"]["path"]] = content
            self.reply(200, {"commitUrl": f"{hub.address}/{name}/commit/1", "commitOid": "1", "hookOutput": ""})

        def reply(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    made = Hub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = handler_of(made)
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def result(tmp_path: Path) -> ProgramResult:
    model = tmp_path / "global_step_4" / "actor" / "hf_model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(range(256)))
    return ProgramResult(tmp_path, 4, 4, tmp_path / "global_step_4")


def stored(result: ProgramResult) -> dict[str, bytes]:
    assert result.checkpoint is not None
    return {path.name: path.read_bytes() for path in (result.checkpoint / "actor" / "hf_model").iterdir()}


def test_a_finished_run_uploads_its_model(hub: Hub, result: ProgramResult) -> None:
    settings = HubConfig(model_id="lab/sorter", private=True, revision="run-1")
    open_repository(settings)
    assert hub.private == {"lab/sorter": True} and not hub.files
    messages: list[str] = []
    with listening(lambda text, level: messages.append(text)):
        upload_result(settings, result, "actor")
    uploaded = {name: content for name, content in hub.files["lab/sorter", "run-1"].items() if name != ".gitattributes"}
    assert uploaded == stored(result)
    assert f"{hub.address}/lab/sorter/commit/1" in messages[-1]


def test_a_run_that_was_stopped_uploads_nothing(hub: Hub, result: ProgramResult) -> None:
    messages: list[str] = []
    with listening(lambda text, level: messages.append(text)):
        upload_result(HubConfig(model_id="lab/sorter"), ProgramResult(result.folder, 3, 4, result.checkpoint), "actor")
        upload_result(HubConfig(), result, "actor")
    assert not hub.files and len(messages) == 1 and "trainer.hub.model_id=lab/sorter" in messages[0]


def test_a_repository_that_cannot_be_had_ends_the_run_before_it_starts(hub: Hub, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with raises_with(UserError, "trainer.hub.model_id=lab/sorter", "HF_TOKEN"):
        open_repository(HubConfig(model_id="lab/sorter"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with raises_with(UserError, "trainer.hub.model_id=lab/sorter"):
        open_repository(HubConfig(model_id="lab/sorter"))


def test_an_upload_that_fails_is_told_with_the_command_that_repeats_it(hub: Hub, result: ProgramResult) -> None:
    hub.refuses = True
    messages: list[tuple[str, str]] = []
    with listening(lambda text, level: messages.append((level, text))):
        upload_result(HubConfig(model_id="lab/sorter", revision="r"), result, "actor")
    (level, text) = messages[-1]
    assert level == "error" and f"hf upload lab/sorter {result.checkpoint}/actor/hf_model --revision r" in text


def test_a_result_can_be_uploaded_afterwards(hub: Hub, result: ProgramResult) -> None:
    assert result.checkpoint is not None
    folder = result.checkpoint / "actor" / "hf_model"
    trained = TrainingResult(result.folder, 4, 4, result.checkpoint, folder, [])
    assert trained.push_to_hub("me/sorter", message="Better") == f"{hub.address}/me/sorter/commit/1"
    assert hub.files["me/sorter", "main"]["model.safetensors"] == stored(result)["model.safetensors"]
    with raises_with(ConfigError, "push_to_hub", "save_last"):
        TrainingResult(result.folder, 4, 4, None, None, []).push_to_hub("me/sorter")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["trainer.hub.model_id=sorter"], ("trainer.hub.model_id=sorter", "ORG/NAME")),
        (["trainer.hub.model_id=a/b", "trainer.save_last=False"], ("trainer.hub.model_id=a/b", "trainer.save_last")),
        (["trainer.hub.model_id=a/b", "checkpoint.save_contents=[model]"], ("checkpoint.save_contents", "hf_model")),
        (["trainer.hub.private=True"], ("trainer.hub.private", "trainer.hub.model_id")),
        (["push_to_hub=true"], ("push_to_hub", "hub_model_id")),
        (["hub_model_id=a/b"], ("hub_model_id=a/b", "push_to_hub")),
        (["push_to_hub=true", "hub_model_id=a/b", "hub_token=x"], ("hub_token", "HF_TOKEN")),
    ],
)
def test_settings_that_cannot_upload_are_named(words: list[str], names: tuple[str, ...]) -> None:
    with raises_with(ConfigError, *names):
        validate(load_config("sft_trainer", ["model.path=x", "data.train_files=a.parquet", *words]))


def test_the_names_of_trl() -> None:
    words = ["push_to_hub=true", "hub_model_id=a/b", "hub_private_repo=true", "hub_revision=r"]
    for tree in ("sft_trainer", "ppo_trainer"):
        assert load_config(tree, words).trainer.hub == HubConfig("a/b", True, "r")
