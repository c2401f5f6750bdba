"""What tests of sessions share: the configuration of a run with a tool, its prompts, and a record of requests."""

from pathlib import Path

import torch

from hybridrl.agents import AgentRollout
from hybridrl.config import load_config
from hybridrl.protocol import DataProto, object_array

ECHO = Path(__file__).with_name("echo_tools.py")
PROMPT, RESPONSE = 1200, 400
ROLLOUT = "actor_rollout_ref.rollout"


def config_for(model: Path, template: str, *more: str):
    config = load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.model.external_lib={ECHO}",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={RESPONSE}",
            f"{ROLLOUT}.multi_turn.enable=True",
            f"{ROLLOUT}.agent.num_workers=0",
            f"{ROLLOUT}.multi_turn.function_tool_path={ECHO}",
            f"{ROLLOUT}.multi_turn.format=every_turn",
            f"{ROLLOUT}.stop=[{','.join('ABCDEFGHIJKLMNOPQ')}]",  # a random model rarely ends a turn
            *more,
        ],
    )
    config.actor_rollout_ref.model.custom_chat_template = template
    return config


class Recorded:
    """A client that notes what passes."""

    def __init__(self, client) -> None:
        self.client, self.calls = client, []

    async def generate(self, request):
        completion = await self.client.generate(request)
        self.calls.append((list(request.prompt_ids), completion))
        return completion


def prompts_of(rollout: AgentRollout, count: int, **columns) -> DataProto:
    """Prompts of different lengths."""
    messages = [[{"role": "user", "content": "Sort: " + "3 1 2 " * (number + 1)}] for number in range(count)]
    turns, schemas = rollout.agents.turns, [tool.tool_schema for tool in rollout.agents.tools.values()]
    ids = [turns.prompt(one, schemas) for one in messages]
    width = max(map(len, ids))
    tensor = torch.tensor([[0] * (width - len(one)) + one for one in ids])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in ids])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    names = {"uid": [f"0-{n}" for n in range(count)], "sample": [0] * count, "raw_prompt": messages, **columns}
    return DataProto.from_dict(
        tensors={"input_ids": tensor, "attention_mask": mask, "position_ids": positions},
        non_tensors={name: object_array(values) for name, values in names.items()},
        meta_info={"global_steps": 1},
    )
