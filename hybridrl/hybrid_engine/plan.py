"""The plan: which bytes move between devices so that each of them gets its generation shard, and no others.

A plan is a pure function of two layouts. For every tensor it holds routes: a slice, the device that sends it, and the
devices that receive it. A device keeps what its training shard and its generation shard share, in place; it receives
every other element of its generation shard exactly once. `python -m hybridrl.hybrid_engine.print_plan` prints the
bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from hybridrl.errors import ConfigError
from hybridrl.layouts.slices import TensorSlice, TensorSlices, TensorSpec, count, overlap, slices_of
from hybridrl.layouts.topology import Coordinates, GenerationLayout, Layout


@dataclass(frozen=True, slots=True)
class Route:
    """One slice of one tensor: `source` sends it to every device of `targets`."""

    slice: TensorSlice
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Plan of one tensor's movement. Counts are elements per device.

    Attributes:
        routes: what is sent.
        resident: elements of the training shard.
        needed: elements of the generation shard.
        reused: elements of the generation shard that stay where they are.
        received: elements that come from other devices; `reused + received == needed`.
        sent: elements that leave the device, counted once per receiver.
    """

    routes: tuple[Route, ...]
    resident: np.ndarray
    needed: np.ndarray
    reused: np.ndarray
    received: np.ndarray
    sent: np.ndarray


def _borders(sets: Iterable[TensorSlices], dims: int) -> list[list[int]]:
    borders: list[set[int]] = [set() for _ in range(dims)]
    for slices in sets:
        for tensor_slice in slices:
            for dim in range(dims):
                borders[dim].update((tensor_slice.start[dim], tensor_slice.stop[dim]))
    return [sorted(border) for border in borders]


def _mask(slices: TensorSlices, borders: list[list[int]]) -> np.ndarray:
    """Return which cells of the grid that the borders span lie in the slices."""
    mask = np.zeros([max(len(border) - 1, 0) for border in borders], dtype=bool)
    for tensor_slice in slices:
        mask[
            tuple(
                slice(bisect_left(border, tensor_slice.start[dim]), bisect_left(border, tensor_slice.stop[dim]))
                for dim, border in enumerate(borders)
            )
        ] = True
    return mask


def _masks(sets: Sequence[TensorSlices], borders: list[list[int]]) -> np.ndarray:
    """Return [devices, cells]; devices with the same slices share the work."""
    kinds = {slices: index for index, slices in enumerate(dict.fromkeys(sets))}
    masks = np.stack([_mask(slices, borders).ravel() for slices in kinds])
    return masks[[kinds[slices] for slices in sets]]


class _Senders:
    """Chooses who sends: a holder in the receiver's copy of the model, then on its node, then the one that sent least.

    Among equals, holders take turns by their distance from the receiver.
    """

    def __init__(self, copies: np.ndarray, per_node: int) -> None:
        self.copies = copies
        self.nodes = np.arange(len(copies)) // per_node
        self.sent = np.zeros(len(copies), dtype=np.int64)

    def choose(self, holders: np.ndarray, target: int, elements: int) -> int:
        if len(holders) == 1:
            source = int(holders[0])
        else:
            keys = (
                (holders - target) % len(self.copies),
                self.sent[holders],
                self.nodes[holders] != self.nodes[target],
                self.copies[holders] != self.copies[target],
            )
            source = int(holders[np.lexsort(keys)[0]])
        self.sent[source] += elements
        return source


def _merge(slices: list[TensorSlice]) -> list[TensorSlice]:
    """Join slices that touch along one dimension and agree in the others."""
    for dim in reversed(range(len(slices[0].start))):
        rest = [other for other in range(len(slices[0].start)) if other != dim]
        rows: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = defaultdict(list)
        for tensor_slice in slices:
            ends = list(zip(tensor_slice.start, tensor_slice.stop, strict=True))
            rows[tuple(ends[other] for other in rest)].append(ends[dim])
        slices = []
        for row, ranges in rows.items():
            ranges.sort()
            joined = [ranges[0]]
            for begin, end in ranges[1:]:
                if begin == joined[-1][1]:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((begin, end))
            for begin, end in joined:
                start, stop = [0] * (len(rest) + 1), [0] * (len(rest) + 1)
                for other, (a, b) in zip(rest, row, strict=True):
                    start[other], stop[other] = a, b
                start[dim], stop[dim] = begin, end
                slices.append(TensorSlice(tuple(start), tuple(stop)))
    return slices


def _cell_slices(cells: Iterable[int], borders: list[list[int]]) -> list[TensorSlice]:
    """Return a slice per cell of the grid that the borders span."""
    shape = [len(border) - 1 for border in borders]
    slices = []
    for cell in cells:
        index = np.unravel_index(cell, shape)
        start = tuple(border[i] for border, i in zip(borders, index, strict=True))
        slices.append(TensorSlice(start, tuple(border[i + 1] for border, i in zip(borders, index, strict=True))))
    return slices


def common(ours: TensorSlices, theirs: TensorSlices) -> list[TensorSlice]:
    """Return disjoint slices of the elements that two sets of slices share; slices of one set may overlap."""
    if len(ours) == len(theirs) == 1:
        both = ours[0].intersect(theirs[0])
        return [] if both is None else [both]
    if not (ours and theirs):
        return []
    borders = _borders([ours, theirs], len(ours[0].start))
    cells = np.flatnonzero(_mask(ours, borders) & _mask(theirs, borders))
    return _merge(_cell_slices((int(cell) for cell in cells), borders)) if len(cells) else []


def plan_tensor(
    name: str,
    training_slices: Sequence[TensorSlices],
    generation_slices: Sequence[TensorSlices],
    copies: Sequence[int],
    per_node: int = 8,
) -> TensorPlan:
    """Plan one tensor.

    Args:
        name: of the tensor, for errors.
        training_slices: per device, the disjoint slices of its training shard.
        generation_slices: per device, the disjoint slices of its generation shard.
        copies: per device, the copy of the model that it trains; a receiver prefers senders of its own copy.
        per_node: devices per node; a receiver prefers senders on its own node.

    Raises:
        ConfigError: no device holds an element that another needs.
    """
    devices = len(training_slices)
    dims = (
        len(next(tensor_slice for slices in generation_slices for tensor_slice in slices).start)
        if any(generation_slices)
        else 0
    )
    empty = np.zeros(devices, dtype=np.int64)
    if dims == 0:
        return TensorPlan((), np.array([count(slices) for slices in training_slices]), empty, empty, empty, empty)
    borders = _borders([*set(training_slices), *set(generation_slices)], dims)
    volumes = _volumes(borders)
    hold, need = _masks(training_slices, borders), _masks(generation_slices, borders)
    missing = need & ~hold
    missing_cells = np.flatnonzero(missing.any(axis=0))
    if not hold[:, missing_cells].any(axis=0).all():
        raise ConfigError(f"{name}: a part of it is needed for generation and no training device holds it")
    senders = _Senders(np.asarray(copies), per_node)
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for cell in missing_cells:
        holders, by_source = np.flatnonzero(hold[:, cell]), defaultdict(list)
        for target in np.flatnonzero(missing[:, cell]):
            by_source[senders.choose(holders, int(target), int(volumes[cell]))].append(int(target))
        for source, targets in by_source.items():
            groups[source, tuple(targets)].append(int(cell))
    routes = []
    for (source, receivers), cells in groups.items():
        routes += [Route(tensor_slice, source, receivers) for tensor_slice in _merge(_cell_slices(cells, borders))]
    return TensorPlan(
        routes=tuple(routes),
        resident=hold @ volumes,
        needed=need @ volumes,
        reused=(need & hold) @ volumes,
        received=missing @ volumes,
        sent=senders.sent,
    )


def _volumes(borders: list[list[int]]) -> np.ndarray:
    """Return the elements of each cell of the grid that the borders span, flat."""
    volumes = np.ones(1, dtype=np.int64)
    for border in borders:
        volumes = np.multiply.outer(volumes, np.diff(np.asarray(border, dtype=np.int64))).reshape(-1)
    return volumes


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a model.

    Attributes:
        training, generation: the layouts; None: the plan was made of slices alone (`plan_slices`).
        slots: per device, its place in the generation layout.
        tensors: name and plan of each tensor; tensors that move alike share one `TensorPlan`.
        resident, needed, reused, received, sent: elements per device, over all tensors (see `TensorPlan`).
        elements: of the whole model.
    """

    training: Layout | None
    generation: GenerationLayout | None
    slots: tuple[int, ...]
    tensors: tuple[tuple[str, TensorPlan], ...]
    resident: np.ndarray
    needed: np.ndarray
    reused: np.ndarray
    received: np.ndarray
    sent: np.ndarray
    elements: int


def plan(
    specs: Sequence[TensorSpec],
    training: Layout,
    generation: GenerationLayout,
    layers: int,
    slots: Sequence[int] | None = None,
    per_node: int = 8,
) -> Plan:
    """Plan the transition of a model.

    Args:
        specs: the model's tensors.
        training: the training layout.
        generation: the generation layout, on the same devices.
        layers: the model's decoder layers.
        slots: per device, its place in the generation layout; None: `best_slots`.
        per_node: devices per node.

    Raises:
        ConfigError: the layouts have different numbers of devices, or a tensor cannot be cut as one of them asks.
    """
    devices = training.devices
    if devices != generation.devices:
        raise ConfigError(
            f"the training layout ({training.describe()}) has {devices} devices and the generation layout "
            f"({generation.describe()}) {generation.devices}; on the same devices both numbers must be equal"
        )
    places = tuple(slots) if slots is not None else best_slots(specs, training, generation, layers)
    if sorted(places) != list(range(devices)):
        raise ConfigError(f"slots must name each place of the generation layout once, from 0 to {devices - 1}")
    at_training = [training.coordinates(device) for device in range(devices)]
    at_generation = [generation.coordinates(slot) for slot in places]
    copies = [training.copy(device) for device in range(devices)]

    def slices() -> Iterator[tuple[str, list[TensorSlices], list[TensorSlices]]]:
        for spec in specs:
            of_training = {at: slices_of(spec, training, at, layers) for at in set(at_training)}
            of_generation = {at: slices_of(spec, generation, at, layers) for at in set(at_generation)}
            yield spec.name, [of_training[at] for at in at_training], [of_generation[at] for at in at_generation]

    tensors, (resident, needed, reused, received, sent) = _plan_all(slices(), copies, per_node)
    elements = sum(spec.elements for spec in specs)
    return Plan(training, generation, places, tensors, resident, needed, reused, received, sent, elements)


def plan_slices(
    shapes: Mapping[str, tuple[int, ...]],
    training_slices: Sequence[Mapping[str, TensorSlices]],
    generation_slices: Sequence[Mapping[str, TensorSlices]],
    slots: Sequence[int] | None = None,
    copies: Sequence[int] | None = None,
    per_node: int = 8,
) -> Plan:
    """Plan the transition of a model from slices, e.g. those that engines' own loaders need (`LoadRecorder.required`).

    Args:
        shapes: name and shape of each tensor.
        training_slices: per device, the slices of each tensor that it has for training. A tensor without a name: none.
        generation_slices: per place of the generation layout, the slices of each tensor that the process there needs.
        slots: per device, its place in the generation layout; None: device i has place i.
        copies: per device, the copy of the model that it trains; None: all train one copy.
        per_node: devices per node.

    Raises:
        ConfigError: `training_slices`, `generation_slices`, `slots` and `copies` have different lengths, a tensor has
            no shape or no dimensions, a slice lies outside its tensor, or no device holds an element that is needed.
    """
    devices = len(training_slices)
    places = tuple(range(devices)) if slots is None else tuple(slots)
    of_copies = [0] * devices if copies is None else list(copies)
    if len(generation_slices) != devices or len(of_copies) != devices:
        raise ConfigError(
            f"slices are held by {devices} devices, needed by {len(generation_slices)}; copies: {len(of_copies)}"
        )
    if sorted(places) != list(range(devices)):
        raise ConfigError(f"slots must name each place of the generation layout once, from 0 to {devices - 1}")
    for of_device in (*training_slices, *generation_slices):
        for name, slices in of_device.items():
            _check_slices(name, slices, shapes)
    in_places = [generation_slices[slot] for slot in places]
    named = (
        (name, [tuple(of.get(name, ())) for of in training_slices], [tuple(of.get(name, ())) for of in in_places])
        for name in shapes
    )
    tensors, (resident, needed, reused, received, sent) = _plan_all(named, of_copies, per_node)
    elements = sum(prod(shape) for shape in shapes.values())
    return Plan(None, None, places, tensors, resident, needed, reused, received, sent, elements)


def _check_slices(name: str, slices: TensorSlices, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        raise ConfigError(f"{name}: slices of it are given and no shape")
    if not shapes[name]:
        raise ConfigError(f"{name}: a tensor without dimensions cannot be planned; give it the shape (1,)")
    for tensor_slice in slices:
        if len(tensor_slice.stop) != len(shapes[name]) or any(
            a > b for a, b in zip(tensor_slice.stop, shapes[name], strict=True)
        ):
            raise ConfigError(f"{name}: {tensor_slice} lies outside its shape {shapes[name]}")


def _plan_all(
    tensors: Iterable[tuple[str, Sequence[TensorSlices], Sequence[TensorSlices]]], copies: Sequence[int], per_node: int
) -> tuple[tuple[tuple[str, TensorPlan], ...], np.ndarray]:
    """Plan tensors, given with the slices that each device holds and needs; those with equal slices share a plan.

    Returns:
        Name and plan of each tensor, and the elements [5, devices]: resident, needed, reused, received and sent.
    """
    plan_by_slices: dict[object, TensorPlan] = {}
    plans = []
    totals = np.zeros((5, len(copies)), dtype=np.int64)
    for name, training_slices, generation_slices in tensors:
        key = (tuple(training_slices), tuple(generation_slices))
        if key not in plan_by_slices:
            plan_by_slices[key] = plan_tensor(name, training_slices, generation_slices, copies, per_node)
        moved = plan_by_slices[key]
        plans.append((name, moved))
        totals += np.stack([moved.resident, moved.needed, moved.reused, moved.received, moved.sent])
    return tuple(plans), totals


def _overlaps(
    specs: Sequence[TensorSpec],
    layouts: tuple[Layout, GenerationLayout],
    kinds: tuple[list[Coordinates], list[Coordinates]],
    layers: int,
) -> np.ndarray:
    """Return [training kinds, generation kinds]: the elements that both parts of the model share."""
    shared = np.zeros((len(kinds[0]), len(kinds[1])), dtype=np.int64)
    shared_by_slices: dict[object, np.ndarray] = {}
    for spec in specs:
        ours = tuple(slices_of(spec, layouts[0], at, layers) for at in kinds[0])
        theirs = tuple(slices_of(spec, layouts[1], at, layers) for at in kinds[1])
        key = (ours, theirs)
        if key not in shared_by_slices:
            pairs: dict[tuple[TensorSlices, TensorSlices], int] = {}
            for pair in product(dict.fromkeys(ours), dict.fromkeys(theirs)):
                pairs[pair] = overlap(*pair)
            shared_by_slices[key] = np.array([[pairs[a, b] for b in theirs] for a in ours], dtype=np.int64)
        shared += shared_by_slices[key]
    return shared


def best_slots(
    specs: Sequence[TensorSpec], training: Layout, generation: GenerationLayout, layers: int
) -> tuple[int, ...]:
    """Return the place in the generation layout that each device gets so that the fewest bytes move.

    Each device should get the part of the model that shares most with its training shard, and every part is needed by
    a fixed number of devices. This is a transportation problem. If the parts that devices prefer fill up exactly, that
    is its solution, and for layouts with t_g | t and p_g | p it moves as little as the paper's grouping (`paper_slot`).
    Otherwise min-cost flow solves it.

    Within one part, devices fill the engines in their order.
    """
    devices = training.devices
    at_training = [training.coordinates(device) for device in range(devices)]
    at_generation = [generation.coordinates(slot) for slot in range(devices)]
    kinds = (list(dict.fromkeys(at_training)), list(dict.fromkeys(at_generation)))
    places: dict[Coordinates, list[int]] = defaultdict(list)
    for slot, at in enumerate(at_generation):
        places[at].append(slot)
    shared = _overlaps(specs, (training, generation), kinds, layers)
    rows = [kinds[0].index(at) for at in at_training]
    room = [len(places[at]) for at in kinds[1]]
    parts = _in_order(shared, rows, room) or _by_flow(shared, rows, room)
    return tuple(places[kinds[1][part]].pop(0) for part in parts)


def engine_order(
    specs: Sequence[TensorSpec], training: Layout, generation: GenerationLayout, layers: int, nodes: Sequence[object]
) -> list[int]:
    """Return the devices in the order of their places in the engines: the first engine's processes, then the next's.

    Args:
        specs, training, generation, layers: as for `best_slots`.
        nodes: of each device. If the best order divides an engine over nodes, the devices stay in their own order.
    """
    slots = best_slots(specs, training, generation, layers)
    order = sorted(range(len(slots)), key=lambda device: slots[device])
    size = generation.per_replica
    engines = [order[first : first + size] for first in range(0, len(order), size)]
    together = all(len({nodes[device] for device in engine}) == 1 for engine in engines)
    return order if together else list(range(len(slots)))


def _in_order(shared: np.ndarray, rows: list[int], room: list[int]) -> list[int] | None:
    """Give each device the best part that is left, or return None if some device does not get one of its best."""
    free, parts = list(room), []
    for row in rows:
        best = shared[row].max()
        part = next((part for part in np.flatnonzero(shared[row] == best) if free[part]), None)
        if part is None:
            return None
        free[part] -= 1
        parts.append(int(part))
    return parts


def _by_flow(shared: np.ndarray, rows: list[int], room: list[int]) -> list[int]:
    import networkx  # slow to import, and needed for layouts that do not nest alone

    supply = np.bincount(rows, minlength=len(shared))
    graph = networkx.DiGraph()
    for row, number in enumerate(supply):
        graph.add_node(("held", row), demand=-int(number))
    for part, number in enumerate(room):
        graph.add_node(("needed", part), demand=number)
        for row in range(len(shared)):
            graph.add_edge(("held", row), ("needed", part), weight=-int(shared[row, part]))
    flow = networkx.min_cost_flow(graph)
    open_parts = {
        row: [part for part in range(len(room)) for _ in range(flow["held", row]["needed", part])]
        for row in range(len(shared))
    }
    return [open_parts[row].pop(0) for row in rows]


@dataclass(frozen=True, slots=True)
class Volume:
    """The largest number of elements over devices, for one way of making the transition.

    Attributes:
        received: elements that a device receives.
        peak: elements of generation parameters that a device holds at the peak.
        redundant: elements of training shards that are held in addition to the generation shard.
    """

    received: int
    peak: int
    redundant: int


def compared(transition: Plan) -> dict[str, Volume]:
    """Return the volumes of a plan and of the two baselines of the paper's Table 2.

    `gather everything` starts from a model that is cut over all devices and collects it whole on each (DS-Chat);
    `gather in the training group` starts from the training shards of the plan and collects one copy (HybridFlow-V).
    Both hold the training shard in memory of its own.
    """
    devices = len(transition.resident)
    part = -(-transition.elements // devices)
    return {
        "gather everything": Volume(transition.elements - part, transition.elements, part),
        "gather in the training group": Volume(
            int((transition.elements - transition.resident).max()), transition.elements, int(transition.resident.max())
        ),
        "this plan": Volume(
            int(transition.received.max()),
            int(transition.needed.max()),
            int((transition.resident - transition.reused).max()),
        ),
    }
