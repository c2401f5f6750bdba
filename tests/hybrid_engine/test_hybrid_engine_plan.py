"""The plan of a transition, against element sets, the paper's formulas and an exhaustive search."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from paper_table import paper_fraction

from hybridrl.errors import ConfigError
from hybridrl.hybrid_engine.plan import best_slots, compared, engine_order, plan
from hybridrl.layouts.slices import Cut, TensorSlice, TensorSpec, slices_of
from hybridrl.layouts.topology import (
    GenerationLayout,
    Layout,
    MegatronLayout,
    ShardedLayout,
    paper_slot,
)

LAYERS = 8


def even_model(layers: int = LAYERS) -> list[TensorSpec]:
    """A model whose tensors all divide by 8 and are all cut: the paper's formulas hold for it exactly."""
    specs = []
    for layer in range(layers):
        specs += [
            TensorSpec(f"layers.{layer}.q", (16, 8), Cut(dim=0, heads=8), layer),
            TensorSpec(f"layers.{layer}.o", (8, 16), Cut(dim=1), layer),
            TensorSpec(f"layers.{layer}.gate_up", (32, 8), Cut(dim=0, sections=(16, 16)), layer),
        ]
    return specs


def full_model(layers: int = 4, tied: bool = False) -> list[TensorSpec]:
    """Every kind of tensor: norms, few KV heads, a vocabulary that needs padding, experts, tied embeddings."""
    specs = [TensorSpec("embed", (203, 8), Cut(dim=0, vocabulary=True), first=True, last=tied)]
    for layer in range(layers):
        specs += [
            TensorSpec(f"layers.{layer}.norm", (8,), Cut(), layer),
            TensorSpec(f"layers.{layer}.k", (16, 8), Cut(dim=0, heads=2, kv=True), layer),
            TensorSpec(f"layers.{layer}.o", (8, 16), Cut(dim=1), layer),
            TensorSpec(f"layers.{layer}.gate_up", (8, 16, 8), Cut(dim=1, sections=(8, 8), expert_dim=0), layer),
            TensorSpec(f"layers.{layer}.down", (8, 8, 8), Cut(dim=2, expert_dim=0), layer),
        ]
    specs.append(TensorSpec("norm", (8,), Cut(), last=True))
    return specs if tied else [*specs, TensorSpec("lm_head", (203, 8), Cut(dim=0, vocabulary=True), last=True)]


def indices(slices: tuple[TensorSlice, ...], shape: tuple[int, ...]) -> set[int]:
    """The flat indices of the elements in the slices, one by one."""
    found: set[int] = set()
    for tensor_slice in slices:
        ranges = [range(a, b) for a, b in zip(tensor_slice.start, tensor_slice.stop, strict=True)]
        for index in itertools.product(*ranges):
            flat = int(np.ravel_multi_index(index, shape))
            assert flat not in found, "slices overlap"
            found.add(flat)
    return found


def assert_exact(specs: list[TensorSpec], training: Layout, generation: GenerationLayout, layers: int) -> None:
    """Check a plan element by element: each device gets what it lacks, once, from a device that has it."""
    made = plan(specs, training, generation, layers)
    tensors = dict(made.tensors)
    received = np.zeros(training.devices, dtype=int)
    for spec in specs:
        held = [
            indices(slices_of(spec, training, training.coordinates(d), layers), spec.shape)
            for d in range(training.devices)
        ]
        needed = [
            indices(slices_of(spec, generation, generation.coordinates(made.slots[d]), layers), spec.shape)
            for d in range(training.devices)
        ]
        got: list[list[int]] = [[] for _ in held]
        for route in tensors[spec.name].routes:
            elements = indices((route.slice,), spec.shape)
            assert elements <= held[route.source]
            for target in route.targets:
                got[target] += elements
        for device in range(training.devices):
            assert sorted(got[device]) == sorted(needed[device] - held[device])
            received[device] += len(got[device])
    assert list(made.received) == list(received)
    assert list(made.reused + made.received) == list(made.needed)
    assert made.sent.sum() == made.received.sum()


def powers(limit: int) -> list[int]:
    """Powers of two up to a limit."""
    return [2**n for n in range(limit.bit_length()) if 2**n <= limit]


NESTED = [
    (t, p, t_g, p_g)
    for t, p in itertools.product(powers(8), powers(8))
    for t_g, p_g in itertools.product(powers(t), powers(p))
    if t * p <= 8
]


@pytest.mark.parametrize(("t", "p", "t_g", "p_g"), NESTED)
def test_bytes_are_those_of_table_2(t: int, p: int, t_g: int, p_g: int) -> None:
    training = MegatronLayout(tp=t, pp=p, dp=2)
    generation = GenerationLayout(tp=t_g, pp=p_g, replicas=2 * t * p // (t_g * p_g))
    specs = even_model()
    made = plan(specs, training, generation, LAYERS)
    assert set(made.received / made.elements) == {paper_fraction(t * p, t_g * p_g)}
    volumes = compared(made)
    assert volumes["this plan"].peak == made.elements // (t_g * p_g)
    assert volumes["this plan"].redundant == 0
    assert volumes["gather in the training group"].received == made.elements * (t * p - 1) // (t * p)
    assert volumes["gather everything"].received == made.elements * (2 * t * p - 1) // (2 * t * p)


@pytest.mark.parametrize(("t", "p", "t_g", "p_g"), NESTED)
def test_the_paper_s_grouping_is_a_best_one(t: int, p: int, t_g: int, p_g: int) -> None:
    training = MegatronLayout(tp=t, pp=p, dp=2)
    generation = GenerationLayout(tp=t_g, pp=p_g, replicas=2 * t * p // (t_g * p_g))
    specs = even_model()
    slots = [paper_slot(training, generation, device) for device in range(training.devices)]
    ours, theirs = plan(specs, training, generation, LAYERS), plan(specs, training, generation, LAYERS, slots)
    assert list(ours.received) == list(theirs.received)
    # within a copy, nobody needs anything from another: the all-gather stays in the micro data parallel group
    for _, tensor in theirs.tensors:
        for route in tensor.routes:
            assert {training.copy(target) for target in route.targets} == {training.copy(route.source)}


def test_two_shards_to_four_parts_by_hand() -> None:
    """FSDP2 on 4 devices to two engines of TP 2: half of the rows, all of the columns."""
    specs = [TensorSpec("rows", (8, 4), Cut(dim=0), 0), TensorSpec("columns", (8, 4), Cut(dim=1), 0)]
    made = plan(specs, ShardedLayout(4), GenerationLayout(tp=2, replicas=2), 1)
    assert made.slots == (0, 2, 1, 3)
    assert list(made.received) == [8 + 12] * 4  # 4 of 8 rows less 2 of its own; half of 8 x 4 less half of 2 rows
    rows = dict(made.tensors)["rows"]
    assert {(route.source, route.targets, route.slice.start, route.slice.stop) for route in rows.routes} == {
        (0, (1,), (0, 0), (2, 4)),
        (1, (0,), (2, 0), (4, 4)),
        (2, (3,), (4, 0), (6, 4)),
        (3, (2,), (6, 0), (8, 4)),
    }


@st.composite
def transitions(draw: st.DrawFn) -> tuple[Layout, GenerationLayout]:
    size = st.sampled_from([1, 2, 3, 4, 6, 8])
    if draw(st.booleans()):
        training: Layout = ShardedLayout(draw(size), draw(st.sampled_from([1, 2])))
    else:
        tp, pp, dp = (draw(st.sampled_from([1, 2])) for _ in range(3))
        cp, vpp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])) if pp == 2 else 1
        etp = draw(st.sampled_from([1, tp]))
        ep = draw(st.sampled_from([e for e in (1, 2, 4) if tp * dp * cp % (e * etp) == 0]))
        training = MegatronLayout(tp, pp, dp, cp, ep, etp, vpp)
    n = training.devices
    assume(n <= 12)
    tp = draw(st.sampled_from([t for t in (1, 2, 4, 8) if n % t == 0]))
    pp = draw(st.sampled_from([p for p in (1, 2, 3, 4) if n % (tp * p) == 0]))
    dp = draw(st.sampled_from([d for d in (1, 2) if n % (tp * pp * d) == 0]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if tp * dp % e == 0]))
    return training, GenerationLayout(tp, pp, dp, ep, n // (tp * pp * dp))


@settings(max_examples=80, deadline=None)
@given(transitions(), st.booleans())
def test_every_device_gets_just_what_it_lacks(layouts: tuple[Layout, GenerationLayout], tied: bool) -> None:
    training, generation = layouts
    assert_exact(full_model(tied=tied), training, generation, 4)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(
        [
            (MegatronLayout(tp=2, pp=2), GenerationLayout(tp=4)),
            (MegatronLayout(tp=2, pp=3), GenerationLayout(tp=2, pp=1, replicas=3)),
            (MegatronLayout(tp=1, pp=6), GenerationLayout(tp=2, pp=3)),
            (MegatronLayout(tp=2, pp=1, dp=3), GenerationLayout(tp=1, pp=3, replicas=2)),
            (ShardedLayout(6), GenerationLayout(tp=2, pp=3)),
            (ShardedLayout(5), GenerationLayout(tp=1, replicas=5)),
            (ShardedLayout(3, 2), GenerationLayout(tp=2, replicas=3)),
        ]
    ),
    st.permutations(range(6)),
    st.integers(1, 40),
)
def test_no_other_placement_moves_less(layouts: tuple[Layout, GenerationLayout], order: list[int], rows: int) -> None:
    training, generation = layouts
    specs = [
        TensorSpec("rows", (rows * 4, 8), Cut(dim=0), 0),
        *[TensorSpec(f"layers.{i}.o", (8, 12), Cut(dim=1), i) for i in range(6)],
    ]
    others = [slot for slot in order if slot < training.devices]
    best = plan(specs, training, generation, 6).received.sum()
    assert best <= plan(specs, training, generation, 6, others).received.sum()


@pytest.mark.parametrize(
    ("training", "generation"),
    [
        (ShardedLayout(5), GenerationLayout(tp=1, pp=5)),
        (MegatronLayout(tp=1, pp=6), GenerationLayout(tp=2, pp=3)),
        (MegatronLayout(tp=2, pp=3), GenerationLayout(tp=1, pp=6)),
    ],
)
def test_the_placement_is_the_best_of_all(training: Layout, generation: GenerationLayout) -> None:
    specs = [TensorSpec(f"layers.{i}.o", (6, 6 + i), Cut(dim=0), i) for i in range(6)]
    held = plan(specs, training, generation, 6).received.sum()
    everyone = itertools.permutations(range(training.devices))
    assert held == min(plan(specs, training, generation, 6, slots).received.sum() for slots in everyone)


def test_sharing_copies_spreads_the_senders() -> None:
    """With HSDP a receiver takes from its own copy, so that no node sends for all."""
    made = plan([TensorSpec("w", (8, 8), Cut(), 0)], ShardedLayout(4, 2), GenerationLayout(replicas=8), 1)
    assert set(made.sent) == {16 * 3}
    for route in dict(made.tensors)["w"].routes:
        assert {target // 4 for target in route.targets} == {route.source // 4}


def test_equal_layouts_move_nothing() -> None:
    specs = [spec for spec in full_model() if not spec.cut.vocabulary]
    made = plan(specs, MegatronLayout(tp=2, pp=2, dp=2), GenerationLayout(tp=2, pp=2, replicas=2), 4)
    assert made.received.sum() == 0
    assert all(not tensor.routes for _, tensor in made.tensors)
    assert list(made.resident) == list(made.needed)


def test_a_padded_vocabulary_is_clipped_to_its_real_rows() -> None:
    """203 rows: Megatron pads to 256 for TP 2 (128 + 75), engines to 256 for TP 4 (64, 64, 64, 11)."""
    spec = TensorSpec("embed", (203, 8), Cut(dim=0, vocabulary=True), first=True)
    training, generation = MegatronLayout(tp=2), GenerationLayout(tp=4)
    rows = [slices_of(spec, training, training.coordinates(d), 1)[0] for d in range(2)]
    assert [(tensor_slice.start[0], tensor_slice.stop[0]) for tensor_slice in rows] == [(0, 128), (128, 203)]
    rows = [slices_of(spec, generation, generation.coordinates(d), 1)[0] for d in range(4)]
    assert [(tensor_slice.start[0], tensor_slice.stop[0]) for tensor_slice in rows] == [
        (0, 64),
        (64, 128),
        (128, 192),
        (192, 203),
    ]


def test_layers_of_stages() -> None:
    assert MegatronLayout(pp=2, vpp=2).stages(8) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert MegatronLayout(pp=3, first_layers=1, last_layers=2).stages(6) == (0, 1, 1, 1, 2, 2)
    # vLLM gives the layers that are left over to later stages, the last one excepted
    assert GenerationLayout(pp=4).stages(10) == (0, 0, 1, 1, 1, 2, 2, 2, 3, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: plan(even_model(), MegatronLayout(tp=2), GenerationLayout(tp=4), LAYERS), r"2 devices.*4"),
        (lambda: plan(even_model(), MegatronLayout(pp=3), GenerationLayout(replicas=3), LAYERS), r"8 .*\[1, 2, 4, 8\]"),
        (lambda: plan(full_model(), MegatronLayout(tp=4), GenerationLayout(tp=4), 4), r"layers\.0\.k: 2 KV.*\[1, 2\]"),
        (lambda: plan(full_model(), MegatronLayout(dp=3, ep=3), GenerationLayout(replicas=3), 4), r"8 experts.*ep=3"),
        (lambda: MegatronLayout(first_layers=4, last_layers=4).stages(8), "first_layers=4,last_layers=4"),
        (lambda: MegatronLayout(first_layers=4, last_layers=5).stages(8), "first_layers=4,last_layers=5"),
        (lambda: MegatronLayout(tp=2, ep=2), r"ep=2.*\[1\]"),
        (lambda: GenerationLayout(tp=2, ep=4), r"ep=4.*\[1, 2\]"),
        (lambda: MegatronLayout(tp=0), "tp=0"),
        (lambda: plan(even_model(), ShardedLayout(2), GenerationLayout(tp=2), LAYERS, [0, 0]), "slots"),
        (lambda: paper_slot(MegatronLayout(tp=2), GenerationLayout(tp=4), 0), "divides 2"),
    ],
)
def test_layouts_that_do_not_fit_are_named(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


def test_an_element_that_no_device_holds() -> None:
    specs = [TensorSpec("lost", (8, 8), Cut(), layer=None, first=False, last=False)]
    layout = ShardedLayout(2)
    made = plan(specs, layout, GenerationLayout(replicas=2), 1)
    assert made.needed.sum() == 0, "outside the layers, on no stage: nobody needs it"
    assert best_slots(specs, layout, GenerationLayout(replicas=2), 1) == (0, 1)


@pytest.mark.parametrize(
    ("training", "tp", "nodes", "expected"),
    [
        (ShardedLayout(4), 2, 1, [0, 2, 1, 3]),
        (MegatronLayout(tp=4), 2, 1, [0, 2, 1, 3]),
        (MegatronLayout(tp=2, dp=2), 2, 1, [0, 1, 2, 3]),
        (ShardedLayout(2, replicate=2), 2, 2, [0, 1, 2, 3]),
        (MegatronLayout(tp=4), 2, 2, [0, 1, 2, 3]),  # the best engines would each have a device on both nodes
    ],
)
def test_engines_are_placed_on_the_devices_that_hold_their_shards(
    training: Layout, tp: int, nodes: int, expected: list[int]
) -> None:
    names = [device * nodes // training.devices for device in range(training.devices)]
    generation = GenerationLayout(tp=tp, replicas=training.devices // tp)
    specs = [spec for spec in even_model() if "gate_up" not in spec.name]
    assert engine_order(specs, training, generation, LAYERS, names) == expected
