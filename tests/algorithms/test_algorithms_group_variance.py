"""Losses that compare the samples of a prompt, against autograd of their papers' formulas over whole prompts."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from test_algorithms_sequences import cut_at_random

from hybridrl.algorithms import AlgorithmError, get_policy_loss_fn, get_policy_loss_prepare_fn, global_counts

torch.set_num_threads(1)
CONFIG = SimpleNamespace(
    policy_loss=SimpleNamespace(gvpo_beta=0.3, flowrl_beta=1.7, online_dpo_beta=0.3),
    clip_ratio_low=0.2,
    clip_ratio_high=0.3,
)
NAMES = ("gvpo", "gvpo_ref", "flowrl_vargrad", "online_dpo")
MODE = "seq-mean-token-sum"
Batch = dict[str, torch.Tensor]


def make(seed: int, sizes: list[int], width: int) -> tuple[Batch, torch.Tensor]:
    """Samples of prompts, in random order, with at least one token each; and the prompt of each."""
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    mask = rng.random((rows, width)) > 0.4
    mask[np.arange(rows), rng.integers(0, width, rows)] = True
    floats = {name: torch.tensor(-rng.exponential(size=(rows, width)) - 0.05) for name in ("old", "new", "ref")}
    rewards = torch.tensor(rng.integers(0, 3, rows) / 2.0)
    batch = {**floats, "mask": torch.tensor(mask).long(), "adv": rewards[:, None].expand(rows, width).clone()}
    return batch, torch.tensor(rng.permutation(np.repeat(np.arange(len(sizes)), sizes)))


batches = st.builds(make, st.integers(0, 10**6), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4))


def anchor(name: str) -> str:
    return "ref" if name == "gvpo_ref" else "old"


def online_dpo(batch: Batch, prompts: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """-log s(beta (x_w - x_l)) of the first best and the first worst sample, with k / N for the share of a prompt."""
    loss, mask = torch.zeros((), dtype=torch.float64), batch["mask"].double()
    for prompt in prompts.unique():
        (rows,) = (prompts == prompt).nonzero(as_tuple=True)
        rewards = batch["adv"][rows, 0].tolist()
        best, worst = (int(rows[rewards.index(pick(rewards))]) for pick in (max, min))
        if best != worst:
            ratios = ((log_prob - batch["ref"]) * mask).sum(-1)
            probability = 1 / (1 + torch.exp(-0.3 * (ratios[best] - ratios[worst])))
            loss = loss - len(rows) / len(prompts) * torch.log(probability)
    return loss


def gvpo(name: str, batch: Batch, prompts: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """1 / (2 (k - 1)) of the paper's squared distances, with k / N for the share of a prompt; means with gradient."""
    loss, mask = torch.zeros((), dtype=torch.float64), batch["mask"].double()
    for prompt in prompts.unique():
        rows = prompts == prompt
        implicit = 0.3 * ((log_prob - batch[anchor(name)]) * mask)[rows].sum(-1)
        rewards, k = batch["adv"][rows, 0], int(rows.sum())
        if k > 1:
            distance = (implicit - implicit.mean()) - (rewards - rewards.mean())
            loss = loss + k / len(prompts) * distance.square().sum() / (2 * (k - 1))
    return loss


def flowrl(batch: Batch, prompts: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """w (log Z + log pi / n - beta R - log pi_ref / n)^2, mean over samples, at the best log Z of each prompt."""
    loss, mask = torch.zeros((), dtype=torch.float64), batch["mask"].double()
    for prompt in prompts.unique():
        rows, length = prompts == prompt, mask[prompts == prompt].sum(-1)
        ratio = ((log_prob.detach() - batch["old"]) * mask)[rows].sum(-1) / length
        weight = ratio.exp().clamp(0.8, 1.3)
        error = ((log_prob - batch["ref"]) * mask)[rows].sum(-1) / length - 1.7 * batch["adv"][rows, 0]
        log_z = -(weight * error).sum() / weight.sum()
        loss = loss + (weight * (log_z + error).square()).sum() / len(prompts)
    return loss


def gradient(
    name: str, batch: Batch, prompts: torch.Tensor, micro: int, sequences: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of the sampled log-probabilities, [B, T], in micro-batches."""
    more: dict[str, Any] = {} if name == "gvpo" else {"ref_log_prob": batch["ref"]}
    prepare = get_policy_loss_prepare_fn(name, CONFIG)
    assert prepare is not None
    fields = (batch["old"], batch["new"], batch["adv"], batch["mask"])
    prepared = prepare(*fields, CONFIG, 0, group_ids=prompts, sequence_ids=sequences, **more)
    counts = global_counts(batch["mask"])
    if sequences is not None:
        tokens = torch.zeros(len(prompts), dtype=torch.int64).index_add(0, sequences, batch["mask"].sum(-1))
        counts["global_batch_size"] = int((tokens > 0).sum())
    log_prob = batch["new"].clone().requires_grad_()
    for start in range(0, len(prompts), micro):
        rows = slice(start, start + micro)
        own = {} if sequences is None else {"sequence_lengths": tokens[sequences[rows]]}
        given = (batch["old"][rows], log_prob[rows], batch["adv"][rows], batch["mask"][rows])
        share, _ = get_policy_loss_fn(name)(*given, MODE, CONFIG, counts={**counts, **own}, prepared=prepared[rows])
        share.backward()
    assert log_prob.grad is not None
    return log_prob.grad


def expected(name: str, batch: Batch, prompts: torch.Tensor) -> torch.Tensor:
    log_prob = batch["new"].clone().requires_grad_()
    own = {"flowrl_vargrad": flowrl, "online_dpo": online_dpo}.get(name, partial(gvpo, name))
    loss = own(batch, prompts, log_prob)
    return torch.autograd.grad(loss, log_prob)[0] if loss.requires_grad else torch.zeros_like(log_prob)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=batches, micro=st.integers(1, 12))
def test_the_gradient_is_that_of_the_paper_however_prompts_are_split(name: str, data: Any, micro: int) -> None:
    batch, prompts = data
    torch.testing.assert_close(gradient(name, batch, prompts, micro), expected(name, batch, prompts))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=batches, seed=st.integers(0, 999))
def test_the_rows_of_a_session_are_one_sample(name: str, data: Any, seed: int) -> None:
    """Rows without a response token, such as copies that fill up a shard, are no sample at all."""
    batch, prompts = data
    if name == "online_dpo":  # of equal samples the first counts, and these rows are in another order
        batch = {**batch, "adv": torch.arange(len(prompts)).double()[:, None].expand_as(batch["adv"]).clone()}
    cut, ids = cut_at_random(batch, np.random.default_rng(seed))
    found = gradient(name, cut, prompts[ids], 2, ids)
    whole = torch.zeros_like(batch["new"]).index_add(0, ids, found)
    torch.testing.assert_close(whole, expected(name, batch, prompts))


@settings(max_examples=30, deadline=None)
@given(data=batches, reward=st.sampled_from([0.1, 0.7, -1 / 3]))
def test_equal_rewards_of_an_unchanged_policy_have_no_gradient(data: Any, reward: float) -> None:
    batch, prompts = data
    same = {**batch, "new": batch["old"], "adv": torch.full_like(batch["adv"], reward)}
    assert not gradient("gvpo", same, prompts, 3).any()


def test_the_optimum_is_the_policy_that_rewards_tilt() -> None:
    """With pi proportional to pi' exp(R / beta), every distance of the paper's sum is 0."""
    batch, prompts = make(3, [4, 3], 1)
    tilted = batch["ref"] + batch["adv"] / 0.3 + 0.9 * prompts[:, None]  # any constant of the prompt
    optimum = {**batch, "new": torch.where(batch["mask"] > 0, tilted, batch["new"])}
    torch.testing.assert_close(gradient("gvpo_ref", optimum, prompts, 2), torch.zeros_like(batch["new"]))


def test_what_it_compares_must_be_given() -> None:
    batch, prompts = make(1, [2, 2], 3)
    fields = (batch["old"], batch["new"], batch["adv"], batch["mask"], MODE, CONFIG)
    with raises_with(AlgorithmError, "gvpo", "group_ids"):
        get_policy_loss_fn("gvpo")(*fields)
    for name in NAMES[1:]:
        with raises_with(AlgorithmError, name, "ref_log_prob"):
            get_policy_loss_fn(name)(*fields, group_ids=prompts)
    log_prob = batch["new"].clone().requires_grad_()
    loss, _ = get_policy_loss_fn("gvpo")(fields[0], log_prob, *fields[2:], group_ids=prompts)
    torch.testing.assert_close(torch.autograd.grad(loss, log_prob)[0], gradient("gvpo", batch, prompts, 4))
