"""The names of verl's `single_controller.ray.base`."""

from typing import TYPE_CHECKING, Any

from hybridrl.single_controller.ray.calls import RayDataProtoFuture, RayPendingOutputs
from hybridrl.single_controller.ray.colocation import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from hybridrl.single_controller.ray.resource_pool import RayResourcePool, ResourcePoolManager
from hybridrl.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup

if TYPE_CHECKING:
    from hybridrl.verl_compat.resource_pools import (
        SubRayResourcePool,
        extract_pg_from_exist,
        merge_resource_pool,
        split_resource_pool,
    )

__all__ = [
    "RayClassWithInitArgs",
    "RayDataProtoFuture",
    "RayPendingOutputs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "extract_pg_from_exist",
    "merge_resource_pool",
    "split_resource_pool",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridrl.verl_compat import resource_pools

    return getattr(resource_pools, name)
