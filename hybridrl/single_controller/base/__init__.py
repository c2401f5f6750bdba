"""Worker groups without Ray: what a worker is, and how arguments are dispatched to its methods."""

from hybridrl.errors import PlacementError, WorkerDiedError, WorkerError, WorkerTimeoutError, WorkerUserError
from hybridrl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_dispatch_fn,
    make_one_to_all_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from hybridrl.single_controller.base.padding import padding_mask, real_rows
from hybridrl.single_controller.base.worker import Worker
from hybridrl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "PlacementError",
    "ResourcePool",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeoutError",
    "WorkerUserError",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_nd_compute_dispatch_fn",
    "make_one_to_all_dispatch_fn",
    "padding_mask",
    "real_rows",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
