"""`verl.single_controller.ray.base`."""

from hybridrl.single_controller.base import Worker
from hybridrl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    SubRayResourcePool,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
    extract_pg_from_exist,
    merge_resource_pool,
    split_resource_pool,
)

__all__ = [
    "Worker",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "SubRayResourcePool",
    "extract_pg_from_exist",
    "merge_resource_pool",
    "split_resource_pool",
]
