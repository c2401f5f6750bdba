#!/usr/bin/env bash
# Data, model and size of a run on pairs of answers, shared by recipes/dpo, recipes/kto and recipes/rm.
#
#   bash recipes/pairs.sh NAME [--smoke] [KEY=VALUE ...]
#
# HYBRIDRL_PYTHON sets the interpreter, MODEL the model, DATA the training data, and OUT the output folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

if [ -n "$smoke" ]; then
    model=$out/smoke_model
    data=$out/smoke_data
    [ -f "$model/config.json" ] || "$python" -m hybridrl.models.tiny --out "$model" --hidden 64 --heads 2 --kv-heads 2
    [ -f "$data/pairs_train.parquet" ] || "$python" -m hybridrl.data.preprocess.sort --out "$data" --train-size 64 --test-size 16
    size=(
        data.train_files="$data/pairs_train.parquet"
        data.val_files="$data/pairs_val.parquet"
        data.train_batch_size=32
        data.micro_batch_size_per_gpu=32
        engine.dtype=float32
        optim.lr=3e-3
        trainer.total_training_steps=8
        trainer.test_freq=4
        trainer.experiment_name="smoke_$name"
        trainer.default_local_dir="$out/smoke_$name"
        trainer.resume_mode=disable
    )
else
    model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
    gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
    [ "$gpus" -gt 0 ] || fail "no GPU on this machine; recipes/$name/run.sh --smoke runs on any"
    size=(
        data.train_files="${DATA:-trl-lib/ultrafeedback_binarized:train}"
        data.val_files="${VAL_DATA:-trl-lib/ultrafeedback_binarized:test}"
        data.val_max_samples=512
        data.train_batch_size=128
        data.max_length=1024
        data.use_dynamic_bsz=True
        data.max_token_len_per_gpu=16384
        trainer.n_gpus_per_node="$gpus"
        trainer.total_epochs=1
        trainer.test_freq=50
        trainer.save_freq=100
        trainer.max_actor_ckpt_to_keep=1
        trainer.experiment_name="$name"
        trainer.default_local_dir="$out/$name"
    )
fi
exec "$python" -m "hybridrl.trainer.main_$name" -cp "recipes/$name" -cn "$name" \
    model.path="$model" \
    trainer.project_name=recipes \
    "${size[@]}" ${words[@]+"${words[@]}"}
