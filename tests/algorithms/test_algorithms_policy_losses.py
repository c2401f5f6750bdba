"""Every policy loss against the loops of `paper_losses`: value, gradient by finite differences, and invariances."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import paper_losses as paper
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

import hybridrl.algorithms as algorithms
from hybridrl.algorithms import (
    LOSS_AGG_MODES,
    AlgorithmError,
    get_policy_loss_fn,
    get_policy_loss_prepare_fn,
    global_counts,
    with_global_batch_info,
)
from hybridrl.algorithms.policy_losses.covariance import token_noise
from hybridrl.algorithms.policy_losses.tokens import ClipRange
from hybridrl.registry import POLICY_LOSSES

torch.set_num_threads(1)
CONFIG = SimpleNamespace(
    clip_ratio=0.7, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.7, tau_pos=1.3, tau_neg=0.9,
    loss_scale_factor=None,
    policy_loss=SimpleNamespace(dro_beta=0.4, sppo_eta=1.7, ppo_kl_coef=0.6, kl_cov_ratio=0.2, clip_cov_ratio=0.2,
                                clip_cov_lb=-0.5, clip_cov_ub=3.0, m2_threshold=0.1, rollout_correction=None),
)  # fmt: skip
NAMES = POLICY_LOSSES.names()  # each has its formula, under its name, in `paper_losses`
CHOOSING = ("clip_cov", "kl_cov", "m2po")  # they choose tokens in a preliminary pass
COMPARING = ("gvpo", "gvpo_ref", "flowrl_vargrad", "online_dpo")  # they compare the samples of a prompt in one
many = settings(max_examples=25, derandomize=True)
few = settings(max_examples=10, derandomize=True)


def make(seed: int, rows: int, width: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) > 0.35
    mask[0, 0] = True
    old = -rng.exponential(size=(rows, width)) - 0.05
    tensors = {
        "old": old,
        "new": np.minimum(old + rng.normal(size=(rows, width)) * 0.5, -0.01),
        "adv": rng.normal(size=(rows, width)) * (rng.random((rows, width)) > 0.1),
        "weights": rng.random((rows, width)) + 0.3,
    }
    out = {name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
    return {**out, "mask": torch.tensor(mask).long(), "chosen": torch.tensor(rng.random((rows, width)) > 0.5)}


batches = st.builds(make, st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5))


def extra(name: str, b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if name in COMPARING:
        return {"prepared": b["adv"]}
    return {"prepared": b["chosen"]} if name in CHOOSING else {}


def run(
    name: str, b: dict[str, torch.Tensor], mode: str = "token-mean", config: object = CONFIG, weights: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """(loss, gradient in log_prob, metrics)"""
    log_prob = b["new"].clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        b["old"], log_prob, b["adv"], b["mask"], mode, config, b["weights"] if weights else None, **extra(name, b)
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient, metrics


def by_paper(name: str, b: dict[str, torch.Tensor], mode: str, weights: bool) -> tuple[float, list[list[float]]]:
    old, new, adv, mask, w = (b[k].tolist() for k in ("old", "new", "adv", "mask", "weights"))
    keywords = {"chosen": extra(name, b)["prepared"].tolist()} if extra(name, b) else {}
    if name == "geo_mean" and weights:
        keywords["weights"] = w

    def value(lp: list[list[float]]) -> float:
        loss = getattr(paper, name)(old, lp, new, adv, mask, CONFIG, **keywords)
        if weights and name != "geo_mean":
            loss = [[x * y for x, y in zip(p, q, strict=True)] for p, q in zip(loss, w, strict=True)]
        return paper.aggregate(loss, mask, mode)

    gradient = [[0.0] * len(row) for row in new]
    step = 1e-6
    for i, row in enumerate(new):
        for t in range(len(row)):
            up, down = ([list(r) for r in new] for _ in range(2))
            up[i][t] += step
            down[i][t] -= step
            gradient[i][t] = (value(up) - value(down)) / (2 * step)
    return value(new), gradient


@pytest.mark.parametrize("name", NAMES)
@many
@given(batch=batches, mode=st.sampled_from(LOSS_AGG_MODES), weights=st.booleans())
def test_value_and_gradient_equal_the_paper(name: str, batch: dict, mode: str, weights: bool) -> None:
    loss, gradient, _ = run(name, batch, mode, weights=weights)
    value, difference = by_paper(name, batch, mode, weights)
    assert float(loss) == pytest.approx(value, rel=1e-9, abs=1e-10)
    torch.testing.assert_close(gradient, torch.tensor(difference, dtype=torch.float64), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@few
@given(batch=batches, bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_padding_reaches_neither_value_nor_gradient(name: str, batch: dict, bad: float) -> None:
    loss, gradient, metrics = run(name, batch, weights=True)
    outside = batch["mask"] == 0
    dirty = {k: v.masked_fill(outside, bad) if v.is_floating_point() else v for k, v in batch.items()}
    wide = {k: torch.nn.functional.pad(v, (0, 2), value=bad if v.is_floating_point() else 0) for k, v in dirty.items()}
    for other in (dirty, wide):
        found, slope, more = run(name, other, weights=True)
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(slope[:, : gradient.shape[1]], gradient)
        assert not slope[:, gradient.shape[1] :].any()
        for key, value in metrics.items():
            torch.testing.assert_close(more[key], value)


@pytest.mark.parametrize("name", NAMES)
@few
@given(batch=batches, mode=st.sampled_from(LOSS_AGG_MODES), seed=st.integers(0, 99))
def test_micro_batches_and_ranks_change_nothing(name: str, batch: dict, mode: str, seed: int) -> None:
    rows = len(batch["mask"])
    info = {**global_counts(batch["mask"]), "loss_scale_factor": 7}
    whole = run(name, batch, mode, with_global_batch_info(CONFIG, **info), weights=True)
    order = np.random.default_rng(seed).permutation(rows).tolist()

    def split(**more: float) -> list:
        config = with_global_batch_info(CONFIG, **info, **more)
        return [run(name, {k: v[[i]] for k, v in batch.items()}, mode, config, weights=True) for i in order]

    parts = split()
    torch.testing.assert_close(sum(p[0] for p in parts), whole[0])
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), whole[1][order])
    # Ranks whose gradients are averaged: each share is multiplied by dp_size.
    ranks = split(dp_size=rows)
    torch.testing.assert_close(sum(p[0] for p in ranks) / rows, whole[0])
    # Metrics are token means: weighted by tokens they merge to the whole's.
    tokens = batch["mask"].sum(-1)[order].double()
    for key, value in whole[2].items():
        merged = sum(n * p[2][key] for n, p in zip(tokens, parts, strict=True)) / tokens.sum()
        torch.testing.assert_close(merged, value, msg=key)


@pytest.mark.parametrize("name", [*NAMES, "bypass_mode"])
def test_a_micro_batch_without_a_token_is_worth_nothing(name: str) -> None:
    batch = make(0, 2, 3)
    batch["mask"] = torch.zeros_like(batch["mask"])
    for mode in LOSS_AGG_MODES:
        loss, gradient, metrics = run(
            name, batch, mode, with_global_batch_info(CONFIG, batch_num_tokens=5, global_batch_size=2)
        )
        assert float(loss) == 0 and not gradient.any() and all(math.isfinite(float(x)) for x in metrics.values())


def test_clip_bounds_fall_back_to_clip_ratio() -> None:
    batch = make(1, 3, 4)
    one = SimpleNamespace(clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0)
    two = SimpleNamespace(clip_ratio=9.0, clip_ratio_low=0.1, clip_ratio_high=0.1)
    torch.testing.assert_close(run("vanilla", batch, config=one)[:2], run("vanilla", batch, config=two)[:2])
    torch.testing.assert_close(run("vanilla", batch, config=vars(one))[0], run("vanilla", batch, config=one)[0])


def test_the_older_signature_of_the_clipped_loss() -> None:
    batch = make(2, 3, 4)
    args = (batch["old"], batch["new"], batch["adv"], batch["mask"])
    loss, clipfrac, kl, lower = algorithms.compute_policy_loss(
        *args, cliprange_low=0.2, cliprange_high=0.3, clip_ratio_c=1.7
    )
    wanted, _, metrics = run("vanilla", batch)
    torch.testing.assert_close(loss, wanted)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    torch.testing.assert_close([clipfrac, kl, lower], [metrics[n] for n in names])


@many
@given(batch=batches)
def test_metrics_of_the_clipped_loss_are_the_fractions_they_say(batch: dict) -> None:
    metrics = run("vanilla", batch)[2]
    clipped = lower = kl = tokens = 0.0
    for i, t in batch["mask"].nonzero().tolist():
        rho, a = math.exp(batch["new"][i, t] - batch["old"][i, t]), float(batch["adv"][i, t])
        held = -a * min(max(rho, 0.8), 1.3)
        clipped += held > -a * rho
        lower += a < 0 and max(held, -a * rho) > -a * 1.7
        kl += float(batch["old"][i, t] - batch["new"][i, t])
        tokens += 1
    found = [float(metrics[k]) for k in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")]
    assert found == pytest.approx([clipped / tokens, lower / tokens, kl / tokens], rel=1e-6, abs=1e-9)


def test_departures_from_verl_in_how_sequences_are_averaged() -> None:
    # gspo and sapo of older verl, and geo_mean still, average over sequences whatever is set: here the mode counts.
    batch = make(5, 4, 5)
    for name in ("gspo", "sapo", "geo_mean"):
        by_token, by_sequence = (float(run(name, batch, mode)[0]) for mode in ("token-mean", "seq-mean-token-mean"))
        assert by_token != pytest.approx(by_sequence, rel=1e-6)
        value, _ = by_paper(name, batch, "seq-mean-token-mean", False)
        assert by_sequence == pytest.approx(value, rel=1e-9)


# --- the preliminary pass -------------------------------------------------------------------------------------------


def covariances(batch: dict) -> dict[tuple[int, int], float]:
    where = [tuple(x) for x in batch["mask"].nonzero().tolist()]
    mean_a, mean_l = (sum(float(batch[k][x]) for x in where) / len(where) for k in ("adv", "new"))
    return {x: (float(batch["adv"][x]) - mean_a) * (float(batch["new"][x]) - mean_l) for x in where}


def prepare(name: str, batch: dict, seed: int = 3, config: object = CONFIG, **more: object) -> torch.Tensor:
    fn = get_policy_loss_prepare_fn(name)
    assert fn is not None
    return fn(batch["old"], batch["new"], batch["adv"], batch["mask"], config, seed, **more)


@many
@given(batch=batches)
def test_kl_cov_takes_the_largest_covariances(batch: dict) -> None:
    cov = covariances(batch)
    count = max(1, int(0.2 * len(cov)))
    chosen = {tuple(x) for x in prepare("kl_cov", batch).nonzero().tolist()}
    assert len(chosen) == count and chosen <= set(cov)
    assert sorted(cov[x] for x in chosen) == pytest.approx(sorted(cov.values())[-count:], rel=1e-9, abs=1e-12)


@many
@given(batch=batches, seed=st.integers(0, 9))
def test_clip_cov_takes_its_share_of_the_candidates(batch: dict, seed: int) -> None:
    cov = covariances(batch)
    candidates = set()
    for x, value in cov.items():
        rho, a = math.exp(batch["new"][x] - batch["old"][x]), float(batch["adv"][x])
        if -0.5 < value < 3.0 and not -a * min(max(rho, 0.8), 1.3) > -a * rho:
            candidates.add(x)
    chosen = {tuple(x) for x in prepare("clip_cov", batch, seed).nonzero().tolist()}
    assert chosen <= candidates and len(chosen) == min(max(1, int(0.2 * len(cov))), len(candidates))


@many
@given(batch=batches, threshold=st.sampled_from([1e-9, 0.01, 0.1, 0.5]))
def test_m2po_leaves_out_the_largest_moments(batch: dict, threshold: float) -> None:
    """Against the paper's loop, which removes one token after another."""
    moments = {}
    for x in map(tuple, batch["mask"].nonzero().tolist()):
        log_ratio, a = float(batch["new"][x] - batch["old"][x]), float(batch["adv"][x])
        if (a > 0 and log_ratio > 0) or (a < 0 and log_ratio < 0):
            moments[x] = log_ratio**2
    left_out = set()
    while moments and sum(moments.values()) / len(moments) > threshold:
        largest = max(moments, key=moments.__getitem__)
        left_out.add(largest)
        del moments[largest]
    config = SimpleNamespace(policy_loss=SimpleNamespace(m2_threshold=threshold))
    assert {tuple(x) for x in prepare("m2po", batch, config=config).nonzero().tolist()} == left_out


@pytest.mark.parametrize("name", CHOOSING)
@few
@given(batch=batches, seed=st.integers(0, 99))
def test_the_choice_depends_on_neither_order_nor_padding(name: str, batch: dict, seed: int) -> None:
    rows = len(batch["mask"])
    ids = torch.arange(rows) + 1000
    chosen = prepare(name, batch, row_ids=ids)
    order = torch.tensor(np.random.default_rng(seed).permutation(rows))
    moved = {k: torch.nn.functional.pad(v[order], (2, 1)) for k, v in batch.items()}
    torch.testing.assert_close(prepare(name, moved, row_ids=ids[order])[:, 2:-1], chosen[order])


def test_the_choice_changes_with_the_seed_and_is_even() -> None:
    mask = torch.ones(64, 64, dtype=torch.long)
    noise = [token_noise(seed, torch.arange(64), mask) for seed in (0, 1)]
    assert len(torch.cat(noise).unique()) == 2 * 64 * 64
    for bit in range(63):  # every bit is set in half of the tokens: 64 standard deviations of slack would hide nothing
        share = float(((noise[0] >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / 64, bit
    assert not torch.equal(noise[0].argsort(dim=-1), noise[1].argsort(dim=-1))
    assert int(torch.stack(noise).min()) >= 0


@pytest.mark.parametrize("name", CHOOSING)
def test_a_part_of_a_mini_batch_without_the_choice_is_refused(name: str) -> None:
    batch = make(4, 4, 5)
    args = (batch["old"], batch["new"], batch["adv"], batch["mask"], "token-mean")
    with raises_with(AlgorithmError, "prepared="):
        get_policy_loss_fn(name)(*args, with_global_batch_info(CONFIG, batch_num_tokens=999))
    # The whole mini-batch in one call needs no preparation, and finds the same as with it.
    alone, _ = get_policy_loss_fn(name)(*args, CONFIG)
    with_it, _ = get_policy_loss_fn(name)(*args, CONFIG, prepared=prepare(name, batch, seed=0))
    torch.testing.assert_close(alone, with_it)
    nothing = {"m2_threshold": 1e9} if name == "m2po" else {f"{name}_ratio": 0.0}
    none = SimpleNamespace(
        **{**vars(CONFIG), "policy_loss": SimpleNamespace(**{**vars(CONFIG.policy_loss), **nothing})}
    )
    assert not prepare(name, batch, config=none).any()


def test_most_losses_need_no_preparation() -> None:
    assert {n for n in NAMES if get_policy_loss_prepare_fn(n)} == {*CHOOSING, *COMPARING}


@pytest.mark.parametrize(("name", "change", "message"), [
    ("vanilla", {"clip_ratio_low": -0.1}, r"clip_ratio_low is -0.1; .*\[0, 1\]"),
    ("vanilla", {"clip_ratio_low": 1.5}, r"clip_ratio_low is 1.5; .*\[0, 1\]"),
    ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; .*greater than 1"),
    ("vanilla", {"clip_ratio": None, "clip_ratio_low": None}, r"needs actor_rollout_ref.actor.clip_ratio.*null"),
    ("vanilla", {"clip_ratio_high": "0.3"}, "clip_ratio_high is '0.3'"),
    ("vanilla", {"clip_ratio_high": math.nan}, "clip_ratio_high is nan"),
    ("sapo", {"tau_pos": 0.0}, "tau_pos is 0.0; .*greater than 0"),
    ("dro", {"policy_loss": SimpleNamespace(dro_beta=None)}, r"needs actor_rollout_ref.actor.policy_loss.dro_beta"),
    ("dro", {"policy_loss": None}, r"needs actor_rollout_ref.actor.policy_loss.dro_beta"),
    ("kl_cov", {"policy_loss": SimpleNamespace(kl_cov_ratio=0.2, ppo_kl_coef=-1.0)}, "ppo_kl_coef is -1.0"),
])  # fmt: skip
def test_settings_out_of_range_are_named(name: str, change: dict, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        run(name, make(0, 2, 3), config=SimpleNamespace(**{**vars(CONFIG), **change}))


def test_no_config_and_shapes_that_differ() -> None:
    batch = make(0, 2, 3)
    with pytest.raises(AlgorithmError, match="config is None"):
        run("vanilla", batch, config=None)
    batch["adv"] = batch["adv"][:1]
    with raises_with(AlgorithmError, "(1, 3)", "log_prob (2, 3)"):
        run("vanilla", batch)
    with raises_with(AlgorithmError, "['tokens']"):
        with_global_batch_info(CONFIG, tokens=3)


# --- losses of the user's -------------------------------------------------------------------------------------------

COUNTS = {"dp_size": 1, "batch_num_tokens": 40, "global_batch_size": 8, "loss_scale_factor": 5}


@pytest.fixture
def user_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms in which a user's loss may come."""

    def of_verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        loss = algorithms.agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info)
        return loss, {"actor/mine": 1.0}

    def of_old_verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **kwargs):
        loss = of_verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)[0]
        return loss, torch.tensor(0.1), torch.tensor(0.2), torch.tensor(0.3)

    def with_counts(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, counts, config=None):
        return algorithms.agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **counts), {}

    def of_three_values(old_log_prob, log_prob, **kwargs):
        return log_prob.sum(), {}, 1

    def per_token(old_log_prob, log_prob, **kwargs):
        return log_prob, {}

    def with_another_input(old_log_prob, log_prob, hidden_states, **kwargs):
        return log_prob.sum(), {}

    for fn in (of_verl, of_old_verl, with_counts, of_three_values, per_token, with_another_input):
        monkeypatch.setitem(algorithms.POLICY_LOSS_REGISTRY, fn.__name__, fn)


def call(name: str, batch: dict) -> tuple[torch.Tensor, dict]:
    return algorithms.call_policy_loss(
        name, counts=COUNTS, config=CONFIG, old_log_prob=batch["old"], log_prob=batch["new"], advantages=batch["adv"],
        response_mask=batch["mask"], loss_agg_mode="token-mean", rollout_is_weights=None,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["of_verl", "of_old_verl", "with_counts", "gpg"])
def test_a_loss_gets_the_global_counts_however_it_takes_them(user_losses, name: str) -> None:
    batch = make(6, 3, 4)
    loss, metrics = call(name, batch)
    wanted = sum(-float(batch["adv"][x] * batch["new"][x]) for x in map(tuple, batch["mask"].nonzero().tolist())) / 40
    assert float(loss) == pytest.approx(wanted, rel=1e-12)
    if name == "of_old_verl":
        found = {key: round(float(value), 6) for key, value in metrics.items()}
        assert found == {"actor/pg_clipfrac": 0.1, "actor/ppo_kl": 0.2, "actor/pg_clipfrac_lower": 0.3}


@pytest.mark.parametrize(("name", "said"), [
    ("of_three_values", r"loss_mode=of_three_values returned 3 values.*\(loss, metrics\)"),
    ("per_token", r"loss_mode=per_token returned a loss of torch.Size.*agg_loss"),
    ("with_another_input", r"loss_mode=with_another_input.*hidden_states.*rollout_is_weights=None"),
])  # fmt: skip
def test_a_loss_that_does_not_fit_is_named_with_what_is_expected(user_losses, name: str, said: str) -> None:
    with pytest.raises(AlgorithmError, match=said):
        call(name, make(6, 3, 4))


@many
@given(batch=batches)
def test_metrics_with_verls_names_have_verls_meaning(batch: dict) -> None:
    tokens = [tuple(x) for x in batch["mask"].nonzero().tolist()]
    left_out = truncated = distance = 0
    for x in tokens:
        p, q, a = math.exp(batch["new"][x]), math.exp(batch["old"][x]), float(batch["adv"][x])
        valid = p - q <= 0.3 if a > 0 else p - q >= -0.2
        left_out += not valid
        truncated += valid and p / q > 1.7
        distance += abs(float(batch["new"][x] - batch["old"][x]))
    metrics = run("dppo_tv", batch)[2]
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(left_out / len(tokens))
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(truncated / len(tokens))
    metrics = run("kl_cov", batch)[2]
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(distance / len(tokens))
    chosen = sum(bool(batch["chosen"][x]) for x in tokens) / len(tokens)
    assert float(metrics["actor/kl_cov_frac"]) == pytest.approx(chosen) and "actor/pg_clipfrac" not in metrics


@pytest.mark.parametrize(
    ("body", "settings", "said"),
    [
        (
            lambda tokens, settings: (tokens.advantages, {}),
            None,
            r"\(tokens\): missing .*'settings'.* Declare settings=",
        ),
        (lambda tokens: (tokens.advantages, {}), ClipRange, r"\(tokens, settings\): too many positional arguments"),
        (lambda tokens: tokens.advantages, None, r"returned Tensor; it returns a loss per token, of shape \(1, 2\)"),
        (lambda tokens: (tokens.advantages.sum(), {}), None, r"returned losses of shape \(\); it returns a loss per"),
        (lambda tokens: (tokens.advantages, 1.0), None, r"returned 2 values; .* and a dict of metrics"),
    ],
)
def test_a_loss_of_the_wrong_form_is_told_what_it_gets_and_returns(body: Any, settings: Any, said: str) -> None:
    try:
        with pytest.raises(AlgorithmError, match=f"policy loss of_the_wrong_form.* {said}"):
            algorithms.policy_loss("of_the_wrong_form", settings=settings)(body)
            two = torch.full((1, 2), -1.0)
            algorithms.call_policy_loss(
                "of_the_wrong_form",
                counts={"dp_size": 1, "batch_num_tokens": 2, "global_batch_size": 1, "loss_scale_factor": 2},
                old_log_prob=two, log_prob=two, advantages=two, response_mask=torch.ones(1, 2),
                loss_agg_mode="token-mean", config=None, rollout_is_weights=None,
            )  # fmt: skip
    finally:
        POLICY_LOSSES.remove("of_the_wrong_form")
