"""Objectives of labelled answers against their papers' formulas in float64, and the shares of micro-batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.config import KTOConfig
from hybridrl.engine.microbatch import BatchPlan
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.errors import AlgorithmError
from hybridrl.protocol import DataProto
from hybridrl.registry import OBJECTIVES
from hybridrl.utils.metrics import merge_metrics, reduce_to_floats
from hybridrl.workers.losses import LossCounts
from hybridrl.workers.objectives import (
    DESIRABLE,
    KL_BASELINE,
    REF_LOG_PROBS,
    LabelledAnswers,
    LabelLoss,
    Objective,
    register_objective,
)

ROWS, T, BETA, DESIRED, UNDESIRED = 7, 6, 0.3, 1.5, 0.8
Z0 = 0.7


def kto(h: float, desirable: bool) -> float:
    """The paper's lambda_y - v(x, y)."""
    if desirable:
        return DESIRED - DESIRED / (1 + math.exp(-BETA * (h - Z0)))
    return UNDESIRED - UNDESIRED / (1 + math.exp(-BETA * (Z0 - h)))


def apo_zero_unpaired(h: float, desirable: bool) -> float:
    """The paper's loss without its pairs: an answer that is not desirable counts by its own probability."""
    probability = 1 / (1 + math.exp(-BETA * h))
    return DESIRED * (1 - probability) if desirable else UNDESIRED * probability


FORMULAS = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


def batch_of(seed: int = 0) -> tuple[torch.Tensor, DataProto]:
    """Log-probabilities [B, T] and a batch of B answers of 1 to T tokens."""
    draw = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(ROWS, T, generator=draw, dtype=torch.float64) * 2
    lengths = torch.randint(1, T + 1, (ROWS,), generator=draw)
    tensors = {
        "response_mask": (torch.arange(T) < lengths[:, None]).long(),
        REF_LOG_PROBS: -torch.rand(ROWS, generator=draw, dtype=torch.float64) * T,
        DESIRABLE: torch.tensor([True, False, False, True, True, False, True]),
        KL_BASELINE: torch.full((ROWS,), Z0, dtype=torch.float64),
    }
    return log_probs, DataProto.from_dict(tensors=tensors)


def settings_of(name: str) -> KTOConfig:
    return KTOConfig(loss_type=name, beta=BETA, desirable_weight=DESIRED, undesirable_weight=UNDESIRED)


def computed(settings: Any, values: torch.Tensor, batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    objective = Objective(settings.loss_type, settings)
    assert objective.output == "log_probs" and objective.rows_together == 1
    return objective.share("train")({"log_probs": values}, batch, LossCounts(0, ROWS))


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_gradient_and_metrics_are_those_of_the_paper(name: str) -> None:
    values, batch = batch_of()
    values.requires_grad_()
    loss, metrics = computed(settings_of(name), values, batch)
    loss.backward()
    mask, before = batch.batch["response_mask"].numpy(), batch.batch[REF_LOG_PROBS].numpy()
    labels, logits = batch.batch[DESIRABLE].numpy(), values.detach().numpy()

    def mean(moved: np.ndarray) -> float:
        ratios = (moved * mask).sum(1) - before
        return float(np.mean([FORMULAS[name](h, label) for h, label in zip(ratios, labels, strict=True)]))

    assert loss.item() == pytest.approx(mean(logits), rel=1e-9)
    assert values.grad is not None and torch.all(values.grad[mask == 0] == 0)
    step = 1e-6
    for row, column in np.argwhere(mask):
        moved = [logits.copy() for _ in range(2)]
        moved[0][row, column] += step
        moved[1][row, column] -= step
        change = (mean(moved[0]) - mean(moved[1])) / (2 * step)
        assert values.grad[row, column].item() == pytest.approx(change, rel=1e-4, abs=1e-8)
        assert (change < 0) == labels[row]  # desirable answers become more probable, others less

    measured, rewards = reduce_to_floats(metrics), BETA * ((logits * mask).sum(1) - before)
    assert measured["train/desirable_reward"] == pytest.approx(rewards[labels].mean())
    assert measured["train/undesirable_reward"] == pytest.approx(rewards[~labels].mean())
    assert measured["train/desirable_log_prob"] == pytest.approx((logits * mask).sum(1)[labels].mean())
    assert measured.get("train/kl_baseline") == (pytest.approx(Z0) if name == "kto" else None)


@pytest.mark.parametrize("name", FORMULAS)
def test_shares_of_micro_batches_add_up_in_any_order_and_width(name: str) -> None:
    values, batch = batch_of()
    whole, metrics = computed(settings_of(name), values, batch)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    shuffled, _ = computed(settings_of(name), values[order], batch.select_idxs(order.numpy()))
    torch.testing.assert_close(shuffled, whole)
    wide = DataProto.from_dict(
        tensors={**batch.batch, "response_mask": torch.nn.functional.pad(batch.batch["response_mask"], (0, 3))}
    )
    padded, _ = computed(settings_of(name), torch.nn.functional.pad(values, (0, 3), value=float("nan")), wide)
    torch.testing.assert_close(padded, whole)

    attention = (torch.arange(2 * T) < torch.arange(T + 1, T + 1 + ROWS)[:, None].clamp(max=2 * T)).long()
    grid = torch.zeros(ROWS, 2 * T - 1, dtype=torch.long)
    grid[:, 0] = 1  # each row has a response token, so each is in a micro-batch
    tensors = {"input_ids": torch.zeros_like(attention), "attention_mask": attention, "response_mask": grid}
    for micro in (MicroBatching(1, None), MicroBatching(3, None), MicroBatching(None, 30)):
        groups = BatchPlan(tensors, micro, False).groups
        assert len(groups) > 1
        parts = [computed(settings_of(name), values[rows], batch.select_idxs(rows)) for rows in groups]
        torch.testing.assert_close(torch.stack([loss for loss, _ in parts]).sum(), whole)
        merged = reduce_to_floats(merge_metrics([found for _, found in parts]))
        assert merged == pytest.approx(reduce_to_floats(merge_metrics([metrics])))


def test_extreme_ratios_have_a_finite_loss_and_gradient() -> None:
    values, batch = batch_of()
    far = (values * 1e4).requires_grad_()
    loss, _ = computed(settings_of("kto"), far, batch)
    loss.backward()
    assert torch.isfinite(loss) and far.grad is not None and torch.all(torch.isfinite(far.grad))


def test_a_module_adds_an_objective_of_labels() -> None:
    @register_objective("test_labels", kind="labels", reference=True, kl_baseline=True, reads=("beta",))
    def distance(answers: LabelledAnswers, settings: Any) -> LabelLoss:
        assert answers.ref_log_probs is not None and answers.kl_baseline is not None
        ratios = answers.log_probs - answers.ref_log_probs - answers.kl_baseline
        return LabelLoss((ratios / answers.tokens - answers.desirable.double()).abs(), ratios)

    try:
        values, batch = batch_of()
        loss, _ = computed(KTOConfig(loss_type="test_labels"), values, batch)
        mask = batch.batch["response_mask"]
        ratios = (values * mask).sum(1) - batch.batch[REF_LOG_PROBS] - Z0
        expected = (ratios / mask.sum(1) - batch.batch[DESIRABLE].double()).abs().mean()
        assert loss.item() == pytest.approx(float(expected))
    finally:
        OBJECTIVES.remove("test_labels")
    for wrong in ({"kind": "labels"}, {"kind": "pairs", "reference": True}):
        with raises_with(AlgorithmError, "'test_labels'", "kl_baseline=True"):
            register_objective("test_labels", kl_baseline=True, **wrong)(lambda *_: None)
