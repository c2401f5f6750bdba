"""Profiles chosen steps of a run on chosen ranks (`global_profiler` of a run, and `profiler` of a role)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.schema.profiler import GlobalProfilerConfig, RoleProfilerConfig
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.utils.files import check_writable
from hybridrl.workers.profiling import ProfileRequest

_NEED_GPU = ("torch_memory", "nsys")


@dataclass(frozen=True)
class ProfiledRole:
    """A role that can be profiled.

    Attributes:
        name: part of the files' names.
        where: the key of its settings.
        settings: which of its ranks are profiled.
        group: its worker group.
    """

    name: str
    where: str
    settings: RoleProfilerConfig
    group: Any


class StepProfiler:
    """Has worker groups record what their ranks do in some steps.

    Args:
        config: what is recorded, in which steps.
        roles: those that can be profiled.

    Raises:
        UserError: the tool needs GPUs and the ranks compute on CPUs, a rank does not exist, or the folder cannot be
            written.
    """

    def __init__(self, config: GlobalProfilerConfig, roles: Iterable[ProfiledRole]) -> None:
        self._config = config
        self._roles: list[ProfiledRole] = []
        if config.tool is None or not config.steps:
            return
        for role in roles:
            settings, group = role.settings, role.group
            if not settings.enable or not (settings.all_ranks or settings.ranks):
                continue
            if wrong := [rank for rank in settings.ranks if not 0 <= rank < group.world_size]:
                raise UserError(
                    f"{role.where}.ranks={settings.ranks}: {role.name} has the ranks 0 to {group.world_size - 1}, not "
                    f"{wrong}"
                )
            if config.tool in _NEED_GPU and "cpu" in group.device_name():
                raise UserError(
                    f"global_profiler.tool={config.tool} records GPUs, and the ranks of {role.name} compute on CPUs; "
                    "set it to torch"
                )
            self._roles.append(role)
        self._folder = Path(config.save_path).expanduser().absolute()
        if self._roles:
            try:
                check_writable(self._folder)
            except OSError as error:
                raise UserError(
                    f"global_profiler.save_path={config.save_path}: the folder cannot be written "
                    f"({error.strerror or error}): name another folder"
                ) from error

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block, if it is one of the chosen steps. A block that fails leaves no files."""
        if not self._roles or number not in (self._config.steps or ()):
            yield
            return
        tool, folder = str(self._config.tool), str(self._folder)
        entries = self._config.global_tool_config.torch_memory.trace_alloc_max_entries
        for role in self._roles:
            ranks = None if role.settings.all_ranks else list(role.settings.ranks)
            role.group.start_profile(ProfileRequest(tool, role.name, number, folder, ranks, entries))
        yield
        files = [file for role in self._roles for file in role.group.stop_profile() if file]
        notify(f"profiled step {number}: {len(files)} files in {self._folder / f'step_{number}'}")
