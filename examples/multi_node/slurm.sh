#!/usr/bin/env bash
# sbatch --nodes=2 examples/multi_node/slurm.sh SETTINGS...
#
# The folder of the repository, its environment, the model, the data and the run's folder are on a shared file system.
# The run's folder is named by the job, whose number stays the same when Slurm requeues it: the run resumes there, and
# another job has a folder of its own. To continue a run in a new job, set trainer.default_local_dir to its folder.
#SBATCH --job-name=hybridrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

RAY_AUTH_TOKEN=$(openssl rand -hex 32)
export RAY_AUTH_TOKEN # srun passes it on
head=$(hostname)      # the script itself runs on the first node
run=(python -m hybridrl.trainer.main_ppo
    "trainer.nnodes=$SLURM_NNODES" "trainer.n_gpus_per_node=$SLURM_GPUS_ON_NODE"
    "trainer.default_local_dir=$SLURM_SUBMIT_DIR/checkpoints/$SLURM_JOB_ID" "$@")

if [ "$SLURM_NNODES" -gt 1 ]; then
    others=$((SLURM_NNODES - 1))
    srun --nodes="$others" --ntasks="$others" --exclude="$head" \
        bash examples/multi_node/node.sh 1 "$SLURM_NNODES" "$head" "${run[@]}" &
fi
bash examples/multi_node/node.sh 0 "$SLURM_NNODES" "$head" "${run[@]}" &
first=$!
trap 'kill -TERM "$first"' TERM # Slurm sends it 600 s before the time limit: the run saves a checkpoint and ends with 75
status=0
while :; do
    wait "$first" && status=0 || status=$?
    kill -0 "$first" 2>/dev/null || break
done
if [ "$status" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
