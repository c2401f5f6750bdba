"""One controller process runs the algorithm; groups of workers, each an SPMD program, do the work.

`base` says what a worker is and how its methods' arguments travel; it knows no Ray. `ray` starts the processes. The
names of both stand here; those of `ray` are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

from hybridrl.single_controller import base
from hybridrl.single_controller.base import *  # noqa: F403

if TYPE_CHECKING:
    from hybridrl.single_controller.ray import init_ray as init_ray
    from hybridrl.single_controller.ray import shutdown_ray as shutdown_ray
    from hybridrl.single_controller.ray.base import *  # noqa: F403

_ON_RAY = (
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "extract_pg_from_exist",
    "init_ray",
    "merge_resource_pool",
    "shutdown_ray",
    "split_resource_pool",
)
__all__ = [*base.__all__, *_ON_RAY]


def __getattr__(name: str) -> Any:
    if name not in _ON_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridrl.single_controller import ray as on_ray

    return getattr(on_ray, name)
