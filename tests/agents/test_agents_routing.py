"""Sessions of a mixture of experts (`router_replay.mode=R3`): the trainer replays the experts of every turn."""

import base64
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_stage import ECHO, config_for, prompts_of
from routed_models import EXPERTS, LAYERS, TOP_K, write_routed_model
from serving_stage import serving
from template_families import FAMILIES, write_model
from transformers import AutoModelForCausalLM

from hybridrl.agents.loop import AgentLoopOutput
from hybridrl.agents.trajectory_record import trajectory_of
from hybridrl.engine.microbatch import MicroBatching
from hybridrl.errors import RolloutError
from hybridrl.protocol import DataProto
from hybridrl.registry import import_external_lib
from hybridrl.rollout.request import Completion
from hybridrl.trainer.ppo.responses import respond

R3 = "actor_rollout_ref.actor.router_replay.mode=R3"
ROLLOUT = "actor_rollout_ref.rollout"
AGENTS = Path(__file__).with_name("my_agents.py")


@pytest.fixture(scope="module")
def model(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_external_lib(str(ECHO))
    folder = tmp_path_factory.mktemp("routed")
    shutil.copytree(micro_model, folder, dirs_exist_ok=True)
    return write_routed_model(write_model(micro_model, folder), scale=3.0)


def whole_passes(model: Path, batch: DataProto) -> list[torch.Tensor]:
    """The experts [tokens, L, K] that transformers' own routers choose for each row, alone and unpadded."""
    peer, returned, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), [], []
    for part in peer.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(lambda module, arguments, output: returned.append(output[2]))
    for row, real in enumerate(batch.batch["attention_mask"].bool()):
        returned.clear()
        with torch.no_grad():
            peer(input_ids=batch.batch["input_ids"][row][real][None])
        found.append(torch.stack(returned, dim=1))
    return found


def check(engine: Any, model: Path, batch: DataProto) -> None:
    """The experts are those of a whole pass, and the trainer's log-probabilities with them are the sampler's."""
    fields = batch.batch
    width = fields["prompts"].shape[1]
    assert fields["routed_experts"].shape == (*fields["input_ids"].shape, LAYERS, TOP_K)
    last = []
    for row, (real, expected) in enumerate(
        zip(fields["attention_mask"].bool(), whole_passes(model, batch), strict=True)
    ):
        used = fields["routed_experts"][row][real].long()
        count = int(real[:width].sum()) + int(fields["response_mask"][row].nonzero().max())  # before the last trained
        assert torch.equal(used[:count].sort(-1).values, expected[:count].sort(-1).values)
        last.append(width + int(fields["response_mask"][row].nonzero().max()))
    trained = fields["response_mask"].bool()

    def log_probs() -> torch.Tensor:
        return engine.infer(batch, MicroBatching(size=3), 1.0, {"log_probs"})["log_probs"]

    torch.testing.assert_close(log_probs()[trained], fields["rollout_log_probs"][trained], atol=1e-5, rtol=1e-5)
    experts = fields["routed_experts"].clone()
    for row, place in enumerate(last):  # what follows what is trained on does not matter to it
        fields["routed_experts"][row, place:] = (experts[row, place:] + 1) % EXPERTS
    torch.testing.assert_close(log_probs()[trained], fields["rollout_log_probs"][trained], atol=1e-5, rtol=1e-5)
    tools = torch.zeros(fields["input_ids"].shape, dtype=torch.bool)
    for row, place in enumerate(last):  # what tools said between the turns does
        tools[row, width:place] = ~trained[row, : place - width]
    fields["routed_experts"] = torch.where(tools[..., None, None], (experts + 1) % EXPERTS, experts)
    changed = (log_probs() - fields["rollout_log_probs"]).abs() * trained
    assert bool((changed.amax(dim=1) > 1e-3)[tools.any(dim=1)].all())
    fields["routed_experts"] = experts


def test_tools_and_turns_have_the_experts_of_the_sampler(started, engine, model) -> None:
    rollout, _ = started(
        config_for(model, FAMILIES["qwen"].template, R3, f"{ROLLOUT}.multi_turn.max_assistant_turns=3")
    )
    prompts = prompts_of(rollout, 4)
    batch = respond(rollout, prompts, 1.0, global_steps=1, routed_experts=True)
    assert min(batch.non_tensor_batch["__num_turns__"]) > 4
    check(engine, model, batch)
    plain = respond(rollout, prompts, 1.0, global_steps=1)
    assert "routed_experts" not in plain.batch.keys()
    assert torch.equal(plain.batch["input_ids"], batch.batch["input_ids"])


@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow(20)  # it starts the server's process
def test_agents_behind_the_server_and_the_route_that_returns_experts(engine, model) -> None:
    words = [
        R3,
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.multi_turn.enable=False",
        f"{ROLLOUT}.multi_turn.function_tool_path=null",
        f"{ROLLOUT}.multi_turn.format=hermes",
        f"{ROLLOUT}.server.enable=True",
        f"{ROLLOUT}.server.host=127.0.0.1",
        f"{ROLLOUT}.agent.default_agent_loop=gateway_agent",
        f"{ROLLOUT}.agent.function={AGENTS}:routes",
        f"{ROLLOUT}.agent.on_error=raise",
    ]
    with serving(config_for(model, FAMILIES["qwen"].template, *words), engine) as (rollout, _):
        batch = respond(rollout, prompts_of(rollout, 2), 1.0, global_steps=1, routed_experts=True)
    assert len(batch) == 4  # a conversation, and a request in tokens
    check(engine, model, batch)
    for row in (1, 3):
        told = np.load(io.BytesIO(base64.b64decode(batch.non_tensor_batch["told"][row])))
        real = batch.batch["attention_mask"][row].bool()
        used = batch.batch["routed_experts"][row][real]
        assert told.dtype == np.uint8 and torch.equal(torch.from_numpy(told), used[:-1])
        assert torch.equal(used[-1], used[-2])


def completion(ids: list[int], experts: list[int]) -> Completion:
    return Completion("r", ids, [-0.5] * len(ids), "stop", routed_experts=np.array(experts, np.uint8).reshape(-1, 1, 1))


def of(prompt: list[int], response: list[int], mask: list[int], calls: list[Any]) -> list[int]:
    found = trajectory_of(AgentLoopOutput(prompt, response, mask), calls, "u", 0, "", 0)
    return found.routed_experts.flatten().tolist()


def test_a_token_keeps_the_experts_with_which_the_next_was_sampled() -> None:
    first = ([1, 2], completion([3, 4], [10, 11, 12]))
    unused = ([1, 2], completion([9], [50, 51]))  # another answer, which the session did not go on from
    second = ([1, 2, 3, 4, 5, 6], completion([7, 8], [20, 21, 22, 23, 24, 25, 26]))
    calls = [unused, first, second]
    assert of([1, 2], [3, 4, 5, 6, 7, 8], [1, 1, 0, 0, 1, 1], calls) == [10, 11, 12, 23, 24, 25, 26, 26]
    # a tool's answer that the model did not read, and a turn of which a loop keeps a part
    assert of([1, 2], [3, 4, 5, 6], [1, 1, 0, 0], [first]) == [10, 11, 12, 12, 12, 12]
    assert of([1, 2, 3, 4, 5, 6], [7, 30], [1, 0], [second]) == [20, 21, 22, 23, 24, 25, 26, 26]
    with pytest.raises(RolloutError, match=r"the experts of 2 tokens of a session of which 3 were computed"):
        of([1, 2], [3, 4], [1, 1], [([1, 2], completion([3, 4], [10, 11]))])
