"""GRPO as a dataflow of your own: one worker class, one worker group, and the algorithm as plain Python.

    python examples/grpo_on_workers.py --model MODEL --data train.parquet [--workers 2] [--steps 20]

The controller below never handles ranks. It calls methods of a group; the `register` line of each method defines how
a batch is split over the ranks and how the results are combined. `hybridrl.trainer.ppo` does the same with
everything else that a long run needs (checkpoints, validation, a critic). Start from this file if your algorithm has
a different structure.
"""

import argparse
from types import SimpleNamespace

import numpy as np
import torch

from hybridrl import DataProto
from hybridrl.algorithms import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from hybridrl.config import ActorRolloutRefConfig, load_config
from hybridrl.data import create_rl_dataset, create_train_loader
from hybridrl.models.info import tokenizer_of
from hybridrl.reward import default_compute_score
from hybridrl.single_controller import make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    init_ray,
    shutdown_ray,
)
from hybridrl.utils.metrics import Metric, merge_metrics, reduce_to_floats
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.model_worker import micro_batching

OVER_RANKS = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class GRPOWorker(ActorRolloutRefWorker):
    """The library's policy worker with one more method: an update with a loss written here."""

    @register(dispatch_mode=OVER_RANKS)
    def update_with_grpo(self, batch: DataProto) -> DataProto:
        """One optimizer step: each rank gets its rows, and the engine sums the gradients of all ranks."""
        actor = self.config.actor
        micro = micro_batching(
            actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu
        )
        with self.engine.loaded(optimizer=True):
            metrics = self.engine.train_batch(batch, micro, grpo_loss, temperature=self.config.rollout.temperature)
        return DataProto(meta_info={"metrics": metrics})


def grpo_loss(outputs: dict[str, torch.Tensor], batch: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The share of one micro-batch, normalised by the tokens of the whole batch, so that shares add up."""
    tokens = batch.meta_info["tokens"]
    settings = SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        global_batch_info={"dp_size": 1, "batch_num_tokens": tokens},
    )
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob=outputs["log_probs"].detach(),  # one update per batch: the policy is still the one that sampled
        log_prob=outputs["log_probs"],
        advantages=batch.batch["advantages"],
        response_mask=batch.batch["response_mask"],
        loss_agg_mode="token-mean",
        config=settings,
    )
    return loss, {"loss": Metric(loss.detach(), kind="sum"), **metrics}


def score(batch: DataProto, tokenizer) -> torch.Tensor:
    """The rule-based reward of each response, on its last token, [B, T]."""
    mask = batch.batch["response_mask"]
    rewards = torch.zeros(mask.shape)
    for row in range(len(batch)):
        length = int(mask[row].sum())
        text = tokenizer.decode(batch.batch["responses"][row, :length], skip_special_tokens=True)
        truth = batch.non_tensor_batch["reward_model"][row]["ground_truth"]
        rewards[row, length - 1] = default_compute_score(batch.non_tensor_batch["data_source"][row], text, truth)
    return rewards


def train(group: RayWorkerGroup, loader, tokenizer, samples: int, steps: int) -> list[float]:
    """The algorithm. Returns the mean reward of each step."""
    rewards_by_step = []
    while True:
        for prompts in loader:
            step = len(rewards_by_step)
            batch = prompts.repeat(samples, interleave=True)
            batch.non_tensor_batch["sample"] = np.tile(np.arange(samples), len(prompts)).astype(object)
            batch.meta_info = {"global_steps": step}
            sampled = group.generate_sequences(batch)
            sampled.non_tensor_batch = batch.non_tensor_batch
            rewards = score(sampled, tokenizer)
            advantages, _ = compute_grpo_outcome_advantage(
                rewards, sampled.batch["response_mask"], index=sampled.non_tensor_batch["uid"]
            )
            update = sampled.select(non_tensor_batch_keys=[])
            update.batch["advantages"] = advantages
            update.meta_info["tokens"] = int(sampled.batch["response_mask"].sum())
            found = group.update_with_grpo(update).meta_info["metrics"]
            metrics = reduce_to_floats(merge_metrics({name: m} for name, parts in found.items() for m in parts))
            rewards_by_step.append(rewards.sum(dim=1).mean().item())
            print(f"step {step:3d}  reward {rewards_by_step[-1]:.3f}  grad_norm {metrics['grad_norm']:.3f}", flush=True)
            if len(rewards_by_step) == steps:
                return rewards_by_step


def settings(arguments: argparse.Namespace) -> ActorRolloutRefConfig:
    """The configuration of `main_ppo`; every key of `actor_rollout_ref` and `data` works here too."""
    return load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={arguments.model}",
            f"data.train_files={arguments.data}",
            f"data.train_batch_size={arguments.prompts}",
            f"data.max_response_length={arguments.response_length}",
            f"actor_rollout_ref.actor.optim.lr={arguments.lr}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        ],
    )


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model directory, or a name on the hub")
    parser.add_argument("--data", required=True, help="parquet file with prompts")
    parser.add_argument("--workers", type=int, default=1, help="processes: one per GPU, or any number on a CPU")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--response-length", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args(argv)
    config = settings(arguments)
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    loader = create_train_loader(config.data, create_rl_dataset(config.data.train_files, config.data, tokenizer))
    init_ray({}, {"all": [arguments.workers]})
    try:
        group = RayWorkerGroup(
            RayResourcePool([arguments.workers], use_gpu=torch.cuda.is_available()),
            RayClassWithInitArgs(GRPOWorker, config=config.actor_rollout_ref, role="actor_rollout"),
        )
        group.init_model(arguments.steps)
        return train(group, loader, tokenizer, arguments.samples, arguments.steps)
    finally:
        shutdown_ray()


if __name__ == "__main__":
    main()
