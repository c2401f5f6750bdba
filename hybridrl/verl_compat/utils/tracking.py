"""`verl.utils.tracking`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.observe import tracking

__all__ = ["Tracking"]


class Tracking(tracking.Tracking):
    """`hybridrl.observe.tracking.Tracking` with verl's arguments.

    `metrics.jsonl` is written in `VERL_FILE_LOGGER_ROOT`, by default `outputs`, under the names of project and
    experiment.

    Args:
        project_name, experiment_name: names of the project and the run.
        default_backend: one or several names of services.
        config: the settings, for services that store them.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", "outputs")) / project_name / experiment_name
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        super().__init__(names, project_name, experiment_name, folder, config)

    def log(self, data: Mapping[str, Any], step: int, backend: str | None = None) -> None:
        """Log the metrics of a step to all services.

        Raises:
            ValueError: `backend` asks for one service alone, or a value is not a single number.
        """
        if backend is not None:
            raise ValueError(f"Tracking.log(backend={backend!r}): every service gets all metrics; leave it out")
        super().log(data, step)
