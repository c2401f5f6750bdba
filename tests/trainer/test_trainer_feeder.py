"""The feeder of lots: when an error of a lot in flight is raised."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

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
