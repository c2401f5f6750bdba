"""Real processes killed, and real writes that fail, in the middle of a save."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.checkpoint import CheckpointError, RunStore, load_json, verify

# Forks one child for each file-system call of a save; the child kills itself just before that call. After each death
# the folder must hold a whole checkpoint, and going on from there must work.
KILL_AT_EVERY_CALL = """
import json, os, shutil, signal, sys
from pathlib import Path
from hybridrl.checkpoint import RunStore, load_json, save_json, verify
from hybridrl.trainer.background_save import BackgroundSave
from hybridrl.utils.background import BackgroundCall
import concurrent.futures.thread  # as the store would: no import in the children, whose calls would count

CALLS = {"open", "shutil.rmtree", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir"}

def write(folder, step, text):
    for name in ("actor/model", "critic/model"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(text.encode() * 5000)
    save_json(folder / "trainer.json", {"step": step, "text": text})

def save(store, step, text):
    with store.writing(step) as folder:
        write(folder, step, text)

class Writer:
    def __init__(self, *what):
        self.call = BackgroundCall(lambda: write(*what))
    def is_saving(self, wait=False):
        return [not self.call.done(wait)]

def save_in_background(store, step, text):
    unfinished = store.begin(step)
    BackgroundSave(unfinished, [Writer(unfinished.folder, step, text)]).advance(wait=True)

def die_before(call):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in CALLS:
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as exc:
            print(repr(exc), file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(pid, 0)[1]

def check(root, allowed):
    store = RunStore(root, keep=2, notice=lambda text: None)
    found = store.find()
    state = load_json(found / "trainer.json")
    assert (state["step"], state["text"]) in allowed, (state, allowed)
    assert (found / "actor" / "model").read_bytes() == state["text"].encode() * 5000
    leftovers = [p.name for p in Path(root).iterdir() if p.suffix in (".tmp", ".old", ".del")]
    assert not leftovers, leftovers
    save(store, 9, "nine")
    assert store.find() == store.folder(9)
    for step in store.steps():
        verify(store.folder(step))

root, scenario = Path(sys.argv[1]), sys.argv[2]
template = root / "template"
def prepare():
    store = RunStore(template, keep=2)
    save(store, 1, "one")
    save(store, 2, "two")
assert in_child(prepare) == 0
step, text = {"new": (3, "three"), "again": (2, "two again"), "background": (3, "three")}[scenario]
attempted = save_in_background if scenario == "background" else save
deaths, call = 0, 0
while True:
    call += 1
    work = root / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(template, work)
    def attempt():
        store = RunStore(work, keep=2, notice=lambda text: None)
        die_before(call)
        attempted(store, step, text)
    status = in_child(attempt)
    assert in_child(lambda: check(work, {(2, "two"), (step, text)})) == 0, f"after a kill before call {call}"
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    deaths += 1
print(json.dumps({"deaths": deaths}))
"""


@pytest.mark.parametrize("scenario", ["new", "again", "background"])
def test_killed_before_every_file_system_call_of_a_save(tmp_path: Path, scenario: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILL_AT_EVERY_CALL, str(tmp_path), scenario], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # A save makes some thirty calls; few deaths would mean that the hook did not see them.
    assert json.loads(done.stdout)["deaths"] > 20


SAVE_FOREVER = """
import sys
from hybridrl.checkpoint import RunStore, load_json, save_json
store = RunStore(sys.argv[1], keep=2)
found = store.find()
step = load_json(found / "trainer.json")["step"] if found else 0
while True:
    step += 1
    with store.writing(step) as folder:
        for i in range(4):
            (folder / f"shard{i}").write_bytes(bytes([step % 256]) * 500_000)
        save_json(folder / "trainer.json", {"step": step})
    print(step, flush=True)
"""


def test_killed_at_any_moment_nothing_confirmed_is_lost(tmp_path: Path) -> None:
    """SIGKILL after random times; what was reported as saved is there, whole, and the next life goes on from it."""
    rng = random.Random(0)
    confirmed = 0
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            assert poll.poll(60_000), "the process did not save anything"
            time.sleep(rng.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err.decode()
        lines = [line for line in out.decode().split("\n")[:-1] if line]
        confirmed = max([confirmed, *map(int, lines)])
        # Looking must leave the folder as the next life will find it.
        whole = [step for step in RunStore(tmp_path).steps() if is_whole(tmp_path / f"global_step_{step}")]
        assert max(whole, default=0) >= confirmed
        assert confirmed > 0
    found = RunStore(tmp_path).find()
    assert found is not None
    step = load_json(found / "trainer.json")["step"]
    assert step >= confirmed
    assert (found / "shard3").read_bytes() == bytes([step % 256]) * 500_000


def is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


# The limit on file size makes write() fail in the middle, as a full disk does.
WRITE_PAST_A_LIMIT = """
import resource, sys
from pathlib import Path
from hybridrl.checkpoint import RunStore, CheckpointError, save_json
root, writer = Path(sys.argv[1]), sys.argv[2]
store = RunStore(root, keep=1)
with store.writing(1) as folder:
    save_json(folder / "trainer.json", {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
try:
    with store.writing(2) as folder:
        save_json(folder / "trainer.json", {"step": 2})
        if writer == "python":
            (folder / "model").write_bytes(bytes(2**21))
        elif writer == "safetensors":
            import torch
            from safetensors.torch import save_file
            save_file({"w": torch.zeros(2**19)}, folder / "model")
        elif writer == "torch":
            import torch
            torch.save({"w": torch.zeros(2**19)}, folder / "model")
except CheckpointError as exc:
    print("CheckpointError:", exc)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("found:", store.find().name)
print("there:", sorted(p.name for p in root.iterdir() if not p.name.startswith(".")))
with store.writing(2) as folder:
    save_json(folder / "trainer.json", {"step": 2})
print("then:", store.find().name)
"""


@pytest.mark.parametrize("writer", ["python", "safetensors", "torch"])
def test_a_write_that_fails_loses_nothing(tmp_path: Path, writer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE_PAST_A_LIMIT, str(tmp_path), writer], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "CheckpointError: the checkpoint of step 2 could not be written into" in done.stdout
    assert "global_step_1 is untouched" in done.stdout
    if writer != "torch":  # torch's writer does not say why the write failed
        assert "make room" in done.stdout
    assert "found: global_step_1" in done.stdout
    assert "there: ['global_step_1', 'latest_checkpointed_iteration.txt']" in done.stdout
    assert "then: global_step_2" in done.stdout


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    """A file stands where the run's folder should be: named, not a traceback from somewhere below."""
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="run"), RunStore(tmp_path / "run").writing(1) as folder:
        (folder / "x").write_text("x")
    assert (tmp_path / "run").read_text() == "a file"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_no_space_left(tmp_path: Path) -> None:
    """A real ENOSPC out of write(2)."""
    store = RunStore(tmp_path)
    message = r"(?s)No space left.*no earlier checkpoint.*make room"
    with pytest.raises(CheckpointError, match=message), store.writing(1) as folder:
        (folder / "a").write_text("a")
        with open("/dev/full", "w") as full:
            full.write("x")
    assert store.find() is None


def test_a_workers_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    """The error of a Ray worker carries the worker's traceback; of it, the line about the disk is shown."""
    from hybridrl.single_controller import WorkerError

    remote = "Traceback (most recent call last):\n  File ...\nOSError: [Errno 28] No space left on device: 'model.pt'"
    with pytest.raises(CheckpointError) as caught, RunStore(tmp_path).writing(1) as folder:
        (folder / "half").write_text("half")
        raise WorkerError(f"actor rank 1 failed in save\n{remote}\nmore context")
    assert "written into" in str(caught.value)
    assert ": OSError: [Errno 28] No space left on device: 'model.pt'. Nothing half-written" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_workers_other_error_passes_through(tmp_path: Path) -> None:
    from hybridrl.single_controller import WorkerError

    with pytest.raises(WorkerError, match="out of tune"), RunStore(tmp_path).writing(1) as folder:
        (folder / "half").write_text("half")
        raise WorkerError("out of tune") from FileNotFoundError(2, "No such file")
    assert RunStore(tmp_path).find() is None
