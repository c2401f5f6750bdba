"""`verl.interactions.base`."""

from hybridrl.agents.interactions.base import BaseInteraction

__all__ = ["BaseInteraction"]
