"""Softmax statistics, masked statistics, aggregation, KL, value loss, PF-PPO, health, and the registries."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import paper_losses as paper
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from raising import raises_with

import hybridrl.algorithms as algorithms
from hybridrl.algorithms import LOSS_AGG_MODES, AlgorithmError, agg_loss, kl_penalty
from hybridrl.algorithms import functional as functional
from hybridrl.algorithms.advantages.scan import check_finite

torch.set_num_threads(1)
many = settings(max_examples=30, derandomize=True)
grids = st.tuples(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))


def random(grid: tuple[int, int, int], n: int) -> tuple[torch.Tensor, ...]:
    """A mask with at least one token and n tensors with NaN outside it, [B, T]."""
    seed, rows, width = grid
    rng = np.random.default_rng(seed)
    mask = torch.tensor(rng.random((rows, width)) > 0.4)
    mask[0, 0] = True
    tensors = [torch.tensor(rng.normal(size=(rows, width))).masked_fill(~mask, torch.nan) for _ in range(n)]
    return (mask.long(), *tensors)


# --- softmax --------------------------------------------------------------------------------------------------------


def by_hand(logits: list[float], label: int, temperature: float) -> tuple[float, float, float]:
    weights = [math.exp(x / temperature) for x in logits]
    p = [w / math.fsum(weights) for w in weights]
    return math.log(p[label]), -math.fsum(x * math.log(x) for x in p), math.fsum(x * x for x in p)


@pytest.mark.parametrize("chunk", [None, 1, 3])
@many
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([1.0, 0.7, 2.0]))
def test_token_statistics(chunk: int | None, seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(2, 4, 9)) * 3, requires_grad=True)
    labels = torch.tensor(rng.integers(0, 9, (2, 4)))
    found = algorithms.token_statistics(
        logits, labels, temperature, entropy=True, sum_pi_squared=True, chunk_size=chunk
    )
    wanted = [by_hand(logits[i, t].tolist(), int(labels[i, t]), temperature) for i in range(2) for t in range(4)]
    for column, name in enumerate(("log_probs", "entropy", "sum_pi_squared")):
        np.testing.assert_allclose(found[name].detach().flatten(), [w[column] for w in wanted], rtol=1e-10, atol=1e-12)
    assert not found["sum_pi_squared"].requires_grad


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("chunk", [None, 2])
def test_token_statistics_gradients(small: bool, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:  # the path of large inputs, which recomputes the softmax in the backward pass
        monkeypatch.setattr(functional, "_SMALL", 0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(5, (2, 3))

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = algorithms.token_statistics(x, labels, 0.8, entropy=True, chunk_size=chunk)
        return found["log_probs"], found["entropy"]

    assert torch.autograd.gradcheck(both, logits)
    assert torch.autograd.gradcheck(lambda x: algorithms.logprobs_from_logits(x, labels, chunk_size=chunk), logits)
    assert torch.autograd.gradcheck(lambda x: algorithms.entropy_from_logits(x, chunk_size=chunk), logits)


@pytest.mark.parametrize("rows", [7, 70])
def test_float32_and_bfloat16_against_torch_over_a_large_vocabulary(rows: int) -> None:
    torch.manual_seed(0)
    vocabulary = 60_000  # 7 rows go in one chunk, 70 in several
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2)):
        logits = (torch.randn(rows, vocabulary) * 3).to(dtype).requires_grad_()
        labels = torch.randint(vocabulary, (rows,))
        found = algorithms.token_statistics(logits, labels, entropy=True)
        assert found["log_probs"].dtype == torch.float32
        (found["log_probs"].sum() + found["entropy"].sum()).backward()
        exact = logits.detach().double().requires_grad_()
        logp = exact.log_softmax(-1)
        wanted = {"log_probs": logp.gather(-1, labels[:, None])[:, 0], "entropy": -(logp.exp() * logp).sum(-1)}
        sum(w.sum() for w in wanted.values()).backward()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].double(), value, rtol=2e-5, atol=2e-5)
        assert logits.grad is not None and logits.grad.dtype == dtype and exact.grad is not None
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_tokens_ruled_out_by_an_infinite_logit() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    found = algorithms.token_statistics(logits, torch.tensor([1]), entropy=True)
    short = logits.detach()[:, :2].clone().requires_grad_()
    wanted = algorithms.token_statistics(short, torch.tensor([1]), entropy=True)
    torch.testing.assert_close(found, wanted)
    for x in (found, wanted):
        (x["log_probs"] + 2 * x["entropy"]).sum().backward()
    assert logits.grad is not None and short.grad is not None
    torch.testing.assert_close(logits.grad, torch.cat([short.grad, torch.zeros(1, 1)], -1))


@pytest.mark.parametrize("small", [True, False])
def test_logits_survive_unless_asked_otherwise(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(functional, "_SMALL", 0)
    start, labels = torch.randn(4, 6), torch.randint(6, (4,))
    gradients = []
    for inplace in (False, True):
        leaf = start.clone().requires_grad_()
        logits = leaf * 1.0
        algorithms.logprobs_from_logits(logits, labels, inplace_backward=inplace).sum().backward()
        gradients.append(leaf.grad)
        assert torch.equal(logits, start) == (small or not inplace)
    torch.testing.assert_close(*gradients)


def test_softmax_bad_input() -> None:
    with pytest.raises(AlgorithmError, match=r"temperature is 0; .*above 0"):
        algorithms.logprobs_from_logits(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), temperature=0)
    with pytest.raises(AlgorithmError, match=r"labels have shape \(3,\).*need \(2,\)"):
        algorithms.logprobs_from_logits(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
    with raises_with(AlgorithmError, "chunk_size", 0):
        algorithms.entropy_from_logits(torch.zeros(2, 3), chunk_size=0)
    nothing = algorithms.token_statistics(
        torch.zeros(0, 3, requires_grad=True), torch.zeros(0, dtype=torch.long), entropy=True
    )
    assert nothing["entropy"].shape == (0,)
    nothing["log_probs"].sum().backward()


# --- masked statistics and aggregation ------------------------------------------------------------------------------


@many
@given(grid=grids)
def test_masked_statistics(grid: tuple[int, int, int]) -> None:
    mask, x = random(grid, 1)
    own = x[mask.bool()].numpy()
    assert float(algorithms.masked_mean(x, mask)) == pytest.approx(own.mean(), abs=1e-7)
    assert float(algorithms.masked_sum(x, mask)) == pytest.approx(own.sum())
    rows = [x[i][mask[i].bool()].sum() for i in range(len(mask))]
    torch.testing.assert_close(algorithms.masked_sum(x, mask, axis=-1), torch.stack(rows))
    torch.testing.assert_close(functional.masked_row_sum(x, mask), torch.stack(rows))
    assert float(algorithms.masked_var(x, mask, unbiased=False)) == pytest.approx(own.var(), abs=1e-12)
    if len(own) > 1:
        assert float(algorithms.masked_var(x, mask)) == pytest.approx(own.var(ddof=1))
        white = algorithms.masked_whiten(x, mask)
        np.testing.assert_allclose(
            white[mask.bool()], (own - own.mean()) / np.sqrt(own.var(ddof=1) + 1e-8), rtol=1e-9, atol=1e-9
        )
        assert not white[mask == 0].any()
        scaled = algorithms.masked_whiten(x, mask, shift_mean=False)
        np.testing.assert_allclose(scaled[mask.bool()] - white[mask.bool()], own.mean(), rtol=1e-9, atol=1e-9)


def test_masked_statistics_need_values() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(AlgorithmError, match="empty mask"):
        algorithms.masked_whiten(x, x)
    with pytest.raises(AlgorithmError, match="single response token"):
        algorithms.masked_var(x, torch.tensor([[1, 0], [0, 0]]))
    assert float(algorithms.masked_mean(x, x)) == 0


@many
@given(grid=grids, mode=st.sampled_from(LOSS_AGG_MODES), factor=st.sampled_from([None, 11]))
def test_aggregation(grid: tuple[int, int, int], mode: str, factor: int | None) -> None:
    mask, x = random(grid, 1)
    loss, m = x.nan_to_num().tolist(), mask.tolist()
    found = agg_loss(x, mask, mode, loss_scale_factor=factor)
    assert float(found) == pytest.approx(paper.aggregate(loss, m, mode, factor=factor), abs=1e-12)
    with_counts = agg_loss(x, mask, mode, 3, 40, 9, factor)
    assert float(with_counts) == pytest.approx(3 * paper.aggregate(loss, m, mode, (40, 9), factor), abs=1e-12)
    as_tensors = agg_loss(x, mask.bool(), mode, 3, torch.tensor(40), torch.tensor(9), factor)
    torch.testing.assert_close(as_tensors, with_counts)


def test_aggregation_without_the_counts_it_needs() -> None:
    ones = torch.ones(2, 3)
    with raises_with(AlgorithmError, "dp_size=2", "batch_num_tokens"):
        agg_loss(ones, ones, "token-mean", dp_size=2)
    with raises_with(AlgorithmError, "global_batch_size"):
        agg_loss(ones, ones, "seq-mean-token-sum", dp_size=2, batch_num_tokens=3)
    with raises_with(AlgorithmError, "'mean'", "token-mean"):
        agg_loss(ones, ones, "mean")
    with raises_with(AlgorithmError, "loss_scale_factor", 0):
        agg_loss(ones, ones, "seq-mean-token-sum-norm", loss_scale_factor=0)
    assert algorithms.global_counts(torch.tensor([[1, 0], [0, 0], [1, 1]])) == {
        "batch_num_tokens": 3,
        "global_batch_size": 2,
    }


def test_entropy_loss() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    entropies = [by_hand(logits[i, t].tolist(), 0, 1.0)[1] for i, t in mask.nonzero().tolist()]
    assert float(algorithms.compute_entropy_loss(logits, mask)) == pytest.approx(np.mean(entropies))
    assert float(algorithms.compute_entropy_loss(logits, mask, batch_num_tokens=9)) == pytest.approx(sum(entropies) / 9)


# --- KL -------------------------------------------------------------------------------------------------------------


@many
@given(grid=grids)
def test_kl_forms(grid: tuple[int, int, int]) -> None:
    _, p, q = random(grid, 2)
    p, q = (0.4 * p).nan_to_num().requires_grad_(), (0.4 * q).nan_to_num()  # k3 stays below its clamp
    d = (p - q).detach()
    forms = {
        "k1": (d, torch.ones_like(d)), "abs": (d.abs(), d.sign()), "k2": (d * d / 2, d),
        "k3": (torch.exp(-d) - 1 + d, 1 - torch.exp(-d)),
    }  # fmt: skip
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {n: n for n in forms}
    for name, form in names.items():
        value, slope = forms[form]
        for plus in ("", "+"):
            found = kl_penalty(p, q, name + plus)
            torch.testing.assert_close(found.detach(), value)
            (gradient,) = torch.autograd.grad(found.sum(), p)
            torch.testing.assert_close(gradient, d if plus else slope)
        torch.testing.assert_close(algorithms.kl_penalty_forward(p, q, name).detach(), value)


def test_k3_is_clamped_as_in_verl() -> None:
    found = kl_penalty(torch.tensor([-30.0, 0.0]), torch.tensor([0.0, -30.0]), "k3")
    assert found.tolist() == [10.0, 10.0]  # exp(20) - 21 and 19, both cut at 10


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_full_kl_from_logits_and_its_gradient(chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    z, y = (torch.randn(2, 5, 7, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    z[0, 0, 2] = -torch.inf  # ruled out by the policy: adds nothing
    weights = torch.randn(2, 5, generator=generator, dtype=torch.float64)

    plain = z.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    values = torch.zeros(2, 5, dtype=torch.float64)
    for b in range(2):
        for t in range(5):
            log_p, log_q = (plain[b, t] / 0.7).log_softmax(0), (y[b, t] / 0.7).log_softmax(0)
            kl = sum(log_p[v].exp() * (log_p[v] - log_q[v]) for v in range(7) if z[b, t, v] > -torch.inf)
            values[b, t] = kl.detach()
            total = total + weights[b, t] * kl
    total.backward()

    logits, ref = z.clone().requires_grad_(), y.clone().requires_grad_()
    found = algorithms.full_kl_from_logits(logits, ref, temperature=0.7, chunk_size=chunk)
    torch.testing.assert_close(found, values, atol=1e-12, rtol=1e-12)
    (found * weights).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad.nan_to_num(), atol=1e-12, rtol=1e-10)
    assert ref.grad is None
    half = algorithms.full_kl_from_logits(z[:, :, 3:].half(), y[:, :, 3:].half(), temperature=0.7)
    assert half.dtype == torch.float32 and algorithms.full_kl_from_logits(z[:0], y[:0]).shape == (0, 5)
    with pytest.raises(algorithms.AlgorithmError, match="one vocabulary"):
        algorithms.full_kl_from_logits(z, y[..., 1:])


def test_full_kl_is_the_sum_over_the_vocabulary_and_the_mean_of_its_estimators() -> None:
    torch.manual_seed(0)
    p, q = (torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    full = kl_penalty(p, q, "full")
    lp, lq = p.log_softmax(-1), q.log_softmax(-1)
    torch.testing.assert_close(full, torch.nn.functional.kl_div(lq, lp, reduction="none", log_target=True).sum(-1))
    torch.testing.assert_close(kl_penalty(lp, lq, "full"), full)
    for form in ("k1", "k3"):  # expectations under pi, over all tokens: no sampling noise
        estimate = (lp.exp() * kl_penalty(lp, lq, form)).sum(-1)
        torch.testing.assert_close(estimate, full)
    # E[k2's gradient] is the gradient of the KL: the reason for the straight-through forms.
    (exact,) = torch.autograd.grad(full.sum(), p, retain_graph=True)
    weighted = (lp.detach().exp() * kl_penalty(lp, lq.detach(), "k3+")).sum()
    torch.testing.assert_close(torch.autograd.grad(weighted, p)[0], exact)
    never = torch.tensor([[[0.0, -torch.inf]]])
    assert float(kl_penalty(never, torch.zeros(1, 1, 2), "full")) == pytest.approx(math.log(2))


def test_kl_names_and_shapes() -> None:
    with raises_with(AlgorithmError, "'k4'", "kl, k1"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with raises_with(AlgorithmError, "[B, T, V]", "(1, 2)"):
        kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), "full")


def test_kl_in_the_reward() -> None:
    mask, score, p, q = random((3, 3, 4), 4 - 1)
    rewards, current = algorithms.penalise_rewards(score, p, q, mask, 0.5, "k2")
    kl = (p - q) ** 2 / 2
    torch.testing.assert_close(rewards[mask.bool()], (score - 0.5 * kl)[mask.bool()])
    rows = [kl[i][mask[i].bool()].mean().nan_to_num() for i in range(3)]
    torch.testing.assert_close(current, torch.stack(rows).mean())
    torch.testing.assert_close(algorithms.compute_rewards(score, p, q, 0.5), score - 0.5 * (p - q), equal_nan=True)


def test_kl_controllers() -> None:
    settings_ = SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=2.0, horizon=100)
    controller = algorithms.get_kl_controller(settings_)
    controller.update(current_kl=2.2, n_steps=10)  # error 0.1 of at most 0.2
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.update(100.0, 10)
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(0.0, 10)
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    for samples, factor in ((440, 0.12), (500, 0.1), (65536, 0.1)):  # 1 - 0.2 n / 100, and never 0 or below
        bounded = algorithms.get_kl_controller(settings_)
        bounded.update(0.0, samples)
        assert bounded.value == pytest.approx(0.1 * factor)
    other = algorithms.get_kl_controller(settings_)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value
    fixed = algorithms.get_kl_controller({"type": "fixed", "kl_coef": 0.3})
    fixed.update(9.0, 9)
    fixed.load_state_dict({"value": 7.0})
    assert fixed.value == 0.3 and fixed.state_dict() == {"value": 0.3}
    with pytest.raises(AlgorithmError, match="the measured KL is nan"):
        controller.update(math.nan, 1)
    with raises_with(AlgorithmError, "horizon=0"):
        algorithms.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=1.0, horizon=0))
    with raises_with(AlgorithmError, "'pid'"):
        algorithms.get_kl_controller({"type": "pid", "kl_coef": 0.1})


# --- value loss -----------------------------------------------------------------------------------------------------


@many
@given(grid=grids, mode=st.sampled_from(LOSS_AGG_MODES))
def test_value_loss(grid: tuple[int, int, int], mode: str) -> None:
    mask, now, target, old = random(grid, 3)
    leaf = now.clone().requires_grad_()
    loss, clipfrac = algorithms.compute_value_loss(leaf, target, old, mask, 0.4, mode)
    m = mask.tolist()

    def at(i: int, t: int, v: float) -> tuple[float, float]:
        held = min(max(v, float(old[i, t]) - 0.4), float(old[i, t]) + 0.4)
        return (v - float(target[i, t])) ** 2, (held - float(target[i, t])) ** 2

    def value(change: tuple[int, int, float]) -> float:
        errors = paper.each(lambda i, t: max(at(i, t, float(now[i, t]) + change[2] * ((i, t) == change[:2]))) / 2, m)
        return paper.aggregate(errors, m, mode)

    assert float(loss.detach()) == pytest.approx(value((0, 0, 0.0)), rel=1e-9)
    where = mask.nonzero().tolist()
    assert float(clipfrac) == pytest.approx(
        np.mean([at(i, t, float(now[i, t]))[1] > at(i, t, float(now[i, t]))[0] for i, t in where])
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    for i in range(len(m)):
        for t in range(len(m[0])):
            slope = (value((i, t, 1e-6)) - value((i, t, -1e-6))) / 2e-6 if m[i][t] else 0.0
            assert float(gradient[i, t]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_value_loss_over_micro_batches_and_its_range() -> None:
    mask, now, target, old = random((5, 4, 5), 3)
    for mode in LOSS_AGG_MODES:
        counts = {**algorithms.global_counts(mask), "loss_scale_factor": 5}
        whole = algorithms.compute_value_loss(now, target, old, mask, 0.4, mode)[0]
        parts = [
            algorithms.compute_value_loss(now[[i]], target[[i]], old[[i]], mask[[i]], 0.4, mode, **counts)[0]
            for i in range(4)
        ]
        torch.testing.assert_close(sum(parts), whole)
    with raises_with(AlgorithmError, "cliprange_value", 0):
        algorithms.compute_value_loss(now, target, old, mask, 0)


# --- PF-PPO, health, registry ---------------------------------------------------------------------------------------


class Rows:
    """The two things that PF-PPO asks of a batch."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def select_idxs(self, rows: torch.Tensor) -> Rows:
        return Rows({k: v[rows] for k, v in self.batch.items()})


def test_pf_ppo_draws_whole_rows_in_proportion() -> None:
    scores = torch.tensor([[0.0], [1.0], [2.0], [-3.0]]).repeat(500, 1)
    data = Rows({"token_level_scores": scores, "response_mask": torch.ones_like(scores), "advantages": scores * 10})
    wanted = {"pow": [0, 1, 4, 9], "max_min": [0, 0, 1, 1], "max_random": [0.1, 0.1, 0.4, 0.1]}
    for method, weights in wanted.items():
        drawn = algorithms.compute_pf_ppo_reweight_data(data, method, 2.0, torch.Generator().manual_seed(0)).batch
        assert drawn["advantages"].shape == scores.shape
        torch.testing.assert_close(drawn["advantages"], drawn["token_level_scores"] * 10)
        for value, weight in zip((0.0, 1.0, 2.0, -3.0), weights, strict=True):
            share = float((drawn["token_level_scores"] == value).float().mean())
            assert share == pytest.approx(weight / sum(weights), abs=0.05)
    assert float(algorithms.pf_ppo_weights(torch.zeros(3)).min()) > 0
    with raises_with(AlgorithmError, "reweight_method", "'max'", "pow"):
        algorithms.pf_ppo_weights(torch.zeros(3), "max")
    with raises_with(AlgorithmError, "weight_pow", 0):
        algorithms.pf_ppo_weights(torch.zeros(3), "pow", 0)


def test_health_numbers() -> None:
    scores = torch.tensor([[0.0], [0.0], [1.0], [1.0], [0.0], [1.0], [1.0]])
    ones = torch.ones_like(scores)
    found = algorithms.group_health(scores, ones, np.array(list("aabbccd")))
    assert found == pytest.approx(
        {"health/groups_uniform": 2 / 3, "health/groups_all_worst": 1 / 3, "health/groups_all_best": 1 / 3}
    )
    lengths = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    reward = torch.tensor([[1.0, 9, 9], [0, 2.0, 9], [0, 0, 3.0]])
    assert algorithms.length_reward_correlation(reward, lengths) == pytest.approx(1.0)
    returns = torch.tensor([[1.0, 2.0, 3.0, 100.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert algorithms.explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert algorithms.explained_variance(torch.zeros(1, 4), returns, mask) == pytest.approx(0.0)
    assert algorithms.explained_variance(-returns, returns, mask) == pytest.approx(-3.0)


def test_registries() -> None:
    with raises_with(AlgorithmError, "adv_estimator", "'ppo'", "gae", "register_adv_est"):
        algorithms.get_adv_estimator_fn("ppo")
    with raises_with(AlgorithmError, "loss_mode", "'ppo'", "bypass_mode", "register_policy_loss"):
        algorithms.get_policy_loss_fn("ppo")
    assert (
        algorithms.get_adv_estimator_fn(algorithms.AdvantageEstimator.GRPO) is algorithms.compute_grpo_outcome_advantage
    )
    entries = algorithms.ADV_ESTIMATOR_REGISTRY.items()  # with those of other tests of this process
    ours = [name for name, function in entries if getattr(function, "__module__", "").startswith("hybridrl.")]
    assert sorted(ours) == sorted(e.value for e in algorithms.AdvantageEstimator)

    def mine(token_level_rewards, response_mask, index, **kwargs):
        return kwargs["values"] * response_mask, token_level_rewards

    name = "of_a_test"
    try:
        assert algorithms.register_adv_est(name)(mine) is mine
        algorithms.register_adv_est(name)(mine)  # the same function again, as a reload does it
        with raises_with(AlgorithmError, "'of_a_test'"):
            algorithms.register_adv_est(name)(lambda: None)
        fields = {
            "token_level_rewards": torch.ones(2, 1),
            "response_mask": torch.ones(2, 1),
            "values": torch.full((2, 1), 3.0),
        }
        with pytest.raises(AlgorithmError, match=r"adv_estimator=of_a_test misses index \(from the prompts' uid"):
            algorithms.estimate_advantages(name, fields, {}, None)
        advantages, _ = algorithms.estimate_advantages(name, fields, {"uid": np.array(["a", "b"])}, None)
        assert advantages.tolist() == [[3.0], [3.0]]
    finally:
        del algorithms.ADV_ESTIMATOR_REGISTRY[name]


def test_a_config_may_be_any_object_with_attributes() -> None:
    values = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.3}
    batch = [torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.5, -2.5]]), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)]
    losses = [algorithms.compute_policy_loss_vanilla(*batch, "token-mean", config)[0]
              for config in (values, SimpleNamespace(**values), OmegaConf.create(values))]  # fmt: skip
    assert losses[0] == losses[1] == losses[2]
    view = algorithms.with_global_batch_info(values, batch_num_tokens=4)
    assert view.clip_ratio == 0.2 and not hasattr(view, "nothing") and values.get("global_batch_info") is None
    torch.testing.assert_close(algorithms.compute_policy_loss_vanilla(*batch, "token-mean", view)[0], losses[0] / 2)


@many
@given(grids, st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), st.booleans())
def test_only_what_is_not_finite_on_a_response_token_is_refused(grid, dtype, spoil) -> None:
    """Numbers near the largest of their dtype are finite, though their sum is not; padding holds anything."""
    mask, values = random(grid, 1)
    mask = mask.bool()
    sign = torch.where(values.nan_to_num(0.0) < 0, -1.0, 1.0)
    large = torch.where(mask, sign, math.nan).to(dtype) * torch.finfo(dtype).max
    if not spoil:
        check_finite(large, mask, "values")
        return
    row, place = mask.nonzero()[-1].tolist()
    for bad in (math.inf, -math.inf, math.nan):
        large[row, place] = bad
        with raises_with(AlgorithmError, "values", f"[{row}]"):
            check_finite(large, mask, "values")
