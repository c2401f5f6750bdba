"""Off-policy correction against loops over tokens, and bypass mode taking effect."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from tensordict import TensorDict

import hybridrl.algorithms as algorithms
from hybridrl.algorithms import (
    PRESETS,
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    AlgorithmError,
    RolloutCorrection,
    get_policy_loss_fn,
    get_policy_loss_prepare_fn,
    global_counts,
    rollout_correction_preset,
    with_global_batch_info,
)

torch.set_num_threads(1)
many = settings(max_examples=25, derandomize=True)


def make(seed: int, rows: int, width: int, scale: float = 0.4) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) > 0.3
    mask[0, 0] = True
    rollout = torch.tensor(-rng.exponential(size=(rows, width)) - 0.05)
    train = (rollout + torch.tensor(rng.normal(size=(rows, width))) * scale).clamp(max=-0.01)
    # What stands outside the mask must not matter: NaN there shows if it does.
    train[~torch.tensor(mask)] = torch.nan
    return {"train": train, "rollout": rollout, "mask": torch.tensor(mask).long(), "adv": torch.tensor(rng.normal(size=(rows, width)))}  # fmt: skip # noqa: E501


batches = st.builds(make, st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))


def ratios(b: dict) -> list[list[float]]:
    """log rho of each sequence's tokens, without those outside the mask."""
    return [[float(b["train"][i, t] - b["rollout"][i, t]) for t in row.nonzero().squeeze(-1).tolist()]
            for i, row in enumerate(b["mask"])]  # fmt: skip


def on_mask(b: dict, rows: list[list[float]]) -> torch.Tensor:
    out = torch.zeros_like(b["train"])
    for i, values in enumerate(rows):
        for t, value in zip(b["mask"][i].nonzero().squeeze(-1).tolist(), values, strict=True):
            out[i, t] = value
    return out


@many
@given(batch=batches, level=st.sampled_from(["token", "sequence"]), spec=st.sampled_from([1.3, "1.3", "0.7_1.4", 2]),
       normalise=st.booleans())  # fmt: skip
def test_weights(batch: dict, level: str, spec: object, normalise: bool) -> None:
    raw = [[math.exp(x) for x in row] if level == "token" else [math.exp(sum(row))] * len(row) for row in ratios(batch)]
    if isinstance(spec, str) and "_" in spec:
        bounded = [[w if 0.7 <= w <= 1.4 else 0.0 for w in row] for row in raw]
    else:
        bounded = [[min(w, float(spec)) for w in row] for row in raw]
    found, metrics = algorithms.compute_rollout_correction_weights(
        batch["train"] - batch["rollout"], batch["mask"], level, spec, normalise
    )
    flat = [w for row in bounded for w in row]
    mean = sum(flat) / len(flat) if level == "token" else np.mean([row[0] for row in bounded if row])
    factor = mean if normalise and mean > 1e-8 else 1.0
    torch.testing.assert_close(found, on_mask(batch, [[w / factor for w in row] for row in bounded]))
    assert metrics["rollout_is_mean"] == pytest.approx(sum(flat) / len(flat))
    if sum(flat):
        assert metrics["rollout_is_eff_sample_size"] == pytest.approx(np.mean(flat) ** 2 / np.mean(np.square(flat)))
    assert metrics["rollout_is_std"] == pytest.approx(np.std(flat), abs=1e-9)
    own = [w for row in raw for w in row] if level == "token" else [row[0] for row in raw if row]
    upper = 1.4 if spec == "0.7_1.4" else float(spec)
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(np.mean([w > upper for w in own]))
    assert metrics["rollout_is_max"] == pytest.approx(max(flat) if level == "token" else max(own))
    if normalise:
        assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(factor)
    if spec == "0.7_1.4":
        oob = [not 0.7 <= w <= 1.4 for row in raw for w in row]
        assert metrics["rollout_is_oob_ratio"] == pytest.approx(np.mean(oob))


def keeps(option: str, row: list[float], threshold: str) -> list[bool]:
    """Which tokens of a sequence an option keeps, by its definition."""
    token = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[option[-2:]]
    values = [token(x) for x in row]
    if not row:
        return []
    whole = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}
    seen = values if option.startswith("token") else [whole[option[:-3]]] * len(row)
    if option.endswith("k1"):
        low, high = (float(x) for x in threshold.split("_"))
        return [low <= math.exp(v) <= high for v in seen]
    return [v <= float(threshold) for v in seen]


@pytest.mark.parametrize("option", SUPPORTED_ROLLOUT_RS_OPTIONS)
@many
@given(batch=batches)
def test_rejection_by_each_option(option: str, batch: dict) -> None:
    threshold = "0.8_1.3" if option.endswith("k1") else "0.08"
    kept = [keeps(option, row, threshold) for row in ratios(batch)]
    found, metrics = algorithms.compute_rollout_rejection_mask(
        batch["train"] - batch["rollout"], batch["mask"], option, threshold
    )
    assert found.dtype == batch["mask"].dtype
    torch.testing.assert_close(found.double(), on_mask(batch, [[float(k) for k in row] for row in kept]))
    tokens = [k for row in kept for k in row]
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - np.mean(tokens))
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(np.mean([not all(row) for row in kept if row]))
    assert metrics[f"rollout_rs_{option}_masked_fraction"] == metrics["rollout_rs_masked_fraction"]
    assert metrics[f"rollout_rs_{option}_fraction_high"] + metrics[
        f"rollout_rs_{option}_fraction_low"
    ] == pytest.approx(
        np.mean([not k for k in tokens]) if option.startswith("token") else np.mean([not row[0] for row in kept if row])
    )


@settings(max_examples=60, derandomize=True)
@given(batch=batches, options=st.sets(st.sampled_from(SUPPORTED_ROLLOUT_RS_OPTIONS), min_size=2, max_size=4))
def test_several_options_must_all_pass(batch: dict, options: set[str]) -> None:
    names = sorted(options)
    thresholds = ["0.8_1.3" if n.endswith("k1") else "0.08" for n in names]
    found, _ = algorithms.compute_rollout_rejection_mask(
        batch["train"] - batch["rollout"], batch["mask"], ",".join(names), ", ".join(thresholds)
    )
    wanted = []
    for row in ratios(batch):
        each = [keeps(n, row, t) for n, t in zip(names, thresholds, strict=True)]
        wanted.append([float(all(ks)) for ks in zip(*each, strict=True)])
    torch.testing.assert_close(found.double(), on_mask(batch, wanted))


def test_a_single_number_for_k1_is_its_interval_around_one() -> None:
    log_ratio = torch.tensor([[math.log(1.9), -math.log(1.9), math.log(2.1), -math.log(2.1)]])
    mask = torch.ones(1, 4)
    for spec in (2.0, "2", "0.5_2.0"):
        found, _ = algorithms.compute_rollout_rejection_mask(log_ratio, mask, "token_k1", spec)
        assert found.tolist() == [[1, 1, 0, 0]]
    # The interval is one of pi_rollout / pi_train.
    found, _ = algorithms.compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.5_1.0")
    assert found.tolist() == [[1, 0, 0, 0]]


@many
@given(batch=batches)
def test_mismatch_metrics(batch: dict) -> None:
    found = algorithms.compute_offpolicy_metrics(batch["train"], batch["rollout"], batch["mask"])
    log_rho = ratios(batch)
    where = [row.nonzero().squeeze(-1).tolist() for row in batch["mask"]]
    mean = {k: np.array([np.mean([float(batch[k][i, t]) for t in ts]) for i, ts in enumerate(where) if ts])
            for k in ("train", "rollout")}  # fmt: skip
    flat = np.array([x for row in log_rho for x in row])
    gap = mean["rollout"] - mean["train"]
    wanted = {
        "training_ppl": np.exp(-mean["train"]).mean(), "training_log_ppl": -mean["train"].mean(),
        "rollout_ppl": np.exp(-mean["rollout"]).mean(), "rollout_log_ppl": -mean["rollout"].mean(),
        "log_ppl_diff": gap.mean(), "log_ppl_abs_diff": abs(gap).mean(), "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(), "ppl_ratio": np.exp(gap).mean(), "kl": -flat.mean(),
        "k3_kl": (np.exp(flat) - flat - 1).mean(), "chi2_token": np.exp(2 * flat).mean() - 1,
        "chi2_seq": np.mean([math.exp(2 * sum(row)) for row in log_rho if row]) - 1,
    }  # fmt: skip
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    named = algorithms.compute_rollout_corr_metrics_from_logprobs(batch["train"], batch["rollout"], batch["mask"])
    assert named == {f"rollout_corr/{k}": v for k, v in found.items()}
    diff = algorithms.rollout_probs_diff_metrics(batch["train"], batch["rollout"], batch["mask"])
    p, q = (np.array([math.exp(float(batch[k][i, t])) for i, ts in enumerate(where) for t in ts]) for k in mean)
    assert diff["training/rollout_probs_diff_mean"] == pytest.approx(abs(p - q).mean())
    assert diff["training/rollout_probs_diff_max"] == pytest.approx(abs(p - q).max())
    if len(p) > 2:
        correlation = np.corrcoef(p, q)[0, 1]
        assert diff["training/rollout_actor_probs_pearson_corr"] == pytest.approx(correlation)


def test_one_call_gives_weights_mask_and_metrics_and_updates_a_batch_without_writing_into_it() -> None:
    b = make(1, 5, 6)
    before = {k: v.clone() for k, v in b.items()}
    batch = SimpleNamespace(batch=TensorDict(
        {"old_log_probs": b["train"], "rollout_log_probs": b["rollout"], "response_mask": b["mask"]}, batch_size=[5]))  # fmt: skip # noqa: E501
    config = rollout_correction_preset("decoupled_geo_rs_token_tis", rollout_rs_threshold="0.9_1.1")
    same, metrics = algorithms.compute_rollout_correction_and_add_to_batch(batch, config)
    weights, mask, more = algorithms.compute_rollout_correction_and_rejection_mask(
        b["train"], b["rollout"], b["mask"], "token", 2.0, False, "seq_mean_k1", "0.9_1.1"
    )
    assert same is batch and weights is not None and metrics == more
    torch.testing.assert_close(batch.batch["rollout_is_weights"], weights.batch["rollout_is_weights"])
    torch.testing.assert_close(batch.batch["response_mask"], mask)
    assert 0 < int(mask.sum()) < int(b["mask"].sum())
    for key, value in before.items():
        torch.testing.assert_close(b[key], value, equal_nan=True)
    assert {"rollout_corr/kl", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction"} <= set(
        metrics
    )
    off, untouched, _ = algorithms.compute_rollout_correction_and_rejection_mask(b["train"], b["rollout"], b["mask"])
    assert off is None and torch.equal(untouched, b["mask"])


def test_presets_are_those_of_verl_and_all_run() -> None:
    assert len(PRESETS) == 19 and rollout_correction_preset("disabled") == RolloutCorrection()
    assert rollout_correction_preset("decoupled_seq_is_rs") == RolloutCorrection(
        rollout_is="sequence", rollout_is_threshold=2.0, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
    )
    assert rollout_correction_preset("bypass_pg_token_icepop") == RolloutCorrection(
        rollout_is="token", rollout_is_threshold="0.5_5.0", bypass_mode=True, loss_type="reinforce"
    )
    b = make(2, 4, 5)
    for name in PRESETS:
        config = rollout_correction_preset(name)
        assert config.bypass_mode == name.startswith("bypass")
        run_bypass(b, config) if config.bypass_mode else algorithms.compute_rollout_correction_and_rejection_mask(
            b["train"], b["rollout"], b["mask"], config.rollout_is, config.rollout_is_threshold,
            config.rollout_is_batch_normalize, config.rollout_rs, config.rollout_rs_threshold)  # fmt: skip
    with raises_with(AlgorithmError, "'geo'", "disabled"):
        rollout_correction_preset("geo")
    with raises_with(AlgorithmError, "['threshold']"):
        rollout_correction_preset("disabled", threshold=1)


# --- bypass mode ----------------------------------------------------------------------------------------------------


def actor(correction: object, **more: object) -> SimpleNamespace:
    return SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, loss_scale_factor=None,
                           policy_loss=SimpleNamespace(loss_mode="vanilla", rollout_correction=correction), **more)  # fmt: skip # noqa: E501


def run_bypass(
    b: dict, correction: object, mode: str = "token-mean", info: dict | None = None, **more: object
) -> tuple:
    config = actor(correction)
    log_prob = b["train"].clone().requires_grad_()
    loss, metrics = get_policy_loss_fn("bypass_mode")(
        b["rollout"],
        log_prob,
        b["adv"],
        b["mask"],
        mode,
        with_global_batch_info(config, **info) if info else config,
        **more,
    )
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0], metrics


@many
@given(batch=batches)
def test_bypass_with_ppo_clip_is_the_clipped_loss_against_the_sampler_without_rejected_tokens(batch: dict) -> None:
    correction = rollout_correction_preset("bypass_ppo_clip_geo_rs", rollout_rs_threshold="0.8_1.25")
    loss, gradient, metrics = run_bypass(batch, correction)
    total = 0.0
    tokens = int(batch["mask"].sum())
    for i, row in enumerate(ratios(batch)):
        for kept, x, t in zip(
            keeps("seq_mean_k1", row, "0.8_1.25"), row, batch["mask"][i].nonzero()[:, 0].tolist(), strict=True
        ):
            a = float(batch["adv"][i, t])
            if not kept:
                assert gradient[i, t] == 0
                continue
            surrogate = min(math.exp(x) * a, min(max(math.exp(x), 0.8), 1.2) * a)
            total -= surrogate if a >= 0 else max(surrogate, 3.0 * a)
    assert float(loss) == pytest.approx(total / tokens, rel=1e-9, abs=1e-12)
    assert not gradient[batch["mask"] == 0].any()
    flat = [x for row in ratios(batch) for x in row]
    assert float(metrics["rollout_corr/kl"]) == pytest.approx(-np.mean(flat))


@many
@given(batch=batches, normalise=st.booleans())
def test_bypass_with_reinforce_weights_the_policy_gradient(batch: dict, normalise: bool) -> None:
    correction = rollout_correction_preset("bypass_pg_is", rollout_is="token", rollout_is_threshold=1.2,
                                           rollout_is_batch_normalize=normalise)  # fmt: skip
    loss, gradient, metrics = run_bypass(batch, correction)
    weights = [[min(math.exp(x), 1.2) for x in row] for row in ratios(batch)]
    flat = [w for row in weights for w in row]
    mean = np.mean(flat) if normalise else 1.0
    found = {name: float(metrics[f"rollout_corr/rollout_is_{name}"]) for name in ("mean", "square_mean", "max")}
    assert found["max"] == pytest.approx(max(flat) / mean)
    effective = sum(flat) ** 2 / (len(flat) * sum(w * w for w in flat))
    assert found["mean"] ** 2 / found["square_mean"] == pytest.approx(effective)
    wanted = on_mask(batch, [[w / mean for w in row] for row in weights]) * batch["adv"]
    # d(-w A log pi) with the weight's own dependence on pi stopped.
    torch.testing.assert_close(gradient, -wanted / len(flat))
    value = -(wanted * batch["train"].nan_to_num()).sum() / len(flat)
    torch.testing.assert_close(loss, value)


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("bypass")])
@pytest.mark.parametrize("normalise", [False, True])
def test_bypass_does_not_depend_on_the_split(name: str, normalise: bool) -> None:
    b = make(3, 6, 5, scale=0.1)
    threshold = {"seq_mean_k1": "0.97_1.03", "seq_mean_k3": 0.005}.get(PRESETS[name].get("rollout_rs", ""))
    correction = rollout_correction_preset(name, rollout_is_batch_normalize=normalise, rollout_rs_threshold=threshold)
    prepare = get_policy_loss_prepare_fn("bypass_mode", actor(correction))
    uses_weights = correction.loss_type == "reinforce" and correction.rollout_is is not None
    assert (prepare is not None) == (normalise and uses_weights)
    prepared = prepare(b["rollout"], b["train"], b["adv"], b["mask"], actor(correction), 0) if prepare else None
    info = global_counts(b["mask"])
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        whole = run_bypass(b, correction, mode)
        parts = []
        for rows in ([0], [1, 2, 3], [4, 5]):
            rest = {"prepared": prepared[rows]} if prepared is not None else {}
            parts.append(run_bypass({k: v[rows] for k, v in b.items()}, correction, mode, info, **rest))
        torch.testing.assert_close(sum(p[0] for p in parts), whole[0])
        torch.testing.assert_close(torch.cat([p[1] for p in parts]), whole[1])
        tokens = [float(b["mask"][rows].sum()) for rows in ([0], [1, 2, 3], [4, 5])]
        for key, value in whole[2].items():
            merged = sum(n * p[2][key] for n, p in zip(tokens, parts, strict=True)) / sum(tokens)
            if key.endswith("_max"):
                merged = max(p[2][key] for p in parts)
            torch.testing.assert_close(merged, value, msg=key)
    if prepared is not None:
        with pytest.raises(AlgorithmError, match="mean over the whole mini-batch"):
            run_bypass({k: v[:1] for k, v in b.items()}, correction, info=info)


def test_bypass_reports_what_each_option_rejects() -> None:
    b = make(3, 6, 5, scale=0.1)
    options, thresholds = "token_k2,seq_mean_k3,seq_sum_k1", "0.004,0.005,0.8_1.25"
    correction = rollout_correction_preset("bypass_ppo_clip", rollout_rs=options, rollout_rs_threshold=thresholds)
    metrics = run_bypass(b, correction)[2]
    mask, wanted = algorithms.compute_rollout_rejection_mask(b["train"] - b["rollout"], b["mask"], options, thresholds)
    for name in ("token_k2", "seq_mean_k3", "seq_sum_k1"):
        share = float(metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"])
        assert share == pytest.approx(wanted[f"rollout_rs_{name}_masked_fraction"])
    assert float(metrics["rollout_corr/rollout_rs_masked_fraction"]) == pytest.approx(1 - mask.sum() / b["mask"].sum())


def test_bypass_takes_effect() -> None:
    correction = rollout_correction_preset("bypass_pg_is")
    assert algorithms.effective_loss_mode("vanilla", correction) == "bypass_mode"
    assert algorithms.effective_loss_mode("gspo", rollout_correction_preset("decoupled_token_is")) == "gspo"
    assert algorithms.effective_loss_mode("gspo", None) == "gspo"
    with raises_with(AlgorithmError, "bypass_mode=True", "'gspo'"):
        algorithms.effective_loss_mode("gspo", correction)
    with raises_with(AlgorithmError, "loss_type", "'ppo'", "ppo_clip, reinforce"):
        algorithms.effective_loss_mode("vanilla", rollout_correction_preset("bypass_pg_is", loss_type="ppo"))
    b = make(0, 2, 3)
    for settings_of in (lambda: {"loss_mode": "vanilla"}, lambda: SimpleNamespace(loss_mode="vanilla")):
        batch, policy_loss = (
            SimpleNamespace(batch={"rollout_log_probs": b["rollout"], "old_log_probs": b["train"]}),
            settings_of(),
        )
        algorithms.apply_bypass_mode(batch, correction, policy_loss)
        assert batch.batch["old_log_probs"] is b["rollout"]
        found = policy_loss if isinstance(policy_loss, dict) else vars(policy_loss)
        assert found == {"loss_mode": "bypass_mode", "rollout_correction": correction}
    with raises_with(AlgorithmError, "rollout_log_probs"):
        algorithms.apply_bypass_mode(SimpleNamespace(batch={}), correction, {})


# --- the probe, and bad input ---------------------------------------------------------------------------------------


def test_the_probe_stops_a_run_whose_sampler_holds_another_model() -> None:
    b = make(0, 4, 6, scale=1e-4)
    found = algorithms.check_probe(b["train"], b["rollout"], b["mask"], 1e-3)
    assert 0 < found["rollout_corr/probe_mean_abs_diff"] < found["rollout_corr/probe_max_abs_diff"]
    other = make(0, 4, 6, scale=1.0)
    with pytest.raises(AlgorithmError, match=r"at most 0.001 is tolerated.*not transferred"):
        algorithms.check_probe(other["train"], other["rollout"], other["mask"], 1e-3)
    with raises_with(AlgorithmError, "differ", "trainer", "nan"):
        algorithms.check_probe(torch.full((1, 1), torch.nan), torch.zeros(1, 1), torch.ones(1, 1), 1e-3)


@pytest.mark.parametrize(("level", "threshold", "message"), [
    ("geometric", 2.0, "rollout_is is 'geometric'.*token, sequence"),
    ("token", 0, "'0' in it is not a number greater than 0"), ("token", "a", "'a' in it is not a number"),
    ("token", True, "must be a number greater than 0"), ("token", None, "rollout_is_threshold is None"),
    ("token", "5_0.5", "lower bound 5 must not be above"), ("token", "nan", "'nan' in it"),
    ("token", "-1_2", "'-1' in it"),
])  # fmt: skip
def test_bad_weights_settings_are_named(level: str, threshold: object, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        algorithms.compute_rollout_correction_and_rejection_mask(
            torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), level, threshold
        )


@pytest.mark.parametrize(("options", "threshold", "message"), [
    ("token_k4", 1, "rollout_rs is 'token_k4'; it must be one or more of token_k1"), ("", 1, "one or more of"),
    ("seq_max_k1", 1, "one or more of"), ("token_k1", None, "needs a threshold"),
    ("token_k3", "0.1_0.2", "upper bound only"),
    ("token_k1,token_k2,token_k3", "1,2", "2 entries for the 3 options"), ("token_k1", 0.5, "must be at least 1"),
])  # fmt: skip
def test_bad_rejection_settings_are_named(options: str, threshold: object, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        algorithms.compute_rollout_rejection_mask(torch.zeros(1, 1), torch.ones(1, 1), options, threshold)


def test_an_empty_batch_and_shapes_that_differ_are_named() -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(AlgorithmError, match="no token set"):
        algorithms.compute_rollout_correction_and_rejection_mask(zeros, zeros, zeros)
    for order in itertools.permutations([zeros, zeros, torch.ones(2, 2)]):
        with pytest.raises(AlgorithmError, match=r"same shape.*\(2, 2\)"):
            algorithms.compute_rollout_correction_and_rejection_mask(*order)
