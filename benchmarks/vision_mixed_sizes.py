"""Do sampler and trainer see the same images over many steps? Log-probabilities of both, on images of mixed sizes.

    python benchmarks/vision_mixed_sizes.py [--rollout vllm] [--family qwen3_vl] [--steps 200] [--out DIR]

GRPO from random weights in float32. A prompt has no image, one, two or three, of 8 to 96 pixels per side. Each step
updates the language layers and the vision tower and sends them to the engine, so a stale or misplaced image changes
log-probabilities. The run ends with an error if a probability differs by more than the limit, or if rows get the images
of others (the digest of images is compared in each pass). 200 steps take ten minutes on one core.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
from pathlib import Path

from PIL import Image

from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.models.tiny_vision import build_tiny_vision_model
from hybridrl.models.vision_families import FAMILIES

SIDES = (8, 96)  # pixels
LIMIT = 1e-5
DIFFERENCE = "training/rollout_probs_diff_max"


def write_data(file: Path, rows: int) -> Path:
    """Prompts with up to three images of noise."""
    rng = random.Random(0)

    def image() -> dict[str, bytes]:
        size = (rng.randint(*SIDES), rng.randint(*SIDES))
        written = io.BytesIO()
        Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).save(written, "PNG")
        return {"bytes": written.getvalue()}

    made = []
    for index in range(rows):
        images = [image() for _ in range(index % 4)]
        text = "".join(f"{rng.choice('ABCD')}<image>" for _ in images) + "Which?"
        made.append(
            {
                "data_source": "hybridrl/colours",
                "prompt": [{"role": "user", "content": text}],
                "images": images,
                "reward_model": {"style": "rule", "ground_truth": rng.choice("rgby")},
            }
        )
    rng.shuffle(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_rows(file, made)
    return file


def train(model: Path, data: Path, out: Path, rollout: str, steps: int) -> list[dict[str, float]]:
    """Run GRPO, and return the metrics of each step."""
    settings = {
        "algorithm.adv_estimator": "reinforce_plus_plus",  # learns from rewards that are equal in a group, too
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.rollout.name": rollout,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.entropy_coeff": 0.1,  # changes the weights whatever the rewards are
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "data.train_files": data,
        "data.train_batch_size": 8,
        "data.max_prompt_length": 600,
        "data.max_response_length": 8,
        "trainer.device": "cpu",
        "trainer.threads_per_worker": 1,
        "trainer.total_training_steps": steps,
        "trainer.save_last": False,
        "trainer.report": False,
        "trainer.logger": "[]",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": out,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    if rollout == "vllm":
        words.append("+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32")
    subprocess.run([sys.executable, "-m", "hybridrl.trainer.main_ppo", *words], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollout", default="vllm", help="rollout.name (vllm)")
    parser.add_argument("--family", default="qwen3_vl", choices=FAMILIES, help="kind of model (qwen3_vl)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    parser.add_argument("--out", type=Path, default=Path("outputs/vision_mixed_sizes"), help="folder of the run")
    arguments = parser.parse_args()
    out = arguments.out / f"{arguments.family}-{arguments.rollout}"
    sizes = {"hidden": 64, "heads": 2, "kv_heads": 1, "layers": 2, "vision_hidden": 32, "vision_layers": 2}
    model = build_tiny_vision_model(out / "model", family=arguments.family, **sizes)
    records = train(model, write_data(out / "train.parquet", 256), out / "run", arguments.rollout, arguments.steps)
    found = [record for record in records if DIFFERENCE in record]
    largest, moved = max(record[DIFFERENCE] for record in found), sum(record["actor/grad_norm"] > 0 for record in found)
    k3 = max(record["rollout_corr/k3_kl"] for record in found)
    print(
        f"{arguments.family}, {arguments.rollout}: {len(found)} steps, {moved} of them with an update; largest "
        f"difference of a token's probability {largest:.1e}, k3 {k3:.1e}"
    )
    if largest > LIMIT or moved < len(found):
        sys.exit(f"sampler and trainer differ by more than {LIMIT}, or a step changed nothing")


if __name__ == "__main__":
    main()
