"""Worker groups on Ray."""

from hybridrl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    SubRayResourcePool,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    extract_pg_from_exist,
    merge_resource_pool,
    split_resource_pool,
)
from hybridrl.single_controller.ray.cluster import init_ray, shutdown_ray

__all__ = [
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
]
