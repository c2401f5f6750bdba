"""What a user would write: a tool, and a format in which every turn of the model is a call of it."""

from hybridrl.agents import FunctionCall, Parsed, ToolParser, function_tool, register_tool_parser


@function_tool
def echo(text: str) -> tuple[str, float]:
    """Say how long a text is.

    Args:
        text: any text.
    """
    return f"{len(text)} characters", 0.25


@register_tool_parser("every_turn")
class EveryTurn(ToolParser):
    def parse(self, text, tools=()):
        return Parsed("", [FunctionCall("echo", {"text": text})])
