"""What the tests of reward share: a way to write a user's file, a configuration, a batch of responses."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[..., str]:
    """Write Python source as a user's file; returns its path."""

    def write(source: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The quickstart's character tokenizer."""
    from hybridrl.models.tiny import build_tokenizer

    return build_tokenizer()


@pytest.fixture
def config() -> Any:
    """A configuration with one reward process and ten seconds a sample."""
    from hybridrl.config import PPOTrainerConfig

    settings = PPOTrainerConfig()
    settings.reward.num_workers, settings.reward.timeout_s = 1, 10.0
    settings.data.max_response_length = 16
    return settings


@pytest.fixture
def make_batch(tokenizer: Any) -> Callable[..., Any]:
    """A generated batch whose responses are the given texts, each followed by EOS."""

    def make(texts: Sequence[str], width: int | None = None, prompt_width: int = 4, **columns: Sequence[Any]) -> Any:
        from hybridrl.protocol import DataProto

        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        width = width or max(map(len, ids))
        responses = torch.full((len(ids), width), tokenizer.pad_token_id)
        mask = torch.zeros(len(ids), prompt_width + width, dtype=torch.int64)
        mask[:, 1:prompt_width] = 1
        for row, sequence in enumerate(ids):
            responses[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, prompt_width : prompt_width + len(sequence)] = 1
        arrays = {}
        for name, values in columns.items():
            arrays[name] = np.empty(len(ids), dtype=object)
            arrays[name][:] = list(values)
        tensors = {"responses": responses, "attention_mask": mask, "response_mask": mask[:, prompt_width:].clone()}
        return DataProto.from_dict(tensors=tensors, non_tensors=arrays)

    return make
