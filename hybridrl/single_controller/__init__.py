"""One controller process runs the algorithm; groups of workers, each an SPMD program, do the work.

`base` defines workers and how arguments are dispatched to their methods; it does not depend on Ray. `ray` starts the
processes. This package exports the names of both, which are imported on first use: a command line whose settings have a
fault needs neither torch nor Ray to say so.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hybridrl.errors import PlacementError, WorkerDiedError, WorkerError, WorkerTimeoutError, WorkerUserError

if TYPE_CHECKING:
    from hybridrl.single_controller.base import (
        ClassWithInitArgs,
        Dispatch,
        Execute,
        ResourcePool,
        Worker,
        WorkerGroup,
        make_nd_compute_dataproto_dispatch_fn,
        make_nd_compute_dispatch_fn,
        make_one_to_all_dispatch_fn,
        padding_mask,
        real_rows,
        register,
        register_dispatch_mode,
        update_dispatch_mode,
    )
    from hybridrl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        ResourcePoolManager,
        SubRayResourcePool,
        create_colocated_worker_cls,
        create_colocated_worker_cls_fused,
        extract_pg_from_exist,
        init_ray,
        merge_resource_pool,
        shutdown_ray,
        split_resource_pool,
    )

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "PlacementError",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeoutError",
    "WorkerUserError",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "extract_pg_from_exist",
    "init_ray",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_nd_compute_dispatch_fn",
    "make_one_to_all_dispatch_fn",
    "merge_resource_pool",
    "padding_mask",
    "real_rows",
    "register",
    "register_dispatch_mode",
    "shutdown_ray",
    "split_resource_pool",
    "update_dispatch_mode",
]


_OF_BASE = {
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_nd_compute_dispatch_fn",
    "make_one_to_all_dispatch_fn",
    "padding_mask",
    "real_rows",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{'base' if name in _OF_BASE else 'ray'}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
