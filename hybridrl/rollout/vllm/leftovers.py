"""Removal of what vLLM leaves on a machine: sockets in a temporary folder, and segments of shared memory.

Each replica has a folder for both: the sockets themselves, and the names of the segments.
"""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

#: vLLM creates its sockets there; inherited by its processes
FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
_PREFIX = "hybridrl-vllm-"
_SEGMENTS = "segments"
_PROCESSES = "processes"
_MAPPED = re.compile(r" (/dev/shm/psm_\w+)")


def make_folder() -> Path:
    """Make the folder, and name it to vLLM; before vLLM is imported."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=os.environ.get(FOLDER_VARIABLE)))
    os.environ[FOLDER_VARIABLE] = str(folder)
    return folder


def note_segments(folder: Path) -> None:
    """Record the segments that this process and those below it use.

    To be called before weights arrive: the segments that carry them belong to the trainer.
    """
    segments: set[str] = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(OSError):
            segments.update(_MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    (folder / _SEGMENTS).write_text("\n".join(sorted(segments)))


def note_process() -> None:
    """Record that this process computes for the replica whose folder it inherited."""
    folder = Path(os.environ[FOLDER_VARIABLE]) / _PROCESSES
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()


def noted_processes(folder: Path) -> list[int]:
    """Return the ids of all processes that called `note_process`."""
    return [int(file.name) for file in (folder / _PROCESSES).iterdir()]


def remove(folder: Path) -> None:
    """Remove what is left of a replica whose processes have ended; another process may be doing the same."""
    if not folder.name.startswith(_PREFIX):
        return
    with contextlib.suppress(OSError):
        for segment in (folder / _SEGMENTS).read_text().split():
            Path(segment).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
