"""`verl.single_controller.base.worker`."""

from hybridrl.single_controller.base import Worker

__all__ = ["Worker"]
