"""The machine's accelerator: a few plain functions, in the only file of the package that uses `torch.cuda`.

All other modules call these functions, so that every code path runs on a CPU with gloo, and uses NCCL, bfloat16 and
flash attention on a GPU that supports them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.utils.machine_memory import machine_memory

GIB = 1024**3
#: the oldest driver that each major version of CUDA runs with
_LEAST_DRIVER = {12: 525, 13: 580}
# Linux: writing 5 to the first resets the peak of resident memory in the second; the third has the present value
_RESET_PEAK_FILE, _RESET_PEAK = Path("/proc/self/clear_refs"), "5"
_STATUS_FILE, _STATM_FILE = Path("/proc/self/status"), Path("/proc/self/statm")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
#: variables with the settings of PyTorch's allocator; the first that is set counts
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"
#: TFLOPs per second of dense matrix products in bfloat16, by a part of the device's name; the first that fits counts
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "B300": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 311.9,
    "A800": 311.9,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
_OPEN_S = 120.0
_replacing: list[torch.device] = []  # of the contexts of `computing_on`
# positions among the arguments that `reduce_tensor` returns for a CUDA tensor
_STORAGE_DEVICE, _COUNTER_FILE, _COUNTER_OFFSET = 6, 11, 12


@functools.cache
def get_device_name() -> str:
    """Return `"cuda"` if a GPU is visible to this process, else `"cpu"`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_gpu() -> bool:
    """Return whether this process computes on a GPU."""
    return get_device_name() == "cuda"


def require_gpu() -> None:
    """Refuse to go on without a usable GPU.

    Raises:
        UserError: PyTorch finds no GPU that it can use; the error names its version of CUDA and the driver's version.
    """
    if torch.cuda.is_available():
        return
    cuda, driver = torch.version.cuda, driver_version()
    installed = f"torch {torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "a build without CUDA")
    installed += f", and {f'NVIDIA driver {driver}' if driver else 'no NVIDIA driver'}"
    remedy = "bash scripts/install.sh cuda"
    if cuda:
        major = int(cuda.split(".")[0])
        least = _LEAST_DRIVER.get(major)
        remedy = f"install driver {least} or newer" if least else "install a newer driver"
        remedy += f", or a torch for an older CUDA than {major}"
    raise UserError(
        f"no GPU can be used here: found {installed}. Change that ({remedy}), or compute on the CPU with "
        "trainer.device=cpu"
    )


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None where none is loaded."""
    try:
        match = re.search(r"\s(\d+\.[\d.]+)\s", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match.group(1) if match else None


def half_precision() -> torch.dtype:
    """Return bfloat16, or float16 where this machine has a GPU that computes no bfloat16 itself (before Ampere)."""
    emulates = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if emulates else torch.bfloat16


def half_name() -> str:
    """Return the name of `half_precision`, such as "bfloat16"."""
    return str(half_precision()).removeprefix("torch.")


def device_count() -> int:
    """Return the number of accelerators visible to this process; 0 on a CPU-only machine."""
    return torch.cuda.device_count() if is_gpu() else 0


def device_names() -> list[str]:
    """Return the product names of the visible accelerators, in order; empty on a CPU-only machine."""
    return [torch.cuda.get_device_name(index) for index in range(device_count())]


def current_name() -> str:
    """Return the product name of the device that this process computes on; `"cpu"` on a CPU."""
    return torch.cuda.get_device_name() if is_gpu() else "cpu"


def peak_tflops(name: str) -> float | None:
    """Return the TFLOPs per second that a device of this name can do in bfloat16; None if that is not known here."""
    return next((peak for part, peak in _PEAK_TFLOPS.items() if re.search(rf"{part}(?!\d)", name)), None)


def current_device() -> torch.device:
    """Return the device that this process computes on: `cuda:<index>` or `cpu`, or that of `computing_on`."""
    if _replacing:
        return _replacing[-1]
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu() else torch.device("cpu")


@contextlib.contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Within the context, `current_device` is this one, such as `meta`, on which nothing is computed or stored."""
    _replacing.append(device)
    try:
        yield
    finally:
        _replacing.pop()


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


def compute_capability() -> tuple[int, int]:
    """Return that of this process's GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if is_gpu() else (0, 0)


@functools.cache
def flash_attention() -> str | None:
    """Return what transformers calls the newest flash attention whose package is installed and runs on this GPU.

    It needs flash-attn and a GPU of compute capability 8.0 or newer, or flash-attn-3 and one of 9.0.
    """
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if compute_capability()[0] == 9 and is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if compute_capability()[0] >= 8 and is_flash_attn_2_available() else None


def supports_varlen_attention() -> bool:
    """Return whether `hybridrl.utils.varlen` has a kernel for half precision: on compute capability 8.0 or newer."""
    return compute_capability()[0] >= 8


@functools.cache
def runs_triton() -> bool:
    """Return whether Triton's kernels can run: on a GPU of compute capability 7.0 or newer, with the package."""
    return compute_capability()[0] >= 7 and importlib.util.find_spec("triton") is not None


def runs_grouped_products(where: torch.device) -> bool:
    """Return whether PyTorch multiplies groups of rows by matrices of their own in one kernel on a device.

    A GPU needs compute capability 8.0 or newer.
    """
    return hasattr(torch.nn.functional, "grouped_mm") and (where.type == "cpu" or compute_capability() >= (8, 0))


def synchronize() -> None:
    """Wait until the device has finished its queued work."""
    if is_gpu():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Release memory that PyTorch holds but does not use."""
    if is_gpu():
        torch.cuda.ipc_collect()  # memory that other processes have released
        torch.cuda.empty_cache()


def host_memory(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `size` elements of main memory, page-locked where there is a GPU.

    PyTorch's own page-locked memory would be rounded up to a power of two.
    """
    memory = torch.empty(size, dtype=dtype)
    if is_gpu() and size:
        runtime, place = torch.cuda.cudart(), memory.data_ptr()
        if int(runtime.cudaHostRegister(place, memory.nbytes, 0)) == 0:
            weakref.finalize(memory, runtime.cudaHostUnregister, place).atexit = False
        else:
            with contextlib.suppress(RuntimeError):  # CUDA reports that failure once more, from the next kernel
                torch.zeros(1, device=current_device())
            notify(
                f"{memory.nbytes / GIB:.1f} GiB of main memory could not be page-locked, so copies between it and the "
                "GPU are slow; raise the limit of locked memory (ulimit -l, docker run --ulimit memlock=-1)",
                "warning",
            )
    return memory


@functools.cache
def copy_stream(purpose: str = "state") -> Any:
    """Return the stream on which this process copies between main memory and its GPU; None on a CPU.

    Args:
        purpose: copies of one purpose wait for each other.
    """
    return torch.cuda.Stream() if is_gpu() else None


class Transfer:
    """Copies between main memory and the device that go on while the device computes.

    On a GPU they run on `copy_stream`, after the work that is queued when they begin. On a CPU they are done when they
    have begun. Until `wait` returns, nothing may read or free a target, or change or free a source.

    Args:
        copies: target and source of each, of the same shape, dtype and strides.
    """

    purpose = "state"
    _end: Any = None

    def __init__(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        #: both sides of copies that may not be done, so that their memory is not used for something else
        self._copies = list(copies)
        stream = copy_stream(self.purpose)
        if stream is None:
            for target, source in self._copies:
                target.copy_(source)
            return
        # The allocator gives memory of freed tensors to targets while kernels that were queued before may still use it.
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for target, source in self._copies:
                    target.copy_(source, non_blocking=True)
        finally:  # those before one that failed go on
            self._end = stream.record_event()

    def wait(self) -> None:
        """Return once every copy is done. Work that is queued later finds the values, on any stream."""
        if self._end is not None:
            self._end.synchronize()
        self._end, self._copies = None, []

    def order(self) -> None:
        """Have work that this thread queues from now on wait for the copies, and return at once.

        That work may read and free the targets. Sources in main memory may be freed if PyTorch page-locked them.
        `wait` returns at once afterwards.
        """
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
            self._end = None

    def __del__(self) -> None:
        """Whoever gives a transfer up, as an interrupted backward pass does, frees memory that is still copied to."""
        if self._end is not None:
            with contextlib.suppress(Exception):  # the process ends, and CUDA is gone
                self._end.synchronize()


class ActivationTransfer(Transfer):
    """Copies that do not wait for those of optimizer states."""

    purpose = "activations"


def manual_seed(seed: int) -> None:
    """Seed PyTorch's generators of the CPU and of every visible accelerator."""
    torch.manual_seed(seed)
    if is_gpu():
        torch.cuda.manual_seed_all(seed)


def compute_deterministically() -> None:
    """Have PyTorch, cuBLAS and flash attention compute bitwise repeatably, or raise where they cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it
    torch.use_deterministic_algorithms(True)


def reset_peak_memory() -> None:
    """Let the maxima of `memory_stats` begin again with what is in use now.

    On a CPU only Linux can do it; elsewhere they stay those of the whole process.
    """
    if is_gpu():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        _RESET_PEAK_FILE.write_text(_RESET_PEAK, encoding="ascii")


def resident_memory() -> float:
    """Return the resident memory of this process in GiB; on systems without `/proc` its maximum so far."""
    try:
        return int(_STATM_FILE.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    except OSError:
        return _peak_resident_bytes() / GIB


def _peak_resident_bytes() -> int:
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS_FILE.read_text(encoding="ascii"))
    except OSError:
        match = None
    if match is not None:
        return int(match.group(1)) * 1024
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_stats() -> dict[str, float]:
    """Return device memory in GiB: `max_memory_allocated_gb` and `max_memory_reserved_gb` so far (see
    `reset_peak_memory`), and the current `free_gb` and `total_gb`.

    On a CPU the two maxima are the process's peak resident memory, and the other two values are those of the machine
    (`machine_memory`; the page cache is free).
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
    peak = _peak_resident_bytes()
    free, total = machine_memory()
    return {
        "max_memory_allocated_gb": peak / GIB,
        "max_memory_reserved_gb": peak / GIB,
        "free_gb": free / GIB,
        "total_gb": total / GIB,
    }


def record_memory(entries: int) -> None:
    """Remember the stacks of the last `entries` allocations on this GPU, for `write_memory`; 0 stops it.

    Raises:
        UserError: there is no GPU.
    """
    require_gpu()
    torch.cuda.memory._record_memory_history("all" if entries else None, max_entries=entries or 1)


def write_memory(path: Path) -> None:
    """Write a snapshot of this GPU's memory, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def start_capture(name: str) -> None:
    """Begin what `nsys profile --capture-range=cudaProfilerApi` records, as a range of this name.

    Raises:
        UserError: there is no GPU.
    """
    require_gpu()
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(name)


def end_capture() -> None:
    """End what `start_capture` began."""
    torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.stop()


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


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this environment that configure PyTorch's allocator, with expandable segments turned off.

    Each value keeps its other settings and ends with `expandable_segments:False`, also where it did not name them.
    Variables that are not set or empty are left out.
    """
    changed = {}
    for name in _ALLOCATOR_VARIABLES:
        parts = [part for part in environment.get(name, "").split(",") if part]
        others = [part for part in parts if part.partition(":")[0].strip() != _EXPANDABLE]
        if parts:
            changed[name] = ",".join([*others, f"{_EXPANDABLE}:False"])
    return changed


@contextlib.contextmanager
def ordinary_segments() -> Iterator[None]:
    """Within the context, no memory is allocated from expandable segments.

    A process shares such a segment by a file descriptor, and containers usually forbid the receiver to take it.
    """
    changed = without_expandable_segments(os.environ)
    name = next(iter(changed), None)  # PyTorch reads the first variable that is set
    if name is None or not is_gpu():
        yield
        return
    # PyTorch resets every setting that the string does not name, so all of them are passed.
    torch._C._accelerator_setAllocatorSettings(changed[name])
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(os.environ[name])


class SharedMemory:
    """A tensor on a GPU that one other process may open, on the same GPU.

    Its memory stays allocated until that process has opened and closed it, whatever happens to the tensor here.

    Attributes:
        handle: what the other process passes to `open_shared`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(tensor)
        self.handle = pickle.dumps((rebuild, arguments))
        self._device = tensor.device
        self._counter = arguments[_COUNTER_FILE], arguments[_COUNTER_OFFSET]

    def reclaim(self) -> None:
        """Do not keep the memory for the other process: it has ended without closing the tensor."""
        torch.UntypedStorage._release_ipc_counter(*self._counter, device=self._device.index)


def open_shared(handle: bytes, here: torch.device) -> torch.Tensor:
    """Open another process's `SharedMemory` on this device. It is closed when the tensor is freed."""
    rebuild, arguments = pickle.loads(handle)
    arguments = list(arguments)
    arguments[_STORAGE_DEVICE] = here.index  # the sender may number this device differently
    tensor: torch.Tensor = rebuild(*arguments)
    return tensor


@functools.cache
def memory_sharing_unsupported_reason() -> str | None:
    """Return why other processes cannot open this GPU's memory (CUDA IPC), as a child process tries; None if they can.

    Sandboxes such as gVisor, Windows' subsystem for Linux and some virtual GPUs do not support it.
    """
    try:
        with ordinary_segments():
            shared = SharedMemory(torch.ones(1, device=current_device()))
    except RuntimeError as error:
        return f"it cannot be exported: {error}"
    reason = opened_by_child(shared.handle, torch.cuda.current_device())
    if reason is not None:
        shared.reclaim()
    return reason


def opened_by_child(handle: bytes, index: int, limit: float = _OPEN_S) -> str | None:
    """Open a `SharedMemory` of GPU number `index` in a new process; return why that failed, or None."""
    code = (
        "import sys, torch; from hybridrl.utils import device; "
        f"device.open_shared(sys.stdin.buffer.read(), torch.device('cuda', {index})).sum().item()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], input=handle, capture_output=True, timeout=limit, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return None
    lines = ended.stderr.decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"a process that opened it ended with status {ended.returncode}: {last}"
