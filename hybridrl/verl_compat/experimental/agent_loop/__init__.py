"""`verl.experimental.agent_loop`."""

from hybridrl.verl_compat.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    TokenOutput,
    register,
)

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "TokenOutput", "register"]
