"""The tools of a run: from a YAML file, from Python files, and from MCP servers."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridrl.agents.entries import checked_config, class_of, entries_of
from hybridrl.agents.tools.tool import BaseTool, tool_of
from hybridrl.errors import RolloutError, UserError
from hybridrl.registry import TOOLS
from hybridrl.utils.user_code import OBJECT_SUFFIX, load_module, load_pickled

_KEY = "actor_rollout_ref.rollout.multi_turn"
_ENTRY = "{class_name: MODULE.CLASS, config: {...}, tool_schema: {...}}"

_loaded: dict[tuple[str | None, str | None], list[BaseTool]] = {}
_loading = threading.Lock()


def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[BaseTool]:
    """Return the tools of both files; each pair of files is loaded once per process.

    Raises:
        RolloutError: a file or an entry is wrong, or two tools have one name.
    """
    with _loading:
        paths = (tool_config_path, function_tool_path)
        if paths not in _loaded:
            _loaded[paths] = _load(*paths)
        return _loaded[paths]


def close_tools(tool_config_path: str | None, function_tool_path: str | None) -> None:
    """End what `load_tools` started."""
    with _loading:
        for tool in _loaded.pop((tool_config_path, function_tool_path), []):
            tool.close()


def tool_schemas(tool_config_path: str | None, function_tool_path: str | None) -> list[dict[str, Any]] | None:
    """The descriptions of the tools for the chat template; None without tools."""
    return [tool.tool_schema for tool in load_tools(tool_config_path, function_tool_path)] or None


def selected_tools(extra_info: Any, names: Sequence[str]) -> list[str]:
    """Return the names of a row's tools: those in `extra_info.tool_selection`, or all."""
    selection = extra_info.get("tool_selection") if isinstance(extra_info, Mapping) else None
    return (
        list(names) if selection is None or not len(selection) else [name for name in names if name in list(selection)]
    )


def _load(tool_config_path: str | None, function_tool_path: str | None) -> list[BaseTool]:
    tools: list[BaseTool] = []
    try:
        if tool_config_path is not None:
            for number, entry in enumerate(entries_of(tool_config_path, f"{_KEY}.tool_config_path", "tools", _ENTRY)):
                tools += _of_entry(entry, f"{_KEY}.tool_config_path={tool_config_path}: tools[{number}]")
        if function_tool_path is not None:
            tools += _of_functions(function_tool_path)
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RolloutError(f"{_KEY}: several tools are called {', '.join(twice)}; rename all but one")
    except BaseException:
        for tool in tools:
            tool.close()
        raise
    return tools


def check_file(path: str) -> Iterator[str]:
    """Yield a sentence for each fault of a file of tools that shows without making them."""
    for number, entry in enumerate(entries_of(path, f"{_KEY}.tool_config_path", "tools", _ENTRY)):
        try:
            checked_class(entry, f"{_KEY}.tool_config_path={path}: tools[{number}]")
        except RolloutError as error:
            yield str(error)


def checked_class(entry: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """The class of an entry of the YAML file, and its config.

    Raises:
        RolloutError: the entry has another form, there is no such class, or it does not read an entry of the config.
    """
    name = entry.get("class_name") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        raise RolloutError(f"{where}: it has no class_name; an entry is {_ENTRY}")
    if unknown := set(entry) - {"class_name", "config", "tool_schema"}:
        raise RolloutError(f"{where} ({name}): it has {', '.join(sorted(unknown))}, and an entry is {_ENTRY}")
    kind = class_of(name, where, TOOLS, BaseTool)
    return kind, checked_config(entry.get("config"), vars(kind).get("config_names"), f"{where} ({name})")


def _of_entry(entry: Any, where: str) -> list[BaseTool]:
    kind, config = checked_class(entry, where)
    name = entry["class_name"]
    try:
        if hasattr(kind, "from_config"):  # one entry may stand for several tools
            tools: list[BaseTool] = list(kind.from_config(config))
            return tools
        return [kind(config=config, tool_schema=entry.get("tool_schema"))]
    except UserError as error:
        raise RolloutError(f"{where}: {error}") from error
    except Exception as error:  # the user's class may raise anything
        raise RolloutError(f"{where}: making {name} failed: {type(error).__name__}: {error}") from error


def _of_functions(path: str) -> list[BaseTool]:
    key = f"{_KEY}.function_tool_path"
    if path.endswith(OBJECT_SUFFIX):
        written: list[BaseTool] = load_pickled(path, key, RolloutError)  # by hybridrl.grpo(tools=)
        return written
    module = load_module(path, key, RolloutError)
    tools = [tool for value in vars(module).values() if (tool := tool_of(value)) is not None]
    if not tools:
        raise RolloutError(f"{key}={path}: it has no function with the decorator @function_tool")
    return list(dict.fromkeys(tools))
