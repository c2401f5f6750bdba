"""The machine's accelerator: a few plain functions, in the only file of the package that uses `torch.cuda`.

All other modules call these functions, so that every code path runs on a CPU with gloo, and uses NCCL, bfloat16 and
flash attention on a GPU that supports them.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

GIB = 1024**3


@functools.cache
def get_device_name() -> str:
    """Return `"cuda"` if a GPU is visible to this process, else `"cpu"`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_gpu() -> bool:
    """Return whether this process computes on a GPU."""
    return get_device_name() == "cuda"


def device_count() -> int:
    """Return the number of accelerators visible to this process; 0 on a CPU-only machine."""
    return torch.cuda.device_count() if is_gpu() else 0


def device_names() -> list[str]:
    """Return the product names of the visible accelerators, in order; empty on a CPU-only machine."""
    return [torch.cuda.get_device_name(index) for index in range(device_count())]


def current_device() -> torch.device:
    """Return the device that this process computes on: `cuda:<index>` or `cpu`."""
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu() else torch.device("cpu")


def set_device(local_rank: int) -> torch.device:
    """Make accelerator number `local_rank` the current one. If only one accelerator is visible, use that one.

    Raises:
        ValueError: the machine shows fewer accelerators than `local_rank` asks for.
    """
    if not is_gpu():
        return torch.device("cpu")
    count = device_count()
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise ValueError(
            f"rank {local_rank} of this node asks for accelerator {index}, but only {count} are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); start fewer workers on a node"
        )
    torch.cuda.set_device(index)
    return current_device()


def backend_name() -> str:
    """Return the `torch.distributed` back end: gloo for tensors in main memory, NCCL for tensors on a GPU."""
    return "cpu:gloo,cuda:nccl" if is_gpu() else "gloo"


@functools.cache
def supports_flash_attention() -> bool:
    """Return whether transformers' `flash_attention_2` can run. It needs the package and a GPU of compute capability
    8.0 or newer."""
    if not is_gpu() or importlib.util.find_spec("flash_attn") is None:
        return False
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available()) and torch.cuda.get_device_capability()[0] >= 8


def synchronize() -> None:
    """Wait until the device has finished its queued work."""
    if is_gpu():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Release memory that PyTorch holds but does not use."""
    if is_gpu():
        torch.cuda.ipc_collect()  # memory that other processes have released
        torch.cuda.empty_cache()


def manual_seed(seed: int) -> None:
    """Seed PyTorch's generators of the CPU and of every visible accelerator."""
    torch.manual_seed(seed)
    if is_gpu():
        torch.cuda.manual_seed_all(seed)


def memory_stats() -> dict[str, float]:
    """Return device memory in GiB: `max_memory_allocated_gb` and `max_memory_reserved_gb` so far, and the current
    `free_gb` and `total_gb`.

    On a CPU the two maxima are the process's peak resident memory, and the other two values are those of the machine.
    """
    if is_gpu():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {
            "max_memory_allocated_gb": allocated / GIB,
            "max_memory_reserved_gb": reserved / GIB,
            "free_gb": free / GIB,
            "total_gb": total / GIB,
        }
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    page, names = os.sysconf("SC_PAGE_SIZE"), os.sysconf_names
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in names else total
    return {
        "max_memory_allocated_gb": peak / GIB,
        "max_memory_reserved_gb": peak / GIB,
        "free_gb": free / GIB,
        "total_gb": total / GIB,
    }


def get_rng_states() -> list[torch.Tensor]:
    """Return the state of the current accelerator's random generator as one `uint8` tensor; an empty list on a CPU."""
    return [torch.cuda.get_rng_state()] if is_gpu() else []


def set_rng_states(states: list[torch.Tensor]) -> None:
    """Restore the states that `get_rng_states` returned. Without an accelerator, do nothing."""
    if is_gpu() and states:
        torch.cuda.set_rng_state(states[0])


def uuid_of(device: torch.device) -> str:
    """Return an id of this device that is the same in every process, whatever its index there; `"cpu"` on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
