"""Supervised fine-tuning over a worker group: `SupervisedTrainer.fit` is the algorithm."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.config import SFTTrainerConfig
from hybridrl.data import create_sft_loader
from hybridrl.protocol import DataProto
from hybridrl.single_controller import WorkerGroup
from hybridrl.trainer.ppo.batching import spread_over_ranks
from hybridrl.trainer.run import TrainingRun
from hybridrl.trainer.utilization import Utilization
from hybridrl.utils.metrics import merge_metrics, reduce_to_floats
from hybridrl.workers.update_plan import UpdatePlan

MODEL_FOLDER = "model"
MESH = "model"  # the dispatch mesh of `SupervisedWorker`


class SupervisedTrainer:
    """Trains a language model on the assistant's turns of conversations.

    Args:
        config: the whole configuration.
        train_dataset: conversations to train on (`SFTDataset`, or a class with the same items).
        val_dataset: conversations to measure the loss on; None means no validation.
        identity: identifies the model; it is compared when a run is resumed.
    """

    def __init__(
        self,
        config: SFTTrainerConfig,
        *,
        train_dataset: Any,
        val_dataset: Any = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        data, trainer = config.data, config.trainer
        self.train_loader = create_sft_loader(data, train_dataset, data.train_batch_size)
        self.val_loader = None
        if val_dataset is not None:
            size = min(data.train_batch_size, len(val_dataset))
            self.val_loader = create_sft_loader(data, val_dataset, size, train=False)
        epoch = len(self.train_loader)
        total_steps = trainer.total_training_steps or trainer.total_epochs * epoch
        save, test = (epoch if each == "after_each_epoch" else each for each in (trainer.save_freq, trainer.test_freq))
        in_steps = replace(trainer, save_freq=save, test_freq=test)
        self.run = TrainingRun(config, in_steps, total_steps, identity=identity or {})

    def sizes(self) -> str:
        """Say how much data there is and how many steps."""
        val = 0 if self.val_loader is None else len(self.val_loader.dataset)
        return f"{len(self.train_loader.dataset)} conversations, {val} for validation, {self.run.total_steps} steps"

    def init_workers(self, group: WorkerGroup) -> None:
        """Have the started worker processes load the model."""
        self.group = group
        self.group.init_model(self.run.total_steps)
        self.run.groups = [group]
        peak = self.config.trainer.peak_tflops
        self.utilization = Utilization("model", self.config.model, group, "update_model", False, peak)
        self.run.writers = [group] if self.config.checkpoint.async_save else []

    def fit(self) -> None:
        """Train until the last step, or until the user asks to stop. Resumes where an earlier run stopped."""
        with self.run:
            self.restore()
            for batch in self.run.batches(self.train_loader):
                with self.run.measured_step():
                    metrics = self.update(batch)
                    self.train_loader.after_step(batch)  # for a sampler or dataset that learns from it
                self.report(metrics)
                self.validate_if_due()
                self.save_if_due()
            self.save_if_due()  # a stop request may arrive between the last save and the end of the loop

    def report(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        run = self.run
        tokens_per_second = metrics["perf/total_num_tokens"] / run.timing["step"]
        run.report(
            {
                **metrics,
                "training/global_step": run.step,
                "training/epoch": (run.step - 1) // len(self.train_loader),
                **{f"timing_s/{name}": seconds for name, seconds in run.timing.items()},
                "perf/throughput": tokens_per_second / self.group.world_size,
            }
        )

    def update(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step on the whole batch and return its metrics."""
        batch = as_responses(batch)
        dp_size = self.group.dp_size(MESH)
        shards, mini_batches = spread_over_ranks(batch, [np.arange(len(batch))], dp_size)
        skip = self.config.trainer.on_nonfinite == "skip"
        UpdatePlan(mini_batches=mini_batches, dp_size=dp_size, updates=1, skip_nonfinite=skip).attach_to(shards)
        with self.run.phase("update_model"), self.run.failed_batches.keeping(batch, self.run.step):
            updated = self.group.update_model(shards).get()
        of_ranks = updated.meta_info["metrics"]
        self.run.failed_batches.keep_if_skipped(batch, self.run.step, of_ranks)
        merged = merge_metrics({name: metric} for name, found in of_ranks.items() for metric in found)
        return reduce_to_floats(merged) | {
            **self.utilization.measure(
                batch.batch["attention_mask"].sum(-1).tolist(), int(batch.batch["response_mask"].sum())
            ),
            "train/global_tokens": int(batch.batch["response_mask"].sum()),
            "perf/total_num_tokens": int(batch.batch["attention_mask"].sum()),
        }

    def validate_if_due(self) -> None:
        """Compute `val/loss`: the mean negative log-likelihood of the tokens under the validation data's loss mask."""
        run = self.run
        if self.val_loader is None or not run.due(run.trainer.test_freq):
            return
        nll = tokens = 0.0
        with run.phase("testing"):
            for loaded in self.val_loader:
                batch = as_responses(loaded)
                nll += float(self.group.compute_nll(batch).batch["nll"].double().sum())
                tokens += int(batch.batch["response_mask"].sum())
        run.report({"val/loss": nll / tokens, "timing_s/testing": run.timing["testing"]})

    def restore(self) -> None:
        """Resume from the run's newest valid checkpoint, as `trainer.resume_mode` says."""

        def load(folder: Path, state: dict[str, Any]) -> None:
            self.group.load_checkpoint(str(folder / MODEL_FOLDER), self.config.checkpoint.load_contents)
            self.train_loader.load_state_dict(state["train_loader"])

        self.run.restore(load)

    def save_if_due(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""

        def write(folder: Path) -> dict[str, Any]:
            checkpoint, where = self.config.checkpoint, str(folder / MODEL_FOLDER)
            self.group.save_checkpoint(where, checkpoint.save_contents, in_background=checkpoint.async_save)
            return {"train_loader": self.train_loader.state_dict()}

        self.run.save_if_due(write)


def as_responses(batch: DataProto) -> DataProto:
    """Convert conversations to an engine's inputs: every token but the first is a response to the ones before it.

    `loss_mask` [B, S] becomes `response_mask` [B, S - 1]. The first token of a sequence has nothing before it and
    never enters the loss.
    """
    mask = batch.batch["loss_mask"][:, 1:].contiguous()
    kept = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict(tensors={**kept, "response_mask": mask})
