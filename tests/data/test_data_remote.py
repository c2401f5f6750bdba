"""Data behind addresses: read as files of this machine are, fetched once, and again when they change."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from flaky_files import FileServer, FlakyFileSystem, ThrottledError, file_server, flaky_files, raising
from raising import raises_with

from hybridrl.data import DataError
from hybridrl.data.data_files import contents, fingerprints, read_table
from hybridrl.utils import remote_files

KEY = "data.val_files"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "_WAITS_S", (0.0, 0.0))
    return tmp_path / "cache" / "hybridrl" / "files"


@pytest.fixture
def flaky() -> Iterator[FlakyFileSystem]:
    with flaky_files() as system:
        yield system


@pytest.fixture
def web(tmp_path: Path) -> Iterator[FileServer]:
    with file_server(tmp_path) as state:
        yield state


def put(system: fsspec.AbstractFileSystem, path: str, file: Path) -> None:
    system.pipe_file(path, file.read_bytes())


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl"])
def test_rows_are_those_of_the_local_file(write, rows, flaky, name):
    put(flaky, f"box/{name}", write(name, rows))
    table = read_table(f"flaky://box/{name}", KEY)
    assert [table[i] for i in range(len(table))] == rows
    assert f"flaky://box/{name}" in table.locate(3)


def test_a_glob_reads_its_matches_in_the_order_of_their_names(write, rows, flaky):
    for name, part in (("b/2.jsonl", rows[4:]), ("b/1.jsonl", rows[:4]), ("c/3.jsonl", rows)):
        put(flaky, f"box/{name}", write(name.replace("/", "-"), part))
    table = read_table("flaky://box/b/*.jsonl", KEY)
    assert [table[i] for i in range(len(table))] == rows
    assert "flaky://box/b/2.jsonl, line 1" in table.locate(4)
    assert len(read_table(["flaky://box/**/*.jsonl"], KEY)) == 14
    with raises_with(DataError, KEY, "flaky://box/b/*.csv"):
        read_table("flaky://box/b/*.csv", KEY)


def test_a_file_scheme_is_a_path(write, rows):
    path = write("a.jsonl", rows)
    assert len(read_table(f"file://{path}", KEY)) == len(read_table(f"file://{path.parent}/*.jsonl", KEY)) == 7
    with raises_with(DataError, KEY, f"{path.parent}/none.jsonl"):
        read_table(f"file://{path.parent}/none.jsonl", KEY)


def test_an_object_is_fetched_once_and_again_when_it_changes(write, rows, web, tmp_path):
    path, url = write("a.jsonl", rows), f"{web.address}/a.jsonl"
    for _ in range(2):
        assert len(read_table(url, KEY)) == 7
    assert web.gets["/a.jsonl"] == 1
    write("a.jsonl", rows[:3])
    os.utime(path, (time.time() + 60,) * 2)
    assert len(read_table(url, KEY)) == 3
    assert web.gets["/a.jsonl"] == 2


def test_without_a_version_a_process_fetches_once(write, rows, web):
    web.names_content = False
    write("a.jsonl", rows)
    for _ in range(2):
        assert len(read_table(f"{web.address}/a.jsonl", KEY)) == 7
    assert web.gets["/a.jsonl"] == 1
    other = "import sys; from hybridrl.data.data_files import read_table; print(len(read_table(sys.argv[1])))"
    write("a.jsonl", rows[:2])
    command = [sys.executable, "-c", other, f"{web.address}/a.jsonl"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "2"


def test_processes_at_once_fetch_it_once(rows, web, tmp_path):
    content = os.urandom(3_000_000)
    (tmp_path / "a.jsonl").write_bytes(content)
    program = (
        "import hashlib, sys; from hybridrl.utils.remote_files import local_copy, matching; "
        "print(hashlib.sha256(local_copy(matching(sys.argv[1])[0]).read_bytes()).hexdigest())"
    )
    command = [sys.executable, "-c", program, f"{web.address}/a.jsonl"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {process.communicate()[0].strip() for process in processes}
    assert digests == {hashlib.sha256(content).hexdigest()}
    assert web.gets["/a.jsonl"] == 1


def test_content_identifies_data_wherever_it_is(write, rows, flaky):
    path = write("a.jsonl", rows)
    put(flaky, "box/a.jsonl", path)
    assert contents(["flaky://box/a.jsonl"]) == contents([str(path)])
    assert fingerprints(["flaky://box/a.jsonl"]) == fingerprints([str(path)])
    put(flaky, "box/a.jsonl", write("a.jsonl", rows[:2]))
    assert contents(["flaky://box/a.jsonl"]) == contents([str(path)])
    assert contents(["flaky://box/no?sig=1"]) == [["flaky://box/no?***"]]
    before = flaky.calls.copy()
    assert contents(["flaky://box/a.jsonl"], fetch=False) == [["flaky://box/a.jsonl"]]
    assert flaky.calls == before


def test_transient_failures_are_tried_again(write, rows, flaky):
    put(flaky, "box/a.jsonl", write("a.jsonl", rows))
    flaky.faults["get_file"] = [raising(ThrottledError("slow down"))]
    flaky.faults["info"] = [raising(TimeoutError("no answer"))]
    assert len(read_table("flaky://box/a.jsonl", KEY)) == 7
    assert flaky.calls["get_file"] == 2
    put(flaky, "box/b.jsonl", write("b.jsonl", rows))
    flaky.faults["info"] = [raising(ThrottledError("slow down"))] * 3
    with raises_with(DataError, KEY, "flaky://box/b.jsonl", "503"):
        read_table("flaky://box/b.jsonl", KEY)


def test_half_a_transfer_is_no_file(write, rows, flaky, cache):
    put(flaky, "box/a.jsonl", write("a.jsonl", rows))
    whole = flaky.cat_file("box/a.jsonl")

    def shorten(_: str, path: str) -> int:
        return Path(path).write_bytes(whole[:100])

    flaky.faults["get_file"] = [shorten] * 3
    with raises_with(DataError, KEY, "flaky://box/a.jsonl", 100, len(whole)):
        read_table("flaky://box/a.jsonl", KEY)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


def test_an_object_that_is_replaced_while_it_is_fetched_is_fetched_again(write, rows, flaky):
    put(flaky, "box/a.jsonl", write("a.jsonl", rows))
    flaky.faults["get_file"] = [lambda *_: flaky.pipe_file("box/a.jsonl", write("a.jsonl", rows[:2]).read_bytes())]
    assert len(read_table("flaky://box/a.jsonl", KEY)) == 2


def test_an_object_that_vanishes_is_named(write, rows, flaky):
    put(flaky, "box/a.jsonl", write("a.jsonl", rows))
    flaky.faults["get_file"] = [lambda *_: flaky.rm_file("/box/a.jsonl")]
    with raises_with(DataError, KEY, "flaky://box/a.jsonl", "no such object"):
        read_table("flaky://box/a.jsonl", KEY)


def test_a_full_disk_is_named(write, rows, flaky, cache):
    put(flaky, "box/a.jsonl", write("a.jsonl", rows))
    flaky.faults["get_file"] = [raising(OSError(errno.ENOSPC, "No space left on device"))]
    with raises_with(DataError, KEY, "flaky://box/a.jsonl", "XDG_CACHE_HOME", cache):
        read_table("flaky://box/a.jsonl", KEY)
    assert flaky.calls["get_file"] == 1


class NoCredentialsError(Exception):
    """As botocore calls it."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError("Forbidden"), "credentials"),
        (NoCredentialsError("Unable to locate credentials"), "no credentials"),
        (FileNotFoundError("box/a.jsonl"), "no such object"),
    ],
)
def test_refusals_are_told_at_once(flaky, error, words):
    flaky.faults["info"] = [raising(error)] * 5
    with raises_with(DataError, KEY, "flaky://box/a.jsonl", words):
        read_table("flaky://box/a.jsonl", KEY)
    assert flaky.calls["info"] == 1


def test_http_refusals_name_the_address_without_its_credentials(write, rows, web):
    write("a.jsonl", rows)
    host = web.address.removeprefix("http://")
    url = f"http://me:hunter2@{host}/a.jsonl?sig=topsecret"
    assert len(read_table(url, KEY)) == 7
    for status, words in ((403, "403"), (404, "no such object"), (500, "500")):
        web.refuses["/a.jsonl"] = status
        with raises_with(DataError, KEY, f"{host}/a.jsonl", words) as caught:
            read_table(url, KEY)
        shown = f"{caught.value!r} {caught.value.__cause__!r}"
        assert "hunter2" not in shown and "topsecret" not in shown
    with raises_with(DataError, KEY, "***"):
        read_table("https://***@host/a.jsonl", KEY)
    with raises_with(DataError, KEY, f"{web.address}/*.jsonl"):
        read_table(f"{web.address}/*.jsonl", KEY)


def test_bad_files_are_named_by_their_address(write, rows, flaky, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    put(flaky, "box/a.parquet", tmp_path / "a.parquet")
    put(flaky, "box/a.xls", tmp_path / "a.parquet")
    flaky.pipe_file("box/empty.jsonl", b"")
    for name, words in (("a.parquet", "parquet"), ("a.xls", "'.xls'"), ("empty.jsonl", "0 bytes")):
        with raises_with(DataError, KEY, f"flaky://box/{name}", words):
            read_table(f"flaky://box/{name}", KEY)
    with raises_with(DataError, KEY, "flaky://box/*.parquet"):
        read_table("flaky://box", KEY)


def test_a_missing_package_and_an_unknown_scheme_are_named():
    with raises_with(DataError, KEY, "nosuch://box/a", "nosuch"):
        read_table("nosuch://box/a", KEY)
    with raises_with(DataError, KEY, "oci://box/a.parquet", "ocifs"):
        read_table("oci://box/a.parquet", KEY)
