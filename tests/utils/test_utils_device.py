"""Device and process group on a machine without an accelerator."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from raising import raises_with

from hybridrl.errors import UserError
from hybridrl.single_controller.base.worker import WorkerSettings, set_up_process
from hybridrl.utils import device, distributed


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds on a machine without a GPU")
def test_a_machine_without_gpu() -> None:
    assert device.get_device_name() == "cpu" and device.device_count() == 0
    assert device.current_device() == device.set_device(3) == torch.device("cpu")
    assert device.backend_name() == "gloo" and device.flash_attention() is None
    assert device.get_rng_states() == []
    device.synchronize()
    device.empty_cache()


@pytest.mark.parametrize(
    ("gpu", "native", "expected"),
    [(True, True, "bfloat16"), (True, False, "float16"), (False, False, "bfloat16")],
)
def test_a_gpu_without_bfloat16_has_another_half_precision(monkeypatch, gpu, native, expected) -> None:
    """Without a GPU it is asked for GPUs elsewhere, as by a forecast."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert (device.half_name(), device.half_precision()) == (expected, getattr(torch, expected))


def test_memory_and_seed() -> None:
    stats = device.memory_stats()
    assert 0.05 < stats["max_memory_allocated_gb"] < stats["total_gb"] and 0 < stats["free_gb"] <= stats["total_gb"]
    device.manual_seed(5)
    first = torch.rand(2)
    device.manual_seed(5)
    assert torch.equal(torch.rand(2), first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures main memory")
def test_files_that_were_read_are_no_memory_in_use(tmp_path: Path) -> None:
    big = tmp_path / "weights.bin"
    big.write_bytes(bytes(768 * 2**20))
    with big.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        while file.read(2**24):
            pass
    cached = _meminfo("Cached")
    assert cached > 0.5  # the kernel keeps the file in memory
    stats = device.memory_stats()
    used = stats["total_gb"] - stats["free_gb"]
    unreclaimable = stats["total_gb"] - _meminfo("MemFree") - _meminfo("Buffers") - cached
    assert used < stats["total_gb"] - _meminfo("MemFree") - 0.5
    assert used == pytest.approx(unreclaimable, abs=1.5)


def _meminfo(name: str) -> float:
    """A line of /proc/meminfo in GiB."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) / 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures main memory")
def test_the_peak_of_memory_begins_anew() -> None:
    def peak() -> float:
        return device.memory_stats()["max_memory_allocated_gb"]

    device.reset_peak_memory()
    before = peak()
    assert before == pytest.approx(device.resident_memory(), abs=0.05)
    taken = torch.ones(300 * 2**20, dtype=torch.uint8)
    assert device.resident_memory() > before + 0.25
    del taken
    assert peak() > before + 0.25 > device.resident_memory()
    device.reset_peak_memory()
    assert peak() < before + 0.05


def test_a_world_of_one_without_a_group() -> None:
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    assert distributed.all_reduce_max(7) == 7 and distributed.all_gather_object("x") == ["x"]
    distributed.barrier()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with raises_with(RuntimeError, "rank 0", "1 could", f"127.0.0.1:{port}"):
            distributed.init_process_group(0, 1, "127.0.0.1", port, timeout_seconds=5)
    assert not distributed.is_distributed()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds on a machine without a GPU")
@pytest.mark.parametrize(
    ("cuda", "driver", "expected"),
    [
        ("13.0", "550.54.15", "CUDA 13.0, and NVIDIA driver 550.54.15.*driver 580 or newer"),
        ("12.8", None, "CUDA 12.8, and no NVIDIA driver.*driver 525 or newer"),
        (None, "580.65.06", "without CUDA, and NVIDIA driver 580.65.06.*install.sh cuda"),
    ],
)
def test_a_worker_with_a_gpu_that_cannot_be_used_is_refused(monkeypatch, tmp_path, cuda, driver, expected) -> None:
    """With a driver older than its CUDA, PyTorch says that there is no GPU, while Ray counts GPUs by the driver."""
    if driver:
        (tmp_path / "version").write_text(
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Feb 22 01:44:30 UTC 2024\n"
            "GCC version:  gcc version 11.4.0\n"
        )
    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    settings = WorkerSettings(role="actor", rank=0, world_size=1, local_rank=0, local_world_size=1, use_gpu=True)
    with pytest.raises(UserError, match=expected):
        set_up_process(settings, "127.0.0.1", 0)


def test_the_driver_of_open_kernel_modules_is_read(monkeypatch, tmp_path) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(device, "_DRIVER_FILE", file)
    assert device.driver_version() is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\n")
    assert device.driver_version() == "580.65.06"


@pytest.mark.parametrize(
    "found",
    [
        "expandable_segments:True",
        "max_split_size_mb:512,expandable_segments:True,roundup_power2_divisions:4",
        "garbage_collection_threshold:0.8",
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_other_settings_of_the_allocator_are_kept(name, found) -> None:
    changed = device.without_expandable_segments({name: found, "HOME": "/root"})
    rest = [part for part in found.split(",") if not part.startswith("expandable")]
    assert changed == {name: ",".join([*rest, "expandable_segments:False"])}
    torch._C._accelerator_setAllocatorSettings(changed[name])  # PyTorch's own parser takes it
    torch._C._accelerator_setAllocatorSettings("")


def test_an_allocator_without_settings_is_left_alone() -> None:
    assert device.without_expandable_segments({"HOME": "/root", "PYTORCH_ALLOC_CONF": ""}) == {}


def test_memory_that_another_process_cannot_open_says_why() -> None:
    """Sandboxes refuse it only when it is opened; here there is nothing to open."""
    reason = device.opened_by_child(b"no handle", 0)
    assert reason is not None and "status 1" in reason and "UnpicklingError" in reason
    assert "timed out" in str(device.opened_by_child(b"no handle", 0, limit=0.01))
