"""Digests of models by samples: a change in any tensor is seen, though most bytes of large files are not read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridrl.utils import content_digest


@pytest.mark.parametrize("changed", [0, 3, 7])
def test_a_change_in_the_middle_of_any_tensor_is_seen(changed: int, tmp_path: Path, monkeypatch) -> None:
    """The evenly spaced blocks alone miss it: tensors are of 1 MiB, and 16 blocks of 4 KiB are read of 8 MiB."""
    monkeypatch.setattr(content_digest, "READ_WHOLE", 0)
    monkeypatch.setattr(content_digest, "_BLOCKS", 0)
    tensors = {f"layer.{number}": torch.zeros(2**18 - 1000 * number) for number in range(8)}

    def digest() -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        return content_digest.digest_of_model(tmp_path)

    before = digest()
    assert digest() == before
    weight = tensors[f"layer.{changed}"]
    weight[len(weight) // 2] = 1.0
    assert digest() != before


def test_every_byte_of_a_large_file_counts_and_is_read_once(tmp_path: Path, monkeypatch) -> None:
    """A byte that no sample has; the second process takes the digest that the first has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, size = tmp_path / "model", 600 * 2**20
    model.mkdir()
    weights = model / "model.safetensors"

    def digest() -> str:
        program = "import sys; from pathlib import Path; from hybridrl.utils.content_digest import digest_of_model\n"
        program += "print(digest_of_model(Path(sys.argv[1])))"
        return subprocess.run([sys.executable, "-c", program, model], check=True, capture_output=True, text=True).stdout

    def write(place: int) -> None:
        with open(weights, "wb") as file:
            file.truncate(size)  # a hole: no bytes on disk
            file.seek(place)
            file.write(b"x")
        os.utime(weights, ns=(10**18, 10**18))

    write(0)
    before = digest()
    write(123_456_789)
    changed = digest()
    assert changed != before
    write(123_456_790)
    assert digest() not in (before, changed)
    write(123_456_789)
    assert digest() == changed
    time.sleep(2.5)  # a file of the last two seconds may change without another time
    assert digest() == changed
    kept = tmp_path / "cache/hybridrl/digests.json"
    names = list(json.loads(kept.read_text()))
    assert names and all(str(weights) in name for name in names)
    kept.write_text(json.dumps(dict.fromkeys(names, "0" * 64)))
    assert digest() != changed, "the file was read again"
    for damaged in ("{", "[]", json.dumps(dict.fromkeys(names, 1))):
        kept.write_text(damaged)
        assert digest() == changed
