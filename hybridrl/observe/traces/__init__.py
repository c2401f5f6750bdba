"""Rollouts as traces in a tracing service (`rollout.trace`): a span per sample, generation and tool call."""

from hybridrl.observe.traces.sample_trace import SampleTrace, Span, TraceBackend, register_trace_backend
from hybridrl.observe.traces.sender import Traces

__all__ = ["SampleTrace", "Span", "TraceBackend", "Traces", "register_trace_backend"]
