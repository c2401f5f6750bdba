"""`verl.single_controller.base.worker_group`."""

from hybridrl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]
