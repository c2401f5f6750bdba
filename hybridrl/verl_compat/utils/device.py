"""`verl.utils.device`."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.utils.device import backend_name as get_nccl_backend
from hybridrl.utils.device import current_device, get_device_name
from hybridrl.utils.device import manual_seed as manual_seed_all

__all__ = [
    "get_device_id",
    "get_device_name",
    "get_nccl_backend",
    "get_torch_device",
    "get_visible_devices_keyword",
    "is_cuda_available",
    "is_npu_available",
    "manual_seed_all",
]

is_cuda_available = torch.cuda.is_available()
#: NPUs are not supported
is_npu_available = False


def get_torch_device() -> Any:
    """Return the module of torch for this process's device: `torch.cuda` or `torch.cpu`."""
    return getattr(torch, get_device_name())


def get_device_id() -> int | str:
    """Return the index of this process's GPU; without one, `cpu`."""
    device = current_device()
    return "cpu" if device.index is None else device.index


def get_visible_devices_keyword() -> str:
    """Return the environment variable that limits the visible GPUs."""
    return "CUDA_VISIBLE_DEVICES"
