"""Batches that are mixed from the sources of the data with weights (`data.mixture`)."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from hybridrl.config.data_names import COMPRESSIONS, FORMATS
from hybridrl.data.table import Table
from hybridrl.errors import DataError
from hybridrl.protocol.names import SCORED_GROUPS

if TYPE_CHECKING:
    from hybridrl.data.group_scores import GroupScore
    from hybridrl.protocol import DataProto

WEIGHTS, COLUMN = "data.mixture.weights", "data.mixture.column"


class SourceRows:
    """The rows of a source, pass after pass: each pass draws all of them, in a permutation of its own.

    The permutation depends on the seed, the name of the source and the pass alone, so that other sources can join.

    Args:
        name: of the source.
        items: positions of its rows in the data set.
        shuffle: whether to permute; otherwise each pass is in file order.
        seed: of the permutations.
    """

    def __init__(self, name: str, items: Sequence[int], shuffle: bool, seed: int) -> None:
        self.items = np.asarray(items)
        self._seed = [seed, zlib.crc32(name.encode())] if shuffle else None
        self.place = self.passes = 0
        self._begin()

    def draw(self) -> int:
        """Return the next row."""
        if self.place == len(self.items):
            self.place, self.passes = 0, self.passes + 1
            self._begin()
        self.place += 1
        return int(self._order[self.place - 1])

    def go_to(self, passes: int, place: int) -> None:
        """Continue after `place` draws of a pass."""
        self.passes, self.place = passes, place
        self._begin()

    def _begin(self) -> None:
        self._order = self.items
        if self._seed is not None:
            self._order = np.random.default_rng([*self._seed, self.passes]).permutation(self.items)


class MixtureSampler(Sampler[int]):
    """Draws rows from K sources so that each has its share of every stretch of draws.

    Let p_s be the share of source s, its weight divided by the sum of the weights. After n draws a source has been
    drawn x_s times, with |x_s - n p_s| <= 1 - 1 / (2 K - 2) for K > 1: each draw takes, of the sources that are owed
    at least 1 / (2 K - 2) draws, the one that would reach the upper limit first (R. Tijdeman, The chairman assignment
    problem, Discrete Mathematics 32, 1980). No random number decides between sources. Within a source every row is
    drawn once before any is drawn again.

    Args:
        items: for each source the positions of its rows in the data set.
        indices: the `index` of each item of the data set.
        weights: of the sources; those with weight 0 are never drawn.
        batch_size: rows per batch. An epoch is a whole number of batches, so that no draw is lost.
        shuffle, seed: of the order within each source.

    Attributes:
        sources: the number of rows of each source that is drawn.
        shares: p_s of each of them. They may be changed at any time.
    """

    def __init__(
        self,
        items: Mapping[str, Sequence[int]],
        indices: Sequence[Any],
        weights: Mapping[str, float],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 1,
    ) -> None:
        self.shuffle, self.seed = shuffle, seed
        drawn = [name for name in items if weights[name] > 0]
        total = sum(weights[name] for name in drawn)
        self.base = {name: weights[name] / total for name in drawn}
        self.shares = dict(self.base)
        self.sources = {name: len(items[name]) for name in drawn}
        self.length = sum(self.sources.values()) // batch_size * batch_size
        self.place = 0  # draws of the epoch so far
        self._owed = dict.fromkeys(drawn, 0.0)
        self._rows = {name: SourceRows(name, items[name], shuffle, seed) for name in drawn}
        self._source_of = {str(indices[item]): name for name in drawn for item in items[name]}

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of the epoch, or a whole one if none is left of it."""
        if self.place == self.length:
            self.place = 0
        while self.place < self.length:
            self.place += 1
            yield self._rows[self._next_source()].draw()

    def _next_source(self) -> str:
        """Choose the source of a draw; see the class."""
        least = 1 / max(2 * len(self._owed) - 2, 1)
        for name, share in self.shares.items():
            self._owed[name] += share
        # The sum is 1, so that one of them is owed 1 / K, which is at least `least`, up to rounding.
        waiting = [name for name, owed in self._owed.items() if owed >= least - 1e-9 and self.shares[name] > 0]
        first = min(waiting, key=lambda name: (1 - least - self._owed[name]) / self.shares[name])
        self._owed[first] -= 1.0
        return first

    def source_of(self, index: Any) -> str | None:
        """Return the source of a row; None if it has none that is drawn."""
        return self._source_of.get(str(index))

    # ------------------------------------------------------------------ metrics

    def metrics(self, batch: DataProto) -> dict[str, float]:
        """Return `data/mixture/<source>/*` of a step.

        They are `share` of the batch's prompts (or rows of supervised training), `weight`, which is the share of the
        next draws, and `pass_rate`, the mean score of the source's prompts that were scored for the step.
        """
        columns = batch.non_tensor_batch
        uids = columns["uid"].tolist() if "uid" in columns else range(len(batch))
        prompts = dict(zip(uids, columns["index"].tolist(), strict=True))
        counts = Counter(self.source_of(index) for index in prompts.values())
        metrics = {f"data/mixture/{name}/share": counts[name] / len(prompts) for name in self.shares}
        metrics |= {f"data/mixture/{name}/weight": share for name, share in self.shares.items()}
        for name, groups in self.scored(batch).items():
            metrics[f"data/mixture/{name}/pass_rate"] = sum(group.mean for group in groups) / len(groups)
        return metrics

    def scored(self, batch: DataProto) -> dict[str, list[GroupScore]]:
        """Return the scores of the step's prompts by source; none of a source without a scored prompt."""
        groups: dict[str, list[GroupScore]] = {}
        for group in batch.meta_info.get(SCORED_GROUPS, []):
            if (name := self.source_of(group.row)) is not None:
                groups.setdefault(name, []).append(group)
        return groups

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the place in each source, and what it is owed."""
        return {
            "place": self.place,
            "sources": {
                name: {"rows": len(rows.items), "pass": rows.passes, "place": rows.place, "owed": self._owed[name]}
                for name, rows in self._rows.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. A source that is new, or has another number of rows, begins with its first row.

        `StatefulLoader` refuses other sources in the middle of an epoch; weights may change anywhere.
        """
        same = {name: source["rows"] for name, source in state["sources"].items()} == self.sources
        self.place = state["place"] if same else self.length
        for name, rows in self._rows.items():
            source = state["sources"].get(name)
            if source is None or source["rows"] != len(rows.items):
                source = {"pass": 0, "place": 0, "owed": 0.0}
            rows.go_to(source["pass"], source["place"])
            self._owed[name] = source["owed"] if same else 0.0


def items_by_source(dataset: Any, column: str | None) -> dict[str, list[int]]:
    """Return the items of each source of a data set, the sources in the order of their first rows.

    Args:
        dataset: a data set of the library, or one derived from it.
        column: names the source of a row; None: the file of the row names it, see `file_names`.

    Raises:
        DataError: the data set has no table of rows, a file has no such column, or a row has no value in it.
    """
    table = getattr(dataset, "table", None)
    if not isinstance(table, Table) or not hasattr(dataset, "indices"):
        raise DataError(
            f"{WEIGHTS}: the data set {type(dataset).__name__} does not say which rows it has; derive it from a class "
            "of hybridrl.data, or draw its rows by a sampler of your own (data.sampler)"
        )
    if column is None:
        files = table.files()
        names = file_names(dict.fromkeys(files))
        values: list[Any] = [names[file] for file in files]
    else:
        table.require(column, COLUMN, f"Add it, name another with {COLUMN}=COLUMN, or mix files with {COLUMN}=null.")
        values = table.column(column)
    items: dict[str, list[int]] = {}
    for item, index in enumerate(dataset.indices):
        if values[index] is None:
            raise DataError(f"{table.locate(index)}: {column!r} ({COLUMN}) is null, so the row has no source")
        items.setdefault(str(values[index]), []).append(item)
    return items


def file_names(files: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Return a short name for each file: as much of the end of its path as no other has, without the ending.

    `a/train.jsonl.gz` and `b/train.parquet` are `a/train` and `b/train`; `math.csv` is `math`.
    """
    paths = {file: _without_endings(file).split("/") for file in files}
    names = {}
    for file, parts in paths.items():
        ends = range(1, len(parts) + 1)
        others = [other for each, other in paths.items() if each != file]
        length = next((n for n in ends if all(other[-n:] != parts[-n:] for other in others)), None)
        names[file] = file if length is None else "/".join(parts[-length:])
    return names


def _without_endings(file: str) -> str:
    for endings in (COMPRESSIONS, FORMATS):
        if Path(file).suffix in endings:
            file = file.removesuffix(Path(file).suffix)
    return file


def check_sources(weights: Mapping[str, float], items: Mapping[str, Sequence[int]]) -> None:
    """Compare the weights with the sources of the data.

    Raises:
        DataError: a source has no weight, a weight no source; the message lists the sources with their rows.
    """
    sources = ", ".join(f"{name} ({len(rows)} rows)" for name, rows in items.items())
    if without_rows := [name for name in weights if name not in items]:
        raise DataError(
            f"{WEIGHTS}: no row is of the source {', '.join(without_rows)}. The sources of the data are {sources}"
        )
    if without_weight := [name for name in items if name not in weights]:
        raise DataError(
            f"{WEIGHTS} has no weight of the source {', '.join(without_weight)}; set it, or 0 to leave its rows out. "
            f"The sources of the data are {sources}"
        )
