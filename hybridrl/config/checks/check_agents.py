"""Cross-checks of `rollout.multi_turn` and `rollout.agent`."""

from collections.abc import Iterator

from hybridrl.config.checks.paths import check_source_file
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.registry import AGENT_LOOPS

_ROLLOUT = "actor_rollout_ref.rollout"
#: what `agent.max_running` is where nothing is set: agents behind the gateway, and other sessions
MAX_AGENTS, MAX_SESSIONS = 256, 4096


def check_agents(rollout: RolloutConfig) -> Iterator[str]:
    """Check that tools and simulated users have a loop that asks them, and that files are there."""
    settings, agent = rollout.multi_turn, rollout.agent
    tools = {name: getattr(settings, name) for name in ("tool_config_path", "function_tool_path")}
    tool_settings = [f"multi_turn.{name}={path}" for name, path in tools.items() if path is not None]
    loop = agent.default_agent_loop  # one from a file is not in the registry
    answers = loop is None or (AGENT_LOOPS.knows(loop) and AGENT_LOOPS.metadata(loop).only_answers)
    plain = answers and agent.agent_loop_config_path is None
    if tool_settings and plain and not settings.enable:
        only = tool_settings[0].partition(".")[2].partition("=")[0]
        yield (
            f"{_ROLLOUT}.{tool_settings[0]} without a loop that calls tools; set {_ROLLOUT}.multi_turn.enable=true "
            f"(or, to describe tools in the prompts and no more, data.{only} instead)"
        )
    if settings.interaction_config_path is not None and plain and not settings.enable:
        yield (
            f"{_ROLLOUT}.multi_turn.interaction_config_path={settings.interaction_config_path} without a loop that "
            f"talks to users; set {_ROLLOUT}.multi_turn.enable=true"
        )
    if agent.function is not None or agent.command is not None:
        yield from check_connections(rollout)
    yield from check_source_file(f"{_ROLLOUT}.multi_turn.function_tool_path", settings.function_tool_path)


def check_connections(rollout: RolloutConfig) -> Iterator[str]:
    """The run's server must take all agents that run at once."""
    at_once, places = rollout.agent.max_running or MAX_AGENTS, rollout.server.max_connections
    if at_once > places:
        yield (
            f"{_ROLLOUT}.agent.max_running={at_once} agents may run at once, with a connection each, "
            f"and {_ROLLOUT}.server.max_connections={places}: the server would refuse the others (503); raise "
            "max_connections, or lower max_running"
        )
