"""What only shows with large models: time limits while files are read, dtypes that are gathered and kept."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_helpers import make_batch, make_engine, make_fields
from ranks import spawn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.engine import MicroBatching
from hybridrl.models import loading, stored
from hybridrl.utils import distributed

LIMIT_S, SLOW_S = 12, 16


def slowly(work):  # type: ignore[no-untyped-def]
    def slow(*arguments, **options):  # type: ignore[no-untyped-def]
        time.sleep(SLOW_S)
        return work(*arguments, **options)

    return slow


def check_file_work(rank: int, model: Path, folder: Path) -> None:
    """The first rank loads a model, and writes one, for longer than a collective may take."""
    make_engine(model)  # nothing is imported or connected for the first time while the limit is low
    distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))
    read, save = stored.open_language_model, loading.save_language_model
    stored.open_language_model, loading.save_language_model = slowly(read), slowly(save)
    engine = make_engine(model)
    engine.save(folder / "saved", ["hf_model"])
    stored.open_language_model, loading.save_language_model = read, save
    distributed_c10d._set_pg_timeout(timedelta(seconds=120))
    if rank == 0:
        assert (folder / "saved" / "hf_model" / "model.safetensors").is_file()


def check_gathered_dtype(model: Path) -> None:
    """Weights are cast before they are gathered: half of the traffic and of the memory, and the same bits."""
    engine = make_engine(model)
    gathered: list[torch.dtype] = []
    full_tensor = DTensor.full_tensor

    def spy(self, **options):  # type: ignore[no-untyped-def]
        gathered.append(self.dtype)
        return full_tensor(self, **options)

    exact = dict(engine.export_weights())
    DTensor.full_tensor = spy  # type: ignore[method-assign]
    sent = dict(engine.export_weights(torch.bfloat16))
    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
    assert set(gathered) == {torch.bfloat16}
    assert all(torch.equal(sent[name], tensor.to(torch.bfloat16)) for name, tensor in exact.items())


def check_frozen_dtype(model: Path) -> None:
    """A model that never learns is kept in the dtype that it computes in, with the results of a float32 one."""
    batch = make_batch(make_fields())
    frozen = make_engine(model, dtype="bfloat16", forward_only=True)
    learning = make_engine(model, dtype="bfloat16")
    assert {p.dtype for p in frozen.module.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    assert {p.dtype for p in learning.module.parameters()} == {torch.float32}  # type: ignore[attr-defined]
    found = [engine.infer(batch, MicroBatching(size=4))["log_probs"] for engine in (frozen, learning)]
    assert torch.equal(*found)


def own_memory() -> int:
    """Bytes of main memory of this process, without pages of files, which the system takes back when it needs them."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


def experts(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def check_memory_of_loading(rank: int, model: Path) -> None:
    """The first rank holds its shards and a few layers at a time, even where experts are stacked as they are read."""
    size = (model / "model.safetensors").stat().st_size
    used: list[int] = []
    broadcast = dist.broadcast

    def spy(*arguments, **options):  # type: ignore[no-untyped-def]
        used.append(own_memory())
        return broadcast(*arguments, **options)

    dist.broadcast = spy  # type: ignore[assignment]
    before = own_memory()
    make_engine(model)
    dist.broadcast = broadcast  # type: ignore[assignment]
    # Its half of the shards, what is allocated at first use, and a few of 12 layers; with the whole model it is 1.6.
    assert rank != 0 or max(used) - before < 1.3 * size


def body(rank: int, model: Path, large: Path, folder: Path) -> None:
    check_memory_of_loading(rank, large)
    check_file_work(rank, model, folder)
    check_gathered_dtype(model)
    check_frozen_dtype(model)
    distributed.barrier()


@pytest.mark.slow
def test_two_ranks(micro_model: Path, tmp_path: Path) -> None:
    spawn(body, 2, micro_model, experts(tmp_path / "experts"), tmp_path)
