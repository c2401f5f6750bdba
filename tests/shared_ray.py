"""The Ray that all tests of a process share."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import forked_processes
import psutil
import pytest

_NEEDED = ("gcs_server", "raylet")


class SharedRay:
    """One Ray: 16 logical CPUs whatever the machine has, a 256 MB object store."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}
        self._servers = ExitStack()
        self._with_engines = False

    def start(self, with_engines: bool) -> None:
        """Start it, with the servers that fork its workers.

        Args:
            with_engines: see `forked_processes.running`.
        """
        from hybridrl.single_controller.ray.start_ray import start_ray

        self._with_engines = with_engines
        self._servers.enter_context(forked_processes.running(Path(os.environ["RAY_TMPDIR"]), with_engines))
        with pytest.MonkeyPatch.context() as patch:
            # Ray's process for logs looks for new files twice a second, among those of all workers that ever ran.
            patch.setenv("LOG_NAME_UPDATE_INTERVAL_S", "1.5")
            patch.setattr(sys, "executable", os.environ[forked_processes.ENGINES])  # of workers
            start_ray(
                address="local",  # another's cluster on this machine is none of ours
                num_cpus=16,
                include_dashboard=False,
                object_store_memory=256 * 1024**2,
                log_to_driver=True,
                logging_level="ERROR",
            )
        children = {child.name(): child for child in psutil.Process().children()}
        self._processes = {name: children[name] for name in _NEEDED}

    def end(self) -> None:
        import ray

        self._processes = {}
        ray.shutdown()
        self._servers.close()

    def check(self) -> None:
        """Start another one where a test has ended this one.

        Without its GCS, Ray ends this process a minute later, in the middle of another test.

        Raises:
            AssertionError: with the names of the processes that have ended.
        """
        ended = [name for name, process in self._processes.items() if not _runs(process)]
        if ended:
            self.end()
            self.start(self._with_engines)
            raise AssertionError(
                f"{' and '.join(ended)} of the Ray that all tests share ended during this test: it may end processes "
                "that it has started, and not others below this one"
            )


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
