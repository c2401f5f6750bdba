"""Agents: conversations of several turns with tools, trained on exactly the tokens that were generated."""

from hybridrl.agents.agent_rollout import AgentRollout
from hybridrl.agents.agents import Agents, create_agents
from hybridrl.agents.environments.environment import Action, Environment, Step, register_environment
from hybridrl.agents.interactions.interaction import BaseInteraction, register_interaction
from hybridrl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, TokenOutput, register
from hybridrl.agents.tools.tool import BaseTool, ToolResponse, function_tool
from hybridrl.chat.parsers.tool_parser import FunctionCall, MalformedCall, Parsed, ToolParser, register_tool_parser

__all__ = [
    "AgentLoopBase",
    "AgentLoopOutput",
    "AgentLoopMetrics",
    "TokenOutput",
    "register",
    "Environment",
    "Action",
    "Step",
    "register_environment",
    "BaseInteraction",
    "register_interaction",
    "BaseTool",
    "ToolResponse",
    "function_tool",
    "ToolParser",
    "FunctionCall",
    "MalformedCall",
    "Parsed",
    "register_tool_parser",
    "Agents",
    "AgentRollout",
    "create_agents",
]
