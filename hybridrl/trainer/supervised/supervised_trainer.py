"""Supervised training over a worker group: `SupervisedTrainer.fit` is the algorithm.

One loop trains on conversations (SFT), on pairs of answers (DPO and its kin), on labelled answers (KTO) and reward
models. What differs is the
objective (`hybridrl.workers.objectives`), the loader, and whether rows are compared with a reference.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.config import LabelledDataConfig, PairsDataConfig, SFTDataConfig, SupervisedConfig, as_dict
from hybridrl.data import create_labelled_loader, create_pair_loader, create_sft_loader
from hybridrl.data.loader import PaddedLoader
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.single_controller import WorkerGroup
from hybridrl.trainer.interrupt import StepAbandoned
from hybridrl.trainer.memory_peaks import ExpectedMemory, PhasePeaks, as_metrics
from hybridrl.trainer.ppo.batching import sequence_work, spread_over_ranks
from hybridrl.trainer.run import TrainingRun
from hybridrl.trainer.run_profiler import ProfiledRole, StepProfiler
from hybridrl.trainer.supervised.objective_rows import Totals, as_responses, as_scored, mismatched, normalise
from hybridrl.trainer.supervised.reference import CachedReference, Reference
from hybridrl.trainer.utilization import Utilization
from hybridrl.utils.metrics import Metric, merge_metrics, reduce_to_floats
from hybridrl.workers.objectives import ANSWER_LOG_PROBS, KL_BASELINE, REF_LOG_PROBS, Objective
from hybridrl.workers.update_plan import UpdatePlan

MODEL_FOLDER = "model"
MESH = "model"  # the dispatch mesh of `SupervisedWorker`
#: the phase of each of its methods that computes
_PHASES = {
    "update": "update_model",
    "compute_reference": "reference",
    "compute_answers": "kl_baseline",
    "evaluate": "testing",
}
_ROWS = {"tokens": "conversations", "labels": "labelled answers"}


class SupervisedTrainer:
    """Trains a language model on conversations, pairs or labelled answers, or a reward model on pairs.

    Args:
        config: the whole configuration.
        train_dataset: the rows to train on (`SFTDataset`, `PreferenceDataset`, `LabelledDataset`, or a class with the
            same items).
        val_dataset: those to measure the objective on; None means no validation.
        identity: identifies the model; it is compared when a run is resumed.

    Raises:
        DataError: the validation data have too few rows for the objective.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        *,
        train_dataset: Any,
        val_dataset: Any = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.identity = identity or {}
        self._work = sequence_work(config.model)
        self.objective = Objective(config.objective.loss_type, config.objective)
        data, trainer = config.data, config.trainer
        self.train_loader = self._loader(train_dataset, data.train_batch_size)
        self.val_loader = None
        if val_dataset is not None and len(val_dataset) < 2 and self.objective.metadata.kl_baseline:
            raise DataError(
                f"data.val_files has one row: {config.objective_group}.loss_type={self.objective.name} compares "
                "prompts with answers of other rows; give two or more"
            )
        if val_dataset is not None:
            self.val_loader = self._loader(val_dataset, min(data.train_batch_size, len(val_dataset)), train=False)
        self._val_totals: Totals | None = None
        epoch = len(self.train_loader)
        total_steps = trainer.total_training_steps or trainer.total_epochs * epoch
        save, test = (epoch if each == "after_each_epoch" else each for each in (trainer.save_freq, trainer.test_freq))
        in_steps = replace(trainer, save_freq=save, test_freq=test)
        self.run = TrainingRun(
            config,
            in_steps,
            total_steps,
            identity=self.identity,
            groups=lambda: [self.group],
            writers=lambda: [self.group] if config.checkpoint.async_save else [],
        )

    def _loader(self, dataset: Any, batch_size: int, train: bool = True) -> PaddedLoader:
        data = self.config.data
        if isinstance(data, PairsDataConfig):
            return create_pair_loader(data, dataset, batch_size, train=train)
        if isinstance(data, LabelledDataConfig):
            return create_labelled_loader(data, dataset, batch_size, train=train)
        assert isinstance(data, SFTDataConfig)
        return create_sft_loader(data, dataset, batch_size, train=train)

    def sizes(self) -> str:
        """Say how much data there is and how many steps."""
        val = 0 if self.val_loader is None else len(self.val_loader.dataset)
        rows = _ROWS.get(self.objective.metadata.kind, "pairs")
        return f"{len(self.train_loader.dataset)} {rows}, {val} for validation, {self.run.total_steps} steps"

    def init_workers(self, group: WorkerGroup, forecast: ExpectedMemory | None = None) -> None:
        """Have the started worker processes load the model, and a second copy of it if it is the reference.

        Args:
            forecast: the memory that the run is expected to take.
        """
        self.group = group
        self.peaks = PhasePeaks([(group, _PHASES)], forecast)
        source = self.config.reference
        self.group.init_model(self.run.total_steps, reference=source == "model", overrides=self._overrides())
        self.profiler = StepProfiler(
            self.config.global_profiler, [ProfiledRole("model", "profiler", self.config.profiler, group)]
        )
        peak = self.config.trainer.peak_tflops
        is_value = self.objective.output == "values"
        self.utilization = Utilization("model", self.config.model, group, "update_model", is_value, peak)
        self.reference: Reference | None = None
        if source == "cache":
            self.reference = CachedReference(
                group.compute_reference, self.run.folder, self._made_of(), self.objective.rows_together
            )
        elif source is not None:
            self.reference = Reference(group.compute_reference)

    def _overrides(self) -> dict[str, Any]:
        """Entries of the configuration of a reward model: transformers finds the last token by the pad token."""
        if self.objective.output != "values":
            return {}
        return {"pad_token_id": self.train_loader.dataset.pad_token_id}  # type: ignore[attr-defined]

    def _made_of(self) -> dict[str, Any]:
        """Return the settings that the reference's log-probabilities depend on, other than the data."""
        config = self.config
        return {"identity": self.identity, "model": as_dict(config.model), "dtype": config.engine.dtype}

    def fit(self) -> None:
        """Train until the last step, or until the user asks to stop. Resumes where an earlier run stopped."""
        with self.run:
            self.prepare_reference()
            self.restore()
            for batch in self.run.batches(self.train_loader):
                with self.run.measured_step(), self.profiler.step(self.run.step):
                    metrics = self.update(batch)
                    metrics |= self.train_loader.after_step(batch)  # for a sampler or dataset that learns from it
                self.report(metrics)
                with suppress(StepAbandoned), self.run.abandonable():
                    self.validate_if_due()
                self.save_if_due()
            self.save_if_due()  # a stop request may arrive between the last save and the end of the loop

    def prepare_reference(self) -> None:
        """Compute the log-probabilities of the reference while the model is that; only if they are kept."""
        if not isinstance(self.reference, CachedReference):
            return
        loaders = {"train": self.train_loader, "val": self.val_loader}

        def batches(loader: PaddedLoader) -> Iterable[tuple[DataProto, list[int]]]:
            for batch in self._loader(loader.dataset, min(loader.batch_size, len(loader.dataset)), train=False):
                yield self.rows_of(batch), _numbers(batch)

        self.reference.prepare(
            {
                part: (loader.dataset, lambda loader=loader: batches(loader))  # type: ignore[misc]
                for part, loader in loaders.items()
                if loader is not None
            }
        )

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
                **as_metrics(self.peaks.measure()),
            }
        )

    def rows_of(self, batch: DataProto) -> DataProto:
        """A loader's batch as the engine reads it."""
        if self.objective.output == "values":
            return as_scored(batch, self.train_loader.dataset.pad_token_id)  # type: ignore[attr-defined]
        return as_responses(batch, pairs=self.objective.rows_together == 2)

    def update(self, loaded: DataProto) -> dict[str, float]:
        """Take one optimizer step on the whole batch and return its metrics."""
        batch = self.rows_of(loaded)
        totals = Totals.of(batch)
        self._add_reference(normalise(batch, totals), loaded, "train")
        if self.objective.metadata.kl_baseline:
            with self.run.phase("kl_baseline"):
                _add_baseline(batch, self.kl_baseline([loaded]))
        with self.run.phase("update_model"), self.run.failed_batches.keeping(batch, self.run.step):
            updated = self.group.update_model(self._arranged(batch, totals)).get()
        of_ranks = updated.meta_info["metrics"]
        self.run.failed_batches.keep_if_skipped(batch, self.run.step, of_ranks)
        tokens = int(batch.batch["attention_mask"].sum())
        return _measured(_merged(of_ranks)) | {
            **self.utilization.measure(batch.batch["attention_mask"].sum(-1).tolist(), totals.tokens),
            "train/global_tokens": totals.tokens,
            "perf/total_num_tokens": tokens,
        }

    def _add_reference(self, batch: DataProto, loaded: DataProto, part: str) -> None:
        if self.reference is not None:
            with self.run.phase("reference"):
                self.reference.add_to(batch, part, _numbers(loaded))

    def kl_baseline(self, batches: Iterable[DataProto]) -> float:
        """z0 = max(0, mean of log pi(y' | x) - log pi_ref(y' | x)), of the model as it is.

        The mean is over the rows of `mismatched`. It is computed over all rows of a step at once, so it does not depend
        on micro-batches or on ranks.

        Args:
            batches: the loader's batches.

        Raises:
            DataError: no two rows have an answer.
        """
        assert self.reference is not None  # `register_objective`
        dataset: Any = self.train_loader.dataset
        ratios = []
        for loaded in batches:
            rows = mismatched(loaded, self.config.data.max_length, dataset.pad_token_id)
            if rows is not None:
                now = self.group.compute_answers(rows).batch[ANSWER_LOG_PROBS]
                ratios.append(now - self.reference.compute(rows).batch[REF_LOG_PROBS])
        if not ratios:
            raise DataError("no two rows of a step have an answer (loss_mask), so there is no KL to estimate")
        return max(0.0, float(torch.cat(ratios).double().mean()))

    def _arranged(self, batch: DataProto, totals: Totals) -> DataProto:
        """The batch arranged for the ranks, with a plan of one mini-batch that is normalised by the totals."""
        dp_size, together = self.group.dp_size(MESH), self.objective.rows_together
        shards, (planned,) = spread_over_ranks(
            batch, [np.arange(len(batch))], dp_size, rows_together=together, work=self._work
        )
        mini_batch = replace(planned, tokens=totals.tokens, sequences=totals.sequences)
        skip = self.config.trainer.on_nonfinite == "skip"
        return UpdatePlan(mini_batches=(mini_batch,), dp_size=dp_size, updates=1, skip_nonfinite=skip).attach_to(shards)

    def validate_if_due(self) -> None:
        """Measure the objective on the validation data: `val/loss`, and what else it measures in training."""
        run = self.run
        if self.val_loader is None or not run.due(run.trainer.test_freq):
            return
        if self._val_totals is None:
            self._val_totals = sum((Totals.of(self.rows_of(batch)) for batch in self.val_loader), Totals())
        results = []
        with run.phase("testing"):
            baseline = self.kl_baseline(self.val_loader) if self.objective.metadata.kl_baseline else None
            for loaded in self.val_loader:
                batch = normalise(self.rows_of(loaded), self._val_totals)
                self._add_reference(batch, loaded, "val")
                if baseline is not None:
                    _add_baseline(batch, baseline)
                results.append(
                    _merged(self.group.evaluate(self._arranged(batch, self._val_totals)).meta_info["metrics"])
                )
        peaks = self.peaks.measure().values()  # the reference computes within this phase, too
        metrics = {"timing_s/testing": run.timing["testing"], **as_metrics({"testing": max(peaks)} if peaks else {})}
        run.report({**_measured(merge_metrics(results)), **metrics})

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


def _numbers(batch: DataProto) -> list[int]:
    """For each row of a loader's batch the number of its row in the data."""
    return [int(number) for number in batch.non_tensor_batch["index"]]


def _add_baseline(batch: DataProto, baseline: float) -> None:
    batch.batch[KL_BASELINE] = torch.full((len(batch),), baseline, dtype=torch.float32)


def _measured(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics as numbers, without means over no rows, and the margin between the labels where both have rows."""
    numbers = reduce_to_floats({name: each for name, each in metrics.items() if each.kind != "mean" or each.weight})
    for name in [name for name in numbers if name.endswith("/desirable_reward")]:
        phase = name.removesuffix("desirable_reward")
        if (undesirable := numbers.get(f"{phase}undesirable_reward")) is not None:
            numbers[f"{phase}margin"] = numbers[name] - undesirable
    return numbers


def _merged(of_ranks: Mapping[str, Iterable[Metric]]) -> dict[str, Metric]:
    return merge_metrics({name: metric} for name, metrics in of_ranks.items() for metric in metrics)
