"""An agent that knows nothing of training: it answers with the help of a calculator, through OpenAI's client.

Any endpoint with tools serves it. `actor_rollout_ref.rollout.agent.function=examples/calculator_client.py:solve` trains
the model behind it (docs/gateway.md); `benchmarks/calculator_learns.py --through gateway_agent` shows that this works.
"""

import json
import operator
import re
from typing import Any

import openai

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "an arithmetic expression such as (3 + 4) * 2",
                    }
                },
                "required": ["expression"],
            },
        },
    }
]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MOST_TURNS = 4


def compute(arguments: str) -> str:
    """The value of two whole numbers with an operator between them, or what is wrong with them."""
    try:
        left, sign, right = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", json.loads(arguments)["expression"]).groups()  # type: ignore[union-attr]
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"Error: {arguments} is not an expression of two numbers"
    return str(OPERATORS[sign](int(left), int(right)))


def solve(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Answer the question of a row. Its score is left to the reward function."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = list(row["raw_prompt"])
    for _ in range(MOST_TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            text = compute(call.function.arguments)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
