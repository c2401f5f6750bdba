"""Device and process group on a machine without an accelerator."""

from __future__ import annotations

import socket

import pytest
import torch

from hybridrl.utils import device, distributed


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds on a machine without a GPU")
def test_a_machine_without_gpu() -> None:
    assert device.get_device_name() == "cpu" and device.device_count() == 0
    assert device.current_device() == device.set_device(3) == torch.device("cpu")
    assert device.backend_name() == "gloo" and not device.supports_flash_attention()
    assert device.get_rng_states() == []
    device.synchronize()
    device.empty_cache()


def test_memory_and_seed() -> None:
    stats = device.memory_stats()
    assert 0.05 < stats["max_memory_allocated_gb"] < stats["total_gb"] and 0 < stats["free_gb"] <= stats["total_gb"]
    device.manual_seed(5)
    first = torch.rand(2)
    device.manual_seed(5)
    assert torch.equal(torch.rand(2), first)


def test_a_world_of_one_without_a_group() -> None:
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    assert distributed.all_reduce_max(7) == 7 and distributed.all_gather_object("x") == ["x"]
    distributed.barrier()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"rank 0 of 1 could not join .*127\.0\.0\.1:{port}"):
            distributed.init_process_group(0, 1, "127.0.0.1", port, timeout_seconds=5)
    assert not distributed.is_distributed()
