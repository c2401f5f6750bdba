"""`verl.interactions.gsm8k_interaction`."""

from hybridrl.agents.interactions.gsm8k_interaction import Gsm8kInteraction

__all__ = ["Gsm8kInteraction"]
