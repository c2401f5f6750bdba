"""PPO and its relatives as one controller program: `RayPPOTrainer.fit` is the algorithm.

`Sampler` produces scored batches and `Learner` learns from them. `fit` alternates between the two, and handles metrics,
validation and checkpoints. A new algorithm registers a function (`register_adv_est`, `register_policy_loss`), or
replaces a phase in a subclass of `Sampler` or `Learner` (`sampler_class`, `learner_class`).
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hybridrl.agents import AgentRollout, create_agents
from hybridrl.config import ModelConfig, PPOTrainerConfig
from hybridrl.config.schema.profiler import RoleProfilerConfig
from hybridrl.data import create_train_loader, create_val_loader
from hybridrl.errors import DataError, RewardError, TooFewReplicasError, UserError
from hybridrl.notify import notify
from hybridrl.observe.step_metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    staleness_metrics,
)
from hybridrl.observe.traces.sender import check_backend
from hybridrl.protocol import DataProto
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.reward import RewardManager
from hybridrl.serve import start_rollout
from hybridrl.single_controller import RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.interrupt import StepAbandoned
from hybridrl.trainer.memory_peaks import as_metrics, check_memory
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.health_checks import MISMATCH, HealthMonitor
from hybridrl.trainer.ppo.learner import Learner, StepResult
from hybridrl.trainer.ppo.memory import MemoryReport, memory_advice, pass_metrics, phase_peaks
from hybridrl.trainer.ppo.recording import Recorder, check_recording, check_stored_batches, sampler_class_of
from hybridrl.trainer.ppo.role_groups import POLICY, ROLLOUT, active_roles, spawn_worker_groups
from hybridrl.trainer.ppo.role_scores import Scorer
from hybridrl.trainer.ppo.run_requirements import total_training_steps
from hybridrl.trainer.ppo.sampler import Sampler, ScoredBatch
from hybridrl.trainer.ppo.samples import Samples
from hybridrl.trainer.ppo.served_judge import judges_of
from hybridrl.trainer.ppo.validation import validate
from hybridrl.trainer.ppo.validation_lane import ValidationLane, ValidationResult
from hybridrl.trainer.run import VALIDATION_SECONDS, TrainingRun
from hybridrl.trainer.run_profiler import ProfiledRole, StepProfiler
from hybridrl.trainer.utilization import Utilization


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
        self.scorer = Scorer.of(config, tokenizer)
        generated_at_once = config.data.gen_batch_size or config.data.train_batch_size
        self.train_loader = create_train_loader(config.data, train_dataset, generated_at_once)
        self._check_reads_ahead()
        self.val_loader = None if val_dataset is None else create_val_loader(config.data, val_dataset)
        if (service := config.actor_rollout_ref.rollout.trace.backend) is not None:
            check_backend(service)
        self.agents = create_agents(config, tokenizer, (train_dataset, val_dataset))
        self.health = HealthMonitor(config.trainer.health)
        self.lane: ValidationLane[ValidationResult] = ValidationLane()
        self.owes_validation = False  # that of the step that is saved has not ended
        prompts_per_epoch = len(self.train_loader) * generated_at_once
        steps = total_training_steps(config, prompts_per_epoch)
        if config.trainer.replay is not None:
            check_recording(config, steps)
        if config.skip.rollout.enable:
            check_stored_batches(config)
        self.groups: dict[str, RayWorkerGroup] = {}
        self.run = TrainingRun(
            config,
            config.trainer,
            steps,
            identity or {},
            short_of_memory=memory_advice(),
            trace=config.actor_rollout_ref.rollout.trace,
            groups=lambda: self.groups.values(),
            writers=lambda: self.learner.background_writers,
        )

    def _check_reads_ahead(self) -> None:
        """Refuse what sees each batch before the next prompts are drawn, where prompts are answered ahead of training.

        Raises:
            DataError: a sampler or data set learns from batches.
            UserError: a sampler class forms its batches itself.
        """
        mode = self.config.trainer.v1
        where = f"trainer.v1.trainer_mode={mode.trainer_mode}"
        if not mode.staleness:
            return
        if hooks := self.train_loader.hooks:
            raise DataError(
                f"{where}: {' and '.join(hooks)} must see a batch before the next rows are drawn, and prompts are "
                "answered ahead. Set trainer.v1.trainer_mode=sync"
            )
        if self.sampler_class.next is not Sampler.next:
            raise UserError(
                f"{where}: {self.sampler_class.__name__}.next forms batches by itself, and prompts are answered ahead. "
                "Override generate or score, or set trainer.v1.trainer_mode=sync"
            )

    def sizes(self) -> str:
        """Say how much data there is and how many steps."""
        val = 0 if self.val_loader is None else len(self.val_loader.dataset)
        return f"{len(self.train_loader.dataset)} prompts, {val} for validation, {self.run.total_steps} steps"

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
        forecast = check_memory(self.config, self.groups[POLICY])
        self.learner.init_models(self.run.total_steps)
        self.utilization = self._measured_roles()
        self.profiler = StepProfiler(self.config.global_profiler, self._profiled_roles())
        self.peaks = phase_peaks(self.groups, forecast)
        self._start_rollout(self.groups[POLICY])
        self.scorer.connect(self.groups, self.rollout)
        for spec in self.learner.roles:
            if spec.asked_in:
                judges = [judge for manager in (self.reward_fn, self.val_reward_fn) for judge in judges_of(manager)]
                self.groups[spec.name].answer_for(judges, self.config)
        self.sampler = sampler_class_of(self.config, self.sampler_class)(
            self.config,
            self.rollout,
            self.reward_fn,
            self.train_loader,
            self.tokenizer.pad_token_id,
            self.scorer,
            self.run.failed_batches,
        )
        self.sampler.total_steps = self.run.total_steps
        self.recorder = Recorder(self.run.folder, self.config)

    def _measured_roles(self) -> dict[str, Utilization]:
        """Return the measure of the updates of each role whose group can tell its device, by the role's name."""
        measures = {}
        for spec in self.learner.roles:
            group, model = self.groups[spec.name], getattr(spec.config_of(self.config), "model", None)
            if spec.update is not None and isinstance(model, ModelConfig) and hasattr(group, "device_name"):
                name, peak = spec.update.phase.removeprefix("update_"), self.config.trainer.peak_tflops
                measures[spec.name] = Utilization(name, model, group, spec.update.method, spec.update.value_head, peak)
        return measures

    def _profiled_roles(self) -> Iterator[ProfiledRole]:
        for spec in active_roles(self.config):
            settings = getattr(spec.settings_of(self.config), "profiler", None)
            if spec.name in self.groups and isinstance(settings, RoleProfilerConfig):
                yield ProfiledRole(spec.name, f"{spec.where}.profiler", settings, self.groups[spec.name])

    def _utilization_metrics(self, batch: DataProto) -> dict[str, float]:
        mask = batch.batch["response_mask"]
        lengths = batch.batch["attention_mask"].sum(-1)[mask.sum(-1) > 0].tolist()
        metrics: dict[str, float] = {}
        for spec in self.learner.roles:
            if spec.name in self.utilization:
                passes = spec.settings_of(self.config).ppo_epochs
                metrics |= self.utilization[spec.name].measure(lengths, int(mask.sum()), passes)
        return metrics

    def _start_rollout(self, policy: RayWorkerGroup) -> None:
        """Start the rollout, and measure how much memory each phase has. The first `reshard` reports it."""
        manager, trainer = self.resource_pool_manager, self.config.trainer
        own = manager is not None and ROLLOUT in manager.mapping
        self.memory = MemoryReport(policy)
        loaded = self.memory.note("models loaded")
        # Engines take a share of the memory that is free now, so what the first update takes must not be free.
        learners = [group for group in self.groups.values() if not own and hasattr(group, "reserve_memory")]
        states = 0.0
        if sum(sum(group.reserve_memory(True)) for group in learners):
            states = self.memory.note("with optimizer states") - loaded

        def check_memory(engine: str) -> None:
            on_gpu = getattr(policy.resource_pool, "use_gpu", False)
            if learners and on_gpu and INFERENCE_ENGINES.metadata(engine).reserves_of_total:
                share = self.config.actor_rollout_ref.rollout.gpu_memory_utilization
                self.memory.check_fits(loaded, states, share)

        try:
            self.rollout = start_rollout(
                self.config.actor_rollout_ref,
                policy,
                manager.get_resource_pool(ROLLOUT) if manager is not None and own else None,
                threads=trainer.threads_per_worker,
                log_folder=self.run.folder / "logs",
                before_start=check_memory,
                template_kwargs=self.config.data.apply_chat_template_kwargs,
                image_kwargs=self.config.data.mm_processor_kwargs,
            )
        finally:
            for group in learners:
                group.reserve_memory(False)
        if self.agents is not None:
            self.rollout = AgentRollout(self.rollout, self.agents)
        self.learner.on_weights_change.append(self.rollout.weights_will_change)
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
        # What a second stop request abandons, it has saved the last complete step before (`keeping_progress`).
        with self.run as run, closing(self.lane), suppress(StepAbandoned):
            resumed = self.restore()
            self.reshard()
            if self.config.trainer.val_only or not resumed or self.owes_validation:
                with run.abandonable():
                    self.validate_if_due()
                self.owes_validation = False
            if self.config.trainer.val_only:
                return None
            while not run.is_last:
                busy = self.worker_seconds()
                with self.keeping_progress(), run.measured_step(), self.profiler.step(run.step):
                    with run.abandonable():
                        sampled = self.sampler.next()  # prompts -> generate -> score, until there are enough
                    if self.config.trainer.record:
                        self.recorder.write(run.step, sampled)
                    self.make_room()  # training needs the rollout's memory now
                    result = self.learner.learn(sampled)  # evaluate -> correct -> advantages -> update
                    self.end_validation()  # of the step before: all its answers are by the weights of that step
                    self.sampler.before_publish()  # prompts that would be too old under the new weights
                    synced = self.reshard()  # training weights -> generation weights
                    # a curriculum uses it to choose the next prompts
                    synced |= self.train_loader.after_step(result.batch, sampled.groups)
                    self.sampler.release()  # the rollout has the weights that were trained on the batch
                self.report_validation()
                metrics = self.report(sampled, result, synced | {"timing_s/workers": self.worker_seconds() - busy})
                self.watch(metrics)
                with self.keeping_progress(validating=True), run.abandonable():
                    self.validate_if_due()
                self.save_if_due()
            with self.keeping_progress(validating=True), run.abandonable():
                self.lane.wait()
                self.report_validation()
                self.lane.check()
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

    def make_room(self) -> None:
        """Have generation return the memory that training needs. Prompts in flight go on under the next weights."""
        self.sampler.settle()
        if self.config.trainer.v1.trainer_mode != "separate_async":  # which has devices of its own
            self.rollout.release(training=self.sampler.reads_ahead)

    def worker_seconds(self) -> float:
        """Return the seconds spent inside worker methods so far, by the slowest rank of each call."""
        return sum(sum(group.method_seconds.values()) for group in self.groups.values())

    def report(self, sampled: ScoredBatch, result: StepResult, further: Mapping[str, float]) -> dict[str, Any]:
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
        metrics |= compute_data_metrics(
            batch,
            use_critic="values" in batch.batch.keys(),
            max_prompt_length=self.config.data.max_prompt_length,
            max_response_length=self.config.data.max_response_length,
        )
        metrics |= compute_timing_metrics(batch, timing)
        metrics |= compute_throughout_metrics(batch, timing, n_gpus=self.n_devices)
        metrics |= self._utilization_metrics(batch)
        metrics |= as_metrics(self.peaks.measure()) | pass_metrics(self.groups)
        run.report(metrics)
        dumped = run.due(self.config.trainer.dump_freq)
        if dumped or run.traces is not None:
            samples = Samples(self.tokenizer, self.config.trainer.dump_tokens)
            extra = {name: batch.non_tensor_batch[name].tolist() for name in sampled.reward_columns}
            samples.add(batch, batch.batch["token_level_scores"].sum(dim=-1).tolist(), extra)
            if dumped:
                samples.write(run.rollout_folder, run.step)
            self._trace(samples, run.step, validate=False)
        return metrics

    def _trace(self, samples: Samples, step: int, validate: bool) -> None:
        """Send samples to the service of `rollout.trace`."""
        if self.run.traces is not None:
            self.run.traces.send(samples.traced(self.run.traces.prompts), step, validate)

    def watch(self, metrics: Mapping[str, Any]) -> None:
        """Check the health of the run after a step, before its state is saved as good (`trainer.health`)."""
        if self.config.trainer.v1.staleness and self.config.algorithm.rollout_correction.bypass_mode:
            # There the update measures the divergence, of old tokens, too: they differ from the trainer by right.
            metrics = {name: value for name, value in metrics.items() if name != MISMATCH}
        if not self.health.act(self.run.step, metrics):
            return
        assert self.health.good is not None
        dropped = self.sampler.drop("rollback")
        notify(
            f"step {self.run.step}: going on with the models of {self.health.good} and the next prompts; {dropped} "
            "prompts that were answered beforehand are dropped",
            "warning",
        )
        self.run.checkpoints.go_back(self.health.good, self.learner.load)
        self.reshard()

    # ------------------------------------------------------------------ validation

    def validate_if_due(self) -> None:
        """Generate and score greedy answers (or sampled ones, by `rollout.val_kwargs`) to the validation prompts.

        With `trainer.v1.separate_async.background_validation` this only begins; the next step goes on beside it.

        Raises:
            UserError: the validation failed, or the one that ended next to this step.
        """
        self.lane.check()
        trainer, run = self.config.trainer, self.run
        due = trainer.val_before_train if run.step == 0 else run.due(trainer.test_freq)
        if self.val_loader is None or not (due or trainer.val_only or self.owes_validation):
            return
        mode = trainer.v1
        beside = mode.trainer_mode == "separate_async" and mode.separate_async.background_validation
        self.owes_validation = False
        if beside and not trainer.val_only and not run.is_last:
            self.lane.start(run.step, partial(self._validate, run.step))
        else:
            self._log_validation(self._validate(run.step))

    def _validate(self, step: int) -> ValidationResult:
        assert self.val_loader is not None
        timer = PhaseTimer(memory_advice())
        samples = Samples(self.tokenizer, self.config.trainer.dump_tokens)
        with timer.phase("testing"):
            metrics = validate(
                self.val_loader,
                self.rollout,
                self.val_reward_fn,
                self.config.actor_rollout_ref.rollout,
                step,
                samples,
                self.sampler.missing,
                self.scorer,
            )
        return ValidationResult(step, samples, metrics, timer.seconds["testing"])

    def end_validation(self) -> None:
        """Wait for the end of the validation of the step before, because new weights are about to be sent.

        It cannot end if every replica was lost, and need not after a second stop request. Then the present step's
        weights are validated in its place.
        """
        step = self.lane.step
        if step is None:
            return
        with self.run.phase("testing_wait"):
            ended = self.lane.wait(lambda: self.run.abandons or self.sampler.awaits_weights())
        if not ended:
            reason = "the run stops" if self.run.abandons else "every replica was lost"
            then = f"step {self.run.step} is validated in its place"
            notify(f"the validation of step {step} is given up ({reason}); {then}", "warning")
            self.owes_validation = True

    def report_validation(self) -> None:
        """Log the validation that has ended next to the step in progress. `lane.check` raises what went wrong in it."""
        if (result := self.lane.take()) is not None:
            self._log_validation(result)

    def _log_validation(self, result: ValidationResult) -> None:
        samples, run = result.samples, self.run
        samples.write(run.validation_folder, result.step)
        self._trace(samples, result.step, validate=True)
        run.tracking.log_generations(samples.rows(self.config.trainer.log_val_generations), step=result.step)
        run.report(result.metrics | {VALIDATION_SECONDS: result.seconds}, result.step)

    # ------------------------------------------------------------------ checkpoints

    def restore(self) -> bool:
        """Resume from the run's newest valid checkpoint, by `trainer.resume_mode`. Return whether there was one."""

        def load(folder: Path, state: dict[str, Any]) -> None:
            self.learner.load(folder, state)
            self.sampler.load(folder, state)
            self.health.load_state_dict(state["health"], folder)
            self.owes_validation = state.get("owes_validation", False)

        resumed = self.run.restore(load)
        self.owes_validation = self.owes_validation and not self.run.has_validated()  # it may have ended afterwards
        self.learner.step = self.sampler.step = self.run.step
        return resumed

    def save_if_due(self) -> None:
        """Write a checkpoint of everything that the next step depends on, if one is due."""
        self.run.checkpoints.store.protect("good", self.health.good)
        self.run.save_if_due(self._write)

    def _write(self, folder: Path) -> dict[str, Any]:
        """Write a checkpoint into `folder`, and return the controller's state."""
        state = self.learner.save(folder) | self.sampler.save(folder)
        self.health.saved = self.run.checkpoints.store.folder(self.run.step)
        owed = self.owes_validation or self.lane.step is not None
        return state | {"health": self.health.state_dict(), "owes_validation": owed}

    @contextmanager
    def keeping_progress(self, validating: bool = False) -> Iterator[None]:
        """Save the last complete step if the reward function fails inside the block, if there are too few replicas, or
        if a second stop request leaves the block; the sampler keeps the batch.

        A resumed run answers the same prompts again.

        Args:
            validating: the block validates a complete step. A resumed run validates it again.
        """
        step = self.run.step
        try:
            yield
        except (RewardError, TooFewReplicasError, StepAbandoned) as error:
            self.run.abandon_step(step)
            self.owes_validation |= validating
            self.sampler.give_back()
            self.rollout.release(training=True)  # saving needs its memory, whatever is still in flight
            self.run.save(self._write)
            self.run.checkpoints.complete()
            if self.run.outcome.checkpoint is not None and isinstance(error, TooFewReplicasError):
                error.add_note(
                    f"step {step}, the last complete one, is kept in {self.run.outcome.checkpoint}; to go on from "
                    "there, run the same command again once there are nodes"
                )
            if self.run.outcome.checkpoint is not None and isinstance(error, RewardError):
                error.add_note(
                    f"step {step}, the last complete one, is kept in {self.run.outcome.checkpoint}; to go on from "
                    "there, run the same command again once the reward function works; if its code was changed for "
                    f"that, add trainer.resume_mode=resume_path trainer.resume_from_path={self.run.outcome.checkpoint}"
                )
            raise
