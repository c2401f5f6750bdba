"""Objects of a program that other processes need: what it registered itself, and its tools, as files of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config.convert import put
from hybridrl.errors import ConfigError, UserError
from hybridrl.registered_entries import write_entries
from hybridrl.utils.pickled_objects import write_object

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_LOOP = "actor_rollout_ref.rollout.agent"


def put_objects(
    tree: dict[str, Any], folder: Path, model_group: str, tools: Sequence[Callable[..., Any]] | None
) -> None:
    """Write the objects into a folder of the run, and name the files in its settings.

    Args:
        tree: the settings, nested.
        model_group: the group of the model, whose `external_lib` names what is registered.
        tools: functions that the model may call; None: there are none.

    Raises:
        ConfigError: something is no function, cannot be pickled, or is given twice.
    """
    if (entries := write_entries(folder)) is not None:
        modules = _value(tree, f"{model_group}.external_lib")
        put(tree, f"{model_group}.external_lib", f"{modules},{entries}" if modules else str(entries))
    if tools is None:
        return
    if model_group == "model":
        raise ConfigError("tools: only grpo and ppo have sessions in which a model calls tools; leave tools= away")
    if (file := _value(tree, f"{_MULTI_TURN}.function_tool_path")) is not None:
        raise ConfigError(f"tools= and {_MULTI_TURN}.function_tool_path={file}: name all tools in one place")
    put(tree, f"{_MULTI_TURN}.function_tool_path", str(_write_tools(tools, folder)))
    loops = (f"{_MULTI_TURN}.enable", f"{_LOOP}.default_agent_loop", f"{_LOOP}.agent_loop_config_path")
    if all(_value(tree, key) is None for key in loops):
        put(tree, f"{_MULTI_TURN}.enable", True)


def _write_tools(tools: Sequence[Callable[..., Any]], folder: Path) -> Path:
    from hybridrl.agents.tools.tool import function_tool, tool_of  # takes a moment (transformers)

    if not isinstance(tools, list | tuple) or not tools or not all(map(callable, tools)):
        raise ConfigError("tools: give a list of functions, with type hints and a docstring each")
    try:
        described = [tool_of(each) or tool_of(function_tool(each)) for each in tools]
    except UserError as error:
        raise ConfigError(f"tools: {error}") from error
    try:
        return write_object(described, folder, "tools")
    except Exception as error:  # objects that they refer to may raise anything
        names = ", ".join(getattr(each, "__name__", repr(each)) for each in tools)
        raise ConfigError(
            f"tools: {names} cannot be sent to the processes of agents ({type(error).__name__}: {error}). Something "
            "refers to an object that exists in this process only, such as a lock, an open file or a client: create "
            "that inside the function"
        ) from error


def _value(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
