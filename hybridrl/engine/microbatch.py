"""Cutting a batch into micro-batches and laying each one out for the model.

There are two layouts; the attention implementation decides which is used:

* *aligned* `[b, W]`: the real tokens of each sequence are moved to the left, so all padding is at the right end.
  Causal attention then never sees padding and needs no attention mask. W is the length of the longest sequence, not
  longest prompt plus longest response.
* *packed* `[1, L]`: all real tokens in one row, one sequence after the other, for flash attention.

Packed rows are cut so that micro-batches take about the same time; attention's part, which grows with the square of a
sequence's length, counts (`hybridrl.models.work`). Ranks that compute in step have as many micro-batches each, in the
order of their work.

In both, the outputs of the model are needed only where a response token is predicted. `MicroBatchLayout.selected`
holds these positions in the flattened layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.engine.train_engine import MicroBatching
from hybridrl.models.work import Work
from hybridrl.protocol.fields import Widths, narrow, padded
from hybridrl.protocol.names import ROUTED_EXPERTS
from hybridrl.utils import device
from hybridrl.utils.seqlen_balancing import karmarkar_karp

if TYPE_CHECKING:
    from hybridrl.engine.batch_images import BatchImages, LayoutImages

# Tokens of an aligned micro-batch, padding included, above which a larger one computes no faster.
PREFERRED_CELLS = {"cpu": 1536, "cuda": 1 << 20}
# Padding tokens that cost about as much as the fixed time of another pass through the model.
WORTHWHILE_PADDING = {"cpu": 64, "cuda": 4096}


@dataclass(slots=True)
class MicroBatchLayout:
    """One micro-batch as the model reads it, with N response tokens."""

    input_ids: torch.Tensor  # [b, W] or [1, L]
    position_ids: torch.Tensor  # the same shape; [k, b, W] or [k, 1, L] with k positions per token
    selected: torch.Tensor  # [N] positions that predict a response token, in the flattened layout
    labels: torch.Tensor  # [N] those tokens
    lengths: list[int] | None  # of the packed sequences; None in the aligned layout
    attention_mask: torch.Tensor | None = None  # [b, W], where causal attention would not be inferred without it
    # [b * W] or [L]: where each token is in the batch's flattened [B, S], -1 for padding; in main memory. None in a
    # layout with tokens that are no row's own: of a prefix tree, or a rank's part of a row.
    origins: torch.Tensor | None = None
    # [b * W, L, K] or [L, L, K]: the experts that each token is to use; in main memory. None: as the routers choose.
    experts: torch.Tensor | None = None
    # fields of the batch at the N response tokens, `[N, ...]` each, that a `LogitsFunction` reads
    inputs: dict[str, torch.Tensor] | None = None
    images: LayoutImages | None = None  # of a vision-language model

    def row_counts(self) -> torch.Tensor:
        """Return the number of rows that hold each token, 0 on padding: `[b * W]` or `[L]`, in main memory."""
        assert self.origins is not None  # of a rank's part of a row, the whole row is asked
        return (self.origins >= 0).long()

    def to(self, target: torch.device) -> MicroBatchLayout:
        if target.type == "cpu":
            return self
        return MicroBatchLayout(
            self.input_ids.to(target, non_blocking=True),
            self.position_ids.to(target, non_blocking=True),
            self.selected.to(target, non_blocking=True),
            self.labels.to(target, non_blocking=True),
            self.lengths,
            None if self.attention_mask is None else self.attention_mask.to(target, non_blocking=True),
            self.origins,
            self.experts,
            None if self.inputs is None else {n: x.to(target, non_blocking=True) for n, x in self.inputs.items()},
            None if self.images is None else self.images.to(target),
        )


class BatchPlan:
    """Plan of a batch's micro-batches: the rows of each, and the places of each row's tokens.

    Rows without response tokens (padding of the batch) are in no micro-batch.

    Args:
        tensors: The batch's tensors, in main memory.
        packed: Whether to use the packed layout.
        work: What a sequence costs, for micro-batches that take about the same time.

    Attributes:
        groups: The rows of each micro-batch.
        images: Those of the rows, where the model reads images.

    Raises:
        ValueError: a field is missing, or a response token has no attention or no token before it.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], micro: MicroBatching, packed: bool, work: Work | None = None
    ):
        self.tensors = {name: tensor for name, tensor in tensors.items() if name != ROUTED_EXPERTS}
        self._experts = tensors.get(ROUTED_EXPERTS)
        self.images: BatchImages | None = None
        self.packed = packed
        self._micro = micro
        self.input_ids = _required(tensors, "input_ids")
        attention = _required(tensors, "attention_mask")
        if attention.shape != self.input_ids.shape:
            raise ValueError(
                f"attention_mask {list(attention.shape)} and input_ids {list(self.input_ids.shape)} differ in "
                "shape; both are [B, S]"
            )
        self.batch_size, self.width = self.input_ids.shape
        self.attention = attention.bool()
        self.response_mask = self._find_response_mask()
        self.response_width = self.response_mask.shape[1]
        # Index of each token among its row's real tokens.
        self.ranks = self.attention.long().cumsum(1) - 1
        self._check()
        self.positions = self._find_positions()
        self.lengths: list[int] = self.attention.sum(1).tolist()
        self.token_counts: list[int] = self.response_mask.sum(1).tolist()
        work = work or Work()
        self._units = _Units.of(self.token_counts, self.lengths, micro, packed, work)
        self._groups = _group(self._units, packed)
        self.groups = self._units.rows_of(self._groups)
        if packed:
            self.balance(len(self.groups))

    def balance(self, count: int) -> None:
        """Re-split packed rows into `count` micro-batches of about the same work, within both limits.

        There are fewer if there are fewer rows. Padded rows stay as they are, because rows of other lengths would be
        padded more.

        Args:
            count: At least the number of micro-batches that there are.
        """
        units = self._units
        count = min(count, sum(map(len, self._groups)))
        if self.packed and count:
            unit_numbers = [unit for group in self._groups for unit in group]
            size, budget = units.size or len(unit_numbers), units.max_tokens or sum(units.lengths)
            cut = _balanced(unit_numbers, units.work, count)
            if not _within(cut, units.lengths, size, budget):
                cut = _filled(unit_numbers, units.lengths, units.work, count, size, budget) or self._groups
            for group in cut:
                group.sort(key=lambda unit: (-units.lengths[unit], unit))
            self._groups = sorted(cut, key=lambda group: -sum(units.work[unit] for unit in group))
            self.groups = units.rows_of(self._groups)

    def halved_budget(self) -> int | None:
        """A token budget that cuts the largest micro-batch of several sequences in two; None if each has only one."""
        several = [group for group in self.groups if len(group) > self._micro.rows_together]
        return max(map(self.tokens, several)) // 2 if several else None

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of these rows as one micro-batch, with padding."""
        lengths = [self.lengths[row] for row in rows]
        return sum(lengths) if self.packed else max(lengths) * len(lengths)

    def layout(self, rows: Sequence[int]) -> MicroBatchLayout:
        """The micro-batch of these rows, in main memory."""
        layout = self._layout(rows)
        if self._experts is not None:
            assert layout.origins is not None  # plans of other layouts are refused with replay
            layout.experts = self._experts.flatten(0, 1)[layout.origins.clamp(min=0)]
        return layout if self.images is None else self.images.add_to(layout, rows, self)

    def _layout(self, rows: Sequence[int]) -> MicroBatchLayout:
        index = torch.tensor(rows)
        ids, attention, ranks = self.input_ids[index], self.attention[index], self.ranks[index]
        mask = self.response_mask[index]
        lengths = [self.lengths[row] for row in rows]
        start = self.width - self.response_width
        before = ranks[:, start:] - 1  # the token before a response token predicts it
        labels = ids[:, start:][mask]
        positions = None if self.positions is None else self.positions[index]
        places = index[:, None] * self.width + torch.arange(self.width)
        if self.packed:
            offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            selected = (before + offsets[:, None])[mask]
            if positions is None:
                packed = ranks[attention][None]
            elif positions.ndim == 2:
                packed = positions[attention][None]
            else:
                packed = positions.transpose(0, 1)[:, attention][:, None]
            return MicroBatchLayout(ids[attention][None], packed, selected, labels, lengths, origins=places[attention])
        width = max(lengths)
        # A stable sort of "is padding" moves the real tokens to the left and keeps their order.
        order = torch.argsort((~attention).to(torch.uint8), dim=1, stable=True)[:, :width]
        selected = (before + torch.arange(len(rows))[:, None] * width)[mask]
        ids, columns = ids.gather(1, order), torch.arange(width).expand(len(rows), width)
        real = columns < torch.tensor(lengths)[:, None]
        origins = torch.where(real, places.gather(1, order), -1).flatten()
        if positions is None:
            return MicroBatchLayout(ids, columns, selected, labels, None, origins=origins)
        per_kind = positions[None] if positions.ndim == 2 else positions.transpose(0, 1)  # [k, b, S]
        moved = torch.where(real, per_kind.gather(2, order.expand(len(per_kind), -1, -1)), columns)
        # Without a mask, transformers takes positions that do not count up by one for the start of another sequence.
        moved = moved[0] if positions.ndim == 2 else moved
        return MicroBatchLayout(ids, moved, selected, labels, None, real.long(), origins)

    def response_columns(self, rows: Sequence[int]) -> int:
        """Return the number of leading response columns that hold a token in any of the rows."""
        columns = self.response_mask[torch.tensor(rows)].any(0).nonzero()
        return int(columns[-1]) + 1

    def slice_tensors(self, rows: Sequence[int], columns: int, target: torch.device) -> dict[str, torch.Tensor]:
        """The batch's fields for these rows, on the device, without the columns that are padding in all of them.

        Response fields keep their first `columns`. Sequence fields lose the same columns at the right, and at the
        left the ones before the first real token, which `prompts` loses too. `hybridrl.protocol.fields` knows which
        field is which.
        """
        index = torch.tensor(rows)
        widths = Widths(self.width - self.response_width, self.response_width)
        first = min(int(self.attention[index].any(0).to(torch.uint8).argmax()), widths.prompt)
        sliced = {}
        for name, tensor in self.tensors.items():
            part = narrow(name, tensor[index], widths, first, columns)
            sliced[name] = part if target.type == "cpu" else part.to(target, non_blocking=True)
        return sliced

    def token_inputs(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Fields `[B, T, ...]` at the rows' response tokens, `[N, ...]`, in the order of `selected`."""
        index = torch.tensor(rows, dtype=torch.int64)
        return {name: _required(self.tensors, name)[index][self.response_mask[index]] for name in names}

    def token_positions(self, rows: Sequence[int]) -> torch.Tensor:
        """Positions of the rows' response tokens in the flattened `[B, T]`, in the order of `selected`."""
        index = torch.tensor(rows)
        grid = index[:, None] * self.response_width + torch.arange(self.response_width)
        return grid[self.response_mask[index]]

    def scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One output of every micro-batch, each `[N, ...]`, as `[B, T, ...]` in main memory; 0 elsewhere.

        Args:
            parts: at least one; those after the last micro-batch are of dummies. What is not integers becomes float32.
        """
        shape, dtype = parts[0].shape[1:], torch.float32 if parts[0].is_floating_point() else parts[0].dtype
        flat = torch.zeros(self.batch_size * self.response_width, *shape, dtype=dtype)
        if self.groups:
            positions = torch.cat([self.token_positions(rows) for rows in self.groups])
            flat[positions] = torch.cat(list(parts[: len(self.groups)])).to(dtype).cpu()
        return flat.view(self.batch_size, self.response_width, *shape)

    def scatter_tokens(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scatter the values of each micro-batch's real tokens, `[N', ...]`, into `[B, S, ...]`; 0 on padding.

        Args:
            parts: in main memory, at least one; those after the last micro-batch are of dummies.
        """
        whole = parts[0].new_zeros(self.batch_size, self.width, *parts[0].shape[1:])
        for rows, part in zip(self.groups, parts, strict=False):
            row, column = self.attention[torch.tensor(rows)].nonzero(as_tuple=True)
            whole[torch.tensor(rows)[row], column] = part
        return whole

    def _find_response_mask(self) -> torch.Tensor:
        mask = self.tensors.get("response_mask")
        if mask is None:
            responses = self.tensors.get("responses")
            if responses is None:
                raise ValueError(
                    "the batch has neither response_mask nor responses; one of them says which columns are the response"
                )
            return self.attention[:, self.width - responses.shape[1] :]
        if mask.ndim != 2 or mask.shape[0] != self.batch_size or mask.shape[1] >= self.width:
            raise ValueError(
                f"response_mask {list(mask.shape)} does not fit input_ids {[self.batch_size, self.width]}: it "
                "is [B, T] with T < S, the last T columns of a sequence"
            )
        return mask.bool()

    def _find_positions(self) -> torch.Tensor | None:
        """The batch's `position_ids`; None where they count the real tokens of each row, as without the field."""
        positions = self.tensors.get("position_ids")
        if positions is None:
            return None
        if positions.ndim not in (2, 3) or (positions.shape[0], positions.shape[-1]) != self.input_ids.shape:
            raise ValueError(
                f"position_ids {list(positions.shape)} do not fit input_ids {list(self.input_ids.shape)}: they are "
                "[B, S], or [B, k, S] with k positions per token"
            )
        if positions.ndim == 2 and torch.equal(positions[self.attention], self.ranks[self.attention]):
            return None
        return positions

    def _check(self) -> None:
        start = self.width - self.response_width
        wrong = self.response_mask & ~(self.attention[:, start:] & (self.ranks[:, start:] > 0))
        if wrong.any():
            row, column = (int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                f"sequence {row}: response column {column} is in response_mask but has attention_mask 0 or no "
                "token before it; a response token is attended to and follows at least one prompt token"
            )


def dummy_layout() -> MicroBatchLayout:
    """Return the smallest micro-batch that runs every collective of forward and backward."""
    zero = torch.zeros(1, dtype=torch.int64)
    padding = torch.full((2,), -1)
    return MicroBatchLayout(
        torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], zero, zero, None, origins=padding
    )


def _required(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors.keys():
        raise ValueError(f"the batch has no {name}; it has {', '.join(sorted(str(key) for key in tensors.keys()))}")
    return tensors[name]


@dataclass(frozen=True, slots=True)
class _Units:
    """Units that are put into micro-batches as a whole: single rows, or rows that have to stay together.

    Attributes:
        rows: the rows of each unit.
        lengths: tokens of each unit: where rows are padded, those of its longest row, for each row.
        work: of each unit.
        size, max_tokens: the limits of a micro-batch; `size` counts units. None: no limit.
    """

    rows: list[list[int]]
    lengths: list[int]
    work: list[int]
    size: int | None
    max_tokens: int | None

    @classmethod
    def of(
        cls, tokens: Sequence[int], lengths: Sequence[int], micro: MicroBatching, packed: bool, work: Work
    ) -> _Units:
        """The units of a batch; those without response tokens are left out.

        Args:
            tokens: response tokens of each row.
            lengths: all tokens of each row.

        Raises:
            ValueError: rows that have to stay together are incomplete.
        """
        together = micro.rows_together
        if len(tokens) % together:
            raise ValueError(f"{len(tokens)} rows cannot be {together} at a time in a micro-batch")
        rows = []
        for start in range(0, len(tokens), together):
            unit = list(range(start, start + together))
            trained = sum(tokens[row] > 0 for row in unit)
            if trained not in (0, together):
                raise ValueError(f"of the rows {unit}, which stay together, only {trained} have response tokens")
            if trained:
                rows.append(unit)
        joined = [[lengths[row] for row in unit] for unit in rows]
        return cls(
            rows,
            [sum(unit) if packed else max(unit) * together for unit in joined],
            [sum(map(work.of, unit)) for unit in joined],
            None if micro.size is None else max(1, micro.size // together),
            micro.max_tokens,
        )

    def rows_of(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """The rows of groups of units."""
        return [[row for unit in group for row in self.rows[unit]] for group in groups]


def _group(units: _Units, packed: bool) -> list[list[int]]:
    """Cut units, from longest to shortest, into micro-batches within both limits."""
    longest_first = sorted(range(len(units.rows)), key=lambda unit: -units.lengths[unit])
    if not longest_first:
        return []
    size = units.size or len(longest_first)
    if packed:
        return _first_fit(longest_first, units.lengths, size, units.max_tokens or sum(units.lengths))
    return _cut_runs(longest_first, units.lengths, size, units.max_tokens)


def _first_fit(rows: Sequence[int], lengths: Sequence[int], size: int, budget: int) -> list[list[int]]:
    """First-fit decreasing by real tokens."""
    groups: list[list[int]] = []
    loads: list[int] = []
    for row in rows:
        for number, group in enumerate(groups):
            if len(group) < size and loads[number] + lengths[row] <= budget:
                group.append(row)
                loads[number] += lengths[row]
                break
        else:
            groups.append([row])
            loads.append(lengths[row])
    return groups


def _balanced(rows: Sequence[int], work: Sequence[int], count: int) -> list[list[int]]:
    """`count` parts of nearly equal work, none of them empty."""
    parts = karmarkar_karp([work[row] for row in rows], count, equal_size=False)
    return [[rows[index] for index in part] for part in parts]


def _within(groups: Sequence[Sequence[int]], lengths: Sequence[int], size: int, budget: int) -> bool:
    """Whether every group is within both limits; a sequence longer than the budget may be alone."""
    return all(
        (len(group) <= size and sum(lengths[row] for row in group) <= budget) or len(group) == 1 for group in groups
    )


def _filled(
    rows: Sequence[int], lengths: Sequence[int], work: Sequence[int], count: int, size: int, budget: int
) -> list[list[int]] | None:
    """`count` groups within both limits: each row, from the longest, goes where the least work is and it still fits.

    None if that leads nowhere.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    loads, works = [0] * count, [0] * count
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        fits = [
            number
            for number, group in enumerate(groups)
            if not group or (len(group) < size and loads[number] + lengths[row] <= budget)
        ]
        if not fits:
            return None
        number = min(fits, key=lambda number: (works[number], number))
        groups[number].append(row)
        loads[number] += lengths[row]
        works[number] += work[row]
    return groups


def _cut_runs(rows: Sequence[int], lengths: Sequence[int], size: int, budget: int | None) -> list[list[int]]:
    """Runs of the sorted rows, within the limits and with little padding.

    A run also ends when its padding would cost more than another pass through the model, and on a CPU when its
    activations would no longer fit into the cache.
    """
    cells, waste = PREFERRED_CELLS[device.get_device_name()], WORTHWHILE_PADDING[device.get_device_name()]
    cells = min(cells, budget or cells)
    groups: list[list[int]] = []
    padding = 0
    for row in rows:
        group = groups[-1] if groups else None
        if group is not None:
            width = lengths[group[0]]
            padding += width - lengths[row]
            if len(group) < size and width * (len(group) + 1) <= cells and padding <= waste:
                group.append(row)
                continue
        groups.append([row])
        padding = 0
    return groups


def fields(batch: Any) -> Mapping[str, torch.Tensor]:
    """The tensors of a `DataProto`, padded, as a plain mapping, so that each is looked up once."""
    if batch.batch is None:
        raise ValueError("the batch holds no tensors")
    return padded({str(name): tensor for name, tensor in batch.batch.items()})
