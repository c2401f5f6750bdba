"""Used by the programs that record an engine's own loader: comparing the recorded copies with a real load."""

import json
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from hybridrl.hybrid_engine.record import LoadRecorder
from hybridrl.layouts.model_tensors import model_tensors
from hybridrl.layouts.slices import count, slices_of
from hybridrl.layouts.topology import GenerationLayout
from hybridrl.models.model_config import load_model_config

PROCESSES = 2

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def compare(model: torch.nn.Module, load: Load, folder: str, layout: GenerationLayout, rank: int) -> dict[str, object]:
    """Record one load, carry its copies out by hand, and compare with the load itself.

    Tensors that cannot be planned are given to the loader before the copies, as a transfer brings them: whole.
    """
    with torch.no_grad():
        state = load_file(Path(folder) / "model.safetensors")
        parameters = dict(model.named_parameters()) | dict(model.named_buffers())
        for parameter in model.parameters():
            parameter.data.zero_()
        recorder = LoadRecorder(parameters, {name: tuple(t.shape) for name, t in state.items()}, torch.float32)
        with recorder:
            load(recorder.sources())
        untouched = all(not parameter.any() for parameter in model.parameters())
        load((name, state[name].clone()) for name in recorder.unplanned)  # some loaders change what they get
        for copy in (copy for copy in recorder.loaded if copy.source not in recorder.unplanned):
            part = state[copy.source][tuple(map(slice, copy.slice.start, copy.slice.stop))]
            whole = parameters[copy.parameter].data
            there = whole[tuple(map(slice, copy.parameter_slice.start, copy.parameter_slice.stop))]
            there.copy_(part.reshape(there.shape))
        by_hand = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for parameter in model.parameters():
            parameter.data.zero_()
        load((name, value.clone()) for name, value in state.items())
    return {
        "copies": len(recorder.loaded),
        "unplanned": recorder.unplanned,
        "untouched": untouched,
        "wrong": [name for name, parameter in parameters.items() if not torch.equal(parameter, by_hand[name])],
        **_against_rules(recorder, folder, layout, rank),
    }


def _against_rules(recorder: LoadRecorder, folder: str, layout: GenerationLayout, rank: int) -> dict[str, object]:
    """What the loader copies, against the slices that the rules of `model_tensors` give this rank."""
    specs, layers = model_tensors(load_model_config(folder))
    found = {spec.name: slices_of(spec, layout, layout.coordinates(rank), layers) for spec in specs}
    rules = {
        name: sorted((tensor_slice.start, tensor_slice.stop) for tensor_slice in slices)
        for name, slices in found.items()
    }
    required = recorder.required()
    names = [*required, *recorder.skipped, *recorder.unplanned]
    experts = {name for name in names if ".experts." in name}
    return {
        "skipped": [
            name for name in recorder.skipped if rules.get(name) or (name not in rules and name not in experts)
        ],
        "differ_from_rules": [
            name
            for name, slices in required.items()
            if name in rules
            and sorted((tensor_slice.start, tensor_slice.stop) for tensor_slice in slices) != rules[name]
        ],
        "without_rule": sorted(name for name in required if name not in rules and name not in experts),
        "experts_recorded": sum(count(required.get(name, ())) for name in experts),
        "experts_by_rules": sum(count(found[spec.name]) for spec in specs if spec.cut.expert_dim is not None),
    }


def run(arguments: list[str], main: Callable[[int, list[str], int], None]) -> None:
    """Fork two processes, once this one has imported what they need, and wait until they have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(main, (arguments, port), PROCESSES, start_method="fork")


def write(which: str, rank: int, report: dict[str, object]) -> None:
    """Write LAYOUT-RANK.json to the folder of a model."""
    layout, _, folder = which.partition("@")
    Path(folder, f"{layout}-{rank}.json").write_text(json.dumps(report))
