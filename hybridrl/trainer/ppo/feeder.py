"""Keeps prompts in flight within the limits of a ledger, so that a step finds scored groups.

Everything runs on one event loop, so there are no locks. The loop may have a virtual clock (`hybridrl.simulation`). The
feeder does not know what prompts and rows are: `draw` returns prompts, and `answer` turns them into rows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hybridrl.trainer.ppo.ledger import Group, GroupState, Ledger, LedgerError

P = TypeVar("P")
R = TypeVar("R")


@dataclass(eq=False)
class Lot(Generic[P]):
    """Prompts that are answered together.

    Attributes:
        prompts: what `draw` returned.
        groups: a group of the ledger for each prompt.
    """

    prompts: P
    groups: list[Group]

    @property
    def key(self) -> int:
        """Keys the sampling noise of all its groups."""
        return self.groups[0].key

    @property
    def first_seq(self) -> int:
        """The number of its first group, which names the lot."""
        return self.groups[0].seq


@dataclass(frozen=True)
class LotResult(Generic[R]):
    """The ends of the groups of a lot. Each uid of the lot is in exactly one of the two mappings.

    Attributes:
        rows: scored groups, by uid.
        voided: reasons of the groups that are not trained on, by uid.
        report: metrics of the lot. They belong to the step that trains on it.
    """

    rows: Mapping[str, R]
    voided: Mapping[str, str] = field(default_factory=dict)
    report: Any = None


@dataclass(frozen=True)
class TakenGroups(Generic[R]):
    """The groups of a step.

    Attributes:
        groups: in the order of their admission.
        rows: of each group.
        reports: those of the lots that ended up to the youngest of these groups, and belong to no earlier step; by the
            number of the first group of the lot, in this order.
    """

    groups: list[Group]
    rows: list[R]
    reports: dict[int, Any]


class Feeder(Generic[P, R]):
    """Draws prompts, has them answered, and hands out scored groups.

    Args:
        ledger: says what may be admitted and taken.
        draw: returns the uids of the next lot, and its prompts.
        answer: generates and scores a lot. It is cancelled where none of the lot's groups is needed any more.
        drain: before new weights are published, wait until nothing is in flight: all tokens of a group have one version
            then, and with a seed for each request a run is a function of its seeds.
        awaits_weights: whether generation stands still until new weights are published, because every replica was lost
            since the last ones. `before_publish` does not wait for lots in flight then. Call `wake` where it changes.
        enough: whether no lot is needed beyond those that a step waits for.
    """

    def __init__(
        self,
        ledger: Ledger,
        draw: Callable[[], tuple[Sequence[str], P]],
        answer: Callable[[Lot[P]], Awaitable[LotResult[R]]],
        drain: bool = False,
        awaits_weights: Callable[[], bool] = lambda: False,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ledger = ledger
        self._draw = draw
        self._answer = answer
        self._drain = drain
        self._awaits_weights = awaits_weights
        self._enough = enough
        self._lots: dict[asyncio.Task[LotResult[R]], Lot[P]] = {}
        self._restored: list[Lot[P]] = []
        self._rows: dict[int, R] = {}  # of ready groups, by seq
        self._reports: dict[int, Any] = {}  # by the first seq of the lot
        self._taken: TakenGroups[R] = TakenGroups([], [], {})
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._reads_ahead = ledger.schedule.staleness > 0

    # ------------------------------------------------------------------ a step

    async def take(self) -> TakenGroups[R]:
        """Wait until the groups of a step are ready, and take them.

        A lot whose `answer` raised is answered again by the next call.

        Raises:
            LedgerError: nothing is in flight, and nothing may be admitted.
            BaseException: what `draw` or `answer` raised.
        """
        restored, self._restored = self._restored, []
        self._start(restored)
        while not self.ledger.takeable():
            self._admit(needed=True)
            if not self._lots and self._error is None:
                raise LedgerError(f"no lot is in flight, and none may be admitted: {self.ledger.state()}")
            await self._change()
        groups = self.ledger.take()
        youngest = groups[-1].seq
        reports = {seq: self._reports.pop(seq) for seq in sorted(self._reports) if seq <= youngest}
        self._read_ahead()
        self._taken = TakenGroups(groups, [self._rows.pop(group.seq) for group in groups], reports)
        return self._taken

    async def before_publish(self) -> list[Group]:
        """Prepare for new weights: void groups that would be too old, and with `drain` wait for those in flight.

        Returns:
            The groups that are void now.
        """
        stale = self.ledger.stale()
        self._void(stale, "stale")
        # An error is for the next `take`: the step that is about to end has trained.
        while self._drain and self._lots and self._error is None and not self._awaits_weights():
            self._changed.clear()
            await self._changed.wait()
        return stale

    async def settle(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            BaseException: what `draw` or `answer` raised, now or since the last wait. A step that trained in spite of
                it would leave the lot to the next weights.
        """
        while self._lots or self._error is not None:
            await self._change()

    def wake(self) -> None:
        """Look at the state again, because `awaits_weights` may have changed."""
        self._changed.set()

    def release(self, groups: Iterable[Group]) -> int:
        """The weights that were trained on the groups are published. Return the new version."""
        version = self.ledger.release(groups)
        self._taken = TakenGroups([], [], {})
        self._read_ahead()
        return version

    def give_back(self) -> None:
        """Undo the last `take`: its groups are ready again. Their rows are those that `take` returned."""
        step, self._taken = self._taken, TakenGroups([], [], {})
        self.ledger.give_back(step.groups)
        self._rows |= {group.seq: row for group, row in zip(step.groups, step.rows, strict=True)}
        self._reports |= step.reports

    def drop(self, reason: str) -> int:
        """Void all groups that are in flight or ready, and return how many there were."""
        groups = [group for group in self.ledger.live.values() if group.state is not GroupState.TAKEN]
        self._void(groups, reason)
        self._restored = []
        self._reports.clear()
        return len(groups)

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._lots)

    async def close(self) -> None:
        """Cancel what is in flight. It stays in flight for the ledger, so that a resumed run generates it again."""
        tasks = list(self._lots)
        self._lots.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ state

    def inflight(self) -> list[Lot[P]]:
        """Return the lots and their groups that are in flight, in the order of admission, for a checkpoint."""
        lots = sorted([*self._lots.values(), *self._restored], key=lambda lot: lot.first_seq)
        unfinished = [
            Lot(lot.prompts, [group for group in lot.groups if group.state is GroupState.INFLIGHT]) for lot in lots
        ]
        return [lot for lot in unfinished if lot.groups]

    def ready_rows(self) -> dict[int, R]:
        """Return the rows of groups that wait to be taken, by `seq`, for a checkpoint."""
        return dict(self._rows)

    def reports(self) -> dict[int, Any]:
        """Return the reports that belong to no step yet, by the first `seq` of their lots, for a checkpoint."""
        return dict(self._reports)

    def restore(
        self, state: Mapping[str, Any], lots: Iterable[tuple[P, Sequence[int]]], rows: Mapping[int, R], reports: Any
    ) -> None:
        """Continue from a checkpoint. Lots in flight are answered again, with their old keys, at the next `take`.

        Args:
            state: of the ledger.
            lots: prompts in flight, with the `seq` of their groups.
            rows: what `ready_rows` returned.
            reports: what `reports` returned.

        Raises:
            LedgerError: prompts or rows of a live group are missing.
        """
        self.ledger.load(state)
        live = self.ledger.live
        self._rows, self._reports = dict(rows), dict(reports)
        self._restored = [Lot(prompts, [live[seq] for seq in seqs]) for prompts, seqs in lots]
        inflight = {group.seq for lot in self._restored for group in lot.groups}
        for group in live.values():
            stored = inflight if group.state is GroupState.INFLIGHT else self._rows
            if group.seq not in stored:
                raise LedgerError(f"the checkpoint has no data of group {group.seq}, which is {group.state.value}")

    # ------------------------------------------------------------------ lots

    def _admit(self, needed: bool = False) -> None:
        """Begin with as many lots as there is room for.

        Args:
            needed: a step waits for them.
        """
        while self._error is None and self.ledger.room() and (not self._enough() or (needed and self.ledger.missing())):
            uids, prompts = self._draw()
            self._start([Lot(prompts, self.ledger.admit(uids))])

    def _read_ahead(self) -> None:
        """Use the room that there is now, for later steps. The next `take` raises what goes wrong."""
        try:
            if self._reads_ahead:
                self._admit()
        except BaseException as error:
            self._error = self._error or error

    def _start(self, lots: Iterable[Lot[P]]) -> None:
        for lot in lots:
            task = asyncio.ensure_future(self._answer(lot))
            self._lots[task] = lot
            task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Future[LotResult[R]]") -> None:
        """A lot has ended: enter its groups, and use the room of void ones."""
        lot = self._lots.pop(task, None)  # type: ignore[call-overload]
        if lot is None or task.cancelled():
            return  # it is not needed any more
        try:
            self._enter(lot, task.result())
        except BaseException as error:  # `take` raises it; nobody looks at what a callback raises
            self._error = self._error or error
            if task.exception() is not None:
                self._restored.append(lot)
        self._read_ahead()
        self._changed.set()

    def _enter(self, lot: Lot[P], result: LotResult[R]) -> None:
        for group in lot.groups:
            if group.state is GroupState.VOID:
                continue  # it became void meanwhile
            if (group.uid in result.rows) == (group.uid in result.voided):
                raise LedgerError(f"group {group.seq} has to end as scored or as void, as one of them")
            if group.uid in result.rows:
                self._rows[group.seq] = result.rows[group.uid]
                self.ledger.ready(group)
            else:
                self.ledger.void(group, result.voided[group.uid])
        self._reports[lot.first_seq] = result.report

    def _void(self, groups: Iterable[Group], reason: str) -> None:
        for group in groups:
            self.ledger.void(group, reason)
            self._rows.pop(group.seq, None)
        for task, lot in list(self._lots.items()):
            if all(group.state is GroupState.VOID for group in lot.groups):
                del self._lots[task]
                task.cancel()

    async def _change(self) -> None:
        """Wait until a lot ends.

        Raises:
            BaseException: what a lot raised.
        """
        if self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
