#!/usr/bin/env bash
# From nothing to a trained policy and a report, in a few minutes on a laptop's CPU:
#
#   bash scripts/quickstart.sh [--out DIR] [--seed N] [--python PATH] [KEY=VALUE ...]
#
# 1. installs hybridrl into .venv            (scripts/install.sh)
# 2. makes the data: sort five digits        (hybridrl.data.preprocess.sort)
# 3. builds a model of 0.36 M parameters     (hybridrl.models.tiny)
# 4. warms it up on solved examples          (hybridrl.trainer.main_sft)
# 5. trains it with GRPO                     (hybridrl.trainer.main_ppo, which also gets the KEY=VALUE settings)
#
# Everything is written below --out (outputs/quickstart). An earlier run there is kept as grpo.previous. --python names an
# interpreter that already has hybridrl; then nothing is installed.
set -euo pipefail

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; }
fail() { printf '\nquickstart.sh: %s\n' "$*" >&2; exit 1; }

here=$PWD
out=outputs/quickstart
seed=0
python=""
overrides=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --out=* | --seed=* | --python=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --out | --seed | --python)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case "$1" in --out) out=$2 ;; --seed) seed=$2 ;; --python) python=$2 ;; esac
            shift 2
            ;;
        -*) fail "unknown option $1; there are --out DIR, --seed N, --python PATH and settings KEY=VALUE" ;;
        *) overrides+=("$1"); shift ;;
    esac
done
case "$seed" in '' | *[!0-9]*) fail "--seed $seed is not a whole number" ;; esac
cd "$(dirname "$0")/.."
case "$out" in
    outputs/quickstart) out=$PWD/$out ;; # the default is in the checkout, wherever the script was called from
    /*) ;;
    *) out=$here/$out ;;
esac
mkdir -p "$out/logs" || fail "cannot make the folder $out; name another one with --out DIR"

number=0
title() { number=$((number + 1)); printf '\n[%d/5] %s\n' "$number" "$1"; }
quietly() { # quietly LOGFILE COMMAND...: output goes to a log, whose end is shown if the command fails
    local log=$out/logs/$1 started=$SECONDS
    shift
    "$@" >"$log" 2>&1 || {
        tail -n 30 "$log" >&2
        fail "step $number failed; its output ends above, all of it is in $log"
    }
    printf '      done in %d s\n' $((SECONDS - started))
}

if [ -n "$python" ]; then
    title "using $python as it is"
    "$python" -c "import hybridrl" || fail "--python $python has no hybridrl; install it there, or leave --python out"
else
    title "installing (the first time takes a few minutes)"
    bash scripts/install.sh auto || fail "step 1 failed, see above"
    python=${HYBRIDRL_VENV:-.venv}/bin/python
fi

title "making the data: 8,000 training and 256 validation prompts such as 'Sort: 31524'"
quietly data.log "$python" -m hybridrl.data.preprocess.sort --out "$out/data" --seed 0

title "building a random Qwen2 of 0.36 M parameters with a character tokenizer"
quietly model.log "$python" -m hybridrl.models.tiny --out "$out/model" --seed "$seed"

grpo=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.fsdp_config.dtype=float32
    actor_rollout_ref.actor.ppo_mini_batch_size="\${data.train_batch_size}"
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear
    actor_rollout_ref.actor.optim.min_lr_ratio=0.1
    actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.seed="$seed"
    data.train_files="'$out/data/train.parquet'"
    data.val_files="'$out/data/test.parquet'"
    data.train_batch_size=32
    data.max_prompt_length=32
    data.max_response_length=8
    data.seed="$seed"
    trainer.project_name=quickstart
    trainer.experiment_name=grpo
    trainer.default_local_dir="'$out/grpo'"
    trainer.threads_per_worker=1
    trainer.total_training_steps=150
    trainer.test_freq=10
    trainer.save_freq=50
    trainer.max_actor_ckpt_to_keep=1
    ${overrides[@]+"${overrides[@]}"}
)
# A setting that cannot be used is reported now, not after the warm start (whose model does not exist yet).
"$python" -c 'import sys; from hybridrl.config import cli; cli("ppo_trainer", lambda config: None, sys.argv[1:])' \
    actor_rollout_ref.model.path="'$out/model'" "${grpo[@]}" ||
    fail "these settings cannot be used, see above: ${overrides[*]-}"

title "warm start: 60 supervised steps"
rm -rf "$out/warm_start"
quietly warm_start.log "$python" -m hybridrl.trainer.main_sft \
    model.path="'$out/model'" \
    model.enable_gradient_checkpointing=False \
    data.train_files="'$out/data/sft_train.parquet'" \
    data.val_files="'$out/data/sft_val.parquet'" \
    data.max_length=64 \
    data.train_batch_size=128 \
    data.micro_batch_size_per_gpu=128 \
    data.seed="$seed" \
    engine.dtype=float32 \
    optim.lr=3e-3 \
    optim.lr_warmup_steps=20 \
    checkpoint.save_contents=[hf_model] \
    trainer.resume_mode=disable \
    trainer.project_name=quickstart \
    trainer.experiment_name=warm_start \
    trainer.default_local_dir="'$out/warm_start'" \
    trainer.threads_per_worker=1 \
    trainer.total_training_steps=60 \
    trainer.save_freq=60 \
    trainer.test_freq=60
tail -n 200 "$out/logs/warm_start.log" | grep validation | tail -n 1 | sed 's/^/      /' || true

title "GRPO: 150 steps of 32 prompts with 8 samples each"
if [ -d "$out/grpo" ]; then
    rm -rf "$out/grpo.previous"
    mv "$out/grpo" "$out/grpo.previous"
fi
"$python" -m hybridrl.trainer.main_ppo \
    actor_rollout_ref.model.path="'$out/warm_start/global_step_60/model/hf_model'" "${grpo[@]}" ||
    fail "step 5 failed, see above; the run's folder is $out/grpo"

printf '\nReport:  %s\n' "$out/grpo/report.html"
printf 'Metrics: %s\n' "$out/grpo/metrics.jsonl"
model=$(ls -d "$out"/grpo/global_step_*/actor/hf_model 2>/dev/null | sort -V | tail -n 1 || true)
[ -z "$model" ] || printf 'Model:   %s\n' "$model"
