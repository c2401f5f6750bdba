"""The ledger of groups: every order of events keeps its promises."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridrl.trainer.ppo.ledger import AdmissionSchedule, Group, GroupState, Ledger, LedgerError

INFLIGHT, READY, TAKEN = GroupState.INFLIGHT, GroupState.READY, GroupState.TAKEN


@st.composite
def schedules(draw: st.DrawFn) -> AdmissionSchedule:
    prompts = draw(st.integers(1, 5))
    staleness = draw(st.sampled_from([0, 0.5, 1, 1.4, 2, 3]))
    window = draw(st.integers(1, math.floor(staleness * prompts) + 1))
    if not staleness:
        return AdmissionSchedule(prompts, 0, 1, draw(st.integers(1, 7)), draw(st.integers(1, 3)))
    free = math.floor((1 + staleness) * prompts) - (window - 1) - (prompts - 1)
    return AdmissionSchedule(prompts, staleness, window, draw(st.integers(1, free)))


class LedgerMachine(RuleBasedStateMachine):
    """Random events; `history` and `passed` are kept apart from the ledger, as what it has to agree with."""

    ledger: Ledger

    @initialize(schedule=schedules())
    def begin(self, schedule: AdmissionSchedule) -> None:
        self.schedule = schedule
        self.history: dict[int, str] = {}
        self.ages: list[int] = []
        self.passed: dict[int, int] = {}
        self.first_seq = 0
        self.ledger = Ledger(schedule)

    def groups(self, *states: GroupState) -> list[Group]:
        return [group for group in self.ledger.live.values() if group.state in states]

    @precondition(lambda self: self.ledger.room() > 0)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, self.schedule.lot))
        first = len(self.history)
        for group in self.ledger.admit([f"uid {first + number}" for number in range(size)]):
            assert group.seq == len(self.history)
            self.history[group.seq] = "live"

    @precondition(lambda self: self.groups(INFLIGHT))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.ledger.ready(data.draw(st.sampled_from(self.groups(INFLIGHT))))

    @precondition(lambda self: self.groups(INFLIGHT, READY))
    @rule(data=st.data(), reason=st.sampled_from(["uniform", "unscored"]))
    def void(self, data: st.DataObject, reason: str) -> None:
        group = data.draw(st.sampled_from(self.groups(INFLIGHT, READY)))
        self.ledger.void(group, reason)
        self.history[group.seq] = reason

    @precondition(lambda self: self.ledger.takeable() and not self.groups(TAKEN))
    @rule()
    def take(self) -> None:
        unfinished = [group.seq for group in self.groups(INFLIGHT)]
        ready = [group.seq for group in self.groups(READY)]
        groups = [group.seq for group in self.ledger.take()]
        assert groups == ready[: self.schedule.prompts], "the oldest that are ready are taken, and no other"
        for seq in unfinished:
            self.passed[seq] = self.passed.get(seq, 0) + sum(other > seq for other in groups)
            assert self.passed[seq] <= self.schedule.window - 1
        by_seq = {group.seq: group for group in self.groups(TAKEN)}
        self.ages += [self.ledger.version - by_seq[seq].admitted for seq in groups if seq >= self.first_seq]

    @precondition(lambda self: self.groups(TAKEN))
    @rule()
    def release(self) -> None:
        groups, version = self.groups(TAKEN), self.ledger.version
        assert self.ledger.release(groups) == version + 1
        for group in groups:
            self.history[group.seq] = "released"

    @precondition(lambda self: not self.groups(TAKEN))
    @rule()
    def resume(self) -> None:
        state = self.ledger.state()
        before = {group.seq: (group.uid, group.key, group.state) for group in self.ledger.live.values()}
        self.ledger = Ledger(self.schedule)
        self.ledger.load(state)
        assert {group.seq: (group.uid, group.key, group.state) for group in self.ledger.live.values()} == before
        self.first_seq = len(self.history)

    @invariant()
    def each_group_is_in_one_state(self) -> None:
        history = list(self.history.values())
        assert list(self.ledger.live) == [seq for seq, state in self.history.items() if state == "live"]
        assert (self.ledger.admitted, self.ledger.released) == (len(history), history.count("released"))
        assert dict(self.ledger.voided) == {
            reason: history.count(reason) for reason in ("uniform", "unscored") if reason in history
        }

    @invariant()
    def ages_and_slots_are_bounded(self) -> None:
        staleness, prompts = self.schedule.staleness, self.schedule.prompts
        assert all(age <= self.schedule.bound for age in self.ages)
        if staleness and self.schedule.lot == 1:
            assert all(age <= math.ceil(staleness) for age in self.ages), "the bound is ceil(S) for every window"
        if staleness:
            assert len(self.ledger.live) <= (1 + staleness) * prompts

    @invariant()
    def something_can_happen(self) -> None:
        """Where nothing is in flight or being trained on, a step can be taken, or there is room."""
        if not self.groups(INFLIGHT, TAKEN):
            assert self.ledger.takeable() or self.ledger.room()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def with_states(schedule: AdmissionSchedule, states: str) -> tuple[Ledger, list[Group]]:
    """A ledger whose groups are in flight (i) or ready (r)."""
    ledger = Ledger(schedule)
    groups: list[Group] = []
    while len(groups) < len(states):
        groups += ledger.admit([f"{len(groups) + number}" for number in range(schedule.lot)])
    for group, state in zip(groups, states, strict=True):
        if state == "r":
            ledger.ready(group)
    return ledger, groups


@pytest.mark.parametrize(
    ("window", "states", "expected"),
    [
        (1, "irrr", []),  # nothing passes an unfinished group
        (2, "irrr", []),  # one may pass
        (3, "irrr", [1, 2]),
        (3, "rirr", [0, 2]),
        (2, "rirr", [0, 2]),
        (2, "riri", [0, 2]),
        (1, "rrii", [0, 1]),
        (2, "iirr", []),
        (3, "iirr", [2, 3]),
    ],
)
def test_the_window_limits_how_many_pass_an_unfinished_group(window: int, states: str, expected: list[int]) -> None:
    ledger, _ = with_states(AdmissionSchedule(2, 2, window), states)
    assert [group.seq for group in ledger.takeable()] == expected


def test_groups_that_passed_in_earlier_steps_count() -> None:
    ledger, groups = with_states(AdmissionSchedule(1, 3, 3), "ir")
    ledger.release(ledger.take())
    ledger.ready(ledger.admit(["2"])[0])
    ledger.release(ledger.take())  # the second that passes group 0
    ledger.ready(ledger.admit(["3"])[0])
    assert ledger.takeable() == []
    ledger.ready(groups[0])
    assert [group.seq for group in ledger.takeable()] == [0]


def test_taken_groups_keep_their_slots_until_the_weights_are_published() -> None:
    ledger, _ = with_states(AdmissionSchedule(2, 1, 1), "rrii")
    assert ledger.room() == 0
    groups = ledger.take()
    assert ledger.room() == 0
    ledger.release(groups)
    assert ledger.room() == 2


def test_without_read_ahead_a_lot_is_admitted_when_a_step_lacks_groups() -> None:
    ledger = Ledger(AdmissionSchedule(3, 0, 1, lot=2))
    first = ledger.admit(["a", "b"])
    assert (ledger.room(), ledger.missing()) == (0, 1)  # one lot after another
    ledger.ready(first[0])
    ledger.void(first[1], "uniform")
    second = ledger.admit(["c", "d"])
    for group in second:
        ledger.ready(group)
    assert (ledger.room(), ledger.missing()) == (0, 0)
    ledger.release(ledger.take())
    ledger.ready(ledger.admit(["e", "f"])[0])
    assert ledger.room() == 0


def test_lots_at_once() -> None:
    ledger = Ledger(AdmissionSchedule(4, 0, 1, lot=2, lots_at_once=2))
    ledger.admit(["a", "b"])
    assert ledger.room() == 1
    ledger.admit(["c", "d"])
    assert ledger.room() == 0


def test_stale_groups_are_those_that_would_be_too_old_after_the_next_update() -> None:
    ledger, groups = with_states(AdmissionSchedule(1, 3, 1, max_age=1), "riri")
    ledger.release(ledger.take())
    assert ledger.stale() == [groups[1], groups[2], groups[3]]  # admitted at 0; the next update makes version 2
    young = ledger.admit(["young"])[0]
    assert young not in ledger.stale()


def test_a_resumed_group_in_flight_keeps_its_key_and_gets_the_weights_of_now() -> None:
    ledger, groups = with_states(AdmissionSchedule(1, 2, 1), "rii")
    ledger.release(ledger.take())
    resumed = Ledger(ledger.schedule)
    resumed.load(ledger.state())
    again = resumed.live[groups[1].seq]
    assert (again.key, again.admitted, groups[1].admitted) == (1, 1, 0)


def test_a_checkpoint_of_a_deeper_schedule_is_drained_and_not_refused() -> None:
    ledger, _ = with_states(AdmissionSchedule(1, 3, 1), "rrrr")
    ledger.release(ledger.take())
    ledger.release(ledger.take())
    shallow = Ledger(AdmissionSchedule(1, 0, 1))
    shallow.load(ledger.state())
    assert shallow.room() == 0
    shallow.release(shallow.take())  # two versions old, as the checkpoint's schedule allowed
    shallow.release(shallow.take())
    assert shallow.room() == 1


@pytest.mark.parametrize(
    "events",
    [
        lambda ledger, group: ledger.ready(group),
        lambda ledger, group: ledger.release([group]),
        lambda ledger, group: ledger.take(),
        lambda ledger, group: ledger.admit([group.uid]),
        lambda ledger, group: ledger.admit(["x", "x"]),
        lambda ledger, group: ledger.admit([]),
        lambda ledger, group: ledger.admit(["1", "2", "3"]),
        lambda ledger, group: (ledger.void(group, "late"), ledger.void(group, "late")),
        lambda ledger, group: (ledger.void(group, "late"), ledger.ready(group)),
        lambda ledger, group: ledger.ready(Group(group.seq, group.uid, 0, 1)),
    ],
)
def test_transitions_that_lose_or_double_a_group_are_refused(events: Any) -> None:
    ledger = Ledger(AdmissionSchedule(2, 2, 1, lot=2))
    group = ledger.admit(["a", "b"])[0]
    ledger.ready(group)
    with pytest.raises(LedgerError):
        events(ledger, group)


def test_a_taken_group_is_not_saved() -> None:
    ledger, _ = with_states(AdmissionSchedule(1, 1, 1), "r")
    ledger.take()
    with pytest.raises(LedgerError):
        ledger.state()


@pytest.mark.parametrize(
    "numbers",
    [
        {"prompts": 0},
        {"prompts": 2, "staleness": -1},
        {"prompts": 2, "window": 0},
        {"prompts": 2, "window": 2},
        {"prompts": 2, "staleness": 1, "window": 4},
        {"prompts": 4, "staleness": 0.5, "lot": 4},
        {"prompts": 2, "staleness": 1, "max_age": -1},
    ],
)
def test_impossible_schedules_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        AdmissionSchedule(**numbers)


@given(prompts=st.integers(1, 512), staleness=st.floats(0, 8), data=st.data())
def test_the_bound_is_the_staleness_for_every_window(prompts: int, staleness: float, data: st.DataObject) -> None:
    """The window is paid for out of the depth, so that it costs no age."""
    ahead = math.floor((1 + staleness) * prompts) - prompts
    if ahead < 1:
        return
    window = data.draw(st.integers(1, math.floor(staleness * prompts) + 1))
    assert AdmissionSchedule(prompts, staleness, window).bound <= math.ceil(staleness)


def test_the_journal_has_each_transition() -> None:
    lines: list[tuple[str, dict[str, Any]]] = []
    ledger = Ledger(AdmissionSchedule(1, 1, 1), lambda event, **fields: lines.append((event, fields)))
    first, second = ledger.admit(["a"])[0], ledger.admit(["b"])[0]
    ledger.ready(first, tokens=7)
    ledger.void(second, "uniform")
    ledger.release(ledger.take())
    assert lines == [
        ("admit", {"seq": 0, "uid": "a", "version": 0, "key": 1}),
        ("admit", {"seq": 1, "uid": "b", "version": 0, "key": 1}),
        ("ready", {"seq": 0, "tokens": 7}),
        ("void", {"seq": 1, "reason": "uniform"}),
        ("take", {"seqs": [0], "version": 0}),
        ("release", {"seqs": [0], "version": 1}),
    ]
