"""A run's checkpoints: complete or not there, newest first, of this model only."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.checkpoint import CheckpointError, RunStore, digest, load_json, read_manifest, save_json, verify
from hybridrl.checkpoint.inspect import main as inspect_main


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, notices: list[str]) -> RunStore:
    return RunStore(tmp_path / "run", notice=notices.append)


def save(store: RunStore, step: int, content: str | None = None) -> Path:
    """A checkpoint with files on two levels whose content tells the step."""
    text = content if content is not None else f"state of step {step}"
    with store.writing(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_bytes(text.encode() * 1000)
        save_json(folder / "trainer.json", {"step": step, "content": text})
    return store.folder(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_saved_step_is_found_with_its_content(store: RunStore) -> None:
    assert store.find() is None
    save(store, 3)
    found = store.find()
    assert found == store.folder(3)
    assert load_json(found / "trainer.json") == {"step": 3, "content": "state of step 3"}
    assert (store.root / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_manifest_holds_every_file_with_size_and_sha256(tmp_path: Path) -> None:
    store = RunStore(tmp_path, identity={"vocab_size": 128}, world={"world_size": 2}, config_digest="abc")
    folder = save(store, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / "actor" / "model.bin").read_bytes()
    assert manifest["files"]["actor/model.bin"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert set(manifest["files"]) == {"actor/model.bin", "trainer.json"}
    assert (manifest["step"], manifest["config_digest"]) == (1, "abc")
    assert (manifest["identity"], manifest["world"]) == ({"vocab_size": 128}, {"world_size": 2})


def test_saving_a_step_again_replaces_it(store: RunStore) -> None:
    save(store, 5, "old")
    save(store, 5, "new")
    found = store.find()
    assert found is not None
    assert load_json(found / "trainer.json")["content"] == "new"
    assert names(store.root) == ["global_step_5", "latest_checkpointed_iteration.txt"]


def test_keeps_the_newest_n(tmp_path: Path) -> None:
    store = RunStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert store.steps() == [3, 4]


def test_protected_ones_are_kept_besides_the_newest_n(tmp_path: Path) -> None:
    """Each for its own reason."""
    store = RunStore(tmp_path, keep=1)
    for step in (1, 2, 3, 4, 5):
        store.protect("good", store.folder(2 if step < 5 else 4))
        store.protect("best", store.folder(1) if step <= 3 else None)
        save(store, step)
        assert step != 3 or store.steps() == [1, 2, 3]
    assert store.steps() == [4, 5]
    store.protect("good", None)
    save(store, 6)
    assert store.steps() == [6]


def test_the_one_resumed_from_outlives_the_first_save(tmp_path: Path) -> None:
    save(RunStore(tmp_path), 1)
    save(RunStore(tmp_path), 2)
    store = RunStore(tmp_path, keep=1)
    assert store.find("resume_path", tmp_path / "global_step_1") == tmp_path / "global_step_1"
    save(store, 3)
    assert store.steps() == [1, 3]
    save(store, 4)
    assert store.steps() == [4]


def test_keep_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep is 0"):
        RunStore(tmp_path, keep=0)


def test_newest_is_the_one_saved_last_not_the_highest_step(store: RunStore, notices: list[str]) -> None:
    """A run that went back to step 10 and went on must not resume from the future it gave up."""
    for step in (10, 20, 30):
        save(store, step)
    store.find("resume_path", store.folder(10))
    save(store, 15)
    assert store.find() == store.folder(15)
    assert "[20, 30] are of an earlier attempt" in notices[-1]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_altered_byte_is_found(store: RunStore, data: st.DataObject) -> None:
    folder = save(store, 1)
    name = data.draw(st.sampled_from(["actor/model.bin", "trainer.json"]))
    content = bytearray((folder / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        verify(folder)


def shorten(folder: Path) -> None:
    with open(folder / "actor" / "model.bin", "rb+") as file:
        file.truncate(10)


def remove(folder: Path) -> None:
    (folder / "actor" / "model.bin").unlink()


def add(folder: Path) -> None:
    (folder / "actor" / "extra.bin").write_text("?")


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def break_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def strip_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "step": 2}')


def alter_manifest(folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(data | {"sequence": 7}))


def replace_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


DAMAGES = {
    shorten: "model.bin has 10 bytes instead of",
    remove: "model.bin is missing",
    add: "extra.bin is not in the manifest",
    remove_manifest: "no manifest.json",
    break_manifest: "no valid JSON",
    strip_manifest: "manifest.json is corrupt",
    alter_manifest: "manifest.json is corrupt: .*its own hash",
    replace_manifest: "manifest.json cannot be read: Is a directory",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_corrupt_checkpoint_is_refused_with_its_reason(store: RunStore, notices: list[str], damage) -> None:  # type: ignore[no-untyped-def]
    save(store, 1)
    corrupt = save(store, 2)
    damage(corrupt)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        verify(corrupt)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        store.find("resume_path", corrupt)
    assert store.find("auto") == store.folder(1)
    assert str(corrupt) in notices[-1]
    assert re.search(DAMAGES[damage], notices[-1])
    assert "INSTEAD" in notices[-1]
    assert str(store.folder(1)) in notices[-1]


def test_nothing_whole_is_an_error_and_not_a_fresh_start(store: RunStore) -> None:
    shorten(save(store, 1))
    remove_manifest(save(store, 2))
    with pytest.raises(
        CheckpointError, match=r"(?s)no checkpoint can be resumed.*model\.bin has 10.*resume_mode=disable"
    ):
        store.find()
    assert store.find("disable") is None


def test_another_model_is_named_with_both_sides(tmp_path: Path) -> None:
    save(RunStore(tmp_path, identity={"architecture": "Qwen2ForCausalLM", "vocab_size": 128, "shape": (2, 3)}), 7)
    same = RunStore(tmp_path, identity={"shape": (2, 3), "vocab_size": 128})
    assert same.find() == tmp_path / "global_step_7"
    other = RunStore(tmp_path, identity={"vocab_size": 151936, "head_dim": 32})
    for arguments in (("auto",), ("resume_path", tmp_path / "global_step_7")):
        with pytest.raises(CheckpointError, match="another model") as error:
            other.find(*arguments)
        assert "vocab_size: checkpoint 128, this run 151936" in str(error.value)
        assert "head_dim: checkpoint 'not recorded', this run 32" in str(error.value)
        assert "shape" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "needs trainer.resume_from_path"),
        ("nowhere", "no such folder"),
        ("run", "it holds global_step_4: name one of these"),
    ],
)
def test_resume_path_that_is_no_checkpoint(store: RunStore, path: str | None, message: str) -> None:
    save(store, 4)
    with pytest.raises(CheckpointError, match=message):
        store.find("resume_path", store.root.parent / path if path else None)


def test_unknown_resume_mode(store: RunStore) -> None:
    with raises_with(CheckpointError, "'always'", "resume_path"):
        store.find("always")


def test_resume_from_the_folder_of_another_run(tmp_path: Path) -> None:
    other = save(RunStore(tmp_path / "other"), 9)
    store = RunStore(tmp_path / "mine", keep=1)
    assert store.find("resume_path", other) == other
    save(store, 10)
    save(store, 11)
    assert store.steps() == [11]
    assert verify(other).step == 9


def test_a_checkpoint_of_the_first_format_is_read(store: RunStore) -> None:
    """Its manifest has no hash of its own."""
    folder = save(store, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    assert verify(folder).step == 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="its own hash"):
        verify(folder)


def test_a_full_disk_makes_room_before_the_save(
    tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be pruned after the save goes before it, and never the last checkpoint."""
    store = RunStore(tmp_path, keep=2, notice=notices.append)
    save(store, 1)
    save(store, 2)
    size = read_manifest(store.folder(2)).size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(size * 9, size * 9, size // 2))
    with store.writing(3) as folder:
        assert store.steps() == [2]
        (folder / "state").write_text("3")
    assert store.steps() == [2, 3]
    assert "global_step_1 is removed" in notices[-1]
    one = RunStore(tmp_path / "one", keep=1)
    save(one, 1)
    with one.writing(2) as folder:
        assert one.steps() == [1]
        (folder / "state").write_text("2")
    assert one.steps() == [2]
    store.protected = store.folder(2)
    with store.writing(4) as folder:
        assert store.steps() == [2, 3]
        (folder / "state").write_text("4")


def test_there_is_room_so_that_nothing_goes_before_the_save(tmp_path: Path) -> None:
    store = RunStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    with store.writing(3) as folder:
        assert store.steps() == [1, 2]
        (folder / "state").write_text("3")


@pytest.mark.parametrize("folder", ["/sys/hybridrl-run", "/proc/hybridrl-run", "FILE/run"])
def test_a_folder_that_cannot_be_written_is_refused_when_a_checkpoint_is_looked_for(
    tmp_path: Path, folder: str
) -> None:
    """That is before models are loaded."""
    (tmp_path / "file").write_text("a file")
    path = folder.replace("FILE", str(tmp_path / "file"))
    for mode in ("auto", "disable"):
        with raises_with(CheckpointError, f"trainer.default_local_dir={path}"):
            RunStore(path).find(mode)


def test_later_format_is_refused(store: RunStore) -> None:
    folder = save(store, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99, "new": 1}))
    with pytest.raises(CheckpointError, match=r"format 99.*update hybridrl"):
        verify(folder)


# ---------------------------------------------------------------- interrupted saves


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug"), SystemExit(1)])
def test_an_exception_passes_through_and_leaves_nothing(store: RunStore, error: BaseException) -> None:
    save(store, 1)
    with pytest.raises(type(error)) as caught, store.writing(2) as folder:
        (folder / "half").write_text("half")
        raise error
    assert any("global_step_1 is untouched" in note for note in caught.value.__notes__)
    assert names(store.root) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert store.find() == store.folder(1)
    save(store, 2)
    assert store.find() == store.folder(2)


def test_leftovers_of_a_killed_run_are_put_right(store: RunStore, notices: list[str]) -> None:
    save(store, 1)
    save(store, 2)
    (store.root / "global_step_3.tmp" / "actor").mkdir(parents=True)
    store.folder(2).rename(store.root / "global_step_2.old")
    (store.root / "global_step_0.del").mkdir()
    (store.root / "rollouts").mkdir()
    assert store.find() == store.folder(2)
    assert "put back" in notices[0]
    assert names(store.root) == ["global_step_1", "global_step_2", "latest_checkpointed_iteration.txt", "rollouts"]


def test_an_empty_checkpoint_is_refused(store: RunStore) -> None:
    with pytest.raises(CheckpointError, match="nothing was written"), store.writing(1):
        pass
    assert store.steps() == []


def test_a_link_is_refused(store: RunStore, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("elsewhere")
    with pytest.raises(CheckpointError, match="link"), store.writing(1) as folder:
        (folder / "model").symlink_to(tmp_path / "weights")
    assert store.steps() == []


def test_writing_does_not_nest(store: RunStore) -> None:
    with pytest.raises(RuntimeError, match="does not nest"), store.writing(1), store.writing(2):
        pass


# ---------------------------------------------------------------- JSON state


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )
)
@settings(max_examples=30)
def test_json_state_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, state: object) -> None:
    path = tmp_path_factory.getbasetemp() / "state.json"
    save_json(path, state)
    back = load_json(path)
    assert back == state
    assert repr(back) == repr(state)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, (2, 3)]}, r"state\.a\[1\] is tuple"),
        ({"a": {1: 2}}, r"state\.a has the key 1"),
        (b"x", "state is bytes"),
    ],
)
def test_json_state_that_would_come_back_different_is_refused(tmp_path: Path, state: object, place: str) -> None:
    path = tmp_path / "state.json"
    save_json(path, "before")
    with pytest.raises(TypeError, match=place):
        save_json(path, state)
    assert load_json(path) == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_json_file_missing_or_damaged(tmp_path: Path) -> None:
    with raises_with(CheckpointError, "state.json"):
        load_json(tmp_path / "state.json")
    (tmp_path / "state.json").write_text('{"a":')
    with raises_with(CheckpointError, "state.json", "JSON"):
        load_json(tmp_path / "state.json")


def test_digest_ignores_the_order_of_keys_only() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.5})
    assert digest([1, 2]) != digest([2, 1])


# ---------------------------------------------------------------- the list on the command line


def test_inspect_lists_and_verifies(store: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    save(store, 1)
    save(store, 2)
    assert inspect_main([str(store.root)]) == 0
    out = capsys.readouterr().out
    assert "global_step_1 " in out
    assert "complete  2 files" in out
    assert "saved last: global_step_2" in out
    shorten(store.folder(2))
    assert inspect_main([str(store.root)]) == 1
    assert "global_step_2        corrupt  checkpoint" in capsys.readouterr().out
    assert inspect_main([str(store.folder(1))]) == 0
    assert inspect_main([str(store.root / "nothing")]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_inspect_leaves_a_save_in_progress_alone(store: RunStore) -> None:
    save(store, 1)
    with store.writing(2) as folder:
        (folder / "part").write_text("x")
        command = [sys.executable, "-m", "hybridrl.checkpoint.inspect", str(store.root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert (folder / "part").exists()
    assert read_manifest(store.folder(2)).step == 2


def test_a_second_run_in_the_same_folder_is_refused(store: RunStore) -> None:
    store.claim()
    code = (
        "import sys\nfrom hybridrl.checkpoint import RunStore\n"
        "try:\n    RunStore(sys.argv[1]).find()\nexcept Exception as exc:\n    print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.root)], capture_output=True, text=True, timeout=60)
    assert "CheckpointError another run is writing into" in done.stdout, done.stderr
    assert f"process {os.getpid()} on" in done.stdout


def test_a_save_that_is_refused_leaves_the_other_runs_save_alone(store: RunStore) -> None:
    code = (
        "import sys\nfrom hybridrl.checkpoint import RunStore\n"
        "try:\n    with RunStore(sys.argv[1]).writing(5):\n        print('written')\n"
        "except Exception as exc:\n    print(type(exc).__name__, exc)\n"
    )
    with store.writing(5) as folder:
        (folder / "part").write_text("x")
        done = subprocess.run([sys.executable, "-c", code, str(store.root)], capture_output=True, text=True, timeout=60)
        assert "CheckpointError another run is writing into" in done.stdout, done.stderr
        assert (folder / "part").read_text() == "x"
    assert verify(store.folder(5)).step == 5
