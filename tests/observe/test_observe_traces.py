"""Rollouts as traces: in a real MLflow on this machine, with a service that fails, and with one of one's own."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.config.schema.rollout import TraceConfig
from hybridrl.errors import RolloutError
from hybridrl.notify import forget
from hybridrl.observe.traces import SampleTrace, Traces, register_trace_backend
from hybridrl.observe.traces.sample_trace import local_store, trace_of
from hybridrl.observe.traces.sender import check_backend
from hybridrl.registry import TRACES

ROW = {
    "input": "what is 2*3?",
    "output": "call 6 done",
    "score": 0.5,
    "uid": "0-7",
    "data_source": "sums",
    "rollout": {
        "sample": 1,
        "num_turns": 4,
        "started": 1_700_000_000.0,
        "seconds": 2.0,
        "messages": [{"role": "user", "content": "what is 2*3?"}],
        "events": [
            {"kind": "generate", "at": 0.25, "seconds": 0.5, "prompt_tokens": 3, "tokens": 2, "finish_reason": "stop"},
            {"kind": "tool", "at": 0.75, "seconds": 0.25, "turn": 0, "name": "calculator",
             "arguments": {"expression": "2*3"}, "response": "6", "reward": None, "fault": "timeout"},
            {"kind": "generate", "at": 1.5, "seconds": 0.5, "prompt_tokens": 6, "tokens": 1, "finish_reason": "length"},
        ],
        "tokens": {
            "prompt_ids": [1, 2, 3], "ids": [10, 11, 12, 13], "texts": ["ca", "ll", " 6", " done"],
            "mask": [1, 1, 0, 1], "log_probs": [-0.5] * 4,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("token2text", [False, True])
def test_the_trace_of_a_sample(token2text: bool) -> None:
    trace = trace_of(ROW, 0.0, token2text, {"step": 3, "validate": False})
    whole, parts = trace.whole, trace.parts
    assert (whole.started, whole.seconds) == (1_700_000_000.0, 2.0)
    assert whole.inputs["prompt_ids"] == [1, 2, 3] and whole.outputs["response_ids"] == [10, 11, 12, 13]
    assert ("prompt_text" in whole.inputs) == ("response_text" in whole.outputs) == token2text
    assert whole.outputs["score"] == 0.5 and whole.attributes["step"] == 3 and whole.attributes["sample"] == 1
    assert [(part.name, part.started - whole.started, part.seconds) for part in parts] == [
        ("generate", 0.25, 0.5),
        ("calculator", 0.75, 0.25),
        ("generate", 1.5, 0.5),
    ]
    assert parts[0].outputs == {"token_ids": [10, 11], **({"text": "call"} if token2text else {})}
    assert parts[2].outputs["token_ids"] == [13] and parts[2].attributes["finish_reason"] == "length"
    assert parts[1].inputs == {"arguments": {"expression": "2*3"}} and parts[1].outputs == {"response": "6"}
    assert [part.failure for part in parts] == ["", "timeout", ""]


def test_a_sample_without_session_has_a_trace() -> None:
    trace = trace_of({"input": "p", "output": "o", "score": float("nan"), "uid": "0", "rollout": {}}, 5.0, True, {})
    assert (trace.whole.started, trace.parts) == (5.0, ()) and trace.whole.outputs["score"] == "NaN"


def test_traces_are_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the real package, into a database in the run's folder; what is read back is what was sent."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = TraceConfig(backend="mlflow", token2text=True, project_name="sums", experiment_name="run 1")
    traces = Traces(settings, tmp_path)
    traces.send([ROW, {**ROW, "uid": "0-8", "rollout": {}}], step=3, validate=False)
    traces.close()
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=local_store(tmp_path))
    experiment = client.get_experiment_by_name("sums")
    found = {one.info.tags["uid"]: one for one in client.search_traces(locations=[experiment.experiment_id])}
    assert found.keys() == {"0-7", "0-8"}
    trace = found["0-7"]
    assert trace.info.tags["step"] == "3" and trace.info.tags["experiment"] == "run 1"
    assert trace.info.execution_duration == 2000
    spans = {(span.name, span.start_time_ns): span for span in trace.data.spans}
    root = next(span for span in trace.data.spans if span.parent_id is None)
    assert root.inputs["prompt_text"] == "what is 2*3?" and root.outputs["score"] == 0.5
    tool = spans["calculator", 1_700_000_000_750_000_000]
    assert tool.parent_id == root.span_id and tool.inputs == {"arguments": {"expression": "2*3"}}
    assert tool.span_type == "TOOL" and tool.status.status_code == "ERROR" and tool.attributes["failure"] == "timeout"
    turn = spans["generate", 1_700_000_001_500_000_000]
    assert turn.end_time_ns == 1_700_000_002_000_000_000 and turn.outputs == {"token_ids": [13], "text": " done"}


@register_trace_backend("notes")
class Notes:
    """A service of one's own, which may fail or wait."""

    seen: ClassVar[list[SampleTrace]] = []
    fails: ClassVar[set[int]] = set()
    go: ClassVar[threading.Event] = threading.Event()
    closed: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, project: str, experiment: str, folder: Path) -> None:
        self.name = (project, experiment)
        self.count = 0

    def send(self, trace: SampleTrace) -> None:
        self.go.wait()
        self.count += 1
        if self.count in self.fails:
            raise ConnectionError("no service")
        self.seen.append(trace)

    def close(self) -> None:
        self.closed.append(self.name)


@pytest.fixture
def notes() -> type[Notes]:
    Notes.seen.clear(), Notes.closed.clear(), Notes.fails.clear(), Notes.go.set()
    return Notes


def test_a_service_that_fails_costs_traces_and_is_left_after_three_in_a_row(notes, tmp_path, capsys) -> None:
    notes.fails.update({2, 4, 5, 6})
    traces = Traces(TraceConfig(backend="notes", project_name="p", experiment_name="e"), tmp_path)
    traces.send([ROW] * 10, 1, False)
    traces.close()
    assert len(notes.seen) == 2 and notes.closed == [("p", "e")]
    told = capsys.readouterr().err
    assert told.count("no service") == 4 and "it is not used any more" in told and "8 were not sent to notes" in told


@pytest.mark.parametrize(("bound", "most"), [("_WAITING", 3), ("_WAITING_BYTES", 3 * len(pickle.dumps(ROW, -1)) + 1)])
def test_a_slow_service_does_not_hold_the_run(notes, tmp_path, monkeypatch, capsys, bound, most) -> None:
    """Neither its time nor, with few and large traces, its memory."""
    monkeypatch.setattr(f"hybridrl.observe.traces.sender.{bound}", most)
    forget()  # what is told once
    notes.go.clear()
    traces = Traces(TraceConfig(backend="notes"), tmp_path)
    traces.send([ROW] * 10, 1, False)  # returns though nothing is taken
    assert "slower than the run" in capsys.readouterr().err
    notes.go.set()
    traces.close()
    assert 3 <= len(notes.seen) <= 4 and f"{10 - len(notes.seen)} were not sent" in capsys.readouterr().err


def test_services_that_cannot_be_used_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_with(RolloutError, "trace.backend", "'jaeger'", "mlflow", "weave"):
        check_backend("jaeger")
    monkeypatch.setitem(sys.modules, "weave", None)
    with raises_with(RolloutError, "backend=weave"):
        check_backend("weave")


def test_settings_are_verls(capsys: pytest.CaptureFixture[str]) -> None:
    key = "actor_rollout_ref.rollout.trace"
    words = [f"{key}.backend=mlflow", f"{key}.token2text=True", f"{key}.max_samples_per_step_per_worker=4"]
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", "trainer.project_name=mine", *words])
    trace = config.actor_rollout_ref.rollout.trace
    assert (trace.backend, trace.token2text, trace.max_samples_per_step_per_worker) == ("mlflow", True, 4)
    assert (trace.project_name, trace.experiment_name) == ("mine", "default")
    assert set(TRACES.names()) >= {"mlflow", "weave"}
    code = "import sys, hybridrl.config, hybridrl.observe.traces; assert not {'mlflow', 'weave'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weave_gets_the_times_and_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for its client, whose methods have the signatures of weave 0.54."""
    calls: list[dict] = []

    class Client:
        def create_call(self, op, inputs, parent=None, attributes=None, display_name=None, *, use_stack=True,
                        _call_id_override=None, started_at=None):  # fmt: skip
            calls.append({"op": op, "inputs": inputs, "parent": parent, "attributes": attributes, "start": started_at})
            return len(calls) - 1

        def finish_call(self, call, output=None, exception=None, *, op=None, ended_at=None):
            calls[call] |= {"output": output, "exception": exception, "end": ended_at}

        def flush(self):
            calls.append({"op": "flush"})

    package = ModuleType("weave")
    package.init = lambda project: Client()
    monkeypatch.setitem(sys.modules, "weave", package)
    traces = Traces(TraceConfig(backend="weave", project_name="p", experiment_name="e"), tmp_path)
    traces.send([ROW], 3, False)
    traces.close()
    assert [call["op"] for call in calls] == ["rollout", "generate", "calculator", "generate", "flush"]
    assert [call["parent"] for call in calls[:4]] == [None, 0, 0, 0]
    assert [(call["end"] - call["start"]).total_seconds() for call in calls[:4]] == [2, 0.5, 0.25, 0.5]
    assert calls[0]["attributes"]["experiment"] == "e" and str(calls[2]["exception"]) == "timeout"
    assert calls[1]["exception"] is None and calls[3]["output"]["token_ids"] == [13]
