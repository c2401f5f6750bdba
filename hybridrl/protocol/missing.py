"""Samples of a rollout without a score, each with the reason."""

from dataclasses import dataclass

from hybridrl.scored import Unscored


@dataclass(frozen=True)
class UnscoredSample:
    """An attempt at a sample that gave nothing to train on.

    Attributes:
        uid, sample: which one; see the columns of these names.
        unscored: the reason.
        tokens: how many were generated; None: the attempt ended before its end, so that its length is not known.
        again: it was generated again at once, by the rollout itself, so that the sample may not be missing.
    """

    uid: str
    sample: int
    unscored: Unscored
    tokens: int | None = None
    again: bool = False

    @property
    def name(self) -> tuple[str, str]:
        """Return the identity of the sample in a batch: uid and number."""
        return self.uid, str(self.sample)
