"""Settings that cannot act are named, and two values for one setting are refused with both places."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from hybridrl.config import ConfigError, load_config
from hybridrl.config.checks.branches import value_at
from hybridrl.config.checks.idle import check_idle, conditional
from hybridrl.config.compose import compose_config
from hybridrl.config.roles import ROLES, RoleSpec
from hybridrl.config.schema.engine import OptimConfig
from hybridrl.config.schema.root import ROOTS
from hybridrl.trainer.api import Trainer

POLICY = "actor_rollout_ref"
ACTOR, ROLLOUT, MODEL = f"{POLICY}.actor", f"{POLICY}.rollout", f"{POLICY}.model"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"]

DISTILLED = ["distillation.enabled=True", "distillation.teacher_models.a.model_path=x"]
REWARD, JUDGE = "reward.reward_model", "reward.reward_model.judge"
SCORED = [f"{REWARD}.enable=True"]
SERVED = [*SCORED, f"{REWARD}.rollout.name=vllm"]
URL = f"{JUDGE}.url=http://h:1/v1"


@dataclass(frozen=True)
class Case:
    """Settings that cannot act for one reason, and what lets them act."""

    remedy: str
    words: Sequence[str]
    given: Sequence[str] = ()
    root: str = "ppo_trainer"


def below(group: str, *words: str) -> list[str]:
    return [f"{group}.{word}" for word in words]


_SERVER = ("host=h", "port=8000", "api_key_env=K", "max_connections=9", "max_requests=9", "max_body_mb=9")
_SERVER = (*_SERVER, "max_sessions=9", "session_idle_s=9")
_REPLICAS = ("tensor_model_parallel_size=2", "gpu_memory_utilization=0.3", "free_cache_engine=False")
_REPLICAS = (*_REPLICAS, "load_format=auto", "enforce_eager=True", "enable_prefix_caching=False", "max_restarts=1")
_REPLICAS = (
    *_REPLICAS,
    "max_num_batched_tokens=99",
    "limit_images=2",
    "scheduling_policy=priority",
    "stuck_timeout_s=9",
)
_REPLICAS = (*_REPLICAS, "engine_kwargs.vllm={seed: 1}", "checkpoint_engine.update_weights_bucket_megabytes=9")

CASES = [
    Case(f"{ACTOR}.use_kl_loss=True", below(ACTOR, "kl_loss_coef=0.1", "kl_loss_type=mse")),
    Case(f"{ACTOR}.policy_loss.loss_mode=sapo", below(ACTOR, "tau_pos=2", "tau_neg=2")),
    Case(
        f"{ACTOR}.policy_loss.loss_mode=clip_cov",
        below(f"{ACTOR}.policy_loss", "clip_cov_ratio=0.1", "clip_cov_lb=2", "clip_cov_ub=9"),
    ),
    Case(f"{ACTOR}.policy_loss.loss_mode=kl_cov", below(f"{ACTOR}.policy_loss", "kl_cov_ratio=0.1", "ppo_kl_coef=1")),
    Case(f"{ACTOR}.policy_loss.loss_mode=dro", below(f"{ACTOR}.policy_loss", "dro_beta=0.1")),
    Case(f"{ACTOR}.policy_loss.loss_mode=sppo", below(f"{ACTOR}.policy_loss", "sppo_eta=2")),
    Case("algorithm.adv_estimator=spo", ["algorithm.spo_rho=0.5"]),
    Case(f"{ACTOR}.policy_loss.loss_mode=flowrl_vargrad", below(f"{ACTOR}.policy_loss", "flowrl_beta=2")),
    Case(f"{ACTOR}.policy_loss.loss_mode=gvpo", below(f"{ACTOR}.policy_loss", "gvpo_beta=2")),
    Case(f"{ACTOR}.policy_loss.loss_mode=online_dpo", below(f"{ACTOR}.policy_loss", "online_dpo_beta=2")),
    Case(f"{ACTOR}.policy_loss.loss_mode=m2po", below(f"{ACTOR}.policy_loss", "m2_threshold=2")),
    Case(
        f"{ACTOR}.policy_loss.loss_mode=vanilla",
        below(ACTOR, "clip_ratio=0.1", "clip_ratio_low=0.3", "clip_ratio_high=0.4", "clip_ratio_c=5"),
        [f"{ACTOR}.policy_loss.loss_mode=sapo"],
    ),
    Case(f"{ACTOR}.shuffle=True", below(ACTOR, "data_loader_seed=7")),
    Case(f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", below(ACTOR, "loss_scale_factor=7")),
    Case(f"{ACTOR}.use_dynamic_bsz=True", below(ACTOR, "ppo_max_token_len_per_gpu=99")),
    Case(
        f"{ACTOR}.use_dynamic_bsz=False",
        below(ACTOR, "ppo_micro_batch_size_per_gpu=2"),
        [f"{ACTOR}.use_dynamic_bsz=True"],
    ),
    Case(f"{ROLLOUT}.log_prob_use_dynamic_bsz=True", below(ROLLOUT, "log_prob_max_token_len_per_gpu=99")),
    Case(f"{ACTOR}.strategy=fsdp2", below(ACTOR, "use_torch_compile=True"), [f"{ACTOR}.strategy=megatron"]),
    Case(
        f"{ACTOR}.strategy=fsdp2",
        below(
            MODEL,
            *("use_liger=True", "share_prefixes=True", "enable_activation_offload=True"),
            *("recompute_granularity=selective", "tiled_mlp.enabled=True"),
        ),
        [f"{ACTOR}.strategy=megatron"],
    ),
    Case("algorithm.adv_estimator=optimal_token_baseline", below(ACTOR, "calculate_sum_pi_squared=True")),
    Case(f"{ACTOR}.optim.lr_scheduler_type=cosine", below(f"{ACTOR}.optim", "num_cycles=2", "min_lr_ratio=0.1")),
    Case(
        f"{ACTOR}.optim.optimizer=AdamW", below(f"{ACTOR}.optim", "betas=[0.8,0.9]"), [f"{ACTOR}.optim.optimizer=SGD"]
    ),
    Case(
        f"{ACTOR}.optim.lr_warmup_steps=-1",
        below(f"{ACTOR}.optim", "lr_warmup_steps_ratio=0.1"),
        [f"{ACTOR}.optim.lr_warmup_steps=5"],
    ),
    Case(f"{ACTOR}.entropy_from_logits_with_chunking=True", below(ACTOR, "entropy_from_logits_chunk_size=8")),
    Case(
        "global_profiler.tool=torch",
        below(f"{ACTOR}.profiler", "enable=True"),
        [f"{ACTOR}.profiler.all_ranks=True", "global_profiler.steps=[1]"],
    ),
    Case(
        f"{ACTOR}.profiler.enable=True",
        below(f"{ACTOR}.profiler", "ranks=[0]"),
        ["global_profiler.tool=torch", "global_profiler.steps=[1]"],
    ),
    Case(
        "global_profiler.tool=torch",
        ["global_profiler.steps=[1]", "global_profiler.save_path=x"],
        below(f"{ACTOR}.profiler", "enable=True", "ranks=[0]"),
    ),
    Case(
        "global_profiler.steps=[1]",
        ["global_profiler.tool=torch"],
        below(f"{ACTOR}.profiler", "enable=True", "ranks=[0]"),
    ),
    Case(f"{MODEL}.lora_rank=4", below(MODEL, "lora_alpha=3", "target_modules=q_proj", "exclude_modules=k_proj")),
    Case(f"{MODEL}.tiled_mlp.enabled=True", below(MODEL, "tiled_mlp.num_shards=2")),
    Case(
        f"{MODEL}.enable_gradient_checkpointing=True",
        below(MODEL, "recompute_granularity=selective"),
        [f"{MODEL}.enable_gradient_checkpointing=False"],
    ),
    Case("data.val_files=[a.parquet]", below(f"{ROLLOUT}.val_kwargs", "n=2", "do_sample=True")),
    Case(
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        below(f"{ROLLOUT}.val_kwargs", "temperature=0.5", "top_k=5", "top_p=0.5"),
        ["data.val_files=[a.parquet]"],
    ),
    Case(f"{ROLLOUT}.do_sample=True", below(ROLLOUT, "top_k=5", "top_p=0.5"), [f"{ROLLOUT}.do_sample=False"]),
    Case(f"{ROLLOUT}.server.enable=True", below(f"{ROLLOUT}.server", *_SERVER)),
    Case(
        f"{ROLLOUT}.prometheus.enable=True", below(f"{ROLLOUT}.prometheus", "port=9", "file=f", "served_model_name=m")
    ),
    Case(
        f"{ROLLOUT}.trace.backend=mlflow",
        below(f"{ROLLOUT}.trace", "token2text=True", "project_name=p", "max_samples_per_step_per_worker=2"),
    ),
    Case(
        f"{ROLLOUT}.enforce_eager=False",
        below(ROLLOUT, "cudagraph_capture_sizes=[1]"),
        [f"{ROLLOUT}.enforce_eager=True"],
    ),
    Case(f"{ROLLOUT}.name=vllm", below(ROLLOUT, *_REPLICAS), [f"{ROLLOUT}.name=hf"]),
    Case(f"{ROLLOUT}.name=sglang", below(ROLLOUT, "engine_kwargs.sglang={x: 1}"), [f"{ROLLOUT}.name=vllm"]),
    Case(f"{ROLLOUT}.name=vllm", below(ROLLOUT, "engine_kwargs.vllm={seed: 1}"), [f"{ROLLOUT}.name=sglang"]),
    Case(f"{ROLLOUT}.name=openai", below(f"{ROLLOUT}.openai", "base_url=http://h", "model=m", "extra_body={a: 1}")),
    Case(f"{ROLLOUT}.nnodes=1", below(ROLLOUT, "n_gpus_per_node=2", "replicas.min=1", "replicas.max=2")),
    Case(
        f"{ROLLOUT}.name=vllm",
        below(ROLLOUT, "replicas.min=1", "replicas.max=2"),
        below(ROLLOUT, "name=hf", "nnodes=1"),
    ),
    Case(f"{ROLLOUT}.replicas.min=1", below(ROLLOUT, "replicas.wait_s=9"), [f"{ROLLOUT}.nnodes=1"]),
    Case(
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        below(
            f"{ROLLOUT}.multi_turn",
            *("format=llama3", "turn_rewards=True", "max_assistant_turns=3", "max_user_turns=3", "tool_timeout_s=9"),
            *("max_parallel_calls=3", "max_tool_response_length=9", "tool_response_truncate_side=left"),
            "tokenization_sanity_check_mode=disable",
        ),
    ),
    Case(
        f"{ROLLOUT}.agent.default_agent_loop=env_agent",
        below(
            f"{ROLLOUT}.agent",
            *("default_environment=e", "environment_config_path=e.yaml", "environment_timeout_s=9"),
            *("environment_turn_tokens=9", "num_workers=2", "max_running=9", "retries=0", "on_error=drop"),
        ),
    ),
    Case(
        f"{ROLLOUT}.agent.default_agent_loop=gateway_agent",
        below(
            f"{ROLLOUT}.agent",
            "function=a:b",
            "command=c",
            "timeout_s=9",
            "sampling=agent",
            "match=loose",
            "trace_dir=t",
        ),
    ),
    Case(
        f"{ROLLOUT}.agent.default_agent_loop=null",
        below(f"{ROLLOUT}.multi_turn", "enable=True"),
        [f"{ROLLOUT}.agent.default_agent_loop=env_agent"],
    ),
    Case("algorithm.use_kl_in_reward=True", ["algorithm.kl_ctrl.kl_coef=0.2", "algorithm.kl_penalty=mse"]),
    Case(
        "algorithm.kl_ctrl.type=adaptive",
        below("algorithm.kl_ctrl", "horizon=9", "target_kl=9"),
        ["algorithm.use_kl_in_reward=True"],
    ),
    Case("algorithm.adv_estimator=gae", ["algorithm.lam=0.9", "algorithm.gamma=0.9"]),
    Case("algorithm.adv_estimator=grpo", ["algorithm.norm_adv_by_std_in_grpo=False"], ["algorithm.adv_estimator=rloo"]),
    Case("algorithm.adv_estimator=gigpo", ["algorithm.gigpo_mode=mean_std_norm", "algorithm.gigpo_step_advantage_w=2"]),
    Case("algorithm.adv_estimator=gdpo", ["algorithm.gdpo_reward_keys=[a]", "algorithm.gdpo_reward_weights=[1]"]),
    Case("algorithm.adv_estimator=sppo", ["algorithm.sppo_preference_scale=2"]),
    Case(
        "algorithm.adv_estimator=prime",
        below("algorithm", "reward_dpo_coef=2", "reward_gt_coef=2", "prime_norm=batch_norm", "prime_whiten=True"),
    ),
    Case(
        "algorithm.filter_groups.enable=True", below("algorithm.filter_groups", "metric=acc", "max_num_gen_batches=3")
    ),
    Case("algorithm.use_pf_ppo=True", below("algorithm.pf_ppo", "weight_pow=3")),
    Case(
        "algorithm.rollout_correction.rollout_is=token",
        below("algorithm.rollout_correction", "rollout_is_threshold=3", "rollout_is_batch_normalize=True"),
    ),
    Case(
        "algorithm.rollout_correction.rollout_rs=token_k1",
        below("algorithm.rollout_correction", "rollout_rs_threshold=0.5"),
    ),
    Case("algorithm.rollout_correction.bypass_mode=True", below("algorithm.rollout_correction", "loss_type=reinforce")),
    Case(
        "algorithm.rollout_correction.bypass_mode=False",
        below("algorithm.rollout_correction", "rollout_is=token"),
        ["algorithm.rollout_correction.bypass_mode=True"],
    ),
    Case("algorithm.missing.significance=0.1", ["algorithm.missing.window=9"], ["algorithm.missing.significance=0"]),
    Case(
        "algorithm.adv_estimator=gae",
        [
            "critic.model.path=/nonexistent",
            "critic.optim.lr=0.1",
            "trainer.critic_warmup=3",
            "trainer.max_critic_ckpt_to_keep=2",
            "trainer.health.dead_critic.patience=2",
        ],
    ),
    Case("critic.use_dynamic_bsz=True", ["critic.ppo_max_token_len_per_gpu=99"], ["critic.enable=True"]),
    Case(
        "data.val_files=[a.parquet]",
        [
            "data.val_max_samples=3",
            "data.val_batch_size=3",
            "data.validation_shuffle=True",
            "trainer.val_before_train=False",
            "trainer.log_val_generations=3",
        ],
    ),
    Case(
        "trainer.val_only=False",
        ["trainer.val_before_train=False"],
        ["data.val_files=[a.parquet]", "trainer.val_only=True"],
    ),
    Case("data.filter_overlong_prompts=False", ["data.truncation=left"], ["data.filter_overlong_prompts=True"]),
    Case("data.custom_cls.path=f.py", ["data.custom_cls.name=C"]),
    Case("data.sampler.class_path=f.py", ["data.sampler.class_name=C"]),
    Case(
        "reward.custom_reward_function.path=f.py",
        below("reward.custom_reward_function", "name=f", "reward_kwargs={a: 1}"),
    ),
    Case(
        "reward.reward_manager.name=naive",
        [
            "reward.custom_reward_function.path=f.py",
            "reward.num_workers=2",
            "reward.timeout_s=3",
            "reward.on_error=zero",
            "reward.sandbox_fusion.url=http://h",
        ],
        ["reward.reward_manager.name=session"],
    ),
    Case(f"{REWARD}.combine=sum", ["reward.functions={a: {path: f.py}}"], [*SCORED, f"{REWARD}.combine=only"]),
    Case("reward.reward_manager.source=importlib", below("reward.reward_manager.module", "path=f.py", "name=M")),
    Case(
        "reward.reward_manager.source=register",
        ["reward.reward_manager.name=dapo"],
        ["reward.reward_manager.source=importlib"],
    ),
    Case("reward.on_error=drop", ["reward.max_error_rate=0.3"]),
    Case("reward.sandbox_fusion.url=http://h", ["reward.sandbox_fusion.max_concurrent=3"]),
    Case(
        f"{REWARD}.enable=True",
        below(REWARD, "weight=2", "combine=sum", "model.path=x", "max_length=9"),
    ),
    Case(
        f"{REWARD}.rollout.name=vllm",
        below(f"{REWARD}.rollout", "tensor_model_parallel_size=2", "max_num_seqs=9", "engine_kwargs={vllm: {seed: 1}}"),
        SCORED,
    ),
    Case(
        f"{REWARD}.rollout.name=null",
        below(REWARD, "strategy=megatron", "micro_batch_size_per_gpu=2", "fsdp_config.param_offload=True"),
        SERVED,
    ),
    Case(f"{REWARD}.steps.enable=True", below(f"{REWARD}.steps", "separator=x", "mark=x", "reward=min"), SCORED),
    Case(f"{REWARD}.enable_resource_pool=True", below(REWARD, "nnodes=1", "n_gpus_per_node=2"), SCORED),
    Case(
        f"{JUDGE}.enable=True",
        below(
            JUDGE, "template=t", "system_prompt=s", "temperature=1", "max_tokens=9", "parse.path=f.py", "timeout_s=9"
        ),
        SERVED,
    ),
    Case(
        URL, below(JUDGE, "model=m", "token_env=T", "max_concurrent=3", "attempts=2"), [*SERVED, f"{JUDGE}.enable=True"]
    ),
    Case(
        f"{JUDGE}.url=null",
        below(
            REWARD,
            "model.path=x",
            "rollout.name=vllm",
            "enable_resource_pool=True",
            "max_length=9",
            "steps.enable=True",
        ),
        [*SCORED, URL],
    ),
    Case(
        "distillation.enabled=True",
        below("distillation", "distillation_loss.loss_max_clamp=3", "teacher_models={a: {model_path: x}}"),
    ),
    Case(
        "distillation.distillation_loss.use_policy_gradient=True",
        below("distillation.distillation_loss", "clip_ratio=0.1", "policy_loss_mode=gspo"),
        DISTILLED,
    ),
    Case(
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        below("distillation.distillation_loss", "topk=9", "log_prob_min_clamp=-9"),
        DISTILLED,
    ),
    Case(
        "distillation.distillation_loss.use_task_rewards=True",
        [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.1"],
        [*DISTILLED, "distillation.distillation_loss.use_task_rewards=False"],
    ),
    Case(
        "distillation.teacher_models.a.inference.name=vllm",
        below("distillation.teacher_models.a", "num_replicas=2", "inference.gpu_memory_utilization=0.3"),
        DISTILLED,
    ),
    Case(
        "distillation.teacher_models.b.model_path=y",
        ["distillation.teacher_models.a.key=x", "distillation.teacher_key=k"],
        DISTILLED,
    ),
    Case("algorithm.adv_estimator=prime", ["roles.prime.beta_train=0.1", "roles.prime.optim.lr=0.1"]),
    Case("roles.prime.shuffle=True", ["roles.prime.data_loader_seed=3"], ["algorithm.adv_estimator=prime"]),
    Case(
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        below("reward.reward_kwargs.overlong_buffer_cfg", "len=9", "log=True"),
        ["reward.reward_manager.name=dapo"],
    ),
    Case("trainer.total_training_steps=null", ["trainer.total_epochs=3"], ["trainer.total_training_steps=9"]),
    Case("data.shuffle=True", ["data.seed=3"], ["data.shuffle=False"]),
    Case(f"{MODEL}.lora_rank=4", [f"{ROLLOUT}.lora_transfer=adapter"], [f"{ROLLOUT}.name=vllm"]),
    Case(f"{ACTOR}.optim.lr_scheduler_type=cosine", [f"{ACTOR}.optim.total_training_steps=9"]),
    Case(
        "reward.sandbox_fusion.url=null",
        ["reward.sandbox_fusion.allow_unisolated=True"],
        ["reward.sandbox_fusion.url=u"],
    ),
    Case(
        f"{ROLLOUT}.name=hf",
        ["data.apply_chat_template_kwargs={a: 1}", "data.mm_processor_kwargs={a: 1}"],
        [f"{ROLLOUT}.name=openai"],
        "generation",
    ),
    Case("data.max_samples=9", ["data.shuffle=True"], root="generation"),
    Case("data.shuffle=True", ["data.seed=3"], ["data.max_samples=9"], "generation"),
    Case("data.shuffle=True", ["data.seed=3"], ["data.shuffle=False"], "sft_trainer"),
    Case("trainer.resume_mode=resume_path", ["trainer.resume_from_path=x"]),
    Case("trainer.report=True", ["trainer.report_rollouts=5"], ["trainer.report=False"]),
    Case("trainer.dump_freq=1", ["trainer.rollout_data_dir=x", "trainer.dump_tokens=3"], ["trainer.dump_freq=-1"]),
    Case("trainer.health.kl_blowup.action=rollback", ["trainer.health.max_rollbacks=9"]),
    Case(
        "trainer.health.kl_blowup.action=warn",
        below("trainer.health.kl_blowup", "threshold=9", "patience=9"),
        ["trainer.health.kl_blowup.action=off"],
    ),
    Case(
        f"{ROLLOUT}.n=4",
        ["trainer.health.uniform_groups.patience=9"],
        ["algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1"],
    ),
    Case("data.use_dynamic_bsz=True", ["data.max_token_len_per_gpu=99"], root="sft_trainer"),
    Case(
        "data.use_dynamic_bsz=False", ["data.micro_batch_size_per_gpu=2"], ["data.use_dynamic_bsz=True"], "sft_trainer"
    ),
    Case("model.lora_rank=4", ["model.lora_alpha=3"], root="sft_trainer"),
    Case("data.prompt_key=null", ["data.messages_key=m"], ["data.prompt_key=p"], "sft_trainer"),
    Case("engine.strategy=fsdp2", ["model.use_liger=True"], ["engine=megatron"], "sft_trainer"),
    Case(
        "global_profiler.tool=torch",
        ["profiler.enable=True"],
        ["profiler.all_ranks=True", "global_profiler.steps=[1]"],
        "sft_trainer",
    ),
    Case("dpo.loss_type=sigmoid", ["dpo.label_smoothing=0.1"], ["dpo.loss_type=ipo"], "dpo_trainer"),
    Case("dpo.loss_type=simpo", ["dpo.simpo_gamma=0.1"], root="dpo_trainer"),
    Case("dpo.loss_type=sigmoid", ["dpo.reference=cache"], ["dpo.loss_type=orpo"], "dpo_trainer"),
    Case("dpo.loss_type=sigmoid", ["data.margin_key=m"], ["dpo.loss_type=hinge"], "dpo_trainer"),
    Case(
        f"{ROLLOUT}.name=hf",
        [f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.max_num_seqs=9"],
        [f"{ROLLOUT}.name=openai"],
        "generation",
    ),
    Case("data.ground_truth_key=null", ["data.reward_model_key=r"], ["data.ground_truth_key=g"], "evaluation"),
    Case("reward.custom_reward_function.path=f.py", ["reward.custom_reward_function.name=f"], root="evaluation"),
]
#: settings that nothing lets act
NEVER = [
    (
        "ppo_trainer",
        [*DISTILLED, "distillation.teacher_models.a.inference.name=vllm"],
        "distillation.fsdp_config.param_offload=True",
    ),
    (
        "ppo_trainer",
        [f"{ACTOR}.use_kl_loss=True", f"{MODEL}.lora_rank=4"],
        f"{POLICY}.ref.fsdp_config.param_offload=True",
    ),
    ("ppo_trainer", SCORED, f"{REWARD}.model.enable_gradient_checkpointing=False"),
    ("ppo_trainer", [f"{ACTOR}.use_kl_loss=True"], f"{POLICY}.ref.fsdp_config.optimizer_offload=True"),
    ("generation", [], f"{ROLLOUT}.multi_turn.enable=True"),
    ("generation", [], f"{ROLLOUT}.agent.retries=3"),
    ("generation", [], f"{ROLLOUT}.trace.backend=mlflow"),
    ("generation", [], f"{ACTOR}.optim.lr=0.1"),
    ("generation", [], f"{ROLLOUT}.server.enable=True"),
]


def sentences(root: str, words: Sequence[str]) -> dict[str, str]:
    """The sentence about each setting that cannot act, by its name."""
    base = GRPO if root == "ppo_trainer" else []
    config = compose_config(root, without_earlier([*base, *words])).config
    validated = [text for texts in check_idle(config) for text in texts]
    return {
        name: text
        for text in validated
        for name in re.findall(r"([\w.]+)=", re.split(" ha(?:s|ve) no effect", text)[0])
    }


def without_earlier(words: Sequence[str]) -> list[str]:
    """Words of which the last one of each key counts."""
    return list({word.split("=", 1)[0]: word for word in words}.values())


def test_the_table_is_long() -> None:
    assert sum(len(case.words) for case in CASES) >= 200


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.words[0])
def test_a_setting_is_named_exactly_where_it_cannot_act(case: Case) -> None:
    told = sentences(case.root, [*case.given, *case.words])
    acting = sentences(case.root, [*case.given, *case.words, case.remedy])
    for word in case.words:
        key = word.split("=", 1)[0]
        mine = [text for name, text in told.items() if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")]
        assert mine, f"{key} is not named"
        assert case.remedy.split("=")[0] in mine[0] or "choose what needs" in mine[0].lower() or "Add " in mine[0], (
            mine[0]
        )
        assert key not in acting, acting[key]


@pytest.mark.parametrize(("root", "given", "word"), NEVER)
def test_a_setting_that_can_never_act_is_to_be_removed(root: str, given: Sequence[str], word: str) -> None:
    assert sentences(root, [*given, word])[word.split("=")[0]].endswith("Remove it")


#: what a remedy says in words -> a value that follows it
EXAMPLES = {
    "lr_scheduler_type": "cosine",
    "action": "warn",
    "optimizer": "AdamW",
    "optimizer_impl": "mine",
    "lr_warmup_steps": -1,
    "trainer_mode": "colocate_async",
    "test_freq": 5,
    "weights": {"a": 1},
}


def follow(config: Any, remedy: str) -> None:
    """Assign what the first part of a remedy says."""
    found = re.match(r"set ([\w.]+?)(?:=(\S+?)| above (\S+)|( to another value))?(?: or .*|, and .*)?$", remedy)
    assert found is not None, remedy
    key, value, limit, other = found.groups()
    group, _, name = key.rpartition(".")
    node = value_at(config, group) if group else config
    field = next(each for each in dataclasses.fields(node) if each.name == name)
    if other is not None:
        new: Any = EXAMPLES[name]
    elif limit is not None:
        new = int(limit) + 1
    elif value is not None:
        new = yaml.safe_load(value)
    else:
        new = EXAMPLES.get(name) or (["x"] if "list" in str(field.type) else "x")
    setattr(node, name, new)


@pytest.mark.parametrize("root", ROOTS)
def test_what_a_sentence_says_lets_a_setting_act(root: str) -> None:
    """For every setting that depends on something: its remedies, one after the other, remove every reason."""
    plain = compose_config(root).config
    followed = 0
    for item in conditional(ROOTS[root]):
        config, reason = copy.deepcopy(plain), None
        for _ in range(8):
            unmet = (need.unmet(group, functools.partial(value_at, config)) for need, group in item.needs)
            reason = next((each for each in unmet if each is not None), None)
            if reason is None or not reason.remedy.startswith("set "):
                break
            follow(config, reason.remedy)
        assert reason is None or not reason.remedy.startswith("set "), (item.key, reason)
        followed += reason is None
    assert followed > 0.2 * len(conditional(ROOTS[root]))


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
    once = compose_config("ppo_trainer", words[:1])
    assert compose_config("ppo_trainer", ["data.seed=2"] * 2).notices == once.notices


def test_a_keyword_and_a_mapping_may_not_contradict() -> None:
    with pytest.raises(ConfigError, match=r"keyword lr.*config"):
        Trainer("grpo", model="org/m", data=[{"prompt": "a"}], lr=1e-5, config={f"{ACTOR}.optim.lr": 1e-4})


def test_a_role_with_a_setting_that_has_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [("seed", int), ("optim", OptimConfig, dataclasses.field(default_factory=OptimConfig))]
    settings = dataclasses.make_dataclass("Settings", fields)
    own = RoleSpec("own", worker=None, needed=lambda _: True, placement=("own",), mesh="own", settings=settings)
    monkeypatch.setitem(ROLES, "own", own)
    told = sentences("ppo_trainer", ["+roles.own={seed: 1, optim: {lr: 0.1, num_cycles: 2, betas: [0.9, 0.999]}}"])
    assert list(told) == ["roles.own.optim.num_cycles"]


@pytest.mark.parametrize(
    "word",
    [
        "critic.model.path=null",
        "actor_rollout_ref.actor.kl_loss_coef=null",
        "algorithm.rollout_correction.rollout_is_threshold=null",
        "actor_rollout_ref.actor.megatron.param_offload=null",
    ],
)
def test_null_sets_nothing(word: str) -> None:
    """Scripts say null for what they leave out."""
    words = ["actor_rollout_ref.model.path=org/m", "data.train_files=[a.parquet]", "algorithm.adv_estimator=grpo"]
    try:
        config = load_config("ppo_trainer", [*words, word])
    except ConfigError as error:
        assert "no effect" not in str(error)  # a setting may not take null at all
    else:
        assert check_idle(config) == ([], [])
