"""PPO and its relatives as one controller program: `RayPPOTrainer.fit` is the algorithm.

`Sampler` produces scored batches and `Learner` learns from them. `fit` alternates between the two, and handles metrics,
validation and checkpoints. A new algorithm registers a function (`register_adv_est`, `register_policy_loss`), or
replaces a phase in a subclass of `Sampler` or `Learner` (`sampler_class`, `learner_class`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hybridrl.config import PPOTrainerConfig
from hybridrl.data import create_train_loader, create_val_loader
from hybridrl.notify import notify
from hybridrl.observe.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    staleness_metrics,
)
from hybridrl.reward import RewardManager
from hybridrl.rollout.start import start_rollout
from hybridrl.single_controller import RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.ppo.health_checks import HealthMonitor
from hybridrl.trainer.ppo.learner import Learner, StepResult
from hybridrl.trainer.ppo.memory import MemoryReport, memory_advice
from hybridrl.trainer.ppo.needs import total_training_steps
from hybridrl.trainer.ppo.prompt_pool import PromptPool
from hybridrl.trainer.ppo.roles import POLICY, ROLLOUT, phases_per_token, spawn_worker_groups
from hybridrl.trainer.ppo.sampler import Sampled, Sampler
from hybridrl.trainer.ppo.samples import Samples
from hybridrl.trainer.ppo.validation import validate
from hybridrl.trainer.run import TrainingRun


class RayPPOTrainer:
    """Runs PPO (with a critic) or one of its critic-free relatives over worker groups.

    Args:
        config: the whole configuration.
        tokenizer: decodes samples for dumps.
        role_worker_mapping: worker classes by role (verl's `Role` or its name), in place of the library's classes.
        resource_pool_manager: maps each role to a pool; None uses `placement` in the configuration.
        ray_worker_group_cls: the class of the worker groups.
        reward_fn: scores a batch of responses.
        val_reward_fn: scores validation responses; None uses `reward_fn`.
        train_dataset: prompts to train on.
        val_dataset: prompts to validate on; None means no validation.
        identity: identifies the model; it is compared when a run is resumed.
    """

    sampler_class: ClassVar[type[Sampler]] = Sampler
    learner_class: ClassVar[type[Learner]] = Learner

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: Any,
        role_worker_mapping: Mapping[str, Any] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        *,
        reward_fn: RewardManager,
        val_reward_fn: RewardManager | None = None,
        train_dataset: Any,
        val_dataset: Any = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn or reward_fn
        generated_at_once = config.data.gen_batch_size or config.data.train_batch_size
        self.train_loader = create_train_loader(config.data, train_dataset, generated_at_once)
        self.val_loader = None if val_dataset is None else create_val_loader(config.data, val_dataset)
        self.health = HealthMonitor(config.trainer.health)
        prompts_per_epoch = len(self.train_loader) * generated_at_once
        self.pool = PromptPool(
            config.algorithm.filter_groups,
            prompts=config.data.train_batch_size,
            samples=config.actor_rollout_ref.rollout.n,
            prompts_in_data=prompts_per_epoch,
            pad_token_id=tokenizer.pad_token_id,
        )
        steps = total_training_steps(config, prompts_per_epoch)
        self.run = TrainingRun(config, config.trainer, steps, identity or {}, short_of_memory=memory_advice())

    def init_workers(self, groups: Mapping[str, RayWorkerGroup] | None = None) -> None:
        """Start the worker processes, unless `groups` holds started ones, and have each load its model."""
        self.groups = dict(
            groups
            or spawn_worker_groups(
                self.config, self.role_worker_mapping, self.resource_pool_manager, self.ray_worker_group_cls
            )
        )
        self.n_devices = sum({id(g.resource_pool): g.world_size for g in self.groups.values()}.values())
        self.learner = self.learner_class(self.config, self.groups, self.run.failed_batches)
        self.learner.init_models(self.run.total_steps)
        self._start_rollout(self.groups[POLICY])
        self.sampler = self.sampler_class(self.config, self.rollout, self.reward_fn, self.train_loader, self.pool)

    def _start_rollout(self, policy: RayWorkerGroup) -> None:
        """Start the rollout, and measure how much memory each phase has. The first `reshard` reports it."""
        manager, trainer = self.resource_pool_manager, self.config.trainer
        own = manager is not None and ROLLOUT in manager.mapping
        self.memory = MemoryReport(policy)
        loaded = self.memory.note("models loaded")
        self.rollout = start_rollout(
            self.config.actor_rollout_ref,
            policy,
            manager.get_resource_pool(ROLLOUT) if manager is not None and own else None,
            start_timeout_s=trainer.ray_wait_register_center_timeout,
            threads=trainer.threads_per_worker,
            log_folder=self.run.folder / "logs",
        )
        if not self.rollout.in_place:
            awake = self.memory.note("with engines")
            self.rollout.release()
            released = self.memory.note("while they sleep")
            if self.rollout.gives_memory_back:
                self.memory.check_released(loaded, awake, released)

    def fit(self) -> StepResult | None:
        """Train until the last step, or until the user asks to stop. Resumes where an earlier run stopped.

        Returns:
            The result of the last step; None if there was no step left.
        """
        result = None
        with self.run as run:
            resumed = self.restore()
            self.reshard()
            if self.config.trainer.val_only or not resumed:  # a checkpoint is written after its step's validation
                self.validate_if_due()
            if self.config.trainer.val_only:
                return None
            while not run.is_last:
                busy = self.worker_seconds()
                with run.measured_step():
                    sampled = self.sampler.next()  # prompts -> generate -> score, until there are enough
                    self.rollout.release()  # training needs its memory now
                    result = self.learner.learn(sampled)  # evaluate -> correct -> advantages -> update
                    synced = self.reshard()  # training weights -> generation weights
                    self.train_loader.after_step(result.batch)  # a curriculum uses it to choose the next prompts
                metrics = self.report(sampled, result, synced | {"timing_s/workers": self.worker_seconds() - busy})
                self.watch(metrics)
                self.validate_if_due()
                self.save_if_due()
            self.save_if_due()  # a stop request may arrive between the last save and the end of the loop
        return result

    # ------------------------------------------------------------------ the phases around sampling and learning

    def reshard(self) -> dict[str, float]:
        """Have the rollout generate with the policy's current weights from now on."""
        with self.run.phase("update_weights"):
            metrics = self.rollout.update_weights(version=self.run.step)
        if not self.memory.printed:
            self.memory.note("with new weights")
            self.memory.print()
        return metrics

    def worker_seconds(self) -> float:
        """Return the seconds spent inside worker methods so far, by the slowest rank of each call."""
        return sum(sum(group.method_seconds.values()) for group in self.groups.values())

    def report(self, sampled: Sampled, result: StepResult, further: Mapping[str, float]) -> dict[str, Any]:
        """Log the metrics of a step, and dump its samples if a dump is due.

        Args:
            further: metrics besides those of sampling and learning.

        Returns:
            All metrics.
        """
        run, batch = self.run, result.batch
        timing = run.timing | sampled.timing | result.timing
        metrics: dict[str, Any] = {
            "training/global_step": run.step,
            "training/epoch": max(int(str(uid).split("-")[0]) for uid in batch.non_tensor_batch["uid"]),
        }
        metrics |= {**sampled.metrics, **result.metrics, **further}
        metrics |= self.health.measure(batch) | {"health/rollbacks": self.health.rollbacks}
        metrics |= self.rollout.metrics() | staleness_metrics(batch, run.step - 1)
        metrics |= compute_data_metrics(batch, use_critic="values" in batch.batch.keys())
        metrics |= compute_timing_metrics(batch, timing, phases_per_token())
        metrics |= compute_throughout_metrics(batch, timing, n_gpus=self.n_devices)
        run.report(metrics)
        if run.due(self.config.trainer.dump_freq):
            samples = Samples(self.tokenizer)
            extra = {name: batch.non_tensor_batch[name].tolist() for name in sampled.reward_columns}
            samples.add(batch, batch.batch["token_level_scores"].sum(dim=-1).tolist(), extra)
            samples.write(run.rollout_folder, run.step)
        return metrics

    def watch(self, metrics: Mapping[str, Any]) -> None:
        """Check the health of the run after a step, before its state is saved as good (`trainer.health`)."""
        if not self.health.act(self.run.step, metrics):
            return
        assert self.health.good is not None
        dropped = self.pool.drop()
        notify(
            f"step {self.run.step}: going on with the models of {self.health.good} and the next prompts; {dropped} "
            "prompts that were answered beforehand are dropped",
            "warning",
        )
        self.run.go_back(self.health.good, self.learner.load)
        self.reshard()

    def validate_if_due(self) -> None:
        """Generate and score greedy answers (or sampled ones, by `rollout.val_kwargs`) to the validation prompts."""
        trainer, run = self.config.trainer, self.run
        due = trainer.val_before_train if run.step == 0 else run.due(trainer.test_freq)
        if self.val_loader is None or not (due or trainer.val_only):
            return
        samples, rollout = Samples(self.tokenizer), self.config.actor_rollout_ref.rollout
        with run.phase("testing"):
            metrics = validate(self.val_loader, self.rollout, self.val_reward_fn, rollout, run.step, samples)
        samples.write(run.validation_folder, run.step)
        run.tracking.log_generations(samples.rows(trainer.log_val_generations), step=run.step)
        run.report(metrics | {"timing_s/testing": run.timing.pop("testing")})

    # ------------------------------------------------------------------ checkpoints

    def restore(self) -> bool:
        """Resume from the run's newest valid checkpoint, by `trainer.resume_mode`. Return whether there was one."""

        def load(folder: Path, state: dict[str, Any]) -> None:
            self.learner.load(folder, state)
            self.sampler.load(folder, state)
            self.health.load_state_dict(state["health"], folder)

        resumed = self.run.restore(load)
        self.learner.step = self.sampler.step = self.run.step
        return resumed

    def save_if_due(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""

        def write(folder: Path) -> dict[str, Any]:
            state = self.learner.save(folder) | self.sampler.save(folder)
            self.health.saved = self.run.store.folder(self.run.step)
            return state | {"health": self.health.state_dict()}

        self.run.store.protected = self.health.good
        self.run.save_if_due(write)
