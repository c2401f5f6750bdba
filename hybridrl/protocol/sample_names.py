"""Which sample each row of a batch belongs to, and samples of a rollout without a score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridrl.protocol.dataproto import DataProto
from hybridrl.scored import Unscored

_UID, _SAMPLE = "uid", "sample"


class SampleName(NamedTuple):
    """The identity of a sample in a step.

    Attributes:
        uid: its prompt.
        sample: which of the prompt's samples it is.
    """

    uid: str
    sample: int


@dataclass(frozen=True)
class UnscoredSample:
    """An attempt at a sample that gave nothing to train on.

    Attributes:
        uid, sample: which one; see the columns of these names.
        unscored: the reason.
        tokens: how many were generated; None: the attempt ended before its end, so that its length is not known.
        again: it was generated again at once, by the rollout itself, so that the sample may have a score.
        action: what becomes of it: `refill`, `drop` or `raise`; None where it is not decided.
        by_reward: the reward function gave no score; False: the rollout.
        counts: it counts for `algorithm.missing.max_share`.
    """

    uid: str
    sample: int
    unscored: Unscored
    tokens: int | None = None
    again: bool = False
    action: str | None = None
    by_reward: bool = False
    counts: bool = True

    @property
    def name(self) -> SampleName:
        """The identity of the sample."""
        return SampleName(self.uid, self.sample)


def sample_names(batch: DataProto) -> Sequence[SampleName]:
    """Return the sample that each row belongs to. Without a column `sample`, every row is a sample of its own.

    The batch keeps the names as long as it has these columns.
    """

    def names() -> list[SampleName]:
        columns = batch.non_tensor_batch
        numbers = map(_number, columns[_SAMPLE].tolist()) if _SAMPLE in columns else range(len(batch))
        return list(map(SampleName, map(str, columns[_UID].tolist()), numbers))

    return batch.cached("sample names", (_UID, _SAMPLE), names)


def request_names(prompts: DataProto) -> Sequence[SampleName]:
    """Return the sample that each row asks for: "" and 0 where there is no such column."""
    columns = prompts.non_tensor_batch
    if _UID in columns and _SAMPLE in columns:
        return sample_names(prompts)
    rows = len(prompts)
    uids = map(str, columns[_UID].tolist()) if _UID in columns else [""] * rows
    numbers = map(int, columns[_SAMPLE].tolist()) if _SAMPLE in columns else [0] * rows
    return list(map(SampleName, uids, numbers))


def _number(value: Any) -> int:
    """Return the number of a sample; -1 for rows that were joined with others and had none."""
    return -1 if value is None else int(value)
