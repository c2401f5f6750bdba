"""Learning-rate schedules against their formulas, and optimizers by configuration."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from hybridrl.config.engine import OptimConfig
from hybridrl.engine.optimizer import build_optimizer, build_schedule, lr_factor
from hybridrl.models.errors import ModelError


def settings(kind: str, **others):  # type: ignore[no-untyped-def]
    optim = OptimConfig(total_training_steps=40, lr=0.5, lr_warmup_steps=4, **others)
    optim.lr_scheduler_type = kind  # the schema admits a kind only when the whole configuration is ready for it
    return optim


def rates(optim, steps: int = 45) -> list[float]:  # type: ignore[no-untyped-def]
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(2))], optim)
    schedule = build_schedule(optimizer, optim)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_to_zero_is_that_of_transformers(kind: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    make = get_linear_schedule_with_warmup if kind == "linear" else get_cosine_schedule_with_warmup
    schedule = make(optimizer, 4, 40)
    expected = []
    for _ in range(41):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(settings(kind), 41) == pytest.approx(expected, abs=1e-12)


def test_floors_and_plateaus() -> None:
    constant, linear, cosine, wsd = (
        rates(settings(k, min_lr_ratio=0.1)) for k in ("constant", "linear", "cosine", "wsd")
    )
    assert constant[:6] == pytest.approx([0, 0.125, 0.25, 0.375, 0.5, 0.5]) and constant[44] == 0.5
    assert linear[22] == pytest.approx(0.5 * 0.55) and linear[40] == linear[44] == pytest.approx(0.05)
    assert cosine[13] == pytest.approx(0.5 * (0.55 + 0.45 * math.cos(math.pi / 4)))
    assert cosine[44] == pytest.approx(0.05)
    assert wsd[4] == wsd[36] == 0.5 and 0.05 < wsd[38] < 0.5 and wsd[40] == pytest.approx(0.05)
    assert rates(settings("cosine", num_cycles=1.0))[40] == pytest.approx(0.5)


def test_warm_up_by_ratio() -> None:
    factor = lr_factor(OptimConfig(total_training_steps=50, lr_warmup_steps_ratio=0.2))
    assert [factor(step) for step in (0, 5, 10, 49)] == [0, 0.5, 1, 1]
    with pytest.raises(ModelError, match=r"total_training_steps=-1.*lr_warmup_steps_ratio=0.2"):
        lr_factor(OptimConfig(lr_warmup_steps_ratio=0.2))
    with pytest.raises(ModelError, match="lr_scheduler_type='triangle' is not known"):
        lr_factor(settings("triangle"))


def test_optimizers_by_name() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    adam = build_optimizer(parameters, OptimConfig(lr=0.1, betas=[0.8, 0.9], override_optimizer_config={"eps": 1e-3}))
    assert isinstance(adam, torch.optim.AdamW)
    assert (adam.defaults["betas"], adam.defaults["eps"], adam.defaults["fused"]) == ((0.8, 0.9), 1e-3, True)
    sgd = build_optimizer(parameters, OptimConfig(optimizer="SGD", override_optimizer_config={"momentum": 0.5}))
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0.5
    slow = build_optimizer(parameters, OptimConfig(override_optimizer_config={"foreach": True}))
    assert slow.defaults["foreach"] and not slow.defaults["fused"]
    with pytest.raises(ModelError, match=r"optim.optimizer='Adm'"):
        build_optimizer(parameters, OptimConfig(optimizer="Adm"))
    with pytest.raises(ModelError, match="takes no argument betta"):
        build_optimizer(parameters, OptimConfig(override_optimizer_config={"betta": 1}))
