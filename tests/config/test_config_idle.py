"""Settings that cannot act are named, and two values for one setting are refused with both places."""

import pytest

from hybridrl.config import ConfigError, load_config
from hybridrl.config.checks.idle import check_idle
from hybridrl.config.compose import compose_config
from hybridrl.config.schema.root import ROOTS
from hybridrl.trainer.api import Trainer

POLICY = "actor_rollout_ref"
ACTOR, ROLLOUT, MODEL = f"{POLICY}.actor", f"{POLICY}.rollout", f"{POLICY}.model"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"]

#: a setting that cannot act in a plain run of GRPO, and what lets it act
PAIRS = [
    (f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.use_kl_loss=True"),
    (f"{ACTOR}.kl_loss_type=mse", f"{ACTOR}.use_kl_loss=True"),
    (f"{ACTOR}.tau_pos=2", f"{ACTOR}.policy_loss.loss_mode=sapo"),
    (f"{ACTOR}.policy_loss.clip_cov_ratio=0.1", f"{ACTOR}.policy_loss.loss_mode=clip_cov"),
    (f"{ACTOR}.data_loader_seed=7", f"{ACTOR}.shuffle=True"),
    (f"{ACTOR}.loss_scale_factor=7", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
    (f"{ACTOR}.optim.num_cycles=2", f"{ACTOR}.optim.lr_scheduler_type=cosine"),
    (f"{ACTOR}.optim.min_lr_ratio=0.1", f"{ACTOR}.optim.lr_scheduler_type=linear"),
    (f"{ACTOR}.entropy_from_logits_chunk_size=8", f"{ACTOR}.entropy_from_logits_with_chunking=True"),
    (f"{MODEL}.lora_alpha=3", f"{MODEL}.lora_rank=4"),
    (f"{MODEL}.target_modules=q_proj", f"{MODEL}.lora_rank=4"),
    (f"{MODEL}.tiled_mlp.num_shards=2", f"{MODEL}.tiled_mlp.enabled=True"),
    (f"{ROLLOUT}.val_kwargs.temperature=0.5", f"{ROLLOUT}.val_kwargs.do_sample=True"),
    (f"{ROLLOUT}.server.port=8000", f"{ROLLOUT}.server.enable=True"),
    (f"{ROLLOUT}.trace.token2text=True", f"{ROLLOUT}.trace.backend=mlflow"),
    (f"{ROLLOUT}.cudagraph_capture_sizes=[1]", None),
    ("algorithm.kl_ctrl.kl_coef=0.2", "algorithm.use_kl_in_reward=True"),
    ("algorithm.kl_penalty=mse", "algorithm.use_kl_in_reward=True"),
    ("algorithm.lam=0.9", "algorithm.adv_estimator=gae"),
    ("algorithm.gigpo_mode=mean_std_norm", "algorithm.adv_estimator=gigpo"),
    ("algorithm.filter_groups.metric=acc", "algorithm.filter_groups.enable=True"),
    ("algorithm.pf_ppo.weight_pow=3", "algorithm.use_pf_ppo=True"),
    ("critic.model.path=/nonexistent", "critic.enable=True"),
    ("critic.optim.lr=0.1", "critic.enable=True"),
    ("trainer.critic_warmup=3", "critic.enable=True"),
    ("reward.max_error_rate=0.3", "reward.on_error=drop"),
    ("reward.reward_model.weight=2", "reward.reward_model.enable=True"),
    ("distillation.distillation_loss.loss_max_clamp=3", "distillation.enabled=True"),
    ("trainer.resume_from_path=x", "trainer.resume_mode=resume_path"),
    ("trainer.report_rollouts=5", None),
]
OFF = {
    f"{ROLLOUT}.cudagraph_capture_sizes=[1]": f"{ROLLOUT}.enforce_eager=True",
    "trainer.report_rollouts=5": "trainer.report=False",
}


@pytest.mark.parametrize(("word", "remedy"), PAIRS)
def test_a_setting_is_named_exactly_where_it_cannot_act(word: str, remedy: str | None) -> None:
    off = [OFF[word]] if word in OFF else []
    key = word.split("=")[0]
    faults, notices = check_idle(load_config("ppo_trainer", [*GRPO, *off, word]))
    assert any(f"{key}=" in text for text in (*faults, *notices))
    faults, notices = check_idle(load_config("ppo_trainer", [*GRPO, *([remedy] if remedy else []), word]))
    assert not any(text.startswith(f"{key}=") or f" {key}=" in text for text in (*faults, *notices))


@pytest.mark.parametrize("root", ROOTS)
def test_defaults_are_never_named(root: str) -> None:
    assert check_idle(load_config(root, [])) == ([], [])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "words",
    [
        [f"{ACTOR}.ppo_micro_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"],
    ],
)
def test_two_values_for_one_setting_are_refused_with_both(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config("ppo_trainer", words)
    assert all(word.lstrip("+") in str(caught.value) for word in words)
    compose_config("ppo_trainer", [words[0], words[0]])


def test_a_weak_old_name_gives_way_and_both_are_named() -> None:
    composed = compose_config("ppo_trainer", [f"{MODEL}.lora.rank=4", f"{MODEL}.lora_rank=2"])
    assert composed.config.actor_rollout_ref.model.lora_rank == 2
    assert any(f"{MODEL}.lora_rank=2 replaces {MODEL}.lora.rank=4" in notice for notice in composed.notices)


@pytest.mark.parametrize("words", [["data.seed=1", "data.seed=2"], ["data.seed=1", "++data.seed=2"]])
def test_the_later_of_two_words_counts_and_both_are_named(words: list[str]) -> None:
    composed = compose_config("ppo_trainer", words)
    assert composed.config.data.seed == 2
    assert "on the command line, data.seed=2 replaces 1 before it" in composed.notices
    assert (
        compose_config("ppo_trainer", ["data.seed=2"] * 2).notices == compose_config("ppo_trainer", words[:1]).notices
    )


def test_a_keyword_and_a_mapping_may_not_contradict() -> None:
    with pytest.raises(ConfigError, match=r"keyword lr.*config"):
        Trainer("grpo", model="org/m", data=[{"prompt": "a"}], lr=1e-5, config={f"{ACTOR}.optim.lr": 1e-4})
