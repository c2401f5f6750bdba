"""Rollouts as traces in a tracing service (`rollout.trace`): a span per sample, generation and tool call."""

from hybridrl.observe.traces.sender import Traces
from hybridrl.observe.traces.trace import SampleTrace, Span, TraceBackend, register_trace_backend

__all__ = ["SampleTrace", "Span", "TraceBackend", "Traces", "register_trace_backend"]
