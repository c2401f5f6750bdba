"""`verl.interactions.base`."""

from hybridrl.agents.interactions.interaction import BaseInteraction

__all__ = ["BaseInteraction"]
