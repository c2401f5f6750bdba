"""Traces in W&B Weave."""

import datetime
from pathlib import Path
from typing import Any

from hybridrl.observe.traces.sample_trace import SampleTrace, Span, register_trace_backend


@register_trace_backend("weave", packages=("weave",), install="pip install weave")
class WeaveTraces:
    """Writes traces to the project of `WANDB_ENTITY`; the experiment is an attribute of each call.

    It needs `WANDB_API_KEY`.
    """

    def __init__(self, project: str, experiment: str, folder: Path) -> None:
        import weave  # type: ignore[import-not-found,unused-ignore]

        self._client: Any = weave.init(project)
        self._run = experiment

    def send(self, trace: SampleTrace) -> None:
        root = self._start(trace.whole, None)
        for part in trace.parts:
            self._end(self._start(part, root), part)
        self._end(root, trace.whole)

    def _start(self, span: Span, parent: Any) -> Any:
        return self._client.create_call(
            span.name,
            dict(span.inputs),
            parent=parent,
            attributes={**span.attributes, "kind": span.kind, "experiment": self._run},
            use_stack=False,
            started_at=_time(span.started),
        )

    def _end(self, call: Any, span: Span) -> None:
        error = RuntimeError(span.failure) if span.failure else None
        self._client.finish_call(
            call, output=dict(span.outputs), exception=error, ended_at=_time(span.started + span.seconds)
        )

    def close(self) -> None:
        self._client.flush()


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
