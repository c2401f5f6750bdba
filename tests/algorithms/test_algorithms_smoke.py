"""Every public name of `hybridrl.algorithms` can be imported, and the room stands alone."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest

import hybridrl.algorithms as algorithms

REWARDS, GROUPS = "token_level_rewards response_mask", "token_level_rewards response_mask index epsilon"
LOSS = "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights"
COUNTS = "dp_size batch_num_tokens global_batch_size loss_scale_factor"
THRESHOLDS = "rollout_is_threshold rollout_is_batch_normalize"
#: verl's names with their parameters in order; what a function takes beyond them comes behind, or by keyword.
VERL = {
    "register_policy_loss": "name",
    "get_policy_loss_fn": "name",
    "register_adv_est": "name_or_enum",
    "get_adv_estimator_fn": "name_or_enum",
    "get_kl_controller": "kl_ctrl",
    "compute_gae_advantage_return": "token_level_rewards values response_mask gamma lam",
    "compute_grpo_outcome_advantage": f"{GROUPS} norm_adv_by_std_in_grpo config",
    "compute_grpo_vectorized_outcome_advantage": f"{GROUPS} norm_adv_by_std_in_grpo config",
    "compute_gdpo_outcome_advantage": f"{GROUPS} norm_adv_by_std_in_grpo config non_tensor_batch batch",
    "compute_grpo_passk_outcome_advantage": f"{GROUPS} norm_adv_by_std_in_grpo config",
    "compute_reinforce_plus_plus_baseline_outcome_advantage": f"{GROUPS} config",
    "compute_rloo_outcome_advantage": f"{GROUPS} config",
    "compute_rloo_vectorized_outcome_advantage": f"{GROUPS} config",
    "compute_opo_outcome_advantage": f"{GROUPS} config",
    "compute_gpg_outcome_advantage": f"{GROUPS} f_norm alpha config",
    "compute_reinforce_plus_plus_outcome_advantage": f"{REWARDS} config",
    "compute_flash_reinforce_outcome_advantage": f"{REWARDS} config",
    "compute_remax_outcome_advantage": "token_level_rewards reward_baselines response_mask config",
    **dict.fromkeys(
        ("compute_optimal_token_baseline_advantage", "compute_multi_turn_optimal_token_baseline_advantage"),
        f"{REWARDS} index old_log_probs sum_pi_squared rollout_is_weights handle_zero_tail epsilon",
    ),
    "compute_rewards": "token_level_scores old_log_prob ref_log_prob kl_ratio",
    "agg_loss": f"loss_mat loss_mask loss_agg_mode {COUNTS}",
    "compute_policy_loss": "old_log_prob log_prob advantages response_mask cliprange cliprange_low cliprange_high "
    "clip_ratio_c loss_agg_mode",
    **{
        f"compute_policy_loss_{name}": LOSS
        for name in ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro")
    },
    "compute_policy_loss_cispo": LOSS,
    "compute_policy_loss_bypass_mode": LOSS,
    "compute_policy_loss_reinforce": LOSS.replace("old_log_prob", "rollout_log_prob"),
    "compute_entropy_loss": "logits response_mask loss_agg_mode",
    "compute_value_loss": f"vpreds returns values response_mask cliprange_value loss_agg_mode {COUNTS}",
    "kl_penalty": "logprob ref_logprob kl_penalty",
    "kl_penalty_forward": "logprob ref_logprob kl_penalty",
    "compute_pf_ppo_reweight_data": "data reweight_method weight_pow",
    "compute_rollout_rejection_mask": "log_ratio response_mask rollout_rs rollout_rs_threshold",
    "compute_rs_metrics": "option_name rs_statistic response_mask seq_valid_mask level per_sequence_values "
    "rollout_rs_threshold rollout_rs_threshold_lower apply_lower_threshold",
    "compute_rollout_correction_weights": f"log_ratio response_mask rollout_is {THRESHOLDS}",
    "compute_is_metrics": "rollout_is_weights raw_rollout_is_weights log_ratio_for_metrics response_mask rollout_is "
    "rollout_is_threshold rollout_is_threshold_lower",
    "compute_rollout_correction_and_rejection_mask": "old_log_prob rollout_log_prob response_mask rollout_is "
    f"{THRESHOLDS} rollout_rs rollout_rs_threshold",
    "compute_offpolicy_metrics": "old_log_prob rollout_log_prob response_mask",
    "compute_rollout_correction_and_add_to_batch": "batch rollout_corr_config",
    "compute_rollout_corr_metrics_from_logprobs": "log_prob rollout_log_prob response_mask",
    "apply_bypass_mode": "batch rollout_corr_config policy_loss_config",
    "masked_mean": "values mask axis",
    "masked_sum": "values mask axis",
    "masked_var": "values mask unbiased",
    "masked_whiten": "values mask shift_mean",
    "logprobs_from_logits": "logits labels inplace_backward",
    "entropy_from_logits": "logits",
}


@pytest.mark.parametrize("name", VERL)
def test_a_call_written_for_verl_fits(name: str) -> None:
    parameters = inspect.signature(getattr(algorithms, name)).parameters
    wanted = VERL[name].split()
    assert list(parameters)[: len(wanted)] == wanted
    more = list(parameters.values())[len(wanted) :]
    assert all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in more)


def test_the_benchmark_measures_every_estimator(repository, tmp_path, monkeypatch, capsys) -> None:
    """On a few rows, where its limits mean nothing: that it runs and writes its figures."""
    monkeypatch.syspath_prepend(repository / "benchmarks")
    script = importlib.import_module("algorithms")
    monkeypatch.setattr(script, "keep_freed_memory", lambda: None)  # this process goes on
    monkeypatch.setattr(script, "LIMITS", {})
    monkeypatch.setattr(script, "SOFTMAX_SIZES", ((8, 16), (4, 32)))
    monkeypatch.setattr(script, "GROWTH_LIMIT", float("inf"))
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["algorithms.py", "--rows=128", "--width=16", "--rounds=1", f"--json={file}"])
    script.main()
    figures = json.loads(file.read_text())
    assert set(figures["estimators"]) == {e.value for e in algorithms.AdvantageEstimator}
    assert [row["vocabulary"] for row in figures["softmax"]] == [16, 32] and "| grpo |" in capsys.readouterr().out


def test_all_names_exist() -> None:
    assert [name for name in algorithms.__all__ if not hasattr(algorithms, name)] == []
    assert len(set(algorithms.__all__)) == len(algorithms.__all__)


def test_imports_neither_ray_nor_the_config_tree_nor_transformers() -> None:
    code = (
        "import sys, hybridrl.algorithms; "
        "heavy = 'ray omegaconf hydra transformers tensordict hybridrl.protocol hybridrl.config'.split(); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
