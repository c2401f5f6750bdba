"""Readers of the YAML files of tools, loops, environments and simulated users, before a run starts anything."""

from collections.abc import Callable, Iterable, Iterator

from hybridrl.config.mappings import FILE, Entries, reads_mapping
from hybridrl.errors import RolloutError


@reads_mapping("tool-file")
def check_tool_file(entries: Entries) -> Iterator[str]:
    """Check the entries of `multi_turn.tool_config_path`."""
    from hybridrl.agents.tools.load_tools import check_file

    yield from _faults(check_file, entries)


@reads_mapping("user-file")
def check_user_file(entries: Entries) -> Iterator[str]:
    """Check the entries of `multi_turn.interaction_config_path`."""
    from hybridrl.agents.interactions.load_interactions import check_file

    yield from _faults(check_file, entries)


@reads_mapping("environment-file")
def check_environment_file(entries: Entries) -> Iterator[str]:
    """Check the entries of `agent.environment_config_path`."""
    from hybridrl.agents.environments.load_environments import check_file

    yield from _faults(check_file, entries)


@reads_mapping("loop-file")
def check_loop_file(entries: Entries) -> Iterator[str]:
    """Check the entries of `agent.agent_loop_config_path`."""
    from hybridrl.agents.agents import listed_loops

    yield from _faults(lambda path: listed_loops(path) and (), entries)


def _faults(check: Callable[[str], Iterable[str]], entries: Entries) -> Iterator[str]:
    try:
        yield from check(str(entries.values[FILE]))
    except RolloutError as error:  # about the file as a whole
        yield str(error)
