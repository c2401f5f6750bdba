"""The names of verl's `single_controller.ray.base`."""

from hybridrl.single_controller.ray.calls import RayDataProtoFuture, RayPendingOutputs
from hybridrl.single_controller.ray.colocation import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from hybridrl.single_controller.ray.resource_pool import RayResourcePool, ResourcePoolManager
from hybridrl.single_controller.ray.split_pools import (
    SubRayResourcePool,
    extract_pg_from_exist,
    merge_resource_pool,
    split_resource_pool,
)
from hybridrl.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup

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
