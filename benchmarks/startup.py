"""Seconds from the command to the first training step, compared with what any program on Ray and transformers waits
for.

    python benchmarks/startup.py [--rounds 3]

The peer is a Python process that calls `ray.init` and waits for one actor that imports torch and transformers. Ours
is `python -m hybridrl.trainer.main_ppo` with the sorting task (8,000 prompts are read and measured, a model is
loaded), until its first training step begins. Rounds alternate; the last line is the ratio of the medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEER = """
import ray

@ray.remote
class Actor:
    def ready(self):
        import torch, transformers
        from transformers import AutoModelForCausalLM
        return True

ray.init(include_dashboard=False, log_to_driver=False)
ray.get(Actor.remote().ready.remote())
print("ready", flush=True)
"""


def until_ready(command: list[str]) -> float:
    """Seconds until the process prints "ready"; it is ended after that."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "ready":
                seconds = time.perf_counter() - begin
                process.wait()
                return seconds
    raise SystemExit(f"the peer ended with {process.returncode} before it was ready")


def until_first_step(folder: Path, round_number: int) -> float:
    """Seconds until the first step of a training run begins."""
    run = folder / f"run{round_number}"
    command = [
        sys.executable,
        "-m",
        "hybridrl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        f"data.train_files={folder / 'data' / 'train.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=1",
        "trainer.report=False",
    ]
    begin = time.perf_counter()
    log = folder / f"run{round_number}.log"
    with open(log, "w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().endswith("\n")):
            if process.poll() is not None and not metrics.exists():
                raise SystemExit(f"main_ppo ended with {process.returncode}:\n{log.read_text()[-3000:]}")
            time.sleep(0.01)
        seconds = time.perf_counter() - begin
        process.wait()
    first = json.loads(metrics.read_text().splitlines()[0])
    return seconds - first["timing_s/step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from hybridrl.data.preprocess.sort import write_sort_data
    from hybridrl.models.tiny import build_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_model(folder / "model")
        write_sort_data(folder / "data")
        peer, ours = [], []
        for number in range(arguments.rounds):
            peer.append(until_ready([sys.executable, "-c", PEER]))
            ours.append(until_first_step(folder, number))
            print(
                f"round {number}: ray.init and an actor {peer[-1]:.1f} s, first training step {ours[-1]:.1f} s",
                flush=True,
            )
    print(f"main_ppo / peer = {statistics.median(ours) / statistics.median(peer):.2f}")


if __name__ == "__main__":
    main()
