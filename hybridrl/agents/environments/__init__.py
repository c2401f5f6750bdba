"""Environments: what a session acts on, step by step (`env_agent`)."""

from hybridrl.agents.environments.environment import Action, Environment, Step, register_environment

__all__ = ["Action", "Environment", "Step", "register_environment"]
