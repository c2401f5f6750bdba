"""SPIN as a dataflow of its own: the policy learns to prefer the data's answers to those of its last iteration.

    python recipes/spin/spin.py --smoke
    python recipes/spin/spin.py --model MODEL --data sft.parquet --out FOLDER [--workers 8] [KEY=VALUE ...]

The rows of the file are conversations, as for main_sft. KEY=VALUE are settings of main_ppo, such as
actor_rollout_ref.actor.optim.lr=5e-7. Each iteration leaves a checkpoint in FOLDER, from which the same command goes
on. recipes/spin/README.md has the formula.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import ray
import torch
from torch.nn.functional import softplus

from hybridrl import DataProto
from hybridrl.config import PPOTrainerConfig, SFTDataConfig, load_config, validate
from hybridrl.data import SFTDataset
from hybridrl.data.preprocess.sort import write_sort_data
from hybridrl.errors import DataError
from hybridrl.models.info import tokenizer_of
from hybridrl.models.tiny import build_tiny_model
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.trajectory import NO_VERSION, Trajectory
from hybridrl.single_controller import make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, init_ray, shutdown_ray
from hybridrl.utils.files import write_text
from hybridrl.utils.metrics import merge_metrics, reduce_to_floats
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.model_worker import micro_batching

CONTENTS = ["model", "optimizer", "extra", "hf_model"]
Row = tuple[list[int], list[int]]  # tokens of a prompt and of its answer


class SPINWorker(ActorRolloutRefWorker):
    """The library's policy worker with one more method: an update with weighted likelihoods."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_with_weights(self, batch: DataProto) -> DataProto:
        """One optimizer step that raises the log-probability of each row by its weight."""
        actor = self.config.actor
        micro = micro_batching(
            actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu
        )
        with self.engine.loaded(optimizer=True):
            metrics = self.engine.train_batch(batch, micro, weighted_likelihood, self.config.rollout.temperature)
        return DataProto(meta_info={"metrics": metrics})


def weighted_likelihood(outputs: dict[str, torch.Tensor], batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    """-sum over rows of weight * log pi(answer): this micro-batch's share."""
    return -(batch.batch["weights"] * outputs["log_probs"].sum(dim=1)).sum(), {}


def spin_weights(margins: torch.Tensor, lam: float) -> torch.Tensor:
    """Weights [2N] of the log-probabilities of real and generated answers in the gradient of mean softplus(-lam m).

    d softplus(-lam m) / d log pi(real) = -lam sigmoid(-lam m) = -d / d log pi(generated), m [N] the margins. A pair
    need not be in one micro-batch, since each row has its weight.
    """
    slope = lam * torch.sigmoid(-lam * margins) / len(margins)
    return torch.stack([slope, -slope], dim=1).flatten()


def play(group: RayWorkerGroup, rows: Sequence[Row], iteration: int, pad: int) -> DataProto:
    """Pairs [2N, ...]: each row's answer, and after it one that the policy gives to the same prompt."""
    width = max(len(prompt) for prompt, _ in rows)
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt, _ in rows])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows])
    names = np.array([str(number) for number in range(len(rows))], dtype=object)
    prompts = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        non_tensors={"uid": names, "sample": np.zeros(len(rows), dtype=object)},
        meta_info={"global_steps": iteration},
    )
    found = group.generate_sequences(prompts).batch
    own = [ids[kept.bool()].tolist() for ids, kept in zip(found["responses"], found["response_mask"], strict=True)]
    trajectories = [
        Trajectory(
            str(number), sample, row[0], answer, [1] * len(answer), [0.0] * len(answer), [(NO_VERSION, len(answer))]
        )
        for number, (row, generated) in enumerate(zip(rows, own, strict=True))
        for sample, answer in enumerate((row[1], generated))
    ]
    return batch_of(trajectories, pad).select(non_tensor_batch_keys=[])


def train(group: RayWorkerGroup, rows: Sequence[Row], iteration: int, pad: int, wanted: argparse.Namespace) -> None:
    """One iteration: generate with the policy, which is then the reference, and learn to tell its answers apart."""
    pairs = play(group, rows, iteration, pad)
    reference = likelihoods(group, pairs)
    order = np.random.default_rng(iteration).permutation(len(rows))
    for start in range(0, len(order) - wanted.batch + 1, wanted.batch):
        chosen = np.stack([2 * order[start : start + wanted.batch], 2 * order[start : start + wanted.batch] + 1], 1)
        part = pairs.select_idxs(chosen.flatten())
        ratios = (likelihoods(group, part) - reference[chosen.flatten()]).view(-1, 2)
        margins = ratios[:, 0] - ratios[:, 1]
        part.batch["weights"] = spin_weights(margins, wanted.lam)
        metrics = group.update_with_weights(part).meta_info["metrics"]
        norm = reduce_to_floats(merge_metrics({n: m} for n, all_ in metrics.items() for m in all_))["grad_norm"]
        loss = softplus(-wanted.lam * margins).mean().item()
        line = {"iteration": iteration, "loss": loss, "margin": margins.mean().item(), "grad_norm": norm}
        with (wanted.out / "metrics.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        print(" ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)


def likelihoods(group: RayWorkerGroup, batch: DataProto) -> torch.Tensor:
    """log pi(answer | prompt) of each row under the current policy, [B]."""
    found: torch.Tensor = group.compute_log_prob(batch.select()).get().batch["old_log_probs"]
    return found.sum(dim=1)


def conversations(wanted: argparse.Namespace, config: PPOTrainerConfig, tokenizer) -> list[Row]:
    """Prompts and last answers that fit, as many as the workers can share evenly."""
    limits, rows = config.data, []
    longest = limits.max_prompt_length + limits.max_response_length
    dataset = SFTDataset(str(wanted.data), tokenizer, SFTDataConfig(max_length=longest, truncation="left"))
    for item in (dataset[number] for number in range(len(dataset))):
        cut = len(item["loss_mask"]) - item["loss_mask"][::-1].index(1)
        start = max([place + 1 for place in range(cut) if not item["loss_mask"][place]], default=0)
        prompt, answer = item["input_ids"][:start], item["input_ids"][start:cut]
        if 0 < len(prompt) <= limits.max_prompt_length and len(answer) <= limits.max_response_length:
            rows.append((prompt, answer))
    if len(rows) < wanted.batch:
        raise DataError(f"{wanted.data}: {len(rows)} conversations fit, fewer than --batch {wanted.batch}; lower it")
    return rows[: len(rows) // wanted.workers * wanted.workers]


def settings(wanted: argparse.Namespace) -> PPOTrainerConfig:
    """Settings of the workers, which are those of main_ppo."""
    return load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={wanted.model}",
            f"data.train_files={wanted.data}",
            "actor_rollout_ref.rollout.name=hf",
            f"trainer.n_gpus_per_node={wanted.workers}",
            "algorithm.adv_estimator=reinforce_plus_plus",  # which takes no part
            *wanted.words,
        ],
    )


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two iterations of a tiny model, on any machine")
    parser.add_argument("--model", help="model directory, or a name on the hub: what supervised fine-tuning wrote")
    parser.add_argument("--data", type=Path, help="file of conversations")
    parser.add_argument("--out", type=Path, default=Path("outputs/recipes/spin"))
    parser.add_argument("--workers", type=int, default=1, help="processes: one per GPU, or any number on a CPU")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="pairs of an update, a multiple of the workers")
    parser.add_argument("--lam", type=float, default=0.1, help="lambda, the regularisation")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    wanted = parser.parse_args(argv)
    if wanted.smoke:
        wanted.model, wanted.iterations, wanted.batch = str(wanted.out / "smoke_model"), 2, 16
        build_tiny_model(wanted.model, hidden=64, heads=2, kv_heads=2)
        wanted.data = write_sort_data(wanted.out / "smoke_data", train_size=64, test_size=16) / "sft_train.parquet"
        size = ["data.max_prompt_length=32", "data.max_response_length=12", "actor_rollout_ref.actor.optim.lr=1e-3"]
        wanted.words = [*size, *wanted.words]
    if not wanted.model or not wanted.data:
        parser.error("give --model and --data, or --smoke")
    if wanted.batch % wanted.workers:
        parser.error(f"--batch {wanted.batch} is not a multiple of --workers {wanted.workers}")
    return wanted


def main(argv: Sequence[str] | None = None) -> None:
    """Play and train until all iterations are done, from the last one that was finished."""
    wanted = arguments_of(argv)
    config = settings(wanted)
    validate(config)
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    rows = conversations(wanted, config, tokenizer)
    wanted.out.mkdir(parents=True, exist_ok=True)
    state = wanted.out / "iterations.json"
    done = json.loads(state.read_text())["done"] if state.exists() else 0
    if done >= wanted.iterations:
        print(f"{done} iterations are done, see {wanted.out}; raise --iterations, or name another --out")
        return
    init_ray({}, {"all": [wanted.workers]})
    pool = RayResourcePool([wanted.workers], use_gpu=torch.cuda.is_available())
    try:
        worker = RayClassWithInitArgs(SPINWorker, config=config.actor_rollout_ref, role="actor_rollout")
        group = RayWorkerGroup(pool, worker)
        group.init_model(wanted.iterations * (len(rows) // wanted.batch))
        if done:
            group.load_checkpoint(str(wanted.out / f"iteration_{done}"), CONTENTS)
        for iteration in range(done + 1, wanted.iterations + 1):
            train(group, rows, iteration, tokenizer.pad_token_id, wanted)
            group.save_checkpoint(str(wanted.out / f"iteration_{iteration}"), CONTENTS)
            write_text(state, json.dumps({"done": iteration}))
    finally:
        shutdown_ray()
        if ray.is_initialized():  # a Ray that was there before goes on; it gets its devices back
            pool.release()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
