"""Checkpoints behind an address: what is uploaded is complete or never taken, and a fresh machine continues from it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flaky_files import FlakyFileSystem, ThrottledError, flaky_files, raising
from raising import raises_with
from test_trainer_sft import configured, conversations, records  # noqa: F401 (a fixture)

from hybridrl.checkpoint import CheckpointError, RunStore, read_manifest, remote_store, verify
from hybridrl.checkpoint.remote_store import RemoteStore
from hybridrl.config import ConfigError, load_config, validate
from hybridrl.errors import RemoteFileError
from hybridrl.notify import listening
from hybridrl.trainer.remote_checkpoints import RemoteCheckpoints
from hybridrl.trainer.settings_change import OtherExperimentError
from hybridrl.trainer.supervised.run_supervised import run_supervised

URL = "flaky://box/run"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "_WAITS_S", (0.0, 0.0))


@pytest.fixture
def flaky() -> Iterator[FlakyFileSystem]:
    with flaky_files() as system:
        yield system


def save(store: RunStore, step: int, text: str = "x") -> Path:
    with store.writing(step) as folder:
        for name in ("trainer.json", "actor/a.bin", "actor/b.bin"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps({"step": step, "text": text, "experiment": None}))
    return store.folder(step)


def fresh(folder: Path, **kwargs: Any) -> tuple[RunStore, RemoteCheckpoints]:
    store = RunStore(folder, notice=lambda text: None, **kwargs)
    return store, RemoteCheckpoints(URL, store)


def upload(store: RunStore, remote: RemoteCheckpoints, *steps: int) -> None:
    for step in steps:
        save(store, step)
        remote.add(step)
        while remote.is_uploading:  # as the next steps of training would
            time.sleep(0.005)
            remote.advance()


def look(remote: RemoteCheckpoints, mode: str = "auto") -> None:
    from hybridrl.config.schema.root import ROOTS

    remote.look(mode, ROOTS["sft_trainer"](), {"values": {}, "code": {}, "parts": {}, "models": {}})


def names(flaky: FlakyFileSystem) -> list[str]:
    return sorted(flaky.store)


def test_a_fresh_machine_gets_the_newest_complete_one(tmp_path, flaky):
    store, remote = fresh(tmp_path / "a")
    upload(store, remote, 10, 20, 30)
    flaky.rm_file("/box/run/global_step_30/manifest.json")  # killed before the marker
    (store.root / "metrics.jsonl").write_text("")
    other, other_remote = fresh(tmp_path / "b")
    look(other_remote)
    assert other.steps() == [20]
    assert verify(other.folder(20)) == read_manifest(store.folder(20))
    assert other.find("auto") == other.folder(20)


def test_folders_are_made_where_a_file_system_needs_them(tmp_path, flaky):
    """Object stores have none; servers of SFTP and the like refuse a file in a folder that is not there."""

    def needs_folder(lpath: str, rpath: str) -> None:
        if not flaky.isdir(rpath.rpartition("/")[0]):
            raise FileNotFoundError(errno.ENOENT, "no such folder", rpath)

    flaky.faults["put_file"] = [needs_folder] * 20
    store, remote = fresh(tmp_path / "a")
    upload(store, remote, 10)
    flaky.faults.clear()
    other, other_remote = fresh(tmp_path / "b")
    look(other_remote)
    assert verify(other.folder(10)) == read_manifest(store.folder(10))


def test_saves_go_on_after_those_elsewhere(tmp_path, flaky):
    """Without the number of those elsewhere, an abandoned step would count as the newest."""
    store, remote = fresh(tmp_path / "a")
    upload(store, remote, 10, 20)
    other, other_remote = fresh(tmp_path / "b")
    look(other_remote, "disable")
    assert other.steps() == []
    upload(other, other_remote, 5)
    third, third_remote = fresh(tmp_path / "c")
    look(third_remote)
    assert third.steps() == [5]


def test_what_is_here_and_newer_is_uploaded_and_nothing_fetched(tmp_path, flaky):
    store, remote = fresh(tmp_path / "a")
    upload(store, remote, 10)
    save(store, 20)
    calls = flaky.calls["get_file"]
    store, remote = fresh(tmp_path / "a")
    look(remote)
    remote.close(lambda: False)
    assert "/box/run/global_step_20/manifest.json" in names(flaky)
    assert not any("global_step" in name for name in names(flaky) if "step_10" not in name and "step_20" not in name)
    assert flaky.calls["get_file"] == calls


def test_the_same_number_is_kept_there(tmp_path, flaky):
    store, remote = fresh(tmp_path / "a", keep=2)
    flaky.pipe_file("/box/run/global_step_7/actor/a.bin", b"half an upload of another start")
    remote.best = 10
    upload(store, remote, 10, 20, 30, 40)
    steps = {name.split("/")[3] for name in names(flaky) if "global_step" in name}
    assert steps == {"global_step_10", "global_step_30", "global_step_40"}
    assert store.steps() == [30, 40]


def test_transient_failures_are_tried_again_and_halves_are_noticed(tmp_path, flaky):
    def half(local: str, path: str) -> bool:
        flaky.pipe_file(path, Path(local).read_bytes()[:5])
        return True

    flaky.faults["put_file"] = [raising(ThrottledError("slow down")), half]
    store, remote = fresh(tmp_path / "a")
    upload(store, remote, 10)
    other, other_remote = fresh(tmp_path / "b")
    look(other_remote)
    assert verify(other.folder(10)) == read_manifest(store.folder(10))


def test_a_failed_upload_is_told_kept_and_repeated(tmp_path, flaky):
    notices: list[str] = []
    store, remote = fresh(tmp_path / "a", keep=1)
    with listening(lambda text, *_: notices.append(str(text))):
        flaky.faults["put_file"] = [raising(PermissionError("Forbidden"))]
        upload(store, remote, 10)
        assert store.steps() == [10] and not any("manifest" in name for name in names(flaky))
        upload(store, remote, 20)
    assert any("step 10" in text and "trainer.remote_dir" in text and URL in text for text in notices)
    assert "/box/run/global_step_20/manifest.json" in names(flaky)
    flaky.faults["put_file"] = [raising(PermissionError("Forbidden"))] * 20
    with listening(lambda text, *_: notices.append(str(text))):
        upload(store, remote, 30)
        remote.close(lambda: False)
    assert str(store.folder(30)) in notices[-1] and URL in notices[-1] and "[30]" in notices[-1]
    verify(store.folder(30))


def test_a_checkpoint_stays_here_until_it_is_there(tmp_path, flaky):
    store, remote = fresh(tmp_path / "a", keep=2)
    flaky.faults["put_file"] = [raising(PermissionError("Forbidden"))]
    upload(store, remote, 10)
    save(store, 20)
    save(store, 30)
    save(store, 40)
    assert store.steps() == [10, 30, 40]


def test_the_end_of_waiting_ends_an_upload(tmp_path, flaky, monkeypatch):
    monkeypatch.setattr(remote_store, "_WAITS_S", (3600.0,))
    notices: list[str] = []
    store, remote = fresh(tmp_path / "a")
    flaky.faults["put_file"] = [raising(ThrottledError("slow down"))] * 9
    save(store, 10)
    remote.add(10)
    with listening(lambda text, *_: notices.append(str(text))):
        remote.close(lambda: True)
    assert "[10]" in notices[-1] and str(store.folder(10)) in notices[-1]


def test_corrupt_ones_are_skipped_by_name(tmp_path, flaky):
    store, remote = fresh(tmp_path / "a")
    upload(store, remote, 10, 20)
    flaky.pipe_file("/box/run/global_step_20/actor/a.bin", flaky.cat_file("/box/run/global_step_10/actor/a.bin"))
    notices: list[str] = []
    other, other_remote = fresh(tmp_path / "b")
    with listening(lambda text, *_: notices.append(str(text))):
        look(other_remote)
    assert other.steps() == [10] and any("global_step_20" in text and "a.bin" in text for text in notices)
    flaky.rm_file("/box/run/global_step_10/actor/b.bin")
    with raises_with(CheckpointError, URL, "trainer.resume_mode=disable"):
        look(fresh(tmp_path / "c")[1])
    assert RunStore(tmp_path / "c").steps() == []


def test_another_model_and_a_full_disk_are_refused_before_anything_is_here(tmp_path, flaky):
    store, remote = fresh(tmp_path / "a", identity={"hidden_size": 8})
    upload(store, remote, 10)
    with raises_with(CheckpointError, f"{URL}/global_step_10", "hidden_size", 16):
        look(fresh(tmp_path / "b", identity={"hidden_size": 16})[1])
    flaky.faults["get_file"] = [lambda *_: None] * 1 + [raising(OSError(errno.ENOSPC, "No space left on device"))] * 4
    with pytest.raises(Exception, match="No space left"):
        look(fresh(tmp_path / "c", identity={"hidden_size": 8})[1])
    assert RunStore(tmp_path / "b").steps() == RunStore(tmp_path / "c").steps() == []


@pytest.mark.parametrize(
    ("value", "words"),
    [("runs/a", "s3://"), ("https://me:hunter2@host/a", "HTTP"), ("oci://box/a", "ocifs")],
)
def test_addresses_that_cannot_be_written_are_refused_at_once(value, words):
    words_of_run = ["data.train_files=openai/gsm8k:train", "model.path=org/name", f"trainer.remote_dir={value}"]
    with raises_with(ConfigError, "trainer.remote_dir", words) as caught:
        validate(load_config("sft_trainer", words_of_run))
    assert "hunter2" not in str(caught.value)


def test_an_address_that_refuses_is_named_at_the_start(tmp_path, flaky, monkeypatch):
    monkeypatch.setattr(FlakyFileSystem, "pipe_file", lambda *_, **__: raising(PermissionError("Forbidden"))())
    with raises_with(RemoteFileError, "trainer.remote_dir", URL, "credentials"):
        look(fresh(tmp_path / "a")[1])


KILLED = """
import sys, time
from pathlib import Path
from hybridrl.checkpoint import RunStore
from hybridrl.checkpoint.remote_store import RemoteStore
store, remote = RunStore(sys.argv[1]), RemoteStore(sys.argv[2])
remote.upload(store.folder(10))
print("one", flush=True)
remote.upload(store.folder(20), check=lambda: time.sleep(0.2))
"""


def test_a_process_killed_during_an_upload_leaves_no_checkpoint(tmp_path):
    store = RunStore(tmp_path / "a")
    save(store, 10)
    save(store, 20)
    url = f"file://{tmp_path}/there"
    process = subprocess.Popen([sys.executable, "-c", KILLED, store.root, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "one"
    while not list((tmp_path / "there").glob("global_step_20/**/*.*")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    remote = RemoteStore(url)
    complete, others = remote.manifests()
    assert list(complete) == [10] and others == [20]
    remote.upload(store.folder(20))
    assert sorted(remote.manifests()[0]) == [10, 20]
    other = RunStore(tmp_path / "b")
    assert verify(remote.download(20, other)) == read_manifest(store.folder(20))


@pytest.mark.usefixtures("ray_session")
def test_a_run_continues_on_a_fresh_machine_bit_for_bit(
    micro_model: Path,
    conversations: Path,  # noqa: F811
    tmp_path: Path,
    flaky: FlakyFileSystem,
) -> None:
    run: Callable[..., Any] = lambda name, data, *words: run_supervised(  # noqa: E731
        configured(
            micro_model, data, tmp_path / name, 1, "trainer.total_training_steps=4", "trainer.save_freq=2",
            "trainer.max_actor_ckpt_to_keep=2", f"trainer.remote_dir={URL}", *words,
        )
    )  # fmt: skip
    first = run("a", conversations)
    assert {name.split("/")[3] for name in names(flaky) if "global_step" in name} == {"global_step_2", "global_step_4"}
    flaky.rm("/box/run/global_step_4", recursive=True)  # the machine ended before that
    lines = flaky.cat_file("/box/run/metrics.jsonl")
    other = tmp_path / "other"
    shutil.copytree(conversations, other)
    pd.read_parquet(other / "train.parquet")[::-1].to_parquet(other / "train.parquet")
    with raises_with(OtherExperimentError, URL, "data.train_files", "trainer.remote_dir"):
        run("c", other)
    assert not RunStore(tmp_path / "c").steps()
    second = run("b", conversations)
    assert second.step == first.step == 4
    files = [read_manifest(result.checkpoint).files for result in (first, second)]
    same = {name for name in files[0] if files[0][name] == files[1][name]}
    assert {name for name in files[0] if name.startswith("model/")} <= same
    assert lines.decode().splitlines()[:2] == (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()[:2]
    assert [record["step"] for record in records(tmp_path / "b") if "train/loss" in record] == [1, 2, 3, 4]
