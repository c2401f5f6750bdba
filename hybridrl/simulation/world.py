"""A training run under a virtual clock: the run's ledger and feeder, with simulated generation, rewards and updates."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hybridrl.errors import TooFewReplicasError
from hybridrl.rollout.replicas.replica_number import ReplicaBounds
from hybridrl.simulation.simulated_pool import SimulatedPool
from hybridrl.trainer.ppo.feeder import Feeder, Lot, LotResult
from hybridrl.trainer.ppo.ledger import AdmissionSchedule, Group, GroupState, Ledger


@dataclass(frozen=True)
class World:
    """A simulated run: its schedule, its latencies and its faults. All times are in seconds.

    Attributes:
        schedule: the limits of reading ahead.
        drain: nothing is in flight while weights are published.
        replicas, places: of the pool.
        samples: n, the samples of a prompt.
        steps: the updates of the run.
        response_s: draws the generation time of a sample.
        reward_s: mean time until a sample is scored, exponential.
        learn_s, publish_s: time of an update, and of publishing its weights.
        shared: training and generation take turns on the same devices.
        reward_lost: share of scores that never arrive; `reward_timeout_s` ends the wait.
        refills: how often a sample without a score is generated again.
        uniform: share of groups whose samples all have the same score.
        replica_lost_s: mean time between losses of a replica, exponential; None: none is lost.
        bounds: of the number of replicas; None: it does not change.
        node_lost_s, node_added_s: mean times between losses of a replica with its node, for ever, and between additions
            of a node with room for a replica, exponential; None: there are none.
    """

    schedule: AdmissionSchedule
    drain: bool = False
    replicas: int = 2
    places: int = 3
    samples: int = 1
    steps: int = 6
    response_s: Callable[[Random], float] = lambda random: random.lognormvariate(1.0, 0.8)
    reward_s: float = 0.5
    learn_s: float = 3.0
    publish_s: float = 0.5
    shared: bool = False
    reward_lost: float = 0.0
    reward_timeout_s: float = 5.0
    refills: int = 1
    uniform: float = 0.0
    replica_lost_s: float | None = None
    bounds: ReplicaBounds | None = None
    node_lost_s: float | None = None
    node_added_s: float | None = None


@dataclass
class SimulatedCheckpoint:
    """The state that a resumed run begins with."""

    ledger: dict[str, Any]
    lots: list[tuple[list[str], list[int]]]
    rows: dict[int, tuple[float, ...]]
    reports: dict[int, Any]
    trained: list[list[int]]
    drawn: int


@dataclass
class SimulatedRun:
    """Results of a simulated run.

    Attributes:
        trained: the `seq` of the groups of each step.
        ages: versions between admission and training, of each group.
        generated_s: generation time of all groups that were trained on.
        longest_s: the longest response of each step, added up.
        seconds, learn_s: simulated time of the run, and of its training.
        busy_s: seconds that the places generated.
        lost_s: those of requests that ended with their replica or their group, and run again or not at all.
        void_s: those of finished groups that were not trained on.
        voided: reasons of void groups.
        replicas_joined, replicas_left: number of replicas that have joined, and left, of all processes of the run.
    """

    trained: list[list[int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    generated_s: float = 0.0
    longest_s: float = 0.0
    seconds: float = 0.0
    busy_s: float = 0.0
    lost_s: float = 0.0
    void_s: float = 0.0
    learn_s: float = 0.0
    voided: Counter[str] = field(default_factory=Counter)
    replicas_joined: int = 0
    replicas_left: int = 0


class Simulation:
    """One run of a world.

    Args:
        world: what is run.
        seed: of all latencies and faults.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = Random(seed)
        self._nodes = Random(f"{seed} nodes")
        self.saved: SimulatedCheckpoint | None = None
        self.seed = seed
        self.results = SimulatedRun()
        self.pool = self.new_pool()
        self.drawn = 0
        self.feeder: Feeder[list[str], tuple[float, ...]]

    def new_pool(self) -> SimulatedPool:
        """Return the pool of replicas."""
        return SimulatedPool(self.world.replicas, self.world.places, bounds=self.world.bounds)

    def new_ledger(self) -> Ledger:
        """Return the ledger of a process that begins."""
        return Ledger(self.world.schedule)

    def replicas_await_weights(self) -> bool:
        """Return whether nothing can be generated until the next publish."""
        return self.pool.awaits_weights

    def draw(self) -> tuple[Sequence[str], list[str]]:
        """Return the uids of the next lot, and the prompts, which are the uids here."""
        uids = [str(self.drawn + number) for number in range(self.world.schedule.lot)]
        self.drawn += len(uids)
        return uids, uids

    # ------------------------------------------------------------------ a lot

    async def answer(self, lot: Lot[list[str]]) -> LotResult[tuple[float, ...]]:
        """Generate and score the samples of a lot. The rows of a group are the seconds of its samples here."""
        groups = await asyncio.gather(*(self._group(group) for group in lot.groups))
        self.results.void_s += sum(sum(seconds) for seconds, reason in groups if reason)
        rows = {group.uid: seconds for group, (seconds, reason) in zip(lot.groups, groups, strict=True) if not reason}
        voided = {group.uid: reason for group, (_, reason) in zip(lot.groups, groups, strict=True) if reason}
        return LotResult(rows, voided, lot.first_seq)

    async def _group(self, group: Group) -> tuple[tuple[float, ...], str]:
        world = self.world
        # A group has its own random numbers: what it does is a function of the prompt, and not of the order of events.
        random = Random(f"{self.seed} {group.uid} {group.key}")
        uniform = random.random() < world.uniform
        samples = [Random(random.random()) for _ in range(world.samples)]
        seconds = await asyncio.gather(*(self._sample(sample) for sample in samples))
        scored = tuple(value for value in seconds if value is not None)
        if len(scored) < len(seconds):
            return scored, "unscored"
        return scored, "uniform" if uniform else ""

    async def _sample(self, random: Random) -> float | None:
        """Generate and score a sample; return its seconds of generation, None where it stays without a score."""
        for _ in range(1 + self.world.refills):
            seconds = self.world.response_s(random)
            await self.pool.generate(seconds)
            if await self.score(random):
                return seconds
        return None

    async def score(self, random: Random) -> bool:
        """Wait for the score of a sample; return whether there is one."""
        world = self.world
        if random.random() >= world.reward_lost:
            await asyncio.sleep(random.expovariate(1 / world.reward_s) if world.reward_s else 0.0)
            return True
        await asyncio.sleep(world.reward_timeout_s)
        return False

    # ------------------------------------------------------------------ the run

    async def run(
        self, checkpoint: SimulatedCheckpoint | None = None, stop_after: int | None = None
    ) -> SimulatedCheckpoint | None:
        """Train to the last step, or stop without warning after `stop_after` steps.

        Returns:
            The last checkpoint.

        Raises:
            TooFewReplicasError: `saved` is the checkpoint that is written then.
        """
        world, results = self.world, self.results
        self.feeder = Feeder(self.new_ledger(), self.draw, self.answer, world.drain, self.replicas_await_weights)
        results.trained = []
        if checkpoint is not None:
            self.restore(checkpoint)
        tasks = [self._faults(), self._node_losses(), self._node_additions(), self.pool.adjust()]
        background = [asyncio.ensure_future(task) for task in tasks]
        try:
            while len(results.trained) < world.steps and len(results.trained) != stop_after:
                await self._step()
                if self.random.random() < 0.5:
                    checkpoint = self.checkpoint()
        except TooFewReplicasError:
            self.saved = self.checkpoint()
            raise
        finally:
            for task in background:
                task.cancel()
            # Before the end cuts off what is in flight.
            results.busy_s, results.lost_s = self.pool.busy_s, self.pool.lost_s
            results.replicas_joined += self.pool.replicas_joined
            results.replicas_left += self.pool.replicas_left
            await self.feeder.close()
        results.seconds += asyncio.get_running_loop().time()
        results.voided = self.feeder.ledger.voided
        return checkpoint

    async def _step(self) -> None:
        world, results, feeder = self.world, self.results, self.feeder
        step = await feeder.take()
        results.ages += [feeder.ledger.version - group.admitted for group in step.groups]
        results.generated_s += sum(map(sum, step.rows))
        results.longest_s += max(map(max, step.rows))
        if world.shared:
            if world.drain:
                await feeder.settle()
            self.pool.pause()
        self.pool.weights_will_change()
        await asyncio.sleep(world.learn_s)
        results.learn_s += world.learn_s
        await self.before_publish()
        await asyncio.sleep(world.publish_s)
        self.pool.publish()
        feeder.release(step.groups)
        results.trained.append([group.seq for group in step.groups])

    async def before_publish(self) -> None:
        """Prepare generation for new weights: first the groups that end, then the pause."""
        await self.feeder.before_publish()
        self.pool.pause()

    async def _faults(self) -> None:
        while self.world.replica_lost_s is not None:
            await asyncio.sleep(self.random.expovariate(1 / self.world.replica_lost_s))
            if self.pool.number:
                self.pool.lose(self.random.randrange(self.pool.number))
            self.feeder.wake()

    async def _node_losses(self) -> None:
        while self.world.node_lost_s is not None:
            await asyncio.sleep(self._nodes.expovariate(1 / self.world.node_lost_s))
            if self.pool.number:
                self.pool.leave(self._nodes.randrange(self.pool.number))
            self.feeder.wake()

    async def _node_additions(self) -> None:
        while self.world.node_added_s is not None:
            await asyncio.sleep(self._nodes.expovariate(1 / self.world.node_added_s))
            self.pool.free_nodes += 1

    # ------------------------------------------------------------------ checkpoints

    def checkpoint(self) -> SimulatedCheckpoint:
        """Return the state between two steps."""
        feeder = self.feeder
        lots = [([group.uid for group in lot.groups], [group.seq for group in lot.groups]) for lot in feeder.inflight()]
        trained = [list(step) for step in self.results.trained]
        return SimulatedCheckpoint(
            feeder.ledger.state(), lots, feeder.ready_rows(), feeder.reports(), trained, self.drawn
        )

    def restore(self, checkpoint: SimulatedCheckpoint) -> None:
        """Begin where a checkpoint was written."""
        self.results.trained = [list(step) for step in checkpoint.trained]
        self.drawn = checkpoint.drawn
        self.pool = self.new_pool()
        self.feeder.restore(checkpoint.ledger, checkpoint.lots, checkpoint.rows, checkpoint.reports)

    def check(self) -> None:
        """Compare the end of a run with what every schedule promises.

        Raises:
            AssertionError: a group was lost or trained on twice, or the bound was passed.
        """
        ledger = self.feeder.ledger
        flat = [seq for step in self.results.trained for seq in step]
        assert len(flat) == len(set(flat)), f"groups were trained on twice: {flat}"
        live = {group.seq for group in ledger.live.values()}
        accounted = len(flat) + ledger.voided.total() + len(live)
        assert accounted == ledger.admitted, f"{ledger.admitted} admitted, {accounted} accounted for"
        assert not live & set(flat), "a group that was trained on is live"
        assert all(age <= ledger.schedule.bound for age in self.results.ages), self.results.ages
        inflight = ledger.count(GroupState.INFLIGHT)
        assert inflight + len(self.feeder.ready_rows()) == len(live), "a live group has neither a lot nor rows"


def ideal_step_s(world: World, generation_s: float, longest_s: float) -> float:
    """Return the shortest possible mean seconds of a step.

    `T* = max(G / C + u, L + u, (d + L + u) / (S + 1))` with own devices: G the seconds of generation of a step's
    samples, C the places, L and u the seconds of an update and of publishing, d the longest response with its reward.
    With shared devices the phases add up: `G / C + L + u`.

    Args:
        generation_s: G, mean of the steps.
        longest_s: the longest response of a step, mean of the steps.
    """
    generation = generation_s / (world.replicas * world.places)
    learn, publish = world.learn_s, world.publish_s
    if world.shared:
        return generation + learn + publish
    chain = (longest_s + world.reward_s + learn + publish) / (math.floor(world.schedule.staleness) + 1)
    return max(generation + publish, learn + publish, chain)
