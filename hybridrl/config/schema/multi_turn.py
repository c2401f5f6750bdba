"""Settings of sessions: `rollout.multi_turn` and `rollout.agent`."""

from dataclasses import dataclass

from hybridrl.config.schema.conditions import (
    Condition,
    Explained,
    LoopNeed,
    MetadataNeed,
    any_of,
    entry_has,
    is_not_set,
    is_set,
    on,
)
from hybridrl.config.schema.node import ConfigNode, key
from hybridrl.registry import AGENT_LOOPS, TOOL_PARSERS

_AGENT = "actor_rollout_ref.rollout.agent"
_LOOP = f"{_AGENT}.default_agent_loop"


def _loops(because: str, remedy: str, needs: MetadataNeed) -> LoopNeed:
    """A loop of sessions runs for which a condition holds. Rows may choose another than the settings do."""
    by_setting = Explained((is_set(_LOOP), needs), "")
    also: tuple[Condition, ...] = (is_set(f"{_AGENT}.agent_loop_config_path"),)
    if "environments" not in needs.values and "gateway" not in needs.values:
        also = (*also, Explained((is_not_set(_LOOP), on("actor_rollout_ref.rollout.multi_turn.enable")), ""))
    return LoopNeed(
        any_of(by_setting, also=also),
        f"{because}, unless rows name one in the column agent_name",
        f"set {_LOOP}={remedy}",
        condition=needs,
    )


_MANY_TURNS = _loops(
    "no setting chooses a loop of sessions", "tool_agent", entry_has(_LOOP, AGENT_LOOPS, "only_answers", False)
)
_WITH_TOOLS = _loops(
    "no setting chooses a loop with tools", "tool_agent", entry_has(_LOOP, AGENT_LOOPS, "reads", "tools")
)
_ENVIRONMENT = _loops(
    "no setting chooses a loop that acts on environments",
    "env_agent",
    entry_has(_LOOP, AGENT_LOOPS, "reads", "environments"),
)
_GATEWAY = _loops(
    "no setting chooses a loop of agents behind the gateway",
    "gateway_agent",
    entry_has(_LOOP, AGENT_LOOPS, "reads", "gateway"),
)


@dataclass
class MultiTurnConfig(ConfigNode):
    """`rollout.multi_turn`: sessions of several turns with tools."""

    enable: bool = key(
        False,
        "answer prompts by the loop tool_agent, unless agent.default_agent_loop names another",
        needs=any_of(
            is_not_set("..agent.default_agent_loop"),
            also=(entry_has("..agent.default_agent_loop", AGENT_LOOPS, "reads", "tools"),),
        ),
    )
    format: str = key("hermes", "how the model writes tool calls", registry=TOOL_PARSERS, needs=_MANY_TURNS)
    tool_config_path: str | None = key(None, "YAML file with tools; null: none", place="file", read_by="tool-file")
    function_tool_path: str | None = key(
        None, "Python file or module with functions marked @function_tool; null: none", place="code"
    )
    interaction_config_path: str | None = key(
        None,
        "YAML file with simulated users, {interaction: [{name, class_name, config}]}; null: none",
        place="file",
        read_by="user-file",
    )
    turn_rewards: bool = key(
        False,
        "tool_agent: scores of simulated users and rewards of tool calls are added to the score, at the last token of "
        "their turn; false: reward functions get them and no more",
        needs=_WITH_TOOLS,
    )
    max_assistant_turns: int | None = key(
        None, "turns of the model in a session; null: any number", gt=0, needs=_MANY_TURNS
    )
    max_user_turns: int | None = key(
        None,
        "rounds of answers of tools, users or environments in a session; null: any number",
        gt=0,
        needs=_MANY_TURNS,
    )
    max_parallel_calls: int = key(
        1, "tool calls of one turn that are run; further ones are answered with an error", gt=0, needs=_WITH_TOOLS
    )
    max_tool_response_length: int = key(
        256, "characters of a tool's answer; longer ones are cut", gt=0, needs=_WITH_TOOLS
    )
    tool_response_truncate_side: str = key(
        "middle",
        "what is cut off a longer answer: its beginning, middle or end",
        choices=("left", "middle", "right"),
        needs=_WITH_TOOLS,
    )
    tool_timeout_s: float = key(
        60.0,
        "seconds that a tool or a simulated user may take for a call; then the model gets an error, or the session has "
        "no score",
        gt=0,
        needs=_WITH_TOOLS,
    )
    tokenization_sanity_check_mode: str = key(
        "strict",
        "refuse chat templates that change earlier text of a conversation that goes on; ignore_strippable: whitespace "
        "may change; disable: anything may",
        choices=("strict", "ignore_strippable", "disable"),
        needs=_MANY_TURNS,
    )


@dataclass
class AgentConfig(ConfigNode):
    """`rollout.agent`: the loops that hold sessions."""

    default_agent_loop: str | None = key(
        None,
        "loop of rows without a column agent_name: its name, or module:Class; null: tool_agent with multi_turn.enable, "
        "else single_turn_agent",
    )
    agent_loop_config_path: str | None = key(
        None,
        "YAML file with loops of one's own, a list of {name, _target_, further arguments}; null: none",
        place="file",
        read_by="loop-file",
    )
    num_workers: int | None = key(
        None,
        "processes that run sessions with tools, environments, users or loops of one's own; 0: the controller runs "
        "them; null: one for each four cores of this machine, at most 8",
        ge=0,
        needs=_MANY_TURNS,
    )
    max_running: int | None = key(
        None,
        "sessions of a batch that run at once, whatever their loop; the others wait. null: 256 gateway "
        "agents, each with a process of its own, and 4096 others",
        gt=0,
        needs=_MANY_TURNS,
    )
    default_environment: str | None = key(
        None,
        "env_agent: environment of rows without env_kwargs.name: a name of environment_config_path, a registered name, "
        "or module:Class; null: the only one of environment_config_path",
        needs=_ENVIRONMENT,
    )
    environment_config_path: str | None = key(
        None,
        "YAML file with environments, {environments: [{name, class_name, config}]}; null: none",
        needs=_ENVIRONMENT,
        place="file",
        read_by="environment-file",
    )
    environment_timeout_s: float = key(
        60.0,
        "seconds that reset or step of an environment may take; then its session has no score",
        gt=0,
        needs=_ENVIRONMENT,
    )
    environment_turn_tokens: int | None = key(
        None,
        "env_agent: tokens of one turn; the environment gets a turn that is cut there; null: any number",
        gt=0,
        needs=_ENVIRONMENT,
    )
    function: str | None = key(
        None,
        "gateway_agent: the agent, a function (base_url, api_key, row) as module:function or FILE.py:function, async "
        "or not; null: agent.command",
        needs=_GATEWAY,
        place="code",
    )
    command: str | None = key(
        None,
        "gateway_agent: the agent, a command that finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, "
        "ANTHROPIC_API_KEY and HYBRIDRL_ROW in its environment; null: agent.function",
        needs=_GATEWAY,
    )
    timeout_s: float = key(
        1800.0, "gateway agents: seconds that an agent may take; then it is ended", gt=0, needs=_GATEWAY
    )
    sampling: str = key(
        "run",
        "gateway agents: whose temperature, top_p and top_k hold: run: those of the rollout, whatever "
        "requests say; agent: those of requests, where they have any",
        choices=("run", "agent"),
        needs=_GATEWAY,
    )
    match: str = key(
        "strict",
        "gateway agents: which messages continue a conversation: strict: the same text and calls; loose: "
        "ids of calls, spaces around text and the types of arguments may differ",
        choices=("strict", "loose"),
        needs=_GATEWAY,
    )
    trace_dir: str | None = key(
        None,
        "gateway agents: folder for the trace of each session, a JSON file of OpenEnv's TrainingTrace; "
        "null: none is written",
        needs=_GATEWAY,
        place="output",
    )
    retries: int = key(
        1,
        "times that a failed session is run again at once, next to the others; not after a time limit",
        ge=0,
        needs=_MANY_TURNS,
    )
    on_error: str | None = key(
        None,
        "a session that still fails: drop: its sample is left out; raise: the run ends; null: as algorithm.missing "
        "says for the reason",
        choices=("drop", "raise"),
        needs=_MANY_TURNS,
    )
