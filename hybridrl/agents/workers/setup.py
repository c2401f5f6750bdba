"""The start-up data of a session worker: the names, paths and settings from which it builds its `Agents`."""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from hybridrl.agents.agents import Agents, make_agents
from hybridrl.agents.environments.load_environments import load_environments
from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.notify import notify
from hybridrl.registry import (
    AGENT_LOOPS,
    ENVIRONMENTS,
    INTERACTIONS,
    TOOL_PARSERS,
    TOOLS,
    Registry,
    import_external_lib,
)
from hybridrl.utils.entry_metadata import EntryMetadata
from hybridrl.utils.user_code import load_module, loaded_file

_REGISTRIES: tuple[Registry[Any], ...] = (AGENT_LOOPS, TOOLS, TOOL_PARSERS, ENVIRONMENTS, INTERACTIONS)


@dataclass(frozen=True)
class SessionWorkerSetup:
    """The start-up data of a session worker.

    Attributes:
        path, folder: the controller's `sys.path` and working directory.
        files: the user's Python files that registered something.
        entries: (number of a registry, name, pickled entry) of what other modules registered.
        config: the pickled configuration.
        tokenizer: pickled; None: the worker loads it, because its class comes with the model.
        default, names, ends: see `make_agents`.
        environments, default_environment: see `load_environments`; None where no loop acts on any.
    """

    path: Sequence[str]
    folder: str
    files: Sequence[str]
    entries: Sequence[tuple[int, str, bytes]]
    config: bytes
    tokenizer: bytes | None
    default: str
    names: Sequence[str]
    ends: Sequence[int]
    environments: Sequence[str] | None
    default_environment: str | None


def setup_of(agents: Agents) -> SessionWorkerSetup:
    """Collect the start-up data from which other processes build the same `Agents`.

    Raises:
        RolloutError: the configuration cannot be sent to another process.
    """
    files: dict[str, None] = {}
    entries: list[tuple[int, str, bytes]] = []
    for number, registry in enumerate(_REGISTRIES):
        for name, entry in registry.objects.items():
            if registry.is_builtin(name) or ":" in name:
                continue
            if (file := loaded_file(entry)) is not None:
                files[file] = None
                continue
            try:
                entries.append((number, name, cloudpickle.dumps(entry)))
            except Exception as error:  # pickling runs the user's code
                notify(
                    f"{registry.kind} {name!r} cannot be sent to the processes that run sessions ({error!r}): put it "
                    "into a file that actor_rollout_ref.model.external_lib names, or set "
                    "actor_rollout_ref.rollout.agent.num_workers=0",
                    "warning",
                )
    try:
        config = cloudpickle.dumps(agents.config)
    except Exception as error:
        raise RolloutError(f"the configuration cannot be sent to the processes that run sessions: {error!r}") from error
    own = type(agents.tokenizer).__module__.startswith("transformers_modules")
    acted_on = agents.environments
    return SessionWorkerSetup(
        [os.path.abspath(path) for path in sys.path],
        os.getcwd(),
        list(files),
        entries,
        config,
        None if own else cloudpickle.dumps(agents.tokenizer),
        agents.default,
        list(agents.loops),
        list(agents.ends),
        None if acted_on is None else list(acted_on.entries),
        None if acted_on is None else acted_on.default,
    )


def agents_of(setup: SessionWorkerSetup) -> Agents:
    """Build the `Agents` that the sessions of this process share.

    Raises:
        RolloutError: something cannot be made here, such as a file that this node does not have.
    """
    sys.path += [path for path in setup.path if path not in sys.path]
    with contextlib.suppress(OSError):  # another node may lack it; paths that are not found are reported by name
        os.chdir(setup.folder)
    for file in setup.files:
        load_module(file, "a file that registered something", RolloutError)
    config: PPOTrainerConfig = cloudpickle.loads(setup.config)
    policy = config.actor_rollout_ref
    import_external_lib(policy.model.external_lib)
    for number, name, data in setup.entries:
        entry, registry = cloudpickle.loads(data), _REGISTRIES[number]
        if name not in registry.objects:  # importing its module may have registered it
            registry.add(name, entry, EntryMetadata())
    tokenizer = tokenizer_of(policy.model) if setup.tokenizer is None else cloudpickle.loads(setup.tokenizer)
    agents = make_agents(config, tokenizer, setup.default, setup.names, setup.ends)
    if setup.environments is not None:
        path = policy.rollout.agent.environment_config_path
        agents.environments = load_environments(path, setup.default_environment, setup.environments)
    return agents
