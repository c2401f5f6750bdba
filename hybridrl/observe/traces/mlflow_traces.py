"""Traces in MLflow."""

import os
from pathlib import Path
from typing import Any

from hybridrl.observe.traces.sample_trace import SampleTrace, Span, local_store, register_trace_backend

_KINDS = {"session": "AGENT", "generate": "LLM", "tool": "TOOL"}


@register_trace_backend("mlflow", packages=("mlflow",), install="bash scripts/install.sh auto tracking")
class MlflowTraces:
    """Writes traces to `MLFLOW_TRACKING_URI`, or to `<run folder>/mlflow.db`.

    The project is MLflow's experiment, as for metrics.
    """

    def __init__(self, project: str, experiment: str, folder: Path) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        uri = os.environ.get("MLFLOW_TRACKING_URI") or local_store(folder)
        mlflow.set_tracking_uri(uri)  # tracing has no argument for it
        client = mlflow.MlflowClient(tracking_uri=uri)
        existing = client.get_experiment_by_name(project)
        if existing is None:
            place = None if os.environ.get("MLFLOW_TRACKING_URI") else (folder.resolve() / "mlartifacts").as_uri()
            self._experiment = client.create_experiment(project, artifact_location=place)
        else:
            self._experiment = existing.experiment_id
        self._run = experiment

    def send(self, trace: SampleTrace) -> None:
        whole = trace.whole
        tags = {name: str(value) for name, value in whole.attributes.items() if isinstance(value, str | int | bool)}
        root = self._start(whole, experiment_id=self._experiment, tags={**tags, "experiment": self._run})
        for part in trace.parts:
            self._end(self._start(part, parent_span=root), part)
        self._end(root, whole)

    def _start(self, span: Span, **further: Any) -> Any:
        return self._mlflow.start_span_no_context(
            span.name,
            span_type=_KINDS.get(span.kind, "UNKNOWN"),
            inputs=dict(span.inputs),
            attributes=dict(span.attributes),
            start_time_ns=_nanoseconds(span.started),
            **further,
        )

    def _end(self, started: Any, span: Span) -> None:
        if span.failure:
            started.set_attribute("failure", span.failure)
            started.set_status("ERROR")
        started.end(outputs=dict(span.outputs), end_time_ns=_nanoseconds(span.started + span.seconds))

    def close(self) -> None:
        self._mlflow.flush_trace_async_logging()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e6) * 1000  # seconds since the epoch are exact to a microsecond
