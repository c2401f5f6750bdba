"""Creation and check of the objects that a run's sessions share: tools, parser, templates and loops by name."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.agents.entries import class_of, entries_of
from hybridrl.agents.environments.load_environments import Environments, load_environments
from hybridrl.agents.gateway import Gateway, gateways_of
from hybridrl.agents.interactions.load_interactions import Interactions, load_interactions
from hybridrl.agents.loop import AgentLoopBase, SessionClient
from hybridrl.agents.loop_settings import check_loop_settings, names_in
from hybridrl.agents.tools.load_tools import close_tools, load_tools
from hybridrl.agents.tools.tool import BaseTool
from hybridrl.chat.parsers.tool_parser import ToolParser, tool_parser_of
from hybridrl.chat.session_images import ImageReader, SeenImages
from hybridrl.chat.turns import Turns
from hybridrl.config import PPOTrainerConfig
from hybridrl.config.schema.multi_turn import AgentConfig
from hybridrl.errors import RolloutError
from hybridrl.models.info import eos_token_ids
from hybridrl.models.model_config import config_of
from hybridrl.models.vision import is_vision_model, processor_of
from hybridrl.notify import notify
from hybridrl.registry import AGENT_LOOPS
from hybridrl.utils.cores import available_cores

SINGLE_TURN, TOOLS = "single_turn_agent", "tool_agent"
_ROLLOUT = "actor_rollout_ref.rollout"
_MOST_WORKERS, _CORES_PER_WORKER = 8, 4  # where agent.num_workers is not set


@dataclass(frozen=True)
class LoopEntry:
    """A loop, and the arguments of its entry in `agent_loop_config_path`."""

    cls: type[AgentLoopBase]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Agents:
    """Everything that sessions share.

    Attributes:
        config: the whole configuration.
        tokenizer: a copy of the policy's, which no other thread uses.
        default: the loop of rows without `agent_name`.
        ends: tokens that end a turn of the model.
        loops: by name.
        tools: by name.
        parser: of `multi_turn.format`.
        turns: makes the tokens between turns.
        environments: None where no loop acts on them.
        gateways: run the agents of loops behind the run's server, by the name of the loop.
        interactions: simulated users; None where there are none.
        reader: of the images of sessions; None: the model reads text alone.
    """

    config: PPOTrainerConfig
    tokenizer: Any
    default: str
    ends: Sequence[int]
    loops: Mapping[str, LoopEntry]
    tools: Mapping[str, BaseTool]
    parser: ToolParser
    turns: Turns
    environments: Environments | None = None
    interactions: Interactions | None = None
    gateways: Mapping[str, Gateway] = field(default_factory=dict)
    reader: ImageReader | None = None

    def session_images(self) -> SeenImages | None:
        """Return a record of images for a new session; None: the model reads text alone."""
        return None if self.reader is None else SeenImages(self.reader)

    @property
    def workers(self) -> int:
        """Number of worker processes that run sessions; 0: the controller runs all of them."""
        if all(entry.cls.runs_on_controller() for entry in self.loops.values()):
            return 0
        setting = self.config.actor_rollout_ref.rollout.agent.num_workers
        return min(_MOST_WORKERS, available_cores() // _CORES_PER_WORKER) if setting is None else setting

    @property
    def acts_on_controller(self) -> bool:
        """Whether a loop acts on environments in the controller's process."""
        classes = [entry.cls for entry in self.loops.values()]
        return any(cls.uses_environments and (not self.workers or cls.runs_on_controller()) for cls in classes)

    def runs_on_controller(self, name: str | None) -> bool:
        """Whether sessions of this loop run in the controller's process; None: the default loop."""
        entry = self.loops.get(name or self.default)
        return entry is None or entry.cls.runs_on_controller()  # that there is none is told by `loop`

    def uses_gateway(self, name: str | None) -> bool:
        """Whether sessions of this loop are agents behind the gateway; None: the default loop."""
        entry = self.loops.get(name or self.default)
        return entry is not None and entry.cls.uses_gateway

    def loop(self, name: str | None, client: SessionClient) -> AgentLoopBase:
        """The loop of a session."""
        entry = self.loops[name or self.default]
        return entry.cls(
            trainer_config=self.config,
            server_manager=client,
            tokenizer=self.tokenizer,
            processor=None,
            data_config=self.config.data,
            tools=self.tools,
            parser=self.parser,
            turns=self.turns,
            environments=self.environments,
            gateway=self.gateways.get(name or self.default),
            interactions=self.interactions,
            **entry.arguments,
        )

    def close(self) -> None:
        """End the agents, the tools and the environments."""
        for gateway in self.gateways.values():
            gateway.close()
        if self.environments is not None:
            self.environments.close()
        paths = self.config.actor_rollout_ref.rollout.multi_turn
        close_tools(paths.tool_config_path, paths.function_tool_path)


def create_agents(config: PPOTrainerConfig, tokenizer: Any, datasets: Iterable[Any]) -> Agents | None:
    """Create and check the objects that a run's sessions share; None if each prompt is answered once, without agents.

    Args:
        datasets: whose rows may name a loop in the column `agent_name`; None entries are skipped.

    Raises:
        RolloutError: a loop, tool or setting cannot work, or the chat template cannot be continued.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    settings = rollout.multi_turn
    datasets = [data for data in datasets if data is not None]
    default = rollout.agent.default_agent_loop or (TOOLS if settings.enable else SINGLE_TURN)
    listed = listed_loops(rollout.agent.agent_loop_config_path)
    names = dict.fromkeys([default, *(name for data in datasets for name in names_in(data, default) or ())])
    check_loop_settings(config, datasets, default, {name: entry.cls for name, entry in listed.items()})
    if names.keys() == {SINGLE_TURN} and not listed:
        return None
    if config.data.last_assistant_turn == "continue":
        raise RolloutError(
            f"data.last_assistant_turn=continue with the agent loops {', '.join(names)}: only loops that answer each "
            f"prompt once ({SINGLE_TURN}) go on with the beginning of an answer; set data.last_assistant_turn=error or "
            "ground_truth"
        )
    ends = eos_token_ids(model.path, config_of(model), tokenizer)
    agents = make_agents(config, copy.deepcopy(tokenizer), default, names, ends)
    turns = agents.turns
    for data in datasets:
        _check_columns(agents.loops, default, data)
        if getattr(data, "has_videos", False):
            raise RolloutError(
                f"data.video_key={config.data.video_key}: rows have videos, and sessions of agents show images and "
                "text; leave out these rows, or answer each prompt once, without agents"
            )
    for tool in agents.tools.values():
        tool.check_settings(settings)
    if agents.interactions is not None:
        named = "interaction_kwargs"
        agents.interactions.check_rows(kwargs_of(row, named) for data in datasets for row in _rows_with(data, named))
        turns.check(None)
    if TOOLS in names and (agents.tools or agents.interactions is None):
        _check_tools(agents.tools, turns)
    agents.environments = _environments(rollout.agent, agents.loops, datasets, turns)
    if agents.environments is not None and agents.workers and not agents.acts_on_controller:
        agents.environments.close()  # that they start was checked; each worker starts its own
    acted_on = "" if agents.environments is None else f"; environments: {', '.join(agents.environments.entries)}"
    notify(f"agents: {', '.join(names)}; tools: {', '.join(agents.tools) or 'none'}{acted_on}")
    entries = {name: (entry.cls, entry.arguments) for name, entry in agents.loops.items()}
    agents.gateways = gateways_of(rollout, entries, turns)
    if agents.gateways and agents.reader is not None:
        for data in datasets:  # agents send the images of their rows
            data.keeps_image_files = True
    if rollout.agent.num_workers and not agents.workers:
        notify(
            f"{_ROLLOUT}.agent.num_workers={rollout.agent.num_workers} has no effect here: sessions of "
            f"{', '.join(names)} only wait for the model or for an agent's own process, and run on the controller",
            "warning",
        )
    return agents


def make_agents(
    config: PPOTrainerConfig, tokenizer: Any, default: str, names: Iterable[str], ends: Sequence[int]
) -> Agents:
    """Create the objects that the sessions of a process share, without environments and gateway.

    Args:
        tokenizer: which nothing else uses.
        default: the loop of rows without `agent_name`.
        names: the loops of the run.
        ends: tokens that end a turn of the model.

    Raises:
        RolloutError: a loop, a tool or a simulated user cannot be made.
    """
    rollout = config.actor_rollout_ref.rollout
    settings = rollout.multi_turn
    listed = listed_loops(rollout.agent.agent_loop_config_path)
    loops = listed | {name: LoopEntry(_registered(name)) for name in names if name not in listed}
    tools = {tool.name: tool for tool in load_tools(settings.tool_config_path, settings.function_tool_path)}
    template_kwargs = dict(config.data.apply_chat_template_kwargs or {})
    reader = _reader(config)
    for tool in tools.values():
        tool.model_reads_images = reader is not None
    processor = None if reader is None else reader.processor
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    turns = Turns(tokenizer, ends, template_kwargs, settings.tokenization_sanity_check_mode, processor, longest)
    path = settings.interaction_config_path
    users = None if path is None else load_interactions(path)
    parser = tool_parser_of(settings.format, tokenizer)
    return Agents(config, tokenizer, default, ends, loops, tools, parser, turns, interactions=users, reader=reader)


def _reader(config: PPOTrainerConfig) -> ImageReader | None:
    """The reader that makes patches of the images of sessions; None for a model that reads text alone."""
    model = config.actor_rollout_ref.model
    if not is_vision_model(config_of(model)):
        return None
    processor = processor_of(model, config.data.mm_processor_kwargs)
    assert processor is not None  # the model reads images
    return ImageReader(processor, config.actor_rollout_ref.rollout.limit_images)


def _environments(
    agent: AgentConfig, loops: Mapping[str, LoopEntry], datasets: Iterable[Any], turns: Turns
) -> Environments | None:
    """The environments of the run, started; None where no loop acts on one.

    Raises:
        RolloutError: an environment cannot work, or the chat template cannot show its observations.
    """
    if not any(entry.cls.uses_environments for entry in loops.values()):
        keys = ("default_environment", "environment_config_path")
        unread = [name for name in keys if getattr(agent, name) is not None]
        if unread:
            raise RolloutError(
                f"{_ROLLOUT}.agent.{unread[0]}={getattr(agent, unread[0])} without a loop that acts on environments; "
                f"set {_ROLLOUT}.agent.default_agent_loop=env_agent, or name env_agent in the column agent_name"
            )
        return None
    turns.check(None)
    row_names = [
        kwargs_of(row, "env_kwargs").get("name") for data in datasets for row in _rows_with(data, "env_kwargs")
    ]
    names = dict.fromkeys(str(name) for name in row_names if name)
    return load_environments(agent.environment_config_path, agent.default_environment, names)


def kwargs_of(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments that a row has in the column of this name, or in that entry of `extra_info` as verl's data do."""
    kwargs, info = row.get(name), row.get("extra_info")
    if kwargs is None and isinstance(info, Mapping):
        kwargs = info.get(name)
    return dict(kwargs or {})


def _rows_with(dataset: Any, name: str) -> list[dict[str, Any]]:
    """The columns of each row that `kwargs_of` reads."""
    columns = [column for column in (name, "extra_info") if column in getattr(dataset, "columns", ())]
    values = [dataset.column(column) for column in columns]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _check_tools(tools: Mapping[str, BaseTool], turns: Turns) -> None:
    """Refuse a tool loop without tools, or with a template that cannot show their answers."""
    if not tools:
        raise RolloutError(
            f"{_ROLLOUT}.multi_turn.enable=true with the loop {TOOLS}, which has no tools; name them with "
            f"{_ROLLOUT}.multi_turn.tool_config_path or .function_tool_path, name simulated users with "
            f"{_ROLLOUT}.multi_turn.interaction_config_path, or choose another loop with "
            f"{_ROLLOUT}.agent.default_agent_loop"
        )
    schemas = [tool.tool_schema for tool in tools.values()]
    turns.check(schemas)
    question = [{"role": "user", "content": "?"}]
    if turns.prompt(question, schemas) == turns.prompt(question):
        notify(
            "the chat template does not show tools to the model: describe them in the prompts (data.system_prompt), or "
            "give a template that does with actor_rollout_ref.model.custom_chat_template",
            "warning",
        )


def _check_columns(loops: Mapping[str, LoopEntry], default: str, dataset: Any) -> None:
    """Refuse data without a column that the loop of some of its rows needs.

    Of a dataset of one's own that does not say its columns, only the rows can tell, when they are sampled.
    """
    columns = getattr(dataset, "columns", ())
    for name in names_in(dataset, default) or ():
        lacking = [column for column in loops[name].cls.needs_columns if column not in columns]
        if lacking:
            raise RolloutError(
                f"rows of the agent loop {name} need the column {lacking[0]}, and the data have, besides the prompt, "
                f"{', '.join(columns) or 'no columns'}; add it to the files of data.train_files "
                "and data.val_files, or choose another loop for these rows with the column agent_name or "
                f"{_ROLLOUT}.agent.default_agent_loop"
            )


def _registered(name: str) -> type[AgentLoopBase]:
    if not AGENT_LOOPS.knows(name):
        raise RolloutError(
            f"agent loop {name!r} (agent_name of a row, or {AGENT_LOOPS.key}): choose from "
            f"{', '.join(AGENT_LOOPS.names())}. Your own is registered with @register(name) in a module that "
            "actor_rollout_ref.model.external_lib names, listed in rollout.agent.agent_loop_config_path, or named "
            "itself as module:Class"
        )
    cls = AGENT_LOOPS.get(name)
    if not (isinstance(cls, type) and issubclass(cls, AgentLoopBase)):
        raise RolloutError(f"agent loop {name!r}: {cls!r} is not derived from hybridrl.agents.AgentLoopBase")
    return cls


def listed_loops(path: str | None) -> dict[str, LoopEntry]:
    """The loops of `agent_loop_config_path`: a list of `{name: ..., _target_: NAME or MODULE.CLASS, ...}`."""
    if path is None:
        return {}
    setting, form = f"{_ROLLOUT}.agent.agent_loop_config_path", "{name: NAME, _target_: NAME or MODULE.CLASS, ...}"
    key = f"{setting}={path}"
    loops = {}
    for number, entry in enumerate(entries_of(path, setting, None, form)):
        if not isinstance(entry, Mapping) or not {"name", "_target_"} <= entry.keys():
            raise RolloutError(f"{key}: entry {number} is {entry!r}, and must be {form}")
        cls = class_of(str(entry["_target_"]), f"{key}: _target_", AGENT_LOOPS, AgentLoopBase)
        arguments = {str(name): value for name, value in entry.items() if name not in ("name", "_target_")}
        loops[str(entry["name"])] = LoopEntry(cls, arguments)
    return loops
