"""Tracking services with one interface. A service's package is imported only when its class is instantiated.

Each class connects in its constructor and then accepts the metrics and samples of each step. Services that cannot
delete what they were sent (`can_cut` False) are not sent a step again after a resume, because the repeated step has the
same numbers. `memory` is a small dict kept in the run folder, so that a resumed run continues the same online run.
"""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hybridrl.observe.jsonl import plain

Rows = Sequence[Mapping[str, Any]]


class Backend(Protocol):
    """The interface that `Tracking` requires of a service."""

    can_cut: bool

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step."""

    def log_generations(self, rows: Rows, step: int) -> None:
        """Send samples: rows with the same keys."""

    def cut_after(self, step: int) -> None:
        """Delete later steps. Called only if `can_cut`."""

    def finish(self, failed: bool) -> None:
        """Send what is pending and close."""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings, with keys joined by dots: `{"actor": {"lr": 1}}` -> `{"actor.lr": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _cells(rows: Rows) -> tuple[list[str], list[list[Any]]]:
    """Return column names and rows. Anything that is not a number or text becomes text."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> Any:
        value = plain(value)
        return value if isinstance(value, (int, float, str)) else "" if value is None else str(value)

    return columns, [[cell(row.get(column)) for column in columns] for row in rows]


def _markdown(rows: Rows) -> str:
    columns, cells = _cells(rows)
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(
        "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", "<br>") for c in line) + " |" for line in lines
    )


class _Permanent:
    """Base of the services that cannot delete what they received."""

    can_cut = False

    def cut_after(self, step: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} keeps what it was sent")


class TensorboardBackend:
    """Event files in `<run folder>/tensorboard`, or in `TENSORBOARD_DIR`."""

    can_cut = True

    def __init__(self, project: str, experiment: str, folder: Path, config: Mapping[str, Any], memory: dict) -> None:
        self._folder = os.environ.get("TENSORBOARD_DIR") or str(folder / "tensorboard")
        self._open(None)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(self._folder, purge_step=purge_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, rows: Rows, step: int) -> None:
        self._writer.add_text("val/generations", _markdown(rows), step)
        self._writer.flush()

    def cut_after(self, step: int) -> None:
        # Readers drop the entries of earlier files from the purge step on.
        self._writer.close()
        self._open(step + 1)

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WandbBackend(_Permanent):
    """Weights & Biases. Its environment variables (WANDB_MODE, WANDB_ENTITY, WANDB_API_KEY, ...) apply as usual."""

    def __init__(self, project: str, experiment: str, folder: Path, config: Mapping[str, Any], memory: dict) -> None:
        import wandb

        self._wandb: Any = wandb
        memory.setdefault("id", secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=project,
            name=experiment,
            id=memory["id"],
            # Only an online run can be continued. An offline run refuses the option with a warning.
            resume=None if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") else "allow",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns, cells = _cells(rows)
        self._run.log({"val/generations": self._wandb.Table(columns=columns, data=cells)}, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class MlflowBackend(_Permanent):
    """MLflow at `MLFLOW_TRACKING_URI`, or in `<run folder>/mlflow.db`."""

    # MLflow accepts letters, digits, _-./: and spaces.
    _NAMES = str.maketrans({"@": "_at_"})
    _MAX_PARAM, _PARAMS_A_CALL, _METRICS_A_CALL = 500, 100, 1000

    def __init__(self, project: str, experiment: str, folder: Path, config: Mapping[str, Any], memory: dict) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        if memory.get("uri") == uri and "run_id" in memory:
            self._run_id = memory["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(project)
        if existing is None:
            # The sqlite store belongs to this run, so keep artifacts next to it and not in the working directory.
            place = None if os.environ.get("MLFLOW_TRACKING_URI") else (folder.resolve() / "mlartifacts").as_uri()
            experiment_id = self._client.create_experiment(project, artifact_location=place)
        else:
            experiment_id = existing.experiment_id
        self._run_id = self._client.create_run(experiment_id, run_name=experiment).info.run_id
        memory.update(uri=uri, run_id=self._run_id)
        params = [Param(self._name(key), str(value)[: self._MAX_PARAM]) for key, value in flatten(config).items()]
        for start in range(0, len(params), self._PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + self._PARAMS_A_CALL])

    def _name(self, key: str) -> str:
        translated = key.translate(self._NAMES)
        return "".join(c if c.isalnum() or c in "_-./: " else "_" for c in translated)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        entries = [self._metric(self._name(key), float(value), now, step) for key, value in metrics.items()]
        for start in range(0, len(entries), self._METRICS_A_CALL):
            self._client.log_batch(self._run_id, metrics=entries[start : start + self._METRICS_A_CALL])

    def log_generations(self, rows: Rows, step: int) -> None:
        columns, cells = _cells(rows)
        table = {column: [row[i] for row in cells] for i, column in enumerate(columns)}
        self._client.log_table(self._run_id, table, f"generations/{step}.json")

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


class SwanlabBackend(_Permanent):
    """SwanLab. `SWANLAB_MODE` (online, local, offline, disabled) and `SWANLAB_API_KEY` apply as usual."""

    def __init__(self, project: str, experiment: str, folder: Path, config: Mapping[str, Any], memory: dict) -> None:
        import swanlab

        self._swanlab: Any = swanlab
        memory.setdefault("id", secrets.token_hex(11)[:21])
        online = os.environ.get("SWANLAB_MODE", "online") in ("online", "cloud")
        log_dir = Path(os.environ.get("SWANLAB_LOG_DIR") or folder / "swanlog")
        log_dir.mkdir(parents=True, exist_ok=True)
        swanlab.init(
            project=project,
            name=experiment,
            config=dict(config),
            log_dir=str(log_dir),
            **({"id": memory["id"], "resume": "allow"} if online else {}),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        texts = [self._swanlab.Text(_markdown([row])) for row in rows]
        self._swanlab.log({"val/generations": texts}, step=step)

    def finish(self, failed: bool) -> None:
        if failed:
            self._swanlab.finish(state="crashed", error="the run ended with an error")
        else:
            self._swanlab.finish()


class TrackioBackend(_Permanent):
    """Trackio, local unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says otherwise."""

    def __init__(self, project: str, experiment: str, folder: Path, config: Mapping[str, Any], memory: dict) -> None:
        import trackio

        self._trackio: Any = trackio
        memory.setdefault("name", f"{experiment}-{secrets.token_hex(3)}")
        self._run: Any = trackio.init(
            project=project, name=memory["name"], config=dict(config), resume="allow", embed=False
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns, cells = _cells(rows)
        self._trackio.log({"val/generations": self._trackio.Table(columns=columns, data=cells)}, step=step)

    def finish(self, failed: bool) -> None:
        self._trackio.finish()


class ClearmlBackend(_Permanent):
    """ClearML. `CLEARML_*` variables and clearml.conf apply as usual."""

    def __init__(self, project: str, experiment: str, folder: Path, config: Mapping[str, Any], memory: dict) -> None:
        from clearml import Task  # type: ignore[import-not-found,unused-ignore]

        self._task: Any = Task.init(
            project_name=project,
            task_name=experiment,
            continue_last_task=memory.get("id", False),
            output_uri=False,
            auto_connect_frameworks=False,
        )
        memory["id"] = self._task.id
        self._task.connect_configuration(dict(config), name="config")
        self._logger: Any = self._task.get_logger()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            title, _, series = name.rpartition("/")
            self._logger.report_scalar(title=title or name, series=series, value=value, iteration=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns, cells = _cells(rows)
        self._logger.report_table("val/generations", "samples", iteration=step, table_plot=[columns, *cells])

    def finish(self, failed: bool) -> None:
        if failed:
            self._task.mark_failed(status_reason="the run ended with an error")
        self._task.close()
