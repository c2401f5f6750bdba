"""The feeder of lots: when an error of a lot in flight is raised."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from sampler_tools import Rows

from hybridrl.data import PromptLoader
from hybridrl.simulation.virtual_loop import run_virtual
from hybridrl.trainer.ppo.feeder import Feeder, Lot, LotResult
from hybridrl.trainer.ppo.ledger import AdmissionSchedule, Ledger

LIMIT_S = 1000.0


@pytest.mark.parametrize("train_s", [0.0, 5.0])
def test_a_lot_that_failed_at_once_stops_the_step_before_it_trains(train_s: float) -> None:
    """Also if the error came before the wait: a step that trained would leave the failed lot to the next weights."""

    async def answer(lot: Lot[str]) -> LotResult[None]:
        await asyncio.sleep(1.0)
        if lot.first_seq >= 4:
            raise OSError("the grader is away")
        return LotResult({group.uid: None for group in lot.groups}, {}, None)

    async def step() -> int:
        numbers = count()
        feeder: Feeder[str, None] = Feeder(
            Ledger(AdmissionSchedule(2, 1, lot=2)),
            lambda: ([f"uid {next(numbers)}", f"uid {next(numbers)}"], "prompts"),
            answer,
            False,
            lambda: False,
            lambda: False,
        )
        feeder.release((await feeder.take()).groups)  # the third lot is admitted here, and fails
        await feeder.take()
        await asyncio.sleep(train_s)
        with pytest.raises(OSError, match="grader"):
            await feeder.settle()
        feeder.give_back()
        return feeder.ledger.version

    version, _ = run_virtual(step(), LIMIT_S)
    assert version == 1


@pytest.mark.parametrize("staleness", [0, 1, 2.5])
def test_rows_that_are_drawn_again_while_they_are_answered_are_prompts_of_their_own(staleness: float) -> None:
    """Each lot has the same two rows; up to seven groups are live at once."""

    async def answer(lot: Lot[str]) -> LotResult[None]:
        await asyncio.sleep(1.0)
        return LotResult({group.uid: None for group in lot.groups}, {}, None)

    async def steps() -> list[str]:
        batches = iter(PromptLoader(Rows(), 2, [3, 5] * 8))  # type: ignore[arg-type]

        def draw() -> tuple[list[str], str]:
            return next(batches).non_tensor_batch["uid"].tolist(), "prompts"

        schedule = AdmissionSchedule(2, staleness, lot=2, lots_at_once=2)
        feeder: Feeder[str, None] = Feeder(Ledger(schedule), draw, answer)
        uids = []
        for _ in range(4):
            taken = await feeder.take()
            uids += [group.uid for group in taken.groups]
            feeder.release(taken.groups)
        await feeder.close()
        return uids

    uids, _ = run_virtual(steps(), LIMIT_S)
    assert uids == ["0-3", "0-5", "0-3-1", "0-5-1", "0-3-2", "0-5-2", "0-3-3", "0-5-3"]
