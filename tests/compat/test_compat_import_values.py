"""`hybridrl import`: values whose unit or meaning differs, against numbers computed by hand, and defaults."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.compat.openrlhf.openrlhf_script import PROGRAM_TABLES
from hybridrl.compat.openrlhf.openrlhf_script import openrlhf as read_openrlhf
from hybridrl.compat.prime_rl import prime_rl_policy as prime_policy
from hybridrl.compat.prime_rl import prime_rl_tuning as prime_tuning
from hybridrl.compat.prime_rl.prime_rl_script import prime_rl as read_prime
from hybridrl.compat.projects.project_settings import SettingTable, default_of
from hybridrl.compat.projects.run_report import RunReport
from hybridrl.compat.slime import slime_policy, slime_tuning
from hybridrl.compat.slime.slime_script import slime as read_slime
from hybridrl.programs import PROGRAMS
from hybridrl.reward.function import RewardFunction, load
from hybridrl.reward.signature import Sample

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
OPENRLHF = "python -m openrlhf.cli.{} --{} organisation/model --{} data.jsonl "
PPO = OPENRLHF.format("train_ppo_ray", "pretrain", "prompt_data")
DPO = OPENRLHF.format("train_dpo", "pretrain", "dataset")
RM = OPENRLHF.format("train_rm", "pretrain", "dataset")
SFT = OPENRLHF.format("train_sft", "pretrain", "dataset") + "--output_key answer "
SLIME = "python train.py --hf-checkpoint m --prompt-data d.jsonl --rollout-batch-size 32 --n-samples-per-prompt 8 "
SLIME_SFT = "python train.py --hf-checkpoint m --prompt-data d.jsonl --loss-type sft_loss --rollout-batch-size 32 "
PRIME = "uv run rl --model.name m --orchestrator.batch-size 128 --orchestrator.group-size 16 "
PRIME_SFT = "uv run sft --model.name m --data.name organisation/data "


def report_of(command: str) -> RunReport:
    words = ["--", *shlex.split(command)]
    reader = read_openrlhf if "openrlhf" in command else read_slime if "train.py" in command else read_prime
    if "train_async.py" in command:
        reader = read_slime
    return reader(words)[0]


def parsed(text: str) -> Any:
    """A value of a command's word."""
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return yaml.safe_load(text)


def values_of(command: str) -> Callable[[str], Any]:
    """The values that the command of a report sets, or hybridrl's defaults."""
    report = report_of(command)
    words = dict(word.split("=", 1) for word in report.words)
    tree = PROGRAMS[report.program].tree
    return lambda key: parsed(words[key]) if key in words else default_of(tree, key, report.program)


GROUPS = "--advantage_estimator group_norm --rollout_batch_size 128 --n_samples_per_prompt 8 --init_kl_coef 0 "
#: a command, and what its settings are here: computed by hand from the documentation of each project
CONVERSIONS: list[tuple[str, dict[str, Any]]] = [
    # 128 prompts x 8 samples, updates of 256 samples: 32 prompts each
    (PPO + GROUPS + "--train_batch_size 256", {
        "data.train_batch_size": 128, f"{ACTOR}.ppo_mini_batch_size": 32, f"{ROLLOUT}.n": 8,
        "algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True, f"{ACTOR}.shuffle": True,
    }),
    # one update per rollout: there is nothing to shuffle
    (PPO + GROUPS + "--train_batch_size 1024", {f"{ACTOR}.ppo_mini_batch_size": 128, f"{ACTOR}.shuffle": False}),
    (PPO + "--advantage_estimator dr_grpo --n_samples_per_prompt 4 --init_kl_coef 0.1 --use_kl_loss --kl_estimator "
        "k2", {
        "algorithm.norm_adv_by_std_in_grpo": False, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.1,
        f"{ACTOR}.kl_loss_type": "k2", "algorithm.use_kl_in_reward": False,
    }),
    # the KL of 0.01 in the reward is the default
    (PPO + "--kl_target 6 --kl_horizon 5000", {
        "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01, "algorithm.kl_penalty": "k1",
        "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 6.0, "algorithm.kl_ctrl.horizon": 5000,
        "algorithm.adv_estimator": "gae", "algorithm.clip_rewards": 10.0,
    }),
    (PPO + "--max_len 4096 --max_new_tokens 3000", {"data.max_prompt_length": 1096, "data.max_response_length": 3000}),
    (PPO + "--max_len 4096", {"data.max_prompt_length": 2048, "data.max_response_length": 2048}),
    (PPO + "--use_dynamic_batch --train_max_tokens_per_gpu 1000 --prompt_max_len 512 --generate_max_len 1024", {
        f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 1536,
    }),
    (PPO + "--enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 3 --vllm_is_correction_type icepop", {
        f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_3",
    }),
    (PPO + "--enable_vllm_is_correction", {f"{CORRECTION}.rollout_is_threshold": 5.0}),
    # 4 engines of 2 GPUs, not with the policy: one node of 8 GPUs
    (PPO + "--vllm_num_engines 4 --vllm_tensor_parallel_size 2", {
        f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 8, f"{ROLLOUT}.tensor_model_parallel_size": 2,
    }),
    (PPO + "--vllm_num_engines 4 --async_train --async_queue_size 3", {
        "trainer.v1.trainer_mode": "separate_async", "trainer.v1.drain": True,
        "trainer.v1.separate_async.num_warmup_batches": 3.0,
    }),
    (PPO + "--overlong_buffer_len 512 --overlong_penalty_factor 0.5 --generate_max_len 1024", {
        "reward.reward_manager.name": "dapo",
    }),
    (PPO + "--l2 0.1 --lr_scheduler linear --critic_learning_rate 3e-6", {
        f"{ACTOR}.optim.weight_decay": 0.1, "critic.optim.weight_decay": 0.1, "critic.optim.lr": 3e-6,
        f"{ACTOR}.optim.lr_scheduler_type": "linear", f"{ACTOR}.optim.min_lr_ratio": 0.0,
        "critic.optim.lr_scheduler_type": "linear",
    }),
    (DPO + "--ipo --max_len 2048 --nll_loss_coef 0.2", {
        "dpo.loss_type": "ipo", "data.max_length": 2048, "dpo.sft_coef": 0.2, "data.truncation": "right",
    }),
    (RM + "--loss logexp", {"rm.loss_type": "bradley_terry", "optim.lr": 9e-6}),
    (SFT + "--input_key question", {"data.prompt_key": "question", "data.response_key": "answer"}),
    # 32 x 8 = 256 samples in 4 updates: 64 samples, which are 8 prompts
    (SLIME + "--num-steps-per-rollout 4", {f"{ACTOR}.ppo_mini_batch_size": 8, "data.train_batch_size": 32}),
    (SLIME + "--global-batch-size 128", {f"{ACTOR}.ppo_mini_batch_size": 16}),
    (SLIME, {f"{ACTOR}.ppo_mini_batch_size": 32}),
    (SLIME + "--eps-clip 0.2 --eps-clip-high 0.28 --eps-clip-c 10", {
        f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.28, f"{ACTOR}.clip_ratio_c": 10.0,
    }),
    (SLIME + "--calculate-per-token-loss", {f"{ACTOR}.loss_agg_mode": "token-mean"}),
    (SLIME + "--advantage-estimator gspo", {f"{ACTOR}.policy_loss.loss_mode": "gspo",
        "algorithm.adv_estimator": "grpo"}),
    (SLIME + "--use-tis", {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 2.0}),
    (SLIME + "--rollout-max-context-len 9000 --rollout-max-response-len 8192", {"data.max_prompt_length": 808}),
    (SLIME + "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --rollout-max-response-len 8192 "
     "--rollout-max-prompt-len 1000 --context-parallel-size 2", {
        f"{ACTOR}.ppo_max_token_len_per_gpu": 4596, f"{ACTOR}.megatron.context_parallel_size": 2,
        f"{ACTOR}.strategy": "megatron",
    }),
    # bytes there, mebibytes here
    (SLIME + "--update-weight-buffer-size 1073741824", {
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 1024,
    }),
    (SLIME.replace("train.py", "train_async.py") + "--rollout-num-gpus 16 --actor-num-gpus-per-node 8", {
        "trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.nnodes": 2, f"{ROLLOUT}.n_gpus_per_node": 8,
    }),
    (SLIME + "--rm-type dapo", {"reward.custom_reward_function.path": "pkg://hybridrl.reward.score.math_dapo"}),
    (SLIME_SFT + "--global-batch-size 64", {"data.train_batch_size": 64, "data.messages_key": "input"}),
    # 128 samples in groups of 16
    (PRIME, {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8, f"{ROLLOUT}.n": 16}),
    (PRIME + "--seq-len 4096 --orchestrator.train.sampling.max-completion-tokens 1024", {
        "data.max_prompt_length": 3072, "data.max_response_length": 1024, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
    }),
    (PRIME + "--seq-len 4096", {"data.max_prompt_length": 1024, "data.max_response_length": 3072}),
    (PRIME + "--trainer.loss.dppo-mask-high 0.3 --trainer.loss.kl-tau 0", {
        f"{ACTOR}.policy_loss.loss_mode": "dppo_tv", f"{ACTOR}.clip_ratio_high": 0.3, f"{ACTOR}.clip_ratio_low": 0.2,
    }),
    (PRIME + "--deployment.num-train-nodes 2 --deployment.num-infer-nodes 2 --deployment.num-infer-replicas 3", {
        "trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, f"{ROLLOUT}.nnodes": 6, f"{ROLLOUT}.n_gpus_per_node": 8,
    }),
    # 8 GPUs in 2 copies: 4 share a copy
    (PRIME + "--deployment.num-train-gpus 8 --trainer.model.dp-replicate 2", {f"{ACTOR}.fsdp_config.fsdp_size": 4}),
    (PRIME + "--inference.vllm.async-scheduling False --inference.vllm.gpu-memory-utilization 0.5", {
        f"{ROLLOUT}.engine_kwargs.vllm.async_scheduling": False, f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    }),
    (SLIME + "--sglang-chunked-prefill-size 4096 --sglang-cuda-graph-bs 1 2 4", {
        f"{ROLLOUT}.engine_kwargs.sglang.chunked_prefill_size": 4096, f"{ROLLOUT}.cudagraph_capture_sizes": [1, 2, 4],
    }),
    (PRIME + "--trainer.model.lora", {"actor_rollout_ref.model.lora_rank": 16,
        "actor_rollout_ref.model.lora_alpha": 32}),
    (PRIME + "--max-async-level 2 --max-steps 50", {
        "trainer.v1.separate_async.num_warmup_batches": 2.0, "trainer.total_training_steps": 50,
    }),
    (PRIME_SFT + "--data.seq-len 4096 --data.batch-size 32 --max-steps 100 --scheduler.type linear "
     "--scheduler.decay-steps 90", {
        "data.max_length": 4096, "data.train_batch_size": 32, "optim.lr_scheduler_type": "linear",
        "optim.lr_warmup_steps": 10, "data.train_files": "organisation/data:train",
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    "command", [PPO + "--use_wandb s3cret", PPO + "--logger.wandb.key s3cret", SLIME + "--wandb-key s3cret"]
)
def test_a_report_shows_no_keys(command: str) -> None:
    report = report_of(command)
    assert "***" in str(report) and "s3cret" not in str(report) + " ".join(report.words)


@pytest.mark.parametrize(("command", "expected"), CONVERSIONS, ids=range(len(CONVERSIONS)))
def test_values_are_converted(command: str, expected: dict[str, Any]) -> None:
    value = values_of(command)
    assert {key: value(key) for key in expected} == expected


#: the start of a command, the setting that is refused, and what its reason has to name
REFUSED = [
    (PPO + GROUPS, "--train_batch_size 100", "n_samples_per_prompt=8"),
    (PPO + GROUPS, "--train_batch_size 384", "384"),
    (PPO, "--reward_clip_range -5 10", "algorithm.clip_rewards"),
    (PPO, "--remote_rm_url http://host/score", "reward.reward_manager.name=remote"),
    (PPO, "--remote_rm_url reward.py", "reward_func(responses, ground_truths)"),
    (PPO, "--agent_func_path agent.py", "docs/agents.md"),
    (PPO, "--param_dtype fp16", "bf16"),
    (PPO.replace("data.jsonl", "a.jsonl,b.jsonl") + "--prompt_data_probs 0.5,0.5 ", "", "0.5,0.5"),
    (PPO + "--n_samples_per_prompt 4 --dynamic_filtering_reward_range 0.1 0.9 ", "--dynamic_filtering", "0.1 to 0.9"),
    (DPO, "--ref_pretrain other/model", "reference"),
    (SLIME, "--global-batch-size 100", "n-samples-per-prompt=8"),
    (SLIME, "--num-steps-per-rollout 3", "n-samples-per-prompt=8"),
    (SLIME, "--custom-rm-path rewards.score", "solution_str"),
    (SLIME, "--rm-type ifbench", "docs/reward.md"),
    (SLIME, "--custom-generate-function-path generate.run", "docs/agents.md"),
    (SLIME, "--load /other/checkpoint", "hf-checkpoint"),
    (SLIME, "--lr-decay-style inverse-square-root", "cosine"),
    (SLIME, "--normalize-advantages", "reinforce_plus_plus_baseline"),
    (SLIME, "--attention-dropout 0.1", "config.json"),
    (PRIME.replace("128", "100"), "", ""),
    (PRIME, "--orchestrator.algo.type opd", "docs/distillation.md"),
    (PRIME, "--trainer.loss.type custom", "docs/extending.md"),
    (PRIME, "--orchestrator.token-batch-size 65536", "orchestrator.batch_size"),
    (PRIME, "--max-steps 100 --trainer.scheduler.type linear", "wsd"),
]


@pytest.mark.parametrize(("start", "setting", "names"), REFUSED)
def test_values_that_mean_nothing_here_are_refused(start: str, setting: str, names: str) -> None:
    report = report_of(start + setting)
    refused = [item for item in report.settings if item.state == "refused"]
    assert not report.can_run and len(refused) == 1 and names in refused[0].why
    assert refused[0].word.split()[0] in start + setting


def test_a_reward_function_with_a_signature_of_this_library_is_mapped(tmp_path: Any) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(responses, ground_truths):\n    return [0.0 for _ in responses]\n")
    value = values_of(PPO + f"--remote_rm_url {reward}")
    assert value("reward.custom_reward_function.path") == str(reward)
    reward.write_text("def reward_func(queries, prompts, labels):\n    return [0.0 for _ in queries]\n")
    assert not report_of(PPO + f"--remote_rm_url {reward}").can_run


SLIME_REWARD = """
async def custom_rm(args, sample, **kwargs):
    right = sample.response.strip() == sample.label
    return {"points": float(right) * sample.metadata.get("weight", 1.0), "right": right}
"""


def test_a_reward_function_of_slime_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(SLIME_REWARD)
    value = values_of(SLIME + "--custom-rm-path rewards.custom_rm --reward-key points")
    prefix = "reward.custom_reward_function"
    kwargs = {name: value(f"{prefix}.reward_kwargs.{name}") for name in ("path", "name", "key")}
    function = load(RewardFunction(value(f"{prefix}.path"), value(f"{prefix}.name"), kwargs, "sample"))
    samples = [
        Sample(None, " 6 ", "6", {}, columns={"metadata": {"weight": 3.0}}),
        Sample(None, "7", "6", {}, columns={"metadata": None}),
    ]
    scores = [asyncio.run(function(sample)) for sample in samples]
    assert scores == [{"points": 3.0, "right": True, "score": 3.0}, {"points": 0.0, "right": False, "score": 0.0}]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>\\boxed{7}</think> It is \\boxed{6}.", 1.0),
        ("<think>\\boxed{6}</think> It is \\boxed{7}.", 0.0),
        ("<think>\\boxed{6}</think> It is six.", 0.0),
        ("It is \\boxed{6}.", 0.0),
        ("###Response \\boxed{\\frac{12}{2}}", 1.0),
    ],
)
def test_the_scorer_of_mathematics_after_thoughts(response: str, score: float) -> None:
    value = values_of(SLIME + "--rm-type deepscaler")
    prefix = "reward.custom_reward_function"
    function = load(RewardFunction(value(f"{prefix}.path"), value(f"{prefix}.name"), {}, "sample"))
    assert function(Sample(None, response, "6", {})) == score


@pytest.mark.parametrize(
    "code",
    [
        "def custom_rm(args, sample): return len(sample.tokens)",
        "def custom_rm(args, sample): return helper(sample)",
        "def custom_rm(args, sample): return args.scale * len(sample.response)",
        "def custom_rm(args, samples): return [0.0 for sample in samples]",
        "def other(args, sample): return 0.0",
    ],
)
def test_a_reward_function_of_slime_that_reads_more_is_refused(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(code + "\n")
    assert not report_of(SLIME + "--custom-rm-path rewards.custom_rm").can_run


#: what a project does where nothing is set, from its documentation and its source
DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    (PPO, {
        "trainer.total_epochs": 1, f"{ROLLOUT}.n": 1, f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.optim.weight_decay": 0.0,
        f"{ACTOR}.optim.betas": [0.9, 0.95], f"{ACTOR}.optim.lr_scheduler_type": "cosine",
        f"{ACTOR}.optim.min_lr_ratio": 0.1, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.03, "critic.optim.lr": 9e-6,
        "critic.optim.betas": [0.9, 0.95], "critic.cliprange_value": 0.5, "data.train_batch_size": 1024,
        f"{ACTOR}.ppo_mini_batch_size": 128, "algorithm.adv_estimator": "gae", "algorithm.kl_ctrl.kl_coef": 0.01,
        "data.prompt_key": "input", f"{ACTOR}.clip_ratio_c": 1e9, "trainer.n_gpus_per_node": 8,
        "trainer.resume_mode": "disable", "trainer.max_actor_ckpt_to_keep": 3, "data.seed": 42,
    }),
    (SFT, {
        "optim.lr": 5e-6, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.0, "optim.lr_scheduler_type": "cosine",
        "trainer.total_epochs": 2, "data.train_batch_size": 128, "data.max_length": 2048, "data.truncation": "right",
    }),
    (DPO, {"optim.lr": 1e-5, "dpo.beta": 0.1, "data.max_length": 512, "trainer.total_epochs": 1}),
    (SLIME, {
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", "data.shuffle": False, "data.seed": 42,
        f"{ACTOR}.fsdp_config.seed": 1234, f"{ACTOR}.optim.lr_scheduler_type": "linear", f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.optim.weight_decay": 0.01, f"{ACTOR}.use_kl_loss": False, f"{ROLLOUT}.name": "sglang",
        "data.prompt_key": "input", f"{ACTOR}.clip_ratio_c": 1e9, "trainer.n_gpus_per_node": 8,
        "trainer.resume_mode": "disable", f"{ROLLOUT}.temperature": 1.0, "algorithm.norm_adv_by_std_in_grpo": True,
    }),
    (SLIME + "--advantage-estimator ppo", {"critic.cliprange_value": 0.2, "critic.optim.lr": 1e-6}),
    (PRIME, {
        "algorithm.norm_adv_by_std_in_grpo": False, f"{ACTOR}.policy_loss.loss_mode": "dppo_tv",
        f"{ACTOR}.loss_agg_mode": "token-mean", "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.sampler.max_off_policy_threshold": 8, f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.optim.weight_decay": 0.01,
        f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 1,
    }),
    (PRIME_SFT, {"optim.lr": 1e-6, "data.max_length": 128, "data.train_batch_size": 128, "data.seed": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("command", "expected"), DEFAULTS, ids=range(len(DEFAULTS)))
def test_defaults_of_the_project_hold_where_a_script_sets_nothing(command: str, expected: dict[str, Any]) -> None:
    value = values_of(command)
    assert {key: value(key) for key in expected} == expected


TABLES: dict[str, SettingTable] = {
    PPO: PROGRAM_TABLES["train_ppo_ray"],
    SFT: PROGRAM_TABLES["train_sft"],
    DPO: PROGRAM_TABLES["train_dpo"],
    RM: PROGRAM_TABLES["train_rm"],
    SLIME: slime_policy.POLICY,
    SLIME_SFT: slime_tuning.TUNING,
    PRIME: prime_policy.POLICY,
    PRIME_SFT: prime_tuning.TUNING,
}


def option(name: str, kind: str, value: Any) -> str:
    if kind == "flag":
        return f"--{name}" if value else ""
    texts = value if isinstance(value, list) else [value]
    return f"--{name} {' '.join(shlex.quote(str(text)) for text in texts)}"


@pytest.mark.parametrize("command", TABLES, ids=lambda command: " ".join(command.split()[:3]))
def test_a_default_that_is_written_out_changes_nothing(command: str) -> None:
    """Each default of a table, written out in the script, gives the same settings as leaving it away."""
    table = TABLES[command]
    left_away = report_of(command)
    names = {item.word.split()[0].lstrip("-").replace("-", "_") for item in left_away.settings}
    options = [
        option(row.names[0], row.kind, row.default)
        for row in table.rows
        if row.default is not None and "*" not in row.names[0] and not row.idle
        and not names & {name.replace("-", "_") for name in row.names}
    ]  # fmt: skip
    written_out = report_of(" ".join([command, *options]))
    assert written_out.program == left_away.program and not written_out.differences[len(left_away.differences) :]
    tree = PROGRAMS[left_away.program].tree
    first, second = (dict(word.split("=", 1) for word in report.words) for report in (left_away, written_out))
    for key in first.keys() | second.keys():
        default = default_of(tree, key, left_away.program)
        values = [parsed(words[key]) if key in words else default for words in (first, second)]
        assert values[0] == values[1], key


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: f"{table.title}-{len(table.rows)}")
def test_rows_have_one_meaning(table: SettingTable) -> None:
    for row in table.rows:
        assert not (row.idle and row.refused), row.names
        acts = bool(row.key or row.translate)
        assert acts != bool(row.idle or row.refused), row.names


@settings(max_examples=25, deadline=None)
@given(
    command=st.sampled_from(list(TABLES)),
    numbers=st.lists(st.integers(0, 400), max_size=12, unique=True),
    text=st.sampled_from(["1", "0.5", "-3", "text", "a/b", "", "true", "[1]"]),
)
def test_any_settings_in_any_order_are_told_once(command: str, numbers: list[int], text: str) -> None:
    """Whatever a script sets, and whatever the values: each of its settings has one state, and nothing is raised."""
    table = TABLES[command]
    names = [table.rows[number % len(table.rows)].names[0] for number in numbers]
    unset = [name for name in dict.fromkeys(names) if "*" not in name and name != "train_async.py"]
    words = [word for name in (*unset, "no-such-setting") for word in (f"--{name}={text}", f"--{name}={text}")]
    options_before = [word for word in shlex.split(command) if word.startswith("--")]
    report = report_of(command + " ".join(map(shlex.quote, words)))
    if table.title == "prime-rl":
        assert len(report.settings) == len({item.word.split("=")[0].split()[0] for item in report.settings})
    else:
        assert len(report.settings) == len(options_before) + len(words)
