"""Scripts in the patterns that users of other projects have, for the tests of `hybridrl import`."""

from __future__ import annotations

_GRPO_OPENRLHF = r"""
set -x
MODEL=${MODEL:-organisation/model}
SAVE="./out/$(basename $MODEL)"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 1 \
   --actor.num_gpus_per_node 4 \
   --ref.num_nodes 1 \
   --ref.num_gpus_per_node 4 \
   --vllm.num_engines 2 \
   --vllm.tensor_parallel_size 2 \
   --train.colocate_all \
   --vllm.gpu_memory_utilization 0.6 \
   --algo.kl.init_coef 1e-3 \
   --algo.kl.use_loss \
   --algo.kl.estimator k3 \
   --algo.advantage.estimator group_norm \
   --algo.dynamic_filtering_enable \
   --algo.dynamic_filtering_range 0 1 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --actor.model_name_or_path $MODEL \
   --ckpt.output_dir $SAVE \
   --ckpt.save_steps 20 \
   --ckpt.save_hf \
   --train.micro_batch_size 8 \
   --train.batch_size 128 \
   --rollout.micro_batch_size 16 \
   --rollout.batch_size 64 \
   --rollout.n_samples_per_prompt 8 \
   --data.max_len 2048 \
   --rollout.max_new_tokens 1024 \
   --data.max_samples 20000 \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --actor.adam.lr 5e-7 \
   --data.prompt_dataset organisation/prompts \
   --data.input_key context_messages \
   --data.apply_chat_template \
   --actor.gradient_checkpointing_enable \
   --ds.packing_samples \
   --vllm.sync_backend nccl \
   --vllm.enforce_eager \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   --algo.advantage.is_correction_enable \
   --algo.advantage.is_correction_type icepop

# You could also try
#   --algo.kl.estimator k2 \
"""
_PPO_OPENRLHF = r"""
#!/bin/bash
python3 -m openrlhf.cli.train_ppo_ray \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --critic_num_nodes 1 --critic_num_gpus_per_node 8 --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --reward_num_nodes 1 --reward_num_gpus_per_node 8 --colocate_all_models \
   --vllm_num_engines 8 --vllm_tensor_parallel_size 1 \
   --pretrain organisation/sft --reward_pretrain organisation/rm \
   --save_path ./final --ckpt_path ./ckpt --save_steps 10 --load_checkpoint \
   --micro_train_batch_size 4 --train_batch_size 128 --micro_rollout_batch_size 8 --rollout_batch_size 1024 \
   --max_samples 100000 --max_epochs 1 --num_episodes 2 --prompt_max_len 1024 --generate_max_len 1536 \
   --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.02 \
   --l2 0.01 --adam_betas 0.9 0.98 --max_norm 0.5 --lr_warmup_ratio 0.05 --value_clip 0.2 --lambd 0.95 \
   --prompt_data data/prompts.jsonl --input_key messages --apply_chat_template --flash_attn --adam_offload \
   --gradient_checkpointing --packing_samples --use_wandb True --wandb_project ppo --freezing_actor_steps 5
"""
_RLOO_ASYNC = r"""
GPUS=4
ARGS=(--rollout_batch_size 128 --n_samples_per_prompt 4 --train_batch_size 256)
python -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node $GPUS --vllm_num_engines 2 \
   --vllm_tensor_parallel_size 1 --async_train --async_queue_size 2 --partial_rollout \
   --advantage_estimator rloo --init_kl_coef 0 --reward_clip_range -5 5 "${ARGS[@]}" --pretrain organisation/model \
   --prompt_data a.jsonl,b.jsonl --input_key prompt --label_key answer --apply_chat_template --prompt_max_len 512 \
   --generate_max_len 512 --use_dynamic_batch --train_max_tokens_per_gpu 8192 --lr_scheduler constant
"""
_SFT_OPENRLHF = r"""
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \
   --data.max_len 4096 \
   --data.dataset organisation/conversations \
   --data.input_key messages \
   --data.multiturn \
   --data.apply_chat_template \
   --train.batch_size 256 \
   --train.micro_batch_size 2 \
   --data.max_samples 500000 \
   --model.model_name_or_path organisation/base \
   --ckpt.output_dir ./checkpoint/sft \
   --ckpt.save_steps -1 \
   --logger.logging_steps 1 \
   --eval.steps -1 \
   --ds.zero_stage 2 \
   --train.max_epochs 1 \
   --ds.attn_implementation flash_attention_2 \
   --adam.lr 5e-6 \
   --ckpt.load_enable \
   --ds.packing_samples \
   --model.gradient_checkpointing_enable
EOF
    # --ds.lora.rank 64

if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
_DPO_OPENRLHF = r"""
deepspeed --module openrlhf.cli.train_dpo \
   --save_path ./dpo --save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 256 \
   --micro_train_batch_size 1 --pretrain organisation/sft --bf16 --max_epochs 1 --max_len 8192 --zero_stage 3 \
   --learning_rate 5e-7 --beta 0.2 --dataset organisation/pairs --apply_chat_template --chosen_key chosen \
   --rejected_key rejected --flash_attn --load_checkpoint --gradient_checkpointing --nll_loss_coef 0.1 \
   --lora_rank 32 --lora_alpha 64
"""
_RM_OPENRLHF = r"""
torchrun --nproc_per_node 8 -m openrlhf.cli.train_rm --ckpt.output_dir ./rm --train.batch_size 256 \
   --train.micro_batch_size 1 --model.model_name_or_path organisation/sft --train.max_epochs 1 --data.max_len 8192 \
   --ds.zero_stage 3 --adam.lr 9e-6 --data.dataset organisation/pairs --data.apply_chat_template \
   --data.chosen_key chosen --data.rejected_key rejected --model.loss_type logexp --model.margin_loss_enable
"""
OPENRLHF = {
    "grpo": _GRPO_OPENRLHF,
    "ppo": _PPO_OPENRLHF,
    "rloo": _RLOO_ASYNC,
    "sft": _SFT_OPENRLHF,
    "dpo": _DPO_OPENRLHF,
    "rm": _RM_OPENRLHF,
}

_SLIME = r"""
#!/bin/bash
pkill -9 sglang
sleep 3
set -ex
export PYTHONUNBUFFERED=1
NUM_GPUS=${{NUM_GPUS:-8}}
SCRIPT_DIR="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
source "${{SCRIPT_DIR}}/models/model.sh"

CKPT_ARGS=(
   --hf-checkpoint /models/model
   #--hf-checkpoint /models/other
   --ref-load /models/model_torch_dist
   --load /out/run/
   --save /out/run/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /data/train.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type dapo
   --num-rollout 3000
   {rollout}
   --rollout-max-response-len 8192
   --rollout-max-prompt-len 2048
)
PERF_ARGS=(
   --tensor-model-parallel-size {tp}
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   {perf}
)
GRPO_ARGS=(
   {algorithm}
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   {optimizer}
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-chunked-prefill-size 4096
)
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)
ray start --head --node-ip-address 127.0.0.1 --num-gpus ${{NUM_GPUS}}
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{{\"env_vars\": {{\"A\": \"/root\"}}}}" \
   -- python3 {program} \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node ${{NUM_GPUS}} \
   {placement} \
   ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} ${{ROLLOUT_ARGS[@]}} ${{OPTIMIZER_ARGS[@]}} ${{GRPO_ARGS[@]}} \
   ${{PERF_ARGS[@]}} ${{SGLANG_ARGS[@]}} ${{MISC_ARGS[@]}}
"""


def _slime(**more: str) -> str:
    parts = {
        "rollout": "--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256",
        "tp": "1",
        "perf": "--use-dynamic-batch-size --max-tokens-per-gpu 9216",
        "algorithm": "--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28",
        "optimizer": "--lr-decay-style constant",
        "program": "train.py",
        "placement": "--colocate",
    }
    return _SLIME.format(**{**parts, **more})


#: the file that slime's scripts source
SLIME_MODEL = """MODEL_ARGS=(
   --swiglu
   --num-layers 36
   --hidden-size 2560
   --normalization "RMSNorm"
   --rotary-base "${ROTARY_BASE:-1000000}"
   --group-query-attention
)
"""
SLIME = {
    "grpo": _slime(
        algorithm="--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl "
        "--entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28",
    ),
    "megatron": _slime(tp="2", algorithm="--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --use-tis"),
    "ppo": _slime(
        algorithm="--advantage-estimator ppo --kl-coef 0.01 --value-clip 0.3 --lambd 0.95 --gamma 1.0 "
        "--num-critic-only-steps 5 --normalize-advantages",
        optimizer="--lr-decay-style cosine --min-lr 1e-7 --lr-warmup-fraction 0.1",
    ),
    "steps": _slime(
        rollout="--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 4 "
        "--over-sampling-batch-size 64 "
        "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        perf="--micro-batch-size 2 --balance-data",
        optimizer="",
    ),
    "async": _slime(
        program="train_async.py", placement="--rollout-num-gpus 4",
        algorithm="--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0 --calculate-per-token-loss",
    ),
    "validation": _slime(
        rollout="--rollout-batch-size 16 --n-samples-per-prompt 4 --eval-interval 10 "
        "--eval-prompt-data aime /data/aime.jsonl --n-samples-per-eval-prompt 16 --eval-top-p 0.7 "
        "--eval-max-response-len 16384 --skip-eval-before-train",
        algorithm="--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages "
        "--use-rollout-routing-replay",
    ),
    "sft": """
python3 train_async.py --hf-checkpoint /models/base --load /out/sft/ --save /out/sft/ --save-interval 1000 \\
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data /data/conversations.parquet \\
   --input-key messages --rollout-shuffle --num-epoch 3 --rollout-batch-size 128 --global-batch-size 128 \\
   --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only \\
   --use-dynamic-batch-size --max-tokens-per-gpu 9216 --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 \\
   --lr-warmup-fraction 0.1 --adam-beta2 0.95
""",
}  # fmt: skip

_SOURCE = """
[[orchestrator.train.source]]
name = "{name}"

[orchestrator.train.source.env.taskset]
id = "{name}"

[orchestrator.train.source.env.agent.harness]
id = "null"

[orchestrator.train.source.env.agent.runtime]
type = "subprocess"
"""
_HEAD = """
max_steps = 20
seq_len = 2048

[model]
name = "organisation/model"
"""
PRIME_RL = {
    "one-environment": f"""{_HEAD}
[deployment]
num_train_gpus = 1
num_infer_gpus = 1

[monitors.wandb]
project = "letters"
name = "letters"

[orchestrator]
batch_size = 128
group_size = 16

[orchestrator.train.sampling]
max_completion_tokens = 128
{_SOURCE.format(name="letters")}
[trainer.optim]
lr = 3e-6

[ckpt]

[inference]
""",
    "several": f"""{_HEAD}
[orchestrator]
batch_size = 64
group_size = 8
max_off_policy_steps = 4
{_SOURCE.format(name="first")}{_SOURCE.format(name="second")}
[orchestrator.eval]
interval = 5
num_examples = 64
group_size = 2

[[orchestrator.eval.source]]
name = "first"

[orchestrator.eval.source.env.taskset]
id = "first"

[inference.vllm]
gpu_memory_utilization = 0.5
tensor_parallel_size = 2

[deployment]
num_train_gpus = 4
num_infer_gpus = 4
""",
    "lora": f"""{_HEAD}
[trainer.model.lora]
rank = 8
alpha = 16.0
target_modules = ["q_proj", "v_proj"]

[trainer.model.ac]
freq = 1

[trainer.scheduler]
type = "cosine"
warmup_steps = 5
min_lr = 1e-7

[orchestrator]
batch_size = 32
group_size = 4
{_SOURCE.format(name="letters")}curriculum = {{ gates = {{ zero = {{ type = "advantage_range" }} }} }}

[orchestrator.renderer]
name = "default"
""".replace('type = "subprocess"\ncurriculum', 'type = "subprocess"\n\n[[orchestrator.train.source]]\nname = "more"\n'
            'env = {taskset = {id = "more"}}\ncurriculum'),
    "nodes": f"""{_HEAD}
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 3

[weight_broadcast]
type = "nccl"

[slurm]
job_name = "letters"

[trainer.model]
attn = "flash_attention_2"
cp = 2
seq_len = 4096

[trainer.optim]
type = "sgd"
lr = 1e-3

[orchestrator]
batch_size = 512
group_size = 8
{_SOURCE.format(name="letters")}
""",
    "older": """
inference_gpu_ids = [0, 1, 2, 3, 4, 5]
trainer_gpu_ids = [6, 7]
max_steps = 200
seq_len = 8192
max_async_level = 2

[wandb]
project = "words"

[model]
name = "organisation/model"

[orchestrator]
batch_size = 1024
rollouts_per_example = 16

[[orchestrator.env]]
id = "organisation/words"

[orchestrator.sampling]
max_tokens = 1024
temperature = 0.8

[inference.parallel]
dp = 6
""",
    "sft": """
max_steps = 100

[ckpt]
interval = 25

[model]
name = "organisation/base"

[data]
name = "organisation/conversations"
splits = ["train"]
seq_len = 4096
batch_size = 32

[optim]
lr = 2e-5

[scheduler]
type = "linear"
warmup_steps = 10
decay_steps = 90
""",
}  # fmt: skip
SCRIPTS = {"openrlhf": OPENRLHF, "slime": SLIME, "prime-rl": PRIME_RL}
