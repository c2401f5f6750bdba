"""Whole jobs: `python -m hybridrl.trainer.main_ppo KEY=VALUE ...` in a process of its own."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 500
#: begin the names of metrics that time the work of processes, or count it since they started
MEASURED = (
    "timing_",
    "perf/",
    "rollout/tokens_per_s",
    "rollout/prompt_tokens",
    "rollout/update_weights_s",
    "rollout/update_weights_gb_per_s",
)


class Job:
    """One running command, its output in a file."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._file = open(log, "w")  # noqa: SIM115  (open as long as the process)
        self.process = subprocess.Popen(
            command,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=environment,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit: float = LIMIT_S) -> int:
        """The exit status.

        Raises:
            AssertionError: it did not end in time; its output is shown.
        """
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {limit} s:\n{self.output[-4000:]}") from None

    def wait_for(self, condition: Callable[[], bool], limit: float = LIMIT_S, every: float = 0.02) -> None:
        """Until `condition`, which is asked for every so many seconds, holds while the process runs."""
        deadline = time.monotonic() + limit
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"not within {limit} s:\n{self.output[-4000:]}"
            time.sleep(every)

    def kill(self) -> None:
        """SIGKILL to the controller, as the kernel's out-of-memory killer would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self._file.close()


def records(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics, a dict a record; nothing where there are none yet, nor a line that is being written."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def without_timing(record: dict[str, Any]) -> dict[str, Any]:
    """The metrics that a repeated run repeats."""
    return {name: value for name, value in record.items() if not name.startswith(MEASURED)}
