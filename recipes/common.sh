#!/usr/bin/env bash
# Data, model and size of a run, shared by the recipes. Called by recipes/NAME/run.sh.
#
#   bash recipes/common.sh NAME [--smoke] [KEY=VALUE ...]
#
# HYBRIDRL_PYTHON sets the interpreter, MODEL the model, TEACHER that of a recipe with a teacher, and OUT the output folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

if [ -n "$smoke" ]; then
    model=$out/smoke_model
    data=$out/smoke_data
    if [ "$name" = grpo_vlm ]; then
        model=$out/smoke_vision_model
        data=$out/smoke_vision_data
        [ -f "$model/config.json" ] || "$python" -m hybridrl.models.tiny_vision --out "$model"
        [ -f "$data/train.parquet" ] || "$python" -m hybridrl.data.preprocess.colours --out "$data" --train-size 64 --test-size 16
    fi
    [ -f "$model/config.json" ] || "$python" -m hybridrl.models.tiny --out "$model" --hidden 64 --heads 2 --kv-heads 2
    [ -f "$data/train.parquet" ] || "$python" -m hybridrl.data.preprocess.sort --out "$data" --train-size 64 --test-size 16
    size=(
        reward.custom_reward_function.path="$root/recipes/smoke_reward.py"
        data.train_batch_size=8
        data.max_prompt_length=32
        data.max_response_length=8
        actor_rollout_ref.rollout.n=4
        actor_rollout_ref.actor.optim.lr=1e-3
        trainer.total_training_steps=2
        trainer.experiment_name="smoke_$name"
        trainer.default_local_dir="$out/smoke_$name"
        trainer.resume_mode=disable
        trainer.test_freq=2
    )
    teacher=$out/smoke_teacher
    [ "$name" != distillation ] || [ -f "$teacher/config.json" ] ||
        "$python" -m hybridrl.models.tiny --out "$teacher" --hidden 64 --heads 2 --kv-heads 2 --seed 1
    [ "$name" != grpo_vlm ] || size+=(data.max_prompt_length=80)
    case "$name" in retool | search_r1) size+=(data.max_prompt_length=1024 data.max_response_length=64) ;; esac
    serve() { # PROGRAM ARGUMENT: starts a server of examples/, whose first line of output begins with its address
        "$python" "examples/$1" "$2" --port 0 >"$out/$1.txt" &
        server=$!
        trap 'kill "$server" 2>/dev/null || true' EXIT
        for _ in $(seq 300); do
            read -r address _ <"$out/$1.txt" && break
            kill -0 "$server" || fail "examples/$1 has ended"
            sleep 0.1
        done
    }
    if [ "$name" = search_r1 ]; then
        data=$out/smoke_questions
        [ -f "$data/train.parquet" ] ||
            "$python" -m hybridrl.data.preprocess.search_r1 --local_dir recipes/search_r1/smoke --out "$data"
        serve retrieval_server.py recipes/search_r1/smoke/corpus.jsonl
        export RETRIEVAL_URL=$address
    fi
    if [ "$name" = collabllm ]; then
        data=$out/smoke_conversations
        [ -f "$data/train.parquet" ] ||
            "$python" -m hybridrl.data.preprocess.collab --local_dir recipes/collabllm/smoke --out "$data"
        serve scripted_chat_server.py recipes/collabllm/smoke/script.jsonl
        export USER_URL=$address
        size+=(reward.custom_reward_function.path=null data.max_prompt_length=512 data.max_response_length=96)
    fi
    [ "$name" != dapo ] || size+=(reward.reward_kwargs.overlong_buffer_cfg.len=2)
else
    model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
    teacher=${TEACHER:-Qwen/Qwen2.5-1.5B-Instruct}
    task=gsm8k
    if [ "$name" = grpo_vlm ]; then
        model=${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}
        task=geo3k
    fi
    case "$name" in
        retool) model=${MODEL:-Qwen/Qwen2.5-7B-Instruct} task=math ;;
        search_r1) model=${MODEL:-Qwen/Qwen2.5-7B-Instruct} task=search_r1 ;;
        collabllm)
            model=${MODEL:-Qwen/Qwen2.5-7B-Instruct} task=collab
            [ -n "${USER_URL:-}" ] || fail "USER_URL is not set; recipes/collabllm/README.md says what it is"
            ;;
    esac
    data=$out/$task
    [ -f "$data/train.parquet" ] || "$python" -m "hybridrl.data.preprocess.$task" --out "$data"
    gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
    [ "$gpus" -gt 0 ] || fail "no GPU on this machine; recipes/$name/run.sh --smoke runs on any"
    size=(
        data.train_batch_size=128
        data.max_prompt_length=512
        data.max_response_length=1024
        data.filter_overlong_prompts=True
        actor_rollout_ref.actor.use_dynamic_bsz=True
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
        actor_rollout_ref.actor.optim.lr=1e-6
        trainer.n_gpus_per_node="$gpus"
        trainer.total_epochs=2
        trainer.test_freq=10
        trainer.save_freq=50
        trainer.max_actor_ckpt_to_keep=1
        trainer.experiment_name="$name"
        trainer.default_local_dir="$out/$name"
    )
    [ "$name" != grpo_vlm ] || size+=(data.max_prompt_length=1024 data.mm_processor_kwargs.max_pixels=262144)
    case "$name" in retool) size+=(data.max_prompt_length=1024 data.max_response_length=8192) ;;
        search_r1 | collabllm) size+=(data.max_prompt_length=1024 data.max_response_length=4096) ;;
    esac
    [ "$name" != grpo_lora ] || size+=(actor_rollout_ref.actor.optim.lr=1e-5)
    [ ! -f "recipes/$name/reward.py" ] || size+=(reward.custom_reward_function.path="$root/recipes/$name/reward.py")
fi
[ "$name" != distillation ] || size+=(distillation.teacher_models.teacher.model_path="$teacher")
mini_batches=4 # updates of a batch, except where the recipe is on-policy
case "$name" in
    opo | gpg) ;;
    *)
        for word in "${size[@]}"; do
            case "$word" in
                data.train_batch_size=*)
                    size+=(actor_rollout_ref.actor.ppo_mini_batch_size=$((${word#*=} / mini_batches)))
                    ;;
            esac
        done
        ;;
esac
run=(
    "$python" -m hybridrl.trainer.main_ppo -cp "recipes/$name" -cn "$name"
    actor_rollout_ref.model.path="$model"
    data.train_files="$data/train.parquet"
    data.val_files="$data/test.parquet"
    trainer.project_name=recipes
    "${size[@]}" ${words[@]+"${words[@]}"}
)
[ -n "${server:-}" ] || exec "${run[@]}"
"${run[@]}" # this shell ends the server afterwards
