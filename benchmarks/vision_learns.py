"""Does a model learn what only its images tell? A tiny vision-language model names colours, and one that sees the
images of other rows does not.

    python benchmarks/vision_learns.py [--family qwen2_5_vl] [--videos] [--steps 100] [--out DIR]

Both runs are GRPO from random weights with the same settings, on the colour task (hybridrl.data.preprocess.colours).
In the second run, images are those of other rows: it can learn to answer with a letter, and no more. With `--videos`
rows have videos, and the colour of their last frames is asked for: a model that does not tell first from last is right
in half of the rows. It takes a few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet

from hybridrl.data.preprocess.colours import write_colours
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.models.tiny_vision import build_tiny_vision_model
from hybridrl.models.vision_families import FAMILIES

SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "layers": 1, "vision_hidden": 16, "vision_layers": 1}
ACCURACY = "val-core/hybridrl/colours/acc/mean@1"
CHANCE = 0.25


def shuffled(folder: Path, out: Path, column: str) -> Path:
    """The rows of a folder with each other's images or videos."""
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist()
        seen = [row[column] for row in rows]
        random.Random(1).shuffle(seen)
        write_rows(out / f"{split}.parquet", [row | {column: one} for row, one in zip(rows, seen, strict=True)])
    return out


def train(model: Path, data: Path, out: Path, steps: int) -> list[dict[str, float]]:
    """Run GRPO, and return the metrics of each step."""
    settings = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 16,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
        "actor_rollout_ref.actor.optim.lr": 5e-3,
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "test.parquet",
        "data.train_batch_size": 32,
        "data.max_prompt_length": 160,
        "data.max_response_length": 1,
        "trainer.device": "cpu",
        "trainer.threads_per_worker": 1,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps // 4,
        "trainer.save_last": False,
        "trainer.report": False,
        "trainer.logger": "[]",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": out,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    subprocess.run([sys.executable, "-m", "hybridrl.trainer.main_ppo", *words], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", default=FAMILIES[0], choices=FAMILIES, help="kind of model (qwen2_5_vl)")
    parser.add_argument("--videos", action="store_true", help="rows with videos")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (100)")
    parser.add_argument("--out", type=Path, default=Path("outputs/vision_learns"), help="folder of the runs")
    arguments = parser.parse_args()
    column = "videos" if arguments.videos else "images"
    out = arguments.out / arguments.family / column
    model = build_tiny_vision_model(out / "model", family=arguments.family, **SIZES)
    own = write_colours(out / "data", videos=arguments.videos, train_size=512, test_size=64)
    print(f"{column:<10} {'reward, first':>14} {'reward, last 10':>16} {'validation accuracy':>20}", flush=True)
    accuracy = {}
    for name, data in (("own", own), ("others'", shuffled(own, out / "shuffled", column))):
        records = train(model, data, out / name.strip("'"), arguments.steps)
        rewards = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
        accuracy[name] = [record[ACCURACY] for record in records if ACCURACY in record][-1]
        print(f"{name:<10} {rewards[0]:>14.3f} {sum(rewards[-10:]) / 10:>16.3f} {accuracy[name]:>20.3f}", flush=True)
    if accuracy["own"] < 0.9 or accuracy["others'"] > 2 * CHANCE:
        sys.exit(f"the model did not learn from its {column}, or learnt without them")


if __name__ == "__main__":
    main()
