"""Rollouts of an environment of verifiers, which run in its own server and call the run's server."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hybridrl.agents.environments.verifiers import TASK, VerifiersServer
from hybridrl.agents.gateway import AgentRunner
from hybridrl.agents.loop import register
from hybridrl.agents.loops.gateway_agent import GatewayAgentLoop
from hybridrl.config import RolloutConfig


@register("verifiers_agent", reads=("gateway",))
class VerifiersAgentLoop(GatewayAgentLoop):
    """Each session is a rollout of verifiers, whose rewards are the score.

    Its entry in `agent.agent_loop_config_path` has the arguments of
    `hybridrl.agents.environments.verifiers.VerifiersServer`.
    """

    agent_settings: ClassVar[Sequence[str]] = ("timeout_s", "max_running", "sampling", "match", "trace_dir")

    needs_columns: ClassVar[Sequence[str]] = (TASK,)

    @classmethod
    def start_agents(cls, rollout: RolloutConfig, arguments: Mapping[str, Any]) -> AgentRunner:
        server = VerifiersServer.of(arguments)
        server.start()
        return server
