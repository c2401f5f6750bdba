"""The number of replicas of a run, between bounds: when to ask for another one, and when there are too few."""

from dataclasses import dataclass

_RETRY_S, _LONGEST_RETRY_S = 60.0, 1800.0


@dataclass(frozen=True)
class ReplicaBounds:
    """Bounds of the number of replicas.

    Attributes:
        minimum: with fewer the run ends after `wait_s`.
        maximum: with fewer another one joins wherever there is room.
        wait_s: seconds for which there may be fewer than `minimum`.
    """

    minimum: int
    maximum: int
    wait_s: float


class ReplicaNumber:
    """Decides from the number of replicas what to do about it. Times are the caller's, in seconds of any clock.

    Args:
        bounds: of the number.
    """

    def __init__(self, bounds: ReplicaBounds) -> None:
        self.bounds = bounds
        self._below_since: float | None = None
        self._failures = 0  # in a row
        self._not_before = 0.0

    def wants_more(self, number: int, now: float) -> bool:
        """Return whether another replica may join.

        Args:
            number: of the replicas that run or start.
        """
        return number < self.bounds.maximum and now >= self._not_before

    def is_too_low(self, number: int, starting: int, now: float) -> bool:
        """Return whether there have been too few replicas for too long. It is to be called again and again.

        Args:
            number: of the replicas that generate, or will after a restart or with the next weights.
            starting: of those that are about to join. While there are some, the answer is no.
        """
        if number >= self.bounds.minimum:
            self._below_since = None
            return False
        if self._below_since is None:
            self._below_since = now
        return not starting and now - self._below_since > self.bounds.wait_s

    def has_joined(self) -> None:
        """Note that a replica has joined."""
        self._failures = 0

    def has_failed(self, now: float) -> None:
        """Note that a replica could not join: the next one has to wait, longer with each failure in a row."""
        self._not_before = now + min(_RETRY_S * 2**self._failures, _LONGEST_RETRY_S)
        self._failures += 1
