"""Which prompts are being answered, which are scored, and which may be trained on now.

The ledger is a state machine without clock, thread or I/O, so that training and its simulation run the same one. A
group is one prompt with all of its samples:

    INFLIGHT -> READY <-> TAKEN -> RELEASED
        \\________\\__-> VOID (with a reason)

Let P be the prompts of a step, S the staleness (how many steps of prompts are answered ahead of training), W the
window (at most W - 1 younger groups pass one that is unfinished), and G the groups of a lot, which are admitted
together. There are `floor((1 + S) P) - (W - 1)` slots, and a group has one from its admission until the weights that
were trained on it are published. A version of the weights is the number of published updates.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class GroupState(Enum):
    """States of a group; see the module."""

    INFLIGHT = "inflight"
    READY = "ready"
    TAKEN = "taken"
    RELEASED = "released"
    VOID = "void"


class LedgerError(RuntimeError):
    """A transition that the ledger does not allow: a fault of the code that called it."""


@dataclass(frozen=True)
class AdmissionSchedule:
    """The numbers that bound how far generation runs ahead of training.

    Attributes:
        prompts: P, the groups that a step takes.
        staleness: S >= 0; fractions are allowed. 0: no prompt is admitted before a step asks for it.
        window: W, from 1 to S * P + 1. 1: groups are trained on in the order of their admission.
        lot: G, the groups of an admission.
        lots_at_once: how many lots may be in flight where S = 0.
        max_age: groups that would be older than this many versions when they are trained on are stale; None: the slots
            alone bound the age.

    Raises:
        ValueError: a number is outside its limits.
    """

    prompts: int
    staleness: float = 0.0
    window: int = 1
    lot: int = 1
    lots_at_once: int = 1
    max_age: int | None = None

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.lot < 1 or self.lots_at_once < 1:
            raise ValueError(f"prompts, lot and lots_at_once must be at least 1: {self}")
        if self.staleness < 0 or (self.max_age is not None and self.max_age < 0):
            raise ValueError(f"staleness and max_age must be at least 0: {self}")
        if not 1 <= self.window <= math.floor(self.staleness * self.prompts) + 1:
            raise ValueError(f"window must be from 1 to staleness * prompts + 1: {self}")
        if self.staleness and self.lot > self.slots - (self.prompts - 1):
            # With a group less than a step needs, another lot has to fit; otherwise nothing would go on.
            raise ValueError(f"a lot of {self.lot} groups does not fit into {self.slots} slots next to a step: {self}")

    @property
    def slots(self) -> int:
        """The number of groups between admission and release: floor((1 + S) P) - (W - 1)."""
        return math.floor((1 + self.staleness) * self.prompts) - (self.window - 1)

    @property
    def largest_occupation(self) -> int:
        """The largest number of live groups: the slots; without read-ahead, the surplus of the last lots, too."""
        return self.slots if self.staleness else self.prompts - 1 + self.lot * self.lots_at_once

    @property
    def bound(self) -> int:
        """The largest age of a group when it is taken, in versions: (occupation + W - 2) // P."""
        return (self.largest_occupation + self.window - 2) // self.prompts


@dataclass(slots=True)
class Group:
    """One prompt with all of its samples.

    Attributes:
        seq: number of the admission, from 0.
        uid: of the prompt.
        admitted: version of the weights at its admission.
        key: keys the sampling noise; fixed at the admission, and kept when a resumed run generates the group again.
        passed: younger groups that were taken while this one was unfinished.
        reason: why it is void.
    """

    seq: int
    uid: str
    admitted: int
    key: int
    state: GroupState = GroupState.INFLIGHT
    passed: int = 0
    reason: str = ""


class Ledger:
    """The groups of a run, in the order of their admission.

    Args:
        schedule: the limits.
        journal: is called with the name of each transition and its fields, after it.

    Attributes:
        version: number of published updates.
        admitted, released: numbers of groups so far.
        voided: number of void groups so far, by reason.
        live: groups in flight, ready or taken, by `seq`.
    """

    def __init__(self, schedule: AdmissionSchedule, journal: Callable[..., None] | None = None) -> None:
        self.schedule = schedule
        self.version = 0
        self.admitted = self.released = 0
        self.voided: Counter[str] = Counter()
        self.live: dict[int, Group] = {}
        self._journal = journal or (lambda event, **fields: None)
        self._first_seq = 0  # groups before it were admitted under the schedule of a checkpoint

    # ------------------------------------------------------------------ admission

    def room(self) -> int:
        """Return how many lots may be admitted now."""
        schedule, occupied = self.schedule, len(self.live)
        if schedule.staleness:
            return max(schedule.slots - occupied, 0) // schedule.lot
        lots_missing = -(-max(schedule.slots - occupied, 0) // schedule.lot)
        lots_inflight = -(-self.count(GroupState.INFLIGHT) // schedule.lot)
        return max(min(lots_missing, schedule.lots_at_once - lots_inflight), 0)

    def admit(self, uids: Sequence[str]) -> list[Group]:
        """Begin with the groups of a lot; a last lot of the data may be smaller.

        Raises:
            LedgerError: there is no room, the lot is empty or too large, or a uid is live already.
        """
        if not 1 <= len(uids) <= self.schedule.lot or not self.room():
            raise LedgerError(f"{len(uids)} groups were admitted with room for {self.room()} lots of {self.schedule}")
        live = {group.uid for group in self.live.values()}
        twice = [uid for number, uid in enumerate(uids) if uid in live or uid in uids[:number]]
        if twice:
            raise LedgerError(f"the prompt with uid {twice[0]!r} is live already")
        groups = []
        for uid in uids:
            group = Group(self.admitted, uid, self.version, self.version + 1)
            self.live[group.seq] = group
            self.admitted += 1
            groups.append(group)
            self._journal("admit", seq=group.seq, uid=uid, version=self.version, key=group.key)
        if len(self.live) > self.schedule.largest_occupation:
            raise LedgerError(f"{len(self.live)} groups are live; {self.schedule}")
        self._check()
        return groups

    # ------------------------------------------------------------------ ends of episodes

    def ready(self, group: Group, **fields: Any) -> None:
        """The group is scored.

        Args:
            fields: for the journal.
        """
        self._expect(group, GroupState.INFLIGHT)
        group.state = GroupState.READY
        self._journal("ready", seq=group.seq, **fields)

    def void(self, group: Group, reason: str) -> None:
        """The group will not be trained on; its slot is free at once."""
        self._expect(group, GroupState.INFLIGHT, GroupState.READY)
        group.state, group.reason = GroupState.VOID, reason
        del self.live[group.seq]
        self.voided[reason] += 1
        self._journal("void", seq=group.seq, reason=reason)
        self._check()

    def stale(self) -> list[Group]:
        """Return the groups that would be older than `max_age` if they were trained on after the next update."""
        if self.schedule.max_age is None:
            return []
        oldest = self.version + 1 - self.schedule.max_age
        return [group for group in self._in(GroupState.INFLIGHT, GroupState.READY) if group.admitted < oldest]

    # ------------------------------------------------------------------ training

    def takeable(self) -> list[Group]:
        """Return the groups that the next step trains on: the oldest that are ready; none if there are not enough.

        No more than W - 1 groups, in all steps together, pass an older one that is unfinished.
        """
        groups: list[Group] = []
        first_unfinished: Group | None = None
        passing = 0
        for group in self.live.values():
            if group.state is GroupState.INFLIGHT:
                first_unfinished = first_unfinished or group
            elif group.state is GroupState.READY:
                if first_unfinished is not None:
                    if first_unfinished.passed + passing >= self.schedule.window - 1:
                        break
                    passing += 1
                groups.append(group)
                if len(groups) == self.schedule.prompts:
                    return groups
        return []

    def missing(self) -> int:
        """Return how many groups the next step lacks, if all that are in flight become ready."""
        live = self.count(GroupState.INFLIGHT, GroupState.READY)
        return max(self.schedule.prompts - live, 0)

    def take(self) -> list[Group]:
        """Hand the groups of a step to training.

        Raises:
            LedgerError: there are not enough, or one is older than the bound.
        """
        groups = self.takeable()
        if not groups:
            raise LedgerError(f"{self.count(GroupState.READY)} of {self.schedule.prompts} groups are ready")
        for group in groups:
            age, bound = self.version - group.admitted, self.schedule.bound
            if age > bound and group.seq >= self._first_seq:
                raise LedgerError(f"group {group.seq} is {age} versions old; {self.schedule} bounds it by {bound}")
            group.state = GroupState.TAKEN
        for other in self._in(GroupState.INFLIGHT):
            other.passed += sum(group.seq > other.seq for group in groups)
        self._journal("take", seqs=[group.seq for group in groups], version=self.version)
        return groups

    def give_back(self, groups: Iterable[Group]) -> None:
        """The groups will not be trained on now: a step was abandoned before its update."""
        groups = list(groups)
        for group in groups:
            self._expect(group, GroupState.TAKEN)
        for group in groups:
            group.state = GroupState.READY
        self._journal("give_back", seqs=[group.seq for group in groups])

    def release(self, groups: Iterable[Group]) -> int:
        """The groups were trained on, and the weights that resulted are published. Return the new version."""
        groups = list(groups)
        for group in groups:
            self._expect(group, GroupState.TAKEN)
        for group in groups:
            group.state = GroupState.RELEASED
            del self.live[group.seq]
        self.released += len(groups)
        self.version += 1
        self._journal("release", seqs=[group.seq for group in groups], version=self.version)
        self._check()
        return self.version

    # ------------------------------------------------------------------ state

    def count(self, *states: GroupState) -> int:
        """Return the number of live groups in these states."""
        return len(self._in(*states))

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values, for `load`.

        Raises:
            LedgerError: a group is taken: a checkpoint is written between steps.
        """
        if self.count(GroupState.TAKEN):
            raise LedgerError("a ledger is saved between steps, and not while groups are trained on")
        return {
            "version": self.version,
            "admitted": self.admitted,
            "released": self.released,
            "voided": dict(self.voided),
            "live": [
                {
                    "seq": group.seq,
                    "uid": group.uid,
                    "admitted": group.admitted,
                    "key": group.key,
                    "state": group.state.value,
                    "passed": group.passed,
                }
                for group in self.live.values()
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned.

        Groups in flight are generated again: with their old keys, and by the weights of now.
        """
        self.version, self.admitted, self.released = state["version"], state["admitted"], state["released"]
        self.voided = Counter(state["voided"])
        self.live = {}
        for fields in state["live"]:
            group = Group(**{**fields, "state": GroupState(fields["state"])})
            if group.state is GroupState.INFLIGHT:
                group.admitted = self.version
            self.live[group.seq] = group
        self._first_seq = self.admitted
        self._check()

    def _in(self, *states: GroupState) -> list[Group]:
        return [group for group in self.live.values() if group.state in states]

    def _expect(self, group: Group, *states: GroupState) -> None:
        if self.live.get(group.seq) is not group or group.state not in states:
            expected = " or ".join(state.value for state in states)
            raise LedgerError(f"group {group.seq} is {group.state.value}; it has to be {expected}")

    def _check(self) -> None:
        ended = self.released + self.voided.total()
        if self.admitted != ended + len(self.live):
            raise LedgerError(f"{self.admitted} groups were admitted, and {ended} ended and {len(self.live)} are live")
