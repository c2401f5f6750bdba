"""Tests that need a GPU. They run with HYBRIDRL_GPU_TESTS=1 only; other tests are kept from using a GPU.

A test reports what it measured with the fixture `figures`; `scripts/gpu_check.py` collects this into one file.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybridrl.utils import device, distributed

#: a file to which figures are appended, one JSON object per line
FIGURES_VARIABLE = "HYBRIDRL_GPU_FIGURES"
#: what a random model of half a billion parameters needs to know, in the proportions of Qwen2.5 0.5B
HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not device.is_gpu():
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine, or HYBRIDRL_GPU_TESTS=1 is not set"))


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """Each test begins with an empty allocator, and its own peak of memory."""
    device.empty_cache()
    if device.is_gpu():
        torch.cuda.reset_peak_memory_stats()
    yield
    device.empty_cache()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Reports measured values by name; the unit is the end of the name."""

    def report(**values: float) -> None:
        line = json.dumps({"test": request.node.name, **{name: round(value, 4) for name, value in values.items()}})
        print(line)
        if os.environ.get(FIGURES_VARIABLE):
            with Path(os.environ[FIGURES_VARIABLE]).open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    return report


@pytest.fixture(scope="session")
def half_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model of 0.49 B parameters, in bfloat16, without a tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("half_billion")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(Qwen2Config(**HALF_BILLION)).bfloat16()
    model.cpu().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group(0, 1, "127.0.0.1", port, timeout_seconds=120)
    yield
    distributed.destroy_process_group()
