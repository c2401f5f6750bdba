"""Loading what arrived with an engine's own loader, against its real load of whole tensors."""

from collections.abc import Callable, Iterable

import pytest
import torch

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.record import LoadRecorder, LoadReplay
from hybridrl.layouts.digest import digest
from hybridrl.layouts.slices import TensorSlice, TensorSlices, whole

SHAPES = {"q": (8, 4), "k": (4, 4), "embed": (7, 4), "up": (6, 4), "down": (4, 6), "scale": (4,), "last": (3,)}
DTYPES = dict.fromkeys(SHAPES, torch.float32) | {"scale": torch.float64}


class LayeredEngine:
    """Loads its part of a layer into temporary tensors when all of the layer is there, and repacks them.

    So does vLLM: before that, the loaders are run on tensors without memory, which counts their elements.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kernel: dict[str, torch.Tensor] = {}
        self.layer: list[tuple[str, torch.Tensor]] = []

    def _place(self, memory: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        rank = self.rank
        if name == "q":
            memory["qkv"].narrow(0, 0, 4).copy_(tensor.narrow(0, rank * 4, 4))
        elif name == "k":
            memory["qkv"][4:6].copy_(tensor.view(2, 2, 4)[rank])
        elif name == "embed":
            rows = tensor[rank * 4 : rank * 4 + 4]
            memory["embed"][: len(rows)].copy_(rows)
            memory["embed"][len(rows) :].fill_(0)
        elif name == "up":
            memory["experts"][0].copy_(tensor[rank * 3 : rank * 3 + 3])
        elif name == "down":
            memory["experts"][1].copy_(tensor[:, rank * 3 : rank * 3 + 3].t().contiguous())  # computed: comes whole
        elif name == "scale":
            memory["scale"].copy_(tensor.to(torch.device("cpu")))
            memory["scale_again"].copy_(tensor)

    def _memory(self, device: str) -> dict[str, torch.Tensor]:
        shapes = {"qkv": (6, 4), "embed": (4, 4), "experts": (2, 3, 4), "scale": (4,), "scale_again": (4,)}
        return {name: torch.full(shape, torch.nan, device=device) for name, shape in shapes.items()}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if tensor.is_meta and name != "down":
                self._place(self._memory("meta"), name, tensor)
            self.layer.append((name, tensor))

    def settle(self) -> None:
        """The layer is complete: load it, repack it."""
        memory = self._memory("cpu")
        for name, tensor in self.layer:
            self._place(memory, name, tensor)
        self.layer = []
        self.kernel = {name: tensor.flip(0).contiguous() for name, tensor in memory.items()}


def recorded(engine: LayeredEngine) -> LoadRecorder:
    recorder = LoadRecorder(None, SHAPES, DTYPES)
    with recorder:
        engine.load(recorder.sources())
        engine.settle()
    return recorder


def pieces(name: str, slices: TensorSlices, value: torch.Tensor) -> list[tuple[TensorSlice, torch.Tensor]]:
    """The slices, each cut in two along its longest dimension, as they come from two training ranks."""
    found = []
    for tensor_slice in slices:
        dim = max(range(len(tensor_slice.start)), key=lambda d: tensor_slice.extents[d])
        middle = (tensor_slice.start[dim] + tensor_slice.stop[dim] + 1) // 2
        for begin, end in ((tensor_slice.start[dim], middle), (middle, tensor_slice.stop[dim])):
            if begin < end:
                start = (*tensor_slice.start[:dim], begin, *tensor_slice.start[dim + 1 :])
                part = TensorSlice(start, (*tensor_slice.stop[:dim], end, *tensor_slice.stop[dim + 1 :]))
                found.append((part, value[part.within(whole(SHAPES[name]))].clone()))
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_what_arrives_in_pieces_is_loaded_as_whole_tensors_are(rank: int) -> None:
    state = {name: torch.randn(shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()}
    engine, loaded = LayeredEngine(rank), LayeredEngine(rank)
    recorder = recorded(engine)
    assert set(recorder.unplanned) == {"down"} and recorder.skipped == ("last",)
    assert recorder.uses["scale", whole((4,))] == 2
    replay = LoadReplay(SHAPES, DTYPES, recorder.uses, recorder.unplanned)
    required = recorder.required() | {"down": (whole(SHAPES["down"]),)}
    assert "last" not in required
    for names in (["q", "k"], ["embed", "up", "down"], ["scale"]):  # the rounds of a transfer
        bucket = []
        for name in names:
            parts = pieces(name, required[name], state[name])
            replay.arrive(name, parts)
            bucket += [part for _, part in parts]
        with replay:
            engine.load([(name, replay.tensor(name)) for name in names])
        replay.keep_the_rest()
        for part in bucket:
            part.fill_(-1)  # the sender overwrites it
    with replay:
        engine.settle()
    assert replay.faults() == []
    loaded.load(state.items())
    loaded.settle()
    for name, value in loaded.kernel.items():
        assert torch.equal(engine.kernel[name], value), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda replay, engine: torch.zeros(4, 4).copy_(replay.tensor("q")[:4] * 2), "q.*mul"),
        (lambda replay, engine: torch.zeros(2, 4).copy_(replay.tensor("k")[:2]), "elements"),
    ],
    ids=["computed", "another slice"],
)
def test_another_load_than_the_recorded_one_is_refused(
    change: Callable[[LoadReplay, LayeredEngine], None], says: str
) -> None:
    engine = LayeredEngine(1)
    recorder = recorded(engine)
    replay = LoadReplay(SHAPES, DTYPES, recorder.uses, recorder.unplanned)
    for name in ("q", "k"):
        replay.arrive(name, pieces(name, recorder.required()[name], torch.zeros(SHAPES[name])))
    with pytest.raises(ModelError, match=says), replay:
        change(replay, engine)
        engine.settle()


def test_tensors_that_are_missing_or_differ_from_their_digest_are_named() -> None:
    engine = LayeredEngine(0)
    recorder = recorded(engine)
    replay = LoadReplay(SHAPES, DTYPES, recorder.uses, recorder.unplanned)
    for name in ("q", "k", "down"):
        slices = recorder.required().get(name) or (whole(SHAPES[name]),)
        parts = pieces(name, slices, torch.randn(SHAPES[name]))
        digests = {tensor_slice: digest(part, tensor_slice, SHAPES[name]) for tensor_slice, part in parts}
        if name != "q":
            parts[-1][1][0, 0] += 1  # on the way
        replay.arrive(name, parts, digests)
    with replay:
        engine.load([(name, replay.tensor(name)) for name in ("q", "k", "down")])
        engine.settle()
    assert set(replay.wrong) == {"k", "down"}
    missing, wrong = replay.faults()
    assert "embed" in missing and "down, k" in wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_digests_of_parts_add_up_and_see_every_change(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (7, 5, 3)
    value = torch.arange(105).view(shape).to(dtype)
    value[1] = value[0].flip(0)  # a row of the same sum
    total = digest(value, whole(shape), shape)
    slices = [TensorSlice((0, 0, 0), (4, 5, 3)), TensorSlice((4, 0, 0), (7, 2, 3)), TensorSlice((4, 2, 0), (7, 5, 3))]
    assert (
        sum(digest(value[tensor_slice.within(whole(shape))], tensor_slice, shape) for tensor_slice in slices) % 2**64
        == total
    )
    monkeypatch.setattr("hybridrl.layouts.digest._CHUNK", 16)
    assert digest(value, whole(shape), shape) == total
    changed, swapped = value.clone(), value.clone()
    changed[6, 4, 2] += 1
    swapped[0], swapped[1] = value[1], value[0]
    assert total not in (digest(changed, whole(shape), shape), digest(swapped, whole(shape), shape))
