"""Objectives of supervised training against their papers' formulas in float64, and the shares of micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from raising import raises_with

from hybridrl.config import DPOConfig, RMConfig, SFTObjectiveConfig
from hybridrl.engine.microbatch import BatchPlan
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.errors import AlgorithmError
from hybridrl.protocol import DataProto
from hybridrl.registry import OBJECTIVES
from hybridrl.utils.metrics import merge_metrics, reduce_to_floats
from hybridrl.workers.losses import LossCounts
from hybridrl.workers.objectives import (
    LOSS_WEIGHTS,
    MARGINS,
    NLL_WEIGHTS,
    REF_LOG_PROBS,
    Objective,
    PairLoss,
    register_objective,
)

PAIRS, T = 5, 7


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Each formula as its paper writes it, of one pair: sums w, l of log-probabilities of the chosen and the rejected
# answer, their tokens n, m, sums rw, rl under the reference, and the margin.
def dpo(w, l, n, m, rw, rl, margin, beta=0.3, smoothing=0.0):  # noqa: E741 (the papers' names)
    z = beta * ((w - rw) - (l - rl)) - margin
    return -(1 - smoothing) * math.log(sigma(z)) - smoothing * math.log(1 - sigma(z))


def dpo_normalised(w, l, n, m, rw, rl, margin):  # noqa: E741
    return -math.log(sigma(0.3 * ((w - rw) / n - (l - rl) / m)))


def ipo(w, l, n, m, rw, rl, margin, tau=0.3):  # noqa: E741
    return ((w - rw) / n - (l - rl) / m - 1 / (2 * tau)) ** 2


def slic(w, l, n, m, rw, rl, margin):  # noqa: E741
    return max(0.0, 1 - 0.3 * ((w - rw) - (l - rl)))


def simpo(w, l, n, m, rw, rl, margin):  # noqa: E741
    return -math.log(sigma(2.0 * w / n - 2.0 * l / m - 0.7))


def orpo(w, l, n, m, rw, rl, margin):  # noqa: E741
    p, q = math.exp(w / n), math.exp(l / m)
    return -0.3 * math.log(sigma(math.log((p / (1 - p)) / (q / (1 - q)))))


CASES: dict[str, tuple[Any, Any]] = {
    "sigmoid": (DPOConfig(beta=0.3), lambda *x: dpo(*x[:-1], 0.0)),
    "sigmoid, margins": (DPOConfig(beta=0.3), dpo),
    "sigmoid, smoothed": (DPOConfig(beta=0.3, label_smoothing=0.2), lambda *x: dpo(*x[:-1], 0.0, smoothing=0.2)),
    "sigmoid, per token": (DPOConfig(beta=0.3, length_normalise=True), dpo_normalised),
    "ipo": (DPOConfig(loss_type="ipo", beta=0.3), ipo),
    "hinge": (DPOConfig(loss_type="hinge", beta=0.3), slic),
    "simpo": (DPOConfig(loss_type="simpo", beta=2.0, simpo_gamma=0.7), simpo),
    "orpo": (DPOConfig(loss_type="orpo", beta=0.3, sft_coef=0.0), orpo),
}


def batch_of(seed: int = 0) -> tuple[torch.Tensor, DataProto]:
    """Log-probabilities [2N, T] and a batch of N pairs whose answers have 1 to T tokens."""
    draw = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(2 * PAIRS, T, generator=draw, dtype=torch.float64) * 2 - 0.01
    lengths = torch.randint(1, T + 1, (2 * PAIRS,), generator=draw)
    mask = (torch.arange(T) < lengths[:, None]).long()
    chosen = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(PAIRS)
    tensors = {
        "response_mask": mask,
        REF_LOG_PROBS: -torch.rand(2 * PAIRS, generator=draw, dtype=torch.float64) * T,
        NLL_WEIGHTS: chosen / mask[::2].sum(),
        MARGINS: torch.rand(PAIRS, generator=draw, dtype=torch.float64).repeat_interleave(2),
    }
    return log_probs, DataProto.from_dict(tensors=tensors)


def computed(settings: Any, values: torch.Tensor, batch: DataProto, counts: LossCounts) -> tuple[torch.Tensor, Any]:
    objective = Objective(settings.loss_type, settings)
    return objective.share("train")({objective.output: values}, batch, counts)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_paper(name: str) -> None:
    settings, formula = CASES[name]
    values, batch = batch_of()
    if "margins" not in name:
        batch = batch.select(batch_keys=["response_mask", REF_LOG_PROBS, NLL_WEIGHTS])
    values.requires_grad_()
    loss, metrics = computed(settings, values, batch, LossCounts(0, 2 * PAIRS))
    loss.backward()

    mask, reference = batch.batch["response_mask"], batch.batch[REF_LOG_PROBS]
    margins = batch.batch[MARGINS] if "margins" in name else torch.zeros(2 * PAIRS)

    def of_pair(pair: int, shift: tuple[int, int, float] | None = None) -> float:
        w, l = (2 * pair, 2 * pair + 1)  # noqa: E741
        moved = values.detach().clone()
        if shift is not None:
            moved[shift[0], shift[1]] += shift[2]
        sums = (moved * mask).sum(1)
        return formula(
            *(float(sums[row]) for row in (w, l)),
            *(int(mask[row].sum()) for row in (w, l)),
            *(float(reference[row]) for row in (w, l)),
            float(margins[w]),
        )

    assert loss.item() == pytest.approx(sum(map(of_pair, range(PAIRS))) / PAIRS, rel=1e-9)
    assert float(metrics["train/loss"].value) == pytest.approx(loss.item())
    assert values.grad is not None and torch.all(values.grad[mask == 0] == 0)
    step = 1e-6
    for row, column in mask.nonzero().tolist():
        change = of_pair(row // 2, (row, column, step)) - of_pair(row // 2, (row, column, -step))
        assert values.grad[row, column].item() == pytest.approx(change / (2 * step) / PAIRS, rel=1e-4, abs=1e-8)


def test_likelihood_of_chosen_answers_is_a_token_mean() -> None:
    values, batch = batch_of()
    base, _ = computed(DPOConfig(), values, batch, LossCounts(0, 2 * PAIRS))
    whole, metrics = computed(DPOConfig(sft_coef=0.4), values, batch, LossCounts(0, 2 * PAIRS))
    trained = [-float(values[row, t]) for row, t in batch.batch["response_mask"].nonzero().tolist() if row % 2 == 0]
    assert (whole - base).item() == pytest.approx(0.4 * sum(trained) / len(trained), rel=1e-9)
    assert float(metrics["train/nll_loss"].value) == pytest.approx(sum(trained) / len(trained))
    orpo_alone, _ = computed(DPOConfig(loss_type="orpo", sft_coef=0.0), values, batch, LossCounts(0, 2 * PAIRS))
    both, _ = computed(DPOConfig(loss_type="orpo"), values, batch, LossCounts(0, 2 * PAIRS))
    assert (both - orpo_alone).item() == pytest.approx(sum(trained) / len(trained), rel=1e-9)  # the paper's L_SFT


def test_orpo_is_the_whole_objective_of_its_paper_with_its_gradient() -> None:
    """E[L_SFT + lambda L_OR], in two micro-batches; L_SFT is the mean over the tokens of all chosen answers."""
    values, batch = batch_of(seed=3)
    mask = batch.batch["response_mask"]

    def paper(moved: torch.Tensor) -> float:
        sums, lengths = (moved * mask).sum(1).tolist(), mask.sum(1).tolist()
        ratios = [orpo(sums[r], sums[r + 1], lengths[r], lengths[r + 1], 0, 0, 0) for r in range(0, 2 * PAIRS, 2)]
        return sum(ratios) / PAIRS - sum(sums[::2]) / sum(lengths[::2])

    values.requires_grad_()
    settings, counts = DPOConfig(loss_type="orpo", beta=0.3), LossCounts(0, 2 * PAIRS)
    parts = [slice(0, 4), slice(4, 2 * PAIRS)]
    whole = sum(computed(settings, values[part], batch[part], counts)[0] for part in parts)
    assert isinstance(whole, torch.Tensor) and whole.item() == pytest.approx(paper(values.detach()), rel=1e-9)
    whole.backward()
    assert values.grad is not None and torch.all(values.grad[mask == 0] == 0)
    step = 1e-6
    for row, column in mask.nonzero().tolist():
        up, down = values.detach().clone(), values.detach().clone()
        up[row, column] += step
        down[row, column] -= step
        change = (paper(up) - paper(down)) / (2 * step)
        assert values.grad[row, column].item() == pytest.approx(change, rel=1e-4, abs=1e-8)


def test_orpo_is_finite_where_answers_are_certain() -> None:
    values, batch = batch_of()
    certain = (values * 1e-9).requires_grad_()
    loss, _ = computed(DPOConfig(loss_type="orpo"), certain, batch, LossCounts(0, 2 * PAIRS))
    loss.backward()
    assert torch.isfinite(loss) and certain.grad is not None and torch.all(torch.isfinite(certain.grad))


def test_rewards_are_compared_by_bradley_terry() -> None:
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(2 * PAIRS, generator=draw, dtype=torch.float64)
    margins = torch.rand(PAIRS, generator=draw, dtype=torch.float64)
    # The engine's output of a row is its one value; what is outside of the mask does not count.
    mask = torch.zeros(2 * PAIRS, T, dtype=torch.long)
    mask[torch.arange(2 * PAIRS), torch.arange(2 * PAIRS) % T] = 1
    values = torch.where(mask.bool(), scores[:, None], 99.0)
    batch = DataProto.from_dict(tensors={"response_mask": mask, MARGINS: margins.repeat_interleave(2)})
    loss, metrics = computed(RMConfig(centering_coef=0.1), values, batch, LossCounts(0, 2 * PAIRS))
    expected = 0.0
    for pair in range(PAIRS):
        w, l = float(scores[2 * pair]), float(scores[2 * pair + 1])  # noqa: E741
        expected += -math.log(sigma(w - l - float(margins[pair]))) + 0.1 * (w + l) ** 2
    assert loss.item() == pytest.approx(expected / PAIRS, rel=1e-9)
    found = reduce_to_floats(metrics)
    assert found["train/accuracy"] == float((scores[::2] > scores[1::2]).double().mean())
    assert found["train/margin"] == pytest.approx(float((scores[::2] - scores[1::2]).mean()))


@pytest.mark.parametrize("name", ["nll", "dft"])
def test_losses_of_tokens(name: str) -> None:
    values, batch = batch_of()
    mask = batch.batch["response_mask"].bool()
    values.requires_grad_()
    tokens = int(mask.sum())
    loss, _ = computed(SFTObjectiveConfig(loss_type=name), values, batch, LossCounts(tokens, 2 * PAIRS))
    loss.backward()
    kept = values.detach()[mask]
    factor = kept.exp() if name == "dft" else torch.ones_like(kept)  # without a gradient of its own
    assert loss.item() == pytest.approx(float(-(factor * kept).sum() / tokens), rel=1e-9)
    assert values.grad is not None
    torch.testing.assert_close(values.grad[mask], -factor / tokens)


def test_weights_of_tokens_make_a_weighted_mean() -> None:
    values, batch = batch_of()
    mask = batch.batch["response_mask"]
    weights = torch.rand(2 * PAIRS, T, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * mask
    batch.batch[LOSS_WEIGHTS] = weights / weights.sum()
    loss, _ = computed(SFTObjectiveConfig(), values, batch, LossCounts(int(mask.sum()), 2 * PAIRS))
    assert loss.item() == pytest.approx(float((-values * weights).sum() / weights.sum()), rel=1e-9)


@pytest.mark.parametrize("settings", [DPOConfig(sft_coef=0.3), DPOConfig(loss_type="ipo"), SFTObjectiveConfig()])
def test_shares_of_micro_batches_add_up(settings: Any) -> None:
    """The engine's micro-batches of any size keep pairs whole and in order, and their shares make the whole."""
    values, batch = batch_of()
    mask = batch.batch["response_mask"]
    counts = LossCounts(int(mask.sum()), 2 * PAIRS)
    whole, metrics = computed(settings, values, batch, counts)
    together = Objective(settings.loss_type, settings).rows_together
    lengths = torch.randint(T + 1, 2 * T, (2 * PAIRS,), generator=torch.Generator().manual_seed(3))
    attention = (torch.arange(2 * T) < lengths[:, None]).long()
    ids = torch.zeros_like(attention)
    grid = torch.zeros(2 * PAIRS, 2 * T - 1, dtype=torch.long)
    grid[:, 0] = 1  # each row has a response token, so each is in a micro-batch
    tensors = {"input_ids": ids, "attention_mask": attention, "response_mask": grid}
    for packed in (False, True):
        for micro in (
            MicroBatching(2, None, together),
            MicroBatching(4, None, together),
            MicroBatching(None, 30, together),
        ):
            plan = BatchPlan(tensors, micro, packed)
            for count in (len(plan.groups), len(plan.groups) + 2):
                plan.balance(count)
                parts = [computed(settings, values[rows], batch.select_idxs(rows), counts) for rows in plan.groups]
                assert sorted(row for rows in plan.groups for row in rows) == list(range(2 * PAIRS))
                assert all(micro.size is None or len(rows) <= micro.size for rows in plan.groups)
                torch.testing.assert_close(torch.stack([loss for loss, _ in parts]).sum(), whole)
                merged = reduce_to_floats(merge_metrics([found for _, found in parts]))
                assert merged == pytest.approx(reduce_to_floats(merge_metrics([metrics])))


def test_half_a_pair_is_refused() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    with pytest.raises(ValueError, match="only 1 have response tokens"):
        BatchPlan(tensors, MicroBatching(rows_together=2), False)


def test_a_module_adds_an_objective() -> None:
    @register_objective("test_likelihood", kind="pairs")
    def likelihood(pairs: Any, settings: Any) -> PairLoss:
        return PairLoss(-pairs.chosen, pairs.chosen, pairs.rejected)

    try:
        values, batch = batch_of()
        loss, _ = computed(DPOConfig(loss_type="test_likelihood"), values, batch, LossCounts(0, 2 * PAIRS))
        chosen = (values * batch.batch["response_mask"])[::2].sum()
        assert loss.item() == pytest.approx(float(-chosen / PAIRS))
    finally:
        del OBJECTIVES.objects["test_likelihood"]
    with raises_with(AlgorithmError, "kind='triples'", "tokens, pairs, labels, scores"):
        register_objective("test_other", kind="triples")(lambda *_: None)
