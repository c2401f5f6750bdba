"""`verl.experimental.agent_loop.agent_loop`."""

from hybridrl.agents import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, TokenOutput, register

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "TokenOutput", "register"]
