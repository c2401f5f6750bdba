"""The scores of prompts: what a sampler can learn about its rows from a step."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridrl.algorithms.functional import rounding_of
from hybridrl.algorithms.groups import Groups
from hybridrl.protocol.sample_names import sample_names

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto

_CPU = torch.device("cpu")


class GroupScore(NamedTuple):
    """The score of a prompt.

    Attributes:
        row: the `index` of its row in the data.
        mean: of its scored samples; a sample without a score does not count.
        mixed: its samples differ in their scores, so that they have advantages.
    """

    row: int | str
    mean: float
    mixed: bool


def group_scores(batch: DataProto) -> list[GroupScore]:
    """Return the score of each prompt, in the order of the first rows; nothing if the rows have no `index`.

    Args:
        batch: scored samples, with `token_level_scores` [B, T]. The score of a sample is summed over its rows.
    """
    if "index" not in batch.non_tensor_batch:
        return []
    names = sample_names(batch)
    samples = Groups(names, _CPU)
    scores = samples.sum(batch.batch["token_level_scores"].sum(dim=-1).double())
    prompts = Groups([name.uid for name in dict.fromkeys(names)], _CPU)
    means = prompts.sum(scores) / prompts.sizes
    lowest, largest = prompts.extremes(prompts.levelled(scores, rounding_of(scores, torch.float32)))
    rows = zip([name.uid for name in names], batch.non_tensor_batch["index"].tolist(), strict=True)
    indices = [_as_json(index) for index in dict(rows).values()]
    return list(map(GroupScore, indices, means.tolist(), (largest > lowest).tolist()))


def _as_json(index: object) -> int | str:
    return int(index) if isinstance(index, Integral) else str(index)
