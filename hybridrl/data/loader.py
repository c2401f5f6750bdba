"""Loads batches in an order that a resumed run repeats exactly."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from hybridrl.data.samplers import EpochSampler
from hybridrl.data.source_mixture import MixtureSampler
from hybridrl.errors import DataError
from hybridrl.notify import notify
from hybridrl.protocol import object_array
from hybridrl.protocol.bookkeeping import foreign_items
from hybridrl.protocol.names import MULTI_MODAL_INPUTS, SCORED_GROUPS

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from hybridrl.data.group_scores import GroupScore
    from hybridrl.protocol import DataProto


class RowDataset(Protocol):
    """A map-style dataset. Optional methods are looked up by name."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> dict[str, Any]: ...


Collated = tuple[dict[str, torch.Tensor], dict[str, list[Any]]]


class StatefulLoader:
    """Iterates over the batches of one epoch at a time and keeps track of its position.

    `for batch in loader` yields the remaining batches of the current epoch: all of them at first, the rest after
    `load_state_dict` or after a `break`. When the last batch of an epoch has been yielded, the position is already the
    start of the next epoch. A run that is saved there and resumed therefore continues with the next epoch and does not
    find an exhausted one.

    Args:
        dataset: a map-style dataset.
        batch_size: rows per batch.
        sampler: default: `EpochSampler` in file order. If it has `set_epoch`, that is called before each epoch. A
            sampler with `state_dict` and `load_state_dict` is saved and restored; others are replayed. See `after_step`
            for `update` and `metrics`.
        drop_last: whether to leave out an incomplete last batch.
        num_workers: number of processes that read ahead; 0 reads in this process.
        collate: rows -> (tensors, lists of objects); runs in the reading process.
        seed: seed of the reading processes' random state, together with the epoch.
        every_epoch_alike: do not count epochs, so that each pass is epoch 0, with its order and uids.
        key: the configuration key of the batch size, for messages.

    Raises:
        DataError: an epoch has less than one batch, or a sampler that learns from batches would be read ahead of them.
    """

    def __init__(
        self,
        dataset: RowDataset,
        batch_size: int,
        sampler: Sampler | None = None,
        drop_last: bool = True,
        *,
        collate: Callable[[Sequence[dict[str, Any]]], Collated],
        num_workers: int = 0,
        seed: int = 0,
        every_epoch_alike: bool = False,
        key: str = "data.train_batch_size",
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.sampler: Any = EpochSampler(len(dataset), shuffle=False, seed=seed) if sampler is None else sampler
        self._check_hooks(num_workers)
        self.seed = seed
        self.every_epoch_alike = every_epoch_alike
        self._generator = torch.Generator()  # a separate one, so that reading data does not draw from the global one
        with warnings.catch_warnings():
            # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates. A user cannot change that.
            warnings.filterwarnings("ignore", message=".*set_vital.*", category=UserWarning)
            self._loader = StatefulDataLoader(
                dataset,
                batch_size=batch_size,
                sampler=self.sampler,
                drop_last=drop_last,
                num_workers=num_workers,
                collate_fn=collate,
                generator=self._generator,
            )
        if len(self) == 0:
            raise DataError(
                f"{key}={batch_size} is larger than the data set of {len(dataset)} rows, so no batch is full. "
                f"Lower {key} to at most {len(dataset)}, or supply more rows."
            )
        self._epoch = 0
        self._batches = 0
        self._pending: dict[str, Any] | None = None  # state of the inner loader to continue from
        self._resumed_at_boundary = False

    def _check_hooks(self, num_workers: int) -> None:
        """Refuse hooks that would act too late or not at all, and report what a resume would not repeat."""
        hooks = self.hooks
        if hooks and num_workers:
            raise DataError(
                f"data.dataloader_num_workers={num_workers}: {' and '.join(hooks)} must see a batch before the next "
                "rows are drawn, and reading processes draw them ahead. Set data.dataloader_num_workers=0."
            )
        if hasattr(self.sampler, "update") and not _is_stateful(self.sampler):
            name = type(self.sampler).__name__
            notify(
                f"data.sampler: {name} has update() but no state_dict() and load_state_dict(), so a resumed run "
                "forgets what it learned and may draw other rows. Add both.",
                "warning",
            )

    @property
    def hooks(self) -> list[str]:
        """The methods that `after_step` calls: they learn from each batch before the next rows are drawn."""
        return [
            f"{type(thing).__name__}.{name}"
            for thing, name in ((self.sampler, "update"), (self.dataset, "on_batch_end"))
            if hasattr(thing, name)
        ]

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return len(self._loader)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    @property
    def batches_done(self) -> int:
        """The number of batches of that epoch that have been yielded."""
        return self._batches

    def __iter__(self) -> Iterator[DataProto]:
        epoch = self._epoch
        if not self._batches:
            self.begin_epoch()
        for collated in self._inner_batches():
            self._batches += 1
            if self._batches == len(self):
                self._epoch, self._batches = epoch + (not self.every_epoch_alike), 0
            yield self.finish(collated, epoch)

    def _inner_batches(self) -> Iterator[Collated]:
        """Yield the rest of the current epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self._epoch)
        self._generator.manual_seed(self.seed * 1_000_003 + self._epoch)
        if self._batches:
            self._loader.load_state_dict(self._pending or self._loader.state_dict())
            self._pending = None
        any_batch = False
        for collated in self._loader:
            any_batch = True
            yield collated
        if not any_batch and self._resumed_at_boundary:
            # A sampler that was saved at the end of its epoch may first have to be exhausted, as it was in the run
            # that saved it.
            yield from self._loader
        self._resumed_at_boundary = False

    def begin_epoch(self) -> None:
        """Prepare for the first batch of an epoch."""

    def after_step(self, batch: DataProto, groups: Sequence[GroupScore] = ()) -> dict[str, float]:
        """Pass a batch to the sampler's `update` and the dataset's `on_batch_end`, if they exist (as in verl).

        Args:
            batch: the batch after its update, with responses, rewards and advantages.
            groups: the prompts that were scored for it, those that are not trained on included; the hooks find them in
                `batch.meta_info["scored_groups"]`.

        Returns:
            What the sampler's `metrics` returns, if it has that method.
        """
        if groups:
            batch.meta_info = {**batch.meta_info, SCORED_GROUPS: list(groups)}
        for hook in (getattr(self.sampler, "update", None), getattr(self.dataset, "on_batch_end", None)):
            if hook is not None:
                hook(batch=batch)
        measure = getattr(self.sampler, "metrics", None)
        return dict(measure(batch=batch)) if callable(measure) else {}

    def finish(self, collated: Collated, epoch: int) -> DataProto:
        """Make the batch, in the controller's process."""
        from hybridrl.protocol import DataProto

        tensors, objects = collated
        return DataProto.from_dict(tensors=tensors, non_tensors={name: object_array(v) for name, v in objects.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as JSON-serialisable objects.

        Raises:
            DataError: a custom sampler's or dataset's state is not JSON-serialisable.
        """
        inner = None
        if self._batches:
            inner = self._pending or self._loader.state_dict()
        state = {
            "epoch": self._epoch,
            "batches": self._batches,
            "loader": inner,
            "sampler": self.sampler.state_dict() if self._batches == 0 and _is_stateful(self.sampler) else None,
            "made_with": self._made_with(),
            **self.epoch_state(),
        }
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the state of the data loader cannot be written as JSON ({error}). state_dict() of the sampler "
                f"{type(self.sampler).__name__} "
                f"and of the data set {type(self.dataset).__name__} must return numbers, strings, lists and dicts only."
            ) from error

    def epoch_state(self) -> dict[str, Any]:
        """Return what else the batches of the rest of the epoch depend on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            DataError: the position is in the middle of an epoch with other data, another batch size or another order.
        """
        changed = {
            name: (old, self._made_with()[name])
            for name, old in state["made_with"].items()
            if old != self._made_with()[name]
        }
        if changed and state["batches"]:
            differences = "; ".join(f"{name} was {old}, is {new}" for name, (old, new) in changed.items())
            raise DataError(
                f"the saved place in the data (epoch {state['epoch']}, batch {state['batches']}) does not fit this "
                f"run: {differences}. "
                "Resume with the settings of the saved run, or from a checkpoint at the end of an epoch."
            )
        self._epoch = state["epoch"]
        self._batches = state["batches"]
        self._pending = state["loader"]
        self._resumed_at_boundary = self._batches == 0 and state["sampler"] is not None
        if self._resumed_at_boundary:
            self.sampler.load_state_dict(state["sampler"])

    def _made_with(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            "rows": len(self.dataset),
            "batch_size": self.batch_size,
            "sampler": type(sampler).__name__,
            "shuffle": getattr(sampler, "shuffle", None),
            "seed": getattr(sampler, "seed", None),
            "workers": self._loader.num_workers > 0,
            "sources": sampler.sources if isinstance(sampler, MixtureSampler) else None,
        }


class PromptLoader(StatefulLoader):
    """Batches of prompts for reinforcement learning.

    A batch holds `input_ids, attention_mask, position_ids` `[B, P]` (int64), left-padded to the longest prompt of the
    batch (`position_ids` are `[B, 4, P]` for a vision-language model), and as non-tensors `uid, raw_prompt, index`, the
    other columns of the rows, and for a vision-language model `multi_modal_inputs`. `uid` is `"{epoch}-{index}"`, and
    `"{epoch}-{index}-{k}"` where the epoch has drawn the row k > 0 times before: the same in every run of the same
    data, different for every draw of a run.

    Args:
        dataset, batch_size, sampler, drop_last, settings: see `StatefulLoader`.
        pad_token_id: default: `dataset.pad_token_id`.
    """

    def __init__(
        self,
        dataset: RowDataset,
        batch_size: int,
        sampler: Sampler | None = None,
        drop_last: bool = True,
        *,
        pad_token_id: int | None = None,
        **settings: Any,
    ) -> None:
        collate = PromptCollator(_pad_id(dataset, pad_token_id))
        super().__init__(dataset, batch_size, sampler, drop_last, collate=collate, **settings)
        self._draws: Counter[str] = Counter()  # of the epoch, by the row's index

    def begin_epoch(self) -> None:
        self._draws.clear()

    def epoch_state(self) -> dict[str, Any]:
        draws_once = type(self.sampler) is EpochSampler  # no row comes again in the rest of its epoch
        return {"draws": dict(self._draws) if self._batches and not draws_once else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._draws = Counter(state.get("draws", {}))  # checkpoints of earlier versions have none

    def finish(self, collated: Collated, epoch: int) -> DataProto:
        tensors, objects = collated
        uids = []
        for index in map(str, objects["index"]):
            again = self._draws[index]
            self._draws[index] += 1
            uids.append(f"{epoch}-{index}-{again}" if again else f"{epoch}-{index}")
        return super().finish((tensors, {**objects, "uid": uids}), epoch)


class PaddedLoader(StatefulLoader):
    """Batches of whole conversations, right-padded to the longest of the batch.

    Args:
        dataset, batch_size, sampler, drop_last, settings: see `StatefulLoader`.
        pad_token_id: default: `dataset.pad_token_id`.
    """

    collator: ClassVar[type[PaddedCollator]]

    def __init__(
        self,
        dataset: RowDataset,
        batch_size: int,
        sampler: Sampler | None = None,
        drop_last: bool = True,
        *,
        pad_token_id: int | None = None,
        **settings: Any,
    ) -> None:
        collate = self.collator(_pad_id(dataset, pad_token_id))
        super().__init__(dataset, batch_size, sampler, drop_last, collate=collate, **settings)


class PromptCollator:
    """Turns rows with `input_ids` into left-padded tensors and lists."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Collated:
        for row in rows:
            if not isinstance(row, dict) or "input_ids" not in row or "index" not in row:
                contents = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise DataError(
                    "the data set class must return dicts with 'input_ids' (unpadded token ids) and 'index' (row "
                    f"number); found: {contents}. "
                    "Derive it from hybridrl.data.RLHFDataset, or add them in its __getitem__."
                )
        ids, mask = pad([row["input_ids"] for row in rows], self.pad_token_id, on_left=True)
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": _positions(rows, mask)}
        names = dict.fromkeys(name for row in rows for name in row if name not in ("input_ids", "position_ids"))
        foreign = foreign_items(names)
        if foreign:
            notify(
                f"the items of the data set have {', '.join(foreign)}: a batch has columns of these names itself, so "
                "it does not carry those of the items; give them other names",
                "warning",
                once=True,
            )
        names = dict.fromkeys(name for name in names if name not in foreign)
        return tensors, {name: [row.get(name) for row in rows] for name in names}


class PaddedCollator(ABC):
    """Turns conversations with `input_ids` and `loss_mask` into right-padded tensors."""

    needs: ClassVar[str]

    @abstractmethod
    def __call__(self, rows: Sequence[dict[str, Any]]) -> Collated:
        """The tensors and objects of a batch."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def refuse(self, row: Any, base: str) -> None:
        """Refuse a row of a user's data set class.

        Raises:
            DataError: says what rows have to hold.
        """
        contents = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"the data set class must return dicts with {self.needs}; found: {contents}. Derive it from "
            f"hybridrl.data.{base}, or add them in its __getitem__."
        )

    def padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The tensors of conversations."""
        ids, mask = pad([row["input_ids"] for row in rows], self.pad_token_id, on_left=False)
        loss_mask, _ = pad([row["loss_mask"] for row in rows], 0, on_left=False)
        positions = _positions(rows, mask, on_left=False)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "loss_mask": loss_mask}

    def media(self, rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        """The images of conversations, if there are any."""
        has_images = any(MULTI_MODAL_INPUTS in row for row in rows)
        return {MULTI_MODAL_INPUTS: [row.get(MULTI_MODAL_INPUTS, {}) for row in rows]} if has_images else {}


class SFTCollator(PaddedCollator):
    """Turns conversations into right-padded tensors."""

    needs = "'input_ids', 'loss_mask' (as long as input_ids) and 'index' (row number)"

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Collated:
        for row in rows:
            if not isinstance(row, dict) or not {"input_ids", "loss_mask", "index"} <= row.keys():
                self.refuse(row, "SFTDataset")
        tensors = self.padded(rows)
        if any("loss_weight" in row for row in rows):
            weights = [row.get("loss_weight", row["loss_mask"]) for row in rows]
            tensors["loss_weight"] = pad(weights, 0, on_left=False, dtype=np.float32)[0]
        return tensors, {"index": [row["index"] for row in rows], **self.media(rows)}


class PairCollator(PaddedCollator):
    """Turns pairs of conversations into right-padded tensors, two rows for each pair, the chosen one first."""

    needs = "'chosen' and 'rejected' (each a dict with 'input_ids' and 'loss_mask') and 'index' (row number)"

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Collated:
        for row in rows:
            if not isinstance(row, dict) or not {"chosen", "rejected", "index"} <= row.keys():
                self.refuse(row, "PreferenceDataset")
        sides = [row[side] for row in rows for side in ("chosen", "rejected")]
        tensors = self.padded(sides)
        if any("margin" in row for row in rows):
            tensors["margins"] = torch.tensor([row.get("margin", 0.0) for row in rows for _ in range(2)])
        return tensors, {"index": [row["index"] for row in rows for _ in range(2)], **self.media(sides)}


class LabelledCollator(PaddedCollator):
    """Turns conversations with labels into right-padded tensors."""

    needs = "'input_ids', 'loss_mask' (as long as input_ids), 'desirable' (bool) and 'index' (row number)"

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Collated:
        for row in rows:
            if not isinstance(row, dict) or not {"input_ids", "loss_mask", "desirable", "index"} <= row.keys():
                self.refuse(row, "LabelledDataset")
        tensors = {**self.padded(rows), "desirable": torch.tensor([bool(row["desirable"]) for row in rows])}
        return tensors, {"index": [row["index"] for row in rows], **self.media(rows)}


class SFTLoader(PaddedLoader):
    """Batches of whole conversations for supervised training.

    A batch holds `input_ids, attention_mask, position_ids, loss_mask` `[B, S]` (int64) and the non-tensor `index`.
    `loss_mask[b, t]` is 1 if token t is trained on (predicted from the tokens before it). If rows have weights,
    there is also `loss_weight` `[B, S]`.
    """

    collator = SFTCollator


class LabelledLoader(PaddedLoader):
    """Batches of conversations with labels: the fields of `SFTLoader`, and `desirable` `[B]` (bool)."""

    collator = LabelledCollator


class PairLoader(PaddedLoader):
    """Batches of pairs of conversations: the fields of `SFTLoader` with 2B rows for B pairs.

    The rows 2i and 2i + 1 are the chosen and the rejected conversation of a pair. `loss_mask` covers the answers. If
    there are margins, the field `margins` `[2B]` holds that of the pair in both rows.
    """

    collator = PairCollator


def pad(
    sequences: Sequence[Sequence[float]], value: int, on_left: bool, dtype: type[np.generic] = np.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad ragged ids to a matrix as wide as the longest, and return it with the mask of the real tokens."""
    width = max(len(ids) for ids in sequences)
    ids = np.full((len(sequences), width), value, dtype=dtype)
    mask = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if on_left else slice(0, len(sequence))
        ids[row, place] = np.asarray(sequence, dtype=dtype)
        mask[row, place] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Return 0, 1, 2, ... over the tokens that the mask keeps, 0 on the padding before them. `[B, S]` -> `[B, S]`."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def _positions(rows: Sequence[dict[str, Any]], mask: torch.Tensor, on_left: bool = True) -> torch.Tensor:
    """The positions of padded rows: `[B, S]`, or `[B, k, S]` of rows that have k of their own per token."""
    own = [row.get("position_ids") for row in rows]
    if all(positions is None for positions in own):
        return position_ids(mask)
    if any(
        positions is None or positions.shape[-1] != len(row["input_ids"])
        for positions, row in zip(own, rows, strict=True)
    ):
        raise DataError(
            "the data set class must return 'position_ids' [k, number of input_ids] for every row, or for none of them."
        )
    width = mask.shape[1]
    room = [(width - positions.shape[-1], positions) for positions in own if positions is not None]
    return torch.stack(
        [torch.nn.functional.pad(positions, (free, 0) if on_left else (0, free)) for free, positions in room]
    )


def _is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _pad_id(dataset: RowDataset, pad_token_id: int | None) -> int:
    value = getattr(dataset, "pad_token_id", None) if pad_token_id is None else pad_token_id
    if value is None:
        raise DataError(
            f"the data set {type(dataset).__name__} has no pad_token_id. Give it one, or pass pad_token_id to the "
            "loader."
        )
    return int(value)
