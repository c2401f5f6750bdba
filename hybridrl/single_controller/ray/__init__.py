"""Worker groups on Ray."""

from typing import TYPE_CHECKING, Any

from hybridrl.single_controller.ray import base
from hybridrl.single_controller.ray.cluster import init_ray, shutdown_ray

if TYPE_CHECKING:
    from hybridrl.single_controller.ray.base import *  # noqa: F403

__all__ = ["init_ray", "shutdown_ray", *base.__all__]


def __getattr__(name: str) -> Any:
    return getattr(base, name)
