"""Thousands of schedules of the ledger and the feeder, under a virtual clock: random latencies, lost replicas, lost
scores and kills. No run waits for ever, loses or repeats a group, or passes the bound of its schedule."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hybridrl.errors import CheckpointError, TooFewReplicasError
from hybridrl.rollout.replicas.replica_number import ReplicaBounds, ReplicaNumber
from hybridrl.simulation.simulated_pool import SimulatedPool
from hybridrl.simulation.virtual_loop import HangError, run_virtual
from hybridrl.simulation.world import SimulatedCheckpoint, Simulation, World, ideal_step_s
from hybridrl.trainer.ppo.feeder import Lot, LotResult
from hybridrl.trainer.ppo.ledger import AdmissionSchedule, Group, GroupState, Ledger, LedgerError
from hybridrl.trainer.ppo.ledger_journal import LedgerJournal, read_journal

FAULTS: dict[str, Any] = {"reward_lost": 0.03, "uniform": 0.1, "replica_lost_s": 8.0}
WORLDS = {
    "synchronous": World(AdmissionSchedule(4, lot=4), shared=True, **FAULTS),
    "synchronous, small lots": World(AdmissionSchedule(4, lot=3, lots_at_once=2), shared=True, **FAULTS),
    "one step ahead": World(AdmissionSchedule(4, 1), **FAULTS),
    "one step ahead, shared devices": World(AdmissionSchedule(4, 1), shared=True, **FAULTS),
    "one step ahead, drained": World(AdmissionSchedule(4, 1), drain=True, **FAULTS),
    "shared and drained": World(AdmissionSchedule(4, 1, lot=2), drain=True, shared=True, **FAULTS),
    "half a step ahead": World(AdmissionSchedule(4, 0.5), samples=2, **FAULTS),
    "window": World(AdmissionSchedule(4, 2, 3), **FAULTS),
    "deep": World(AdmissionSchedule(3, 3, 4), **FAULTS),
    "old groups are dropped": World(AdmissionSchedule(3, 3, 2, max_age=1), **FAULTS),
}
# Nodes are lost every few steps, and others are added as often: all may be gone for a while, also for longer than the
# run waits.
NODES: dict[str, Any] = {"bounds": ReplicaBounds(1, 4, 30.0), "node_lost_s": 15.0, "node_added_s": 15.0}
ELASTIC = {
    "replicas come and go": World(AdmissionSchedule(4, 1), **FAULTS, **NODES),
    "replicas come and go, drained": World(AdmissionSchedule(4, 1), drain=True, **FAULTS, **NODES),
    "replicas come and go, deep": World(AdmissionSchedule(3, 3, 4), **FAULTS, **NODES),
    "replicas come and go, old groups are dropped": World(AdmissionSchedule(3, 3, 2, max_age=1), **FAULTS, **NODES),
    "too few replicas": World(
        AdmissionSchedule(4, 1), replicas=3, bounds=ReplicaBounds(2, 3, 10.0), node_lost_s=15.0, node_added_s=40.0
    ),
    "no node is added": World(AdmissionSchedule(4, 1), replicas=3, bounds=ReplicaBounds(1, 3, 10.0), node_lost_s=20.0),
}
WORLDS |= ELASTIC
LIMIT_S = 5000.0  # of simulated time; these runs take some hundred seconds


async def lives(simulation: Simulation) -> None:
    """A whole run; half of the runs are killed and resumed once. One that has too few replicas is started again."""
    killed = simulation.random.random() < 0.5
    stop_after = simulation.random.randrange(1, simulation.world.steps) if killed else None
    checkpoint = None
    while len(simulation.results.trained) < simulation.world.steps:
        try:
            checkpoint = await simulation.run(checkpoint, stop_after)
        except TooFewReplicasError:
            checkpoint = simulation.saved
        else:
            stop_after = None


def fault(kind: type[Simulation], world: World, seed: int) -> str:
    """Run a schedule; return what was wrong with it."""
    simulation = kind(world, seed)
    try:
        run_virtual(lives(simulation), LIMIT_S)
        simulation.check()
    except (HangError, LedgerError, AssertionError) as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", WORLDS)
def test_no_schedule_hangs_or_loses_a_group(name: str) -> None:
    for seed in range(150):
        assert not fault(Simulation, WORLDS[name], seed)


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", WORLDS)
def test_hundreds_of_further_schedules(name: str) -> None:
    """A planted bug (below) shows in at least a quarter of the schedules: of these, one in a hundred is enough."""
    for seed in range(150, 450):
        assert not fault(Simulation, WORLDS[name], seed)


@pytest.mark.parametrize("name", ELASTIC)
def test_replicas_do_come_and_go_in_these_worlds(name: str) -> None:
    """Also until too few are left for too long: the run saves, ends, and goes on as another process."""
    runs = [Simulation(WORLDS[name], seed) for seed in range(40)]
    for simulation in runs:
        run_virtual(lives(simulation), LIMIT_S)
    joined, left = (sum(getattr(run.results, f"replicas_{what}") for run in runs) for what in ("joined", "left"))
    assert left >= 80 and sum(run.saved is not None for run in runs) >= 3
    assert joined >= 20 or WORLDS[name].node_added_s is None


def test_of_a_drained_run_the_number_of_replicas_changes_only_the_time() -> None:
    """As long as one is left: the same groups are trained on, answered by the same versions of the weights."""

    class LosesNotTheLast(Simulation):
        def new_pool(self) -> SimulatedPool:
            class Pool(SimulatedPool):
                def leave(self, number: int) -> None:
                    if self.number > 1 and self._replicas[number - 1].alive:
                        super().leave(number)

            return Pool(self.world.replicas, self.world.places, bounds=self.world.bounds)

    world = World(AdmissionSchedule(4, 1, lot=2), drain=True, samples=2, uniform=0.2)
    changing = replace(world, bounds=ReplicaBounds(1, 4, 600.0), node_lost_s=10.0, node_added_s=10.0)
    for seed in range(30):
        fixed, elastic = Simulation(world, seed), LosesNotTheLast(changing, seed)
        for simulation in (fixed, elastic):
            run_virtual(simulation.run(), LIMIT_S)
        assert elastic.results.replicas_left
        assert elastic.results.trained == fixed.results.trained and elastic.results.ages == fixed.results.ages


@given(
    minimum=st.integers(1, 3),
    further=st.integers(0, 3),
    numbers=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.floats(0.1, 100)), max_size=30),
)
def test_a_run_ends_only_where_too_few_replicas_were_there_all_the_time(
    minimum: int, further: int, numbers: list[tuple[int, int, float]]
) -> None:
    bounds = ReplicaBounds(minimum, minimum + further, 100.0)
    number, now, low_since = ReplicaNumber(bounds), 0.0, None
    for replicas, starting, seconds in numbers:
        now += seconds
        low_since = None if replicas >= minimum else now if low_since is None else low_since
        ends = low_since is not None and now - low_since > 100.0 and not starting
        assert number.is_too_low(replicas, starting, now) == ends
        assert number.wants_more(replicas, now) == (replicas < bounds.maximum)


def test_a_place_at_which_replicas_do_not_start_is_tried_less_and_less_often() -> None:
    number, now, waits = ReplicaNumber(ReplicaBounds(1, 2, 600.0)), 0.0, []
    for _ in range(8):
        number.has_failed(now)
        before = now
        while not number.wants_more(1, now):
            now += 1
        waits.append(now - before)
    assert waits == [60, 120, 240, 480, 960, 1800, 1800, 1800]
    number.has_joined()
    number.has_failed(now)
    assert number.wants_more(1, now + 60)


# ---------------------------------------------------------------------- killed at every line of the journal


class KilledAtLine(Simulation):
    """The process is killed when the ledger has written a line of its journal, and resumes from the last checkpoint."""

    def __init__(self, world: World, seed: int, line: int | None, file: Path) -> None:
        super().__init__(world, seed)
        self.line, self.file, self.lines = line, file, 0
        self.last: SimulatedCheckpoint | None = None
        self.size = 0  # of the journal, at that checkpoint
        self.process: asyncio.Future[Any]
        self.journal = LedgerJournal(file)

    def new_ledger(self) -> Ledger:
        def write(event: str, **fields: Any) -> None:
            self.journal(event, **fields)
            self.lines += 1
            if self.lines == self.line:
                self.process.cancel()

        return Ledger(self.world.schedule, write)

    def checkpoint(self) -> SimulatedCheckpoint:
        self.last, self.size = super().checkpoint(), self.journal.size
        return self.last

    def restore(self, checkpoint: SimulatedCheckpoint) -> None:
        super().restore(checkpoint)
        self.journal.resume(self.size, self.feeder.ledger)

    async def whole_life(self) -> None:
        """Run to the end, in one process or in two."""
        self.process = asyncio.ensure_future(self.run())
        try:
            await self.process
            return
        except asyncio.CancelledError:
            self.journal = LedgerJournal(self.file)
            self.drawn = 0 if self.last is None else self.drawn
            self.pool = self.new_pool()
        except TooFewReplicasError:
            self.journal = LedgerJournal(self.file)
        while len(self.results.trained) < self.world.steps or self.last is None:
            try:
                await self.run(self.last)
            except TooFewReplicasError:
                self.journal = LedgerJournal(self.file)


@pytest.mark.parametrize("name", WORLDS)
def test_killed_at_every_line_no_group_is_lost_or_trained_on_twice(name: str, tmp_path: Path) -> None:
    world = replace(WORLDS[name], steps=3)
    whole = KilledAtLine(world, 1, None, tmp_path / "whole.jsonl")
    run_virtual(whole.whole_life(), LIMIT_S)
    assert whole.lines > 3 * world.schedule.prompts
    for line in range(1, whole.lines + 1):
        file = tmp_path / f"{line}.jsonl"
        simulation = KilledAtLine(world, 1, line, file)
        run_virtual(simulation.whole_life(), LIMIT_S)
        simulation.check()
        journal = read_journal(file)
        trained = [seq for seq, state in journal.states.items() if state is GroupState.RELEASED]
        assert sorted(trained) == sorted(seq for step in simulation.results.trained for seq in step)
        assert len(trained) == 3 * world.schedule.prompts and max(journal.ages) <= world.schedule.bound


def test_a_journal_with_a_fault_is_refused(tmp_path: Path) -> None:
    """A group that is admitted twice, trained on without having been ready, or gone after a resume."""
    file = tmp_path / "ledger.jsonl"
    run = KilledAtLine(WORLDS["one step ahead"], 3, None, file)
    run_virtual(run.whole_life(), LIMIT_S)
    lines = file.read_text().splitlines()
    states = Counter(read_journal(file).states.values())
    assert states[GroupState.RELEASED] == 24 and states[GroupState.VOID] == run.feeder.ledger.voided.total()
    release = next(line for line in reversed(lines) if '"release"' in line)
    ready = next(number for number, line in enumerate(lines) if '"ready"' in line)
    resume = json.dumps({"event": "resume", "version": 0, "admitted": 0, "live": [[99, "ready", 0]]})
    for faulty, named in (
        ([*lines[:1], *lines], "twice"),
        ([*lines[:ready], *lines[ready + 1 :]], "take"),
        ([*lines, release], "release"),
        ([*lines, resume], "other groups"),
    ):
        file.write_text("".join(f"{line}\n" for line in faulty))
        with pytest.raises(CheckpointError) as refused:
            read_journal(file)
        assert named in str(refused.value) and "line" in str(refused.value)
    file.write_text("".join(f"{line}\n" for line in lines) + lines[-1][:20])  # killed while it wrote
    assert len(read_journal(file).states) == run.feeder.ledger.admitted


# ---------------------------------------------------------------------- planted bugs are found


class WaitsForever(Simulation):
    """A score that is lost is waited for without a limit."""

    async def score(self, random: Random) -> bool:
        if random.random() < self.world.reward_lost:
            await asyncio.get_running_loop().create_future()
        return True


class FinishesTwice(Simulation):
    """Now and then a group is entered twice."""

    async def answer(self, lot: Lot[list[str]]) -> LotResult[tuple[float, ...]]:
        result = await super().answer(lot)
        group = lot.groups[0]
        if group.uid in result.rows and self.random.random() < 0.02:
            self.feeder.ledger.ready(group)
        return result


class PoolThatStaysPaused(SimulatedPool):
    """A request that is aborted while the pool is paused leaves its place taken."""

    def pause(self) -> None:
        super().pause()
        self.holds = True

    def resume(self) -> None:
        self.holds = False
        super().resume()

    async def generate(self, seconds: float) -> None:
        try:
            await super().generate(seconds)
        except asyncio.CancelledError:
            if getattr(self, "holds", False):
                self.places -= 1
            raise


class AbortsWhilePaused(Simulation):
    """Old groups are voided after the pause, and not before it."""

    def new_pool(self) -> SimulatedPool:
        return PoolThatStaysPaused(self.world.replicas, self.world.places)

    async def before_publish(self) -> None:
        self.pool.pause()
        await self.feeder.before_publish()


class LedgerWithoutCarriedGroups(Ledger):
    """Groups of a checkpoint take no slots."""

    def room(self) -> int:
        schedule = self.schedule
        occupied = sum(group.seq >= self.first for group in self.live.values())
        return max(schedule.slots - occupied, 0) // schedule.lot

    first = 0

    def load(self, state: Any) -> None:
        super().load(state)
        self.first = self.admitted


class BurstsAfterResume(Simulation):
    def new_ledger(self) -> Ledger:
        return LedgerWithoutCarriedGroups(self.world.schedule)


class DropsReadyGroups(Simulation):
    """A checkpoint without the groups that are ready."""

    def checkpoint(self) -> SimulatedCheckpoint:
        checkpoint = super().checkpoint()
        live = checkpoint.ledger["live"]
        checkpoint.ledger["live"] = [group for group in live if group["state"] != GroupState.READY.value]
        checkpoint.rows.clear()
        return checkpoint


class PoolThatForgetsRequests(SimulatedPool):
    """Requests of a replica that leaves wait for its successor."""

    def leave(self, number: int) -> None:
        for request in self._replicas[number].running:
            self._stop(request)
        self._replicas[number].running = []
        super().leave(number)


class LeavesWithRequests(Simulation):
    def new_pool(self) -> SimulatedPool:
        return PoolThatForgetsRequests(self.world.replicas, self.world.places, bounds=self.world.bounds)


class PoolThatExpectsReturns(SimulatedPool):
    """A replica that has left still counts, as if its node returned: none joins, and the run does not end."""

    @property
    def number(self) -> int:
        return len(self._replicas) + self.replicas_left

    def leave(self, number: int) -> None:
        if number < len(self._replicas):
            super().leave(number)

    def lose(self, number: int) -> None:
        if number < len(self._replicas):
            super().lose(number)


class ExpectsReturns(Simulation):
    def new_pool(self) -> SimulatedPool:
        return PoolThatExpectsReturns(self.world.replicas, self.world.places, bounds=self.world.bounds)


class PoolThatNeverGivesUp(SimulatedPool):
    """Requests wait although nobody will answer them."""

    def _fail(self, error: TooFewReplicasError) -> None:
        """Nothing."""


class NeverGivesUp(Simulation):
    def new_pool(self) -> SimulatedPool:
        return PoolThatNeverGivesUp(self.world.replicas, self.world.places, bounds=self.world.bounds)


class DrainsWithoutReplicas(Simulation):
    """Publishing waits for requests whose replicas wait for the publishing."""

    def replicas_await_weights(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("kind", "name", "seed"),
    [
        (WaitsForever, "one step ahead", 0),
        (FinishesTwice, "one step ahead", 0),
        (AbortsWhilePaused, "old groups are dropped", 11),
        (BurstsAfterResume, "window", 3),
        (DropsReadyGroups, "one step ahead", 3),
        (DrainsWithoutReplicas, "one step ahead, drained", 0),
        (LeavesWithRequests, "replicas come and go", 0),
        (ExpectsReturns, "replicas come and go", 0),
        (NeverGivesUp, "no node is added", 2),
    ],
)
def test_a_planted_bug_is_found(kind: type[Simulation], name: str, seed: int) -> None:
    """The seed is the first that shows it; without the bug, the same schedule is right."""
    assert not any(fault(kind, WORLDS[name], earlier) for earlier in range(seed))
    assert fault(kind, WORLDS[name], seed)
    assert not fault(Simulation, WORLDS[name], seed)


# ---------------------------------------------------------------------- what a run is a function of


def slow(random: Random) -> float:
    return random.expovariate(0.1)


def even(random: Random) -> float:
    return 1.0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(0, 3),
    lot=st.integers(1, 2),
    response_s=st.sampled_from([slow, even]),
    replicas=st.integers(1, 4),
)
def test_drained_a_run_does_not_depend_on_times(
    seed: int, staleness: int, lot: int, response_s: Callable[[Random], float], replicas: int
) -> None:
    """Step j trains on the same groups, answered by version max(0, j - S), however long generation takes."""

    def run(**settings: Any) -> Simulation:
        world = World(AdmissionSchedule(4, staleness, lot=lot), drain=True, reward_s=0.0, **settings)
        simulation = Simulation(world, seed)
        run_virtual(simulation.run(), LIMIT_S)
        return simulation

    first, second = run(), run(response_s=response_s, replicas=replicas, learn_s=0.1)
    assert first.results.trained == second.results.trained
    assert first.results.ages == second.results.ages
    if 4 % lot == 0:
        assert first.results.ages == [min(step, staleness) for step in range(6) for _ in range(4)]


def test_without_read_ahead_all_tokens_are_those_of_the_newest_weights() -> None:
    simulation = Simulation(World(AdmissionSchedule(4, lot=4), shared=True), 1)
    run_virtual(simulation.run(), LIMIT_S)
    assert simulation.results.ages == [0] * 24


def test_a_step_is_never_faster_than_the_ideal() -> None:
    """Equal responses on own devices: the mean step reaches the ideal T* but for its start and end."""
    world = World(
        AdmissionSchedule(6, 2),
        replicas=2,
        places=3,
        steps=60,
        response_s=even,
        reward_s=0.0,
        learn_s=0.5,
        publish_s=0.1,
    )
    simulation = Simulation(world, 3)
    _, seconds = run_virtual(simulation.run(), LIMIT_S)
    ideal = ideal_step_s(world, 6.0, 1.0)
    assert ideal == pytest.approx(1.1)  # six responses on six places, and 0.1 s in which none is generated
    assert 1.0 <= seconds / (60 * ideal) < 1.1


def test_reading_ahead_hides_the_shorter_of_generation_and_training() -> None:
    def seconds(staleness: int, shared: bool) -> float:
        world = World(
            AdmissionSchedule(6, staleness, lot=1 if staleness else 6), steps=40, response_s=even, shared=shared
        )
        return run_virtual(Simulation(world, 0).run(), LIMIT_S)[1]

    assert seconds(1, False) < 0.8 * seconds(0, True)


def test_a_virtual_hour_ends_at_once_and_a_hang_is_seen() -> None:
    async def hour() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(hour()) == (3600.0, 3600.0)

    async def stands_still() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(HangError):
        run_virtual(stands_still())

    async def spins() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(HangError):
        run_virtual(spins(), limit_s=10)


def test_an_error_of_a_lot_is_raised_by_the_step_that_waits() -> None:
    class Fails(Simulation):
        async def answer(self, lot: Lot[list[str]]) -> LotResult[tuple[float, ...]]:
            if lot.first_seq == 5:
                raise ZeroDivisionError("the reward of group 5")
            return await super().answer(lot)

    simulation = Fails(World(AdmissionSchedule(2, 1)), 0)
    with pytest.raises(ZeroDivisionError):
        run_virtual(simulation.run(), LIMIT_S)
    # Nothing is lost: the group is in flight for a checkpoint, with its key.
    groups: list[Group] = [group for lot in simulation.feeder.inflight() for group in lot.groups]
    assert 5 in simulation.feeder.ledger.live and all(group.state is GroupState.INFLIGHT for group in groups)


def test_reports_belong_to_the_step_that_trains_on_their_lots() -> None:
    class Reports(Simulation):
        reports: list[list[int]]

        async def _step(self) -> None:
            taken = self.feeder.take

            async def take() -> Any:
                groups = await taken()
                self.reports.append(groups.reports)
                return groups

            self.feeder.take = take  # type: ignore[method-assign]
            await super()._step()
            self.feeder.take = taken  # type: ignore[method-assign]

    for seed in range(20):
        simulation = Reports(World(AdmissionSchedule(3, 1, lot=1), drain=True, uniform=0.3), seed)
        simulation.reports = []
        run_virtual(simulation.run(), LIMIT_S)
        reported = [seq for step in simulation.reports for seq in step]
        assert reported == sorted(set(reported)), "each lot is reported once, in order"
        for step, groups in zip(simulation.reports, simulation.results.trained, strict=True):
            assert set(groups) <= set(step) and max(step) == max(groups)
