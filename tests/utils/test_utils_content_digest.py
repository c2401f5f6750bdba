"""Digests of models by samples: a change in any tensor is seen, though most bytes of large files are not read."""

from __future__ import annotations

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
