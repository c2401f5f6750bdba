"""`verl.tools.function_tool`."""

from hybridrl.agents.tools.tool import FunctionTool, function_tool

__all__ = ["FunctionTool", "function_tool"]
