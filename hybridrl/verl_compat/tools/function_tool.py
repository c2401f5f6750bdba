"""`verl.tools.function_tool`."""

from hybridrl.agents.tools.base import FunctionTool, function_tool

__all__ = ["FunctionTool", "function_tool"]
