"""Simulated users, who answer the turns of the model that call no tool (`multi_turn.interaction_config_path`)."""

from hybridrl.agents.interactions.interaction import BaseInteraction, register_interaction

__all__ = ["BaseInteraction", "register_interaction"]
