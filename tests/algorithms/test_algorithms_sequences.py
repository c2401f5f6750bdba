"""Sequences in several rows: however a sequence is cut, and wherever its rows are, each loss is that of the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from test_algorithms_policy_losses import COMPARING, CONFIG, NAMES, batches, by_paper, extra, make

from hybridrl.algorithms import (
    LOSS_AGG_MODES,
    AlgorithmError,
    get_policy_loss_fn,
    get_policy_loss_prepare_fn,
    global_counts,
    rollout_correction_preset,
)
from hybridrl.algorithms.algorithm_registry import reads_whole_sequences
from hybridrl.algorithms.sequences import RowTotals, SplitSequences, other_rows

torch.set_num_threads(1)
WHOLE = ("gspo", "geo_mean", "sppo")  # losses with a value per sequence


def cut_at_random(batch: dict[str, torch.Tensor], rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], Any]:
    """Each row cut into up to three, in random order; tokens that belong to other rows are NaN. And their sequences."""
    rows = []
    width = batch["mask"].shape[1]
    for row in range(len(batch["mask"])):
        part_of = np.sort(rng.integers(0, 3, width))
        for part in np.unique(part_of):
            own = torch.from_numpy(part_of == part)
            fields = {name: tensor[row] for name, tensor in batch.items()}
            kept = {k: v.masked_fill(~own, torch.nan) if v.is_floating_point() else v & own for k, v in fields.items()}
            rows.append((row, kept))
    rng.shuffle(rows)  # type: ignore[arg-type]
    cut = {name: torch.stack([kept[name] for _, kept in rows]) for name in batch}
    return cut, torch.tensor([row for row, _ in rows])


def run_cut(
    name: str, batch: dict[str, torch.Tensor], mode: str, config: Any, seed: int, weights: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of the tokens of each uncut row) of rows on two ranks, in micro-batches of at most two."""
    rng = np.random.default_rng(seed)
    cut, ids = cut_at_random(batch, rng)
    counts = {**global_counts(batch["mask"]), "loss_scale_factor": 7}
    tokens = torch.zeros(len(batch["mask"]), dtype=torch.int64).index_add(0, ids, cut["mask"].sum(-1))
    fn, total, gradient = get_policy_loss_fn(name), torch.zeros((), dtype=torch.float64), torch.zeros_like(batch["new"])

    def call(rows: Any, log_prob: torch.Tensor, counts: dict[str, Any], sequences: Any) -> torch.Tensor:
        more = {} if prepared is None else {"prepared": prepared[rows]}
        given = [cut["old"][rows], log_prob, cut["adv"][rows], cut["mask"][rows]]
        loss, _ = fn(*given, mode, config, cut["weights"][rows] if weights else None, counts=counts,
                     sequences=sequences, **more)  # fmt: skip
        return loss

    prepared = extra(name, cut).get("prepared")
    if name == "bypass_mode" and (prepare := get_policy_loss_prepare_fn(name, config)) is not None:
        prepared = prepare(cut["old"], cut["new"], cut["adv"], cut["mask"], config, 0, sequence_ids=ids)
    found = []
    for rank in torch.arange(len(ids)).chunk(2):
        totals = RowTotals()
        call(rank, cut["new"][rank], {}, totals)
        found.append(torch.stack(totals.partials, 1) if totals.partials else torch.zeros(len(rank), 0))
    others = other_rows(torch.cat(found), totals.kinds, ids)
    for start in range(0, len(ids), 2):
        rows = slice(start, start + 2)
        log_prob = cut["new"][rows].clone().requires_grad_()
        share = call(rows, log_prob, {**counts, "sequence_lengths": tokens[ids[rows]]}, SplitSequences(others[rows]))
        total = total + share.detach()
        gradient.index_add_(0, ids[rows], torch.autograd.grad(share, log_prob)[0])
    return total, gradient


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(batch=batches, mode=st.sampled_from(LOSS_AGG_MODES), weights=st.booleans(), seed=st.integers(0, 999))
def test_a_sequence_in_rows_has_the_value_and_gradient_of_the_papers_whole(name, batch, mode, weights, seed) -> None:
    if mode == "seq-mean-token-sum-norm":  # `by_paper` divides by the width
        mode = "seq-mean-token-sum"
    loss, gradient = run_cut(name, batch, mode, CONFIG, seed, weights)
    value, difference = by_paper(name, batch, mode, weights)
    assert float(loss) == pytest.approx(value, rel=1e-9, abs=1e-10)
    torch.testing.assert_close(gradient, torch.tensor(difference, dtype=torch.float64), rtol=1e-5, atol=1e-7)


CORRECTIONS = {
    "is": {"name": "bypass_pg_is", "rollout_is": "sequence", "rollout_is_threshold": 1.1},
    "normalised": {"name": "bypass_pg_is", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.8_1.25"},
    "mean_k3_token_k2": {"rollout_rs": "seq_mean_k3,token_k2", "rollout_rs_threshold": "0.1,0.05"},
    "max_k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.1"},
}


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=20)
@given(batch=batches, mode=st.sampled_from(LOSS_AGG_MODES), seed=st.integers(0, 999))
def test_bypass_mode_weighs_and_rejects_whole_sequences(name, batch, mode, seed) -> None:
    """The uncut batch is compared with loops over tokens in test_algorithms_rollout_correction."""
    words = {"name": "bypass_ppo_clip", **CORRECTIONS[name]}
    config = SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=None,
        loss_scale_factor=7,
        policy_loss=SimpleNamespace(rollout_correction=rollout_correction_preset(**words)),
    )
    assert reads_whole_sequences("bypass_mode", config)
    log_prob = batch["new"].clone().requires_grad_()
    wanted, _ = get_policy_loss_fn("bypass_mode")(batch["old"], log_prob, batch["adv"], batch["mask"], mode, config)
    loss, gradient = run_cut("bypass_mode", batch, mode, config, seed)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, log_prob)[0])


@pytest.mark.parametrize(("mode", "reads"), [("token-mean", False), ("seq-mean-token-mean", True)])
def test_rejecting_tokens_needs_whole_sequences_only_where_their_lengths_are_read(mode, reads) -> None:
    """A preliminary pass that nothing reads would be a forward pass of each mini-batch for nothing."""
    rejection = {"name": "bypass_ppo_clip", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    correction = SimpleNamespace(rollout_correction=rollout_correction_preset(**rejection))
    config = SimpleNamespace(loss_agg_mode=mode, policy_loss=correction)
    assert reads_whole_sequences("bypass_mode", config) == reads


def test_who_reads_whole_sequences() -> None:
    assert [name for name in NAMES if reads_whole_sequences(name, CONFIG)] == sorted(
        (*WHOLE, *COMPARING), key=NAMES.index
    )


@pytest.mark.parametrize("name", WHOLE)
def test_a_part_of_a_sequence_is_refused_without_the_sums_of_the_rest(name: str) -> None:
    batch = make(0, 2, 3)
    counts = {**global_counts(batch["mask"]), "sequence_lengths": torch.tensor([5, 5])}
    with raises_with(AlgorithmError, f"loss {name}", "several rows"):
        get_policy_loss_fn(name)(
            batch["old"], batch["new"], batch["adv"], batch["mask"], "token-mean", CONFIG, None, counts=counts
        )
