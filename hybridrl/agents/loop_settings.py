"""Settings of sessions that no loop of the run reads: only the rows can tell, because they may choose loops."""

from collections.abc import Iterable, Mapping
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.checks.branches import value_at
from hybridrl.config.checks.idle import conditional, default_at
from hybridrl.config.schema.conditions import LoopNeed
from hybridrl.errors import ConfigError
from hybridrl.registry import AGENT_LOOPS

_AGENT = "actor_rollout_ref.rollout.agent"
#: what verl's own scripts set for prompts that are answered once, too
_NOTICED = (f"{_AGENT}.num_workers",)


def names_in(dataset: Any, default: str) -> list[str] | None:
    """The loops of a dataset's rows; None for a dataset of one's own that does not say its columns."""
    columns = getattr(dataset, "columns", None)
    if columns is None:
        return None
    named = dataset.column("agent_name") if "agent_name" in columns else [None]
    return list(dict.fromkeys(default if name is None else str(name) for name in named))


def check_loop_settings(
    config: PPOTrainerConfig, datasets: Iterable[Any], default: str, classes: Mapping[str, type]
) -> None:
    """Refuse settings of sessions that none of the loops reads which the rows use.

    Args:
        datasets: of the run.
        default: the loop of rows without `agent_name`.
        classes: of loops that `agent.agent_loop_config_path` lists.

    Raises:
        ConfigError: there are some; each is named, with what would read it.
    """
    used: dict[str, None] = {}
    for dataset in datasets:
        names = names_in(dataset, default)
        if names is None:
            return  # its rows may choose any loop
        used.update(dict.fromkeys(names))
    if not used:
        return
    loops = [_registered_name(name, classes) for name in used]
    idle: dict[tuple[str, str], list[str]] = {}
    schema: type = type(config)
    for item in conditional(schema):
        needs = [condition for condition, _ in item.needs if isinstance(condition, LoopNeed)]
        unmet = [need for need in needs if not any(map(need.condition.met_by, loops))]
        if not unmet or item.key in _NOTICED:
            continue
        value = value_at(config, item.key)
        if value is not None and value != default_at(config, item.key):
            idle.setdefault((unmet[0].because, unmet[0].remedy), []).append(f"{item.key}={value}")
    own = config.actor_rollout_ref.rollout.agent.default_agent_loop
    faults = [
        f"{', '.join(settings)}: no row uses a loop that reads {'it' if len(settings) == 1 else 'them'}; the rows of "
        f"data.train_files and data.val_files are answered by {', '.join(used)}. Remove "
        f"{'it' if len(settings) == 1 else 'them'}, {remedy}, or name such a loop in the column agent_name"
        for (_, remedy), settings in idle.items()
    ]
    if own is not None and own not in used:
        faults.append(
            f"{_AGENT}.default_agent_loop={own}: each row names a loop in the column agent_name ({', '.join(used)}), "
            "so none is answered by it; remove it"
        )
    if faults:
        raise ConfigError(faults)


def _registered_name(name: str, classes: Mapping[str, type]) -> str:
    """The name of the library's loop that a loop of `agent_loop_config_path` is; the name itself for others."""
    if name not in classes:
        return name
    builtin = [entry for entry in AGENT_LOOPS.names() if AGENT_LOOPS.is_builtin(entry)]
    return next((entry for entry in builtin if AGENT_LOOPS.get(entry) is classes[name]), f"{name}:")
