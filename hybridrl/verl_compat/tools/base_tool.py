"""`verl.tools.base_tool`."""

from hybridrl.agents.tools.tool import BaseTool, ToolResponse
from hybridrl.verl_compat.tools.schemas import OpenAIFunctionToolSchema

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"]
