"""Thousands of schedules of the ledger and the feeder, under a virtual clock: random latencies, lost replicas, lost
scores and kills. No run waits for ever, loses or repeats a group, or passes the bound of its schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hybridrl.simulation.simulated_pool import SimulatedPool
from hybridrl.simulation.virtual_loop import HangError, run_virtual
from hybridrl.simulation.world import SimulatedCheckpoint, Simulation, World, ideal_step_s
from hybridrl.trainer.ppo.feeder import Lot, LotResult
from hybridrl.trainer.ppo.ledger import AdmissionSchedule, Group, GroupState, Ledger, LedgerError

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
LIMIT_S = 5000.0  # of simulated time; these runs take some hundred seconds


async def lives(simulation: Simulation) -> None:
    """A whole run; half of the runs are killed and resumed once."""
    if simulation.random.random() < 0.5:
        checkpoint = await simulation.run(stop_after=simulation.random.randrange(1, simulation.world.steps))
        await simulation.run(checkpoint)
    else:
        await simulation.run()


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
