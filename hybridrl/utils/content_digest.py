"""Digests of what files and models hold. Files are read whole; what is beyond `READ_WHOLE` is compared by samples.

Each digest is kept for the state of its file (place, size, times), so that a second look costs nothing. Those of large
files are kept on disk, too, for the next run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridrl.errors import DiskFullError
from hybridrl.notify import notify
from hybridrl.utils.files import cache_folder, write_text

#: bytes of the files of a model, or of a file by itself, that are read whole, the smallest files first
READ_WHOLE = 32 * 2**30
#: bytes of a file from which on its digest is kept on disk, and how many are
_RECORDED_FROM, _RECORDS = 256 * 2**20, 1000
_NOTICE_FROM = 2 * 2**30  # bytes, of which reading takes seconds
_SETTLED_NS = 2 * 10**9  # a file that was written just now may change again without another time
_writing = threading.Lock()
_BLOCK = 4096
#: evenly spaced blocks that are read of a model's larger files, in all; at least 16 of each file
_BLOCKS = 50_000
#: what a model consists of besides its weights: settings, tokenizer, templates, code
_MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "additional_chat_templates/*")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.npz")
#: what training leaves next to a model, and nothing reads
_NOT_OF_MODELS: tuple[str, ...] = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "rng_state.pth",
)
_NOT_OF_MODELS += (
    "trainer_state.json",
    "requirements.txt",
    "README.txt",
    "LICENSE.txt",
    "NOTICE.txt",
    "USE_POLICY.txt",
)


def digest_of_content(path: Path) -> str:
    """Return a digest of a file's bytes; of a file of more than `READ_WHOLE` bytes, of its size and of samples."""
    return _digests([path])[0]


def digest_of_files(folder: Path, paths: Iterable[Path]) -> str:
    """Return a digest of files with their names below `folder`, of which `READ_WHOLE` bytes are read whole."""
    files = sorted(set(paths))
    named = zip((path.relative_to(folder).as_posix() for path in files), _digests(files), strict=True)
    return hashlib.sha256(repr(list(named)).encode()).hexdigest()


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter in Hugging Face format, or a tokenizer."""
    names = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
    return any((folder / name).is_file() for name in names)


def digest_of_model(folder: Path) -> str:
    """Return a digest of a model's weights, settings, tokenizer, templates and code, wherever the folder lies.

    Of files beyond `READ_WHOLE` it reads the header, 4 KiB in the middle of every tensor, and evenly spaced blocks.
    Weights in another format are left out where there are safetensors files, as they are when a model is loaded.
    """
    weights = [sorted(folder.glob(pattern)) for pattern in _WEIGHTS]
    files = weights[0] or [path for paths in weights[1:] for path in paths]
    files += [path for pattern in _MODEL_FILES for path in folder.glob(pattern)]
    return digest_of_files(folder, (path for path in files if path.is_file() and path.name not in _NOT_OF_MODELS))


def _digests(files: list[Path]) -> list[str]:
    sizes = {path: path.stat().st_size for path in files}
    budget, large = READ_WHOLE, []
    for path in sorted(files, key=lambda path: sizes[path]):
        budget -= sizes[path]
        if budget < 0:
            large.append(path)
    blocks = max(16, _BLOCKS // max(1, len(large)))
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda path: _digest(path, blocks if path in large else 0), files))


def _digest(path: Path, blocks: int) -> str:
    return _digest_of_state(path.resolve(), blocks, _state_of(path))


def _state_of(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.lru_cache(maxsize=4096)
def _digest_of_state(path: Path, blocks: int, state: tuple[int, ...]) -> str:
    """`_read`, unless that was done before: here, or for a large file by another process of this user."""
    if blocks or state[1] < _RECORDED_FROM:
        return _read(path, blocks, state[1])
    name = f"{path} {' '.join(map(str, state))}"
    if isinstance(digest := _recorded().get(name), str):
        return digest
    if state[1] >= _NOTICE_FROM:
        notify(f"reading {path} ({state[1] / 2**30:.1f} GiB) once, to recognise it when a run is resumed", once=True)
    is_settled = time.time_ns() - max(state[2:]) > _SETTLED_NS
    digest = _read(path, blocks, state[1])
    if is_settled and _state_of(path) == state:
        # A folder that cannot be written, or is full, costs time alone.
        with _writing, contextlib.suppress(OSError, RuntimeError, DiskFullError):
            record = {**dict(list(_recorded().items())[1 - _RECORDS :]), name: digest}
            _record_file().parent.mkdir(parents=True, exist_ok=True)
            write_text(_record_file(), json.dumps(record))
    return digest


def _record_file() -> Path:
    return cache_folder() / "digests.json"


def _recorded() -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # none yet, damaged, or no home
        record = json.loads(_record_file().read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    return {}


def _read(path: Path, blocks: int, size: int) -> str:
    """The digest of a file's bytes, or of its size and samples if `blocks` is the number of evenly spaced ones."""
    with open(path, "rb") as opened:
        if not blocks:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        hashed = hashlib.sha256(str(size).encode())
        header = _header(path)
        hashed.update(header)
        step = max(_BLOCK, size // blocks)
        for offset in sorted({*range(0, size, step), max(0, size - _BLOCK), *_middles(header)}):
            opened.seek(offset)
            hashed.update(opened.read(_BLOCK))
        return hashed.hexdigest()


def _header(path: Path) -> bytes:
    """The header of a safetensors file, which names its tensors; empty for other files."""
    if path.suffix != ".safetensors":
        return b""
    with open(path, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return opened.read(length) if length < 2**28 else b""


def _middles(header: bytes) -> Iterator[int]:
    """Yield the place of the middle of every tensor."""
    try:
        tensors = json.loads(header or b"{}")
        start = 8 + len(header)
        for name, tensor in tensors.items():
            if name != "__metadata__":
                yield start + sum(tensor["data_offsets"]) // 2
    except (ValueError, KeyError, TypeError, AttributeError):  # not a header; evenly spaced blocks are enough
        return
