"""Agents behind the run's server, over a model that generates in the test's process."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hybridrl.agents import AgentRollout, create_agents
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.rollout import HFRollout, InPlaceRollout
from hybridrl.serve import RunServer, make_server


class Recorded:
    """A client that notes what passes."""

    def __init__(self, client: Any) -> None:
        self.client, self.calls = client, []
        self.abort, self.stats, self.health = client.abort, client.stats, client.health

    async def generate(self, request: Any) -> Any:
        completion = await self.client.generate(request)
        self.calls.append((request, completion))
        return completion


@contextlib.contextmanager
def serving(config: Any, engine: Any, *datasets: Any) -> Iterator[tuple[AgentRollout, Recorded]]:
    """A rollout of agents behind a server in a process of its own, and its calls.

    Args:
        engine: generates in place.
        datasets: of the run.
    """
    policy, tokenizer = config.actor_rollout_ref, tokenizer_of(config.actor_rollout_ref.model)
    ends = eos_token_ids(policy.model.path, config_of(policy.model), tokenizer)
    local = HFRollout(policy.rollout, engine, ends, tokenizer.pad_token_id, tokenizer)
    inner = InPlaceRollout(SimpleNamespace(generate_sequences=local.generate, world_size=1), policy.rollout)
    inner.update_weights(0)
    recorded = Recorded(inner.client())
    inner.client = lambda: recorded  # type: ignore[method-assign, assignment, return-value]
    process, access = make_server(
        policy.rollout,
        policy.model,
        recorded,  # type: ignore[arg-type]
        image_kwargs=config.data.mm_processor_kwargs,
        records_routing=policy.actor.router_replay.records_in_generation,
    )
    process.start()
    inner.server = RunServer(process, access)
    inner.on_close.append(process.stop)
    agents = create_agents(config, tokenizer, datasets)
    assert agents is not None
    process.wait_ready()
    made = AgentRollout(inner, agents)
    try:
        yield made, recorded
    finally:
        made.close()
