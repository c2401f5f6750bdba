"""Profiles chosen steps of a run on chosen ranks (`global_profiler`, and `profiler` of each role)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.schema.profiler import RoleProfilerConfig
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.trainer.ppo.roles import active_roles
from hybridrl.utils.files import check_writable
from hybridrl.workers.profiling import ProfileRequest

_NEED_GPU = ("torch_memory", "nsys")


class StepProfiler:
    """Has worker groups record what their ranks do in some steps.

    Args:
        config: the whole configuration.
        groups: worker groups by role.

    Raises:
        UserError: the tool needs GPUs and the ranks compute on CPUs, a rank does not exist, or the folder cannot be
            written.
    """

    def __init__(self, config: PPOTrainerConfig, groups: Mapping[str, Any]) -> None:
        self._config = config.global_profiler
        self._ranks: dict[str, list[int] | None] = {}
        self._groups: dict[str, Any] = {}
        if self._config.tool is None or not self._config.steps:
            return
        for spec in active_roles(config):
            role, where, wanted = (
                spec.name,
                f"{spec.where}.profiler",
                getattr(spec.settings_of(config), "profiler", None),
            )
            group = groups.get(role)
            if group is None or not isinstance(wanted, RoleProfilerConfig) or not wanted.enable:
                continue
            if not (wanted.all_ranks or wanted.ranks):
                continue
            if wrong := [rank for rank in wanted.ranks if not 0 <= rank < group.world_size]:
                raise UserError(
                    f"{where}.ranks={wanted.ranks}: {role} has the ranks 0 to {group.world_size - 1}, not {wrong}"
                )
            if self._config.tool in _NEED_GPU and "cpu" in group.device_name():
                raise UserError(
                    f"global_profiler.tool={self._config.tool} records GPUs, and the ranks of {role} compute on CPUs; "
                    "set it to torch"
                )
            self._groups[role] = group
            self._ranks[role] = None if wanted.all_ranks else list(wanted.ranks)
        self._folder = Path(self._config.save_path).expanduser().absolute()
        if self._groups:
            try:
                check_writable(self._folder)
            except OSError as error:
                raise UserError(
                    f"global_profiler.save_path={self._config.save_path}: the folder cannot be written "
                    f"({error.strerror or error}): name another folder"
                ) from error

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block, if it is one of the chosen steps. A block that fails leaves no files."""
        if not self._groups or number not in (self._config.steps or ()):
            yield
            return
        entries = self._config.global_tool_config.torch_memory.trace_alloc_max_entries
        for role, group in self._groups.items():
            request = ProfileRequest(
                str(self._config.tool), role, number, str(self._folder), self._ranks[role], entries
            )
            group.start_profile(request)
        yield
        files = [file for group in self._groups.values() for file in group.stop_profile() if file]
        notify(f"profiled step {number}: {len(files)} files in {self._folder / f'step_{number}'}")
