"""PPO and its relatives as one controller program: `RayPPOTrainer.fit` is the algorithm.

The controller owns the order of things and the small numbers; worker groups own the models. A new algorithm registers a
function (`register_adv_est`, `register_policy_loss`) or replaces one of the methods that `fit` names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.algorithms import check_group_sizes, get_kl_controller, masked_mean
from hybridrl.config import PPOTrainerConfig
from hybridrl.data import create_train_loader, create_val_loader
from hybridrl.notify import notify
from hybridrl.observe.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    staleness_metrics,
)
from hybridrl.protocol import DataProto, object_array
from hybridrl.reward import RewardManager
from hybridrl.rollout.start import start_rollout
from hybridrl.single_controller import RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.ppo.advantage import (
    SLOT,
    apply_kl_penalty,
    compute_advantage,
    critic_metrics,
    draw_by_reward,
)
from hybridrl.trainer.ppo.batching import (
    balanced_order,
    epochs_of_mini_batches,
    in_canonical_order,
    repeat_for_sampling,
    seed_of,
    spread_over_ranks,
    trim,
)
from hybridrl.trainer.ppo.correction import TRAINED_MASK, correct_rollout, probe, probe_rows
from hybridrl.trainer.ppo.health_checks import HealthMonitor
from hybridrl.trainer.ppo.memory import SHORT_OF_MEMORY, MemoryReport
from hybridrl.trainer.ppo.needs import Needs, total_training_steps
from hybridrl.trainer.ppo.prompt_pool import PromptPool, endless
from hybridrl.trainer.ppo.reward_transform import RewardTransform
from hybridrl.trainer.ppo.roles import Role, spawn_worker_groups
from hybridrl.trainer.ppo.samples import Samples
from hybridrl.trainer.ppo.validation import validate
from hybridrl.trainer.run import TrainingRun
from hybridrl.utils.metrics import Metric, merge_metrics, reduce_to_floats
from hybridrl.utils.seqlen_balancing import log_seqlen_unbalance
from hybridrl.workers.loss_prepass import ROW_IDS
from hybridrl.workers.update_plan import UpdatePlan

MODEL_INPUTS = ["responses", "input_ids", "attention_mask", "position_ids", "response_mask"]


class RayPPOTrainer:
    """Runs PPO (with a critic) or one of its critic-free relatives over worker groups.

    Args:
        config: the whole configuration.
        tokenizer: decodes samples for dumps.
        role_worker_mapping: the worker class of each role; the library's own where None.
        resource_pool_manager: which pool each role lives in; by `placement` in the configuration where None.
        ray_worker_group_cls: the class of the worker groups.
        reward_fn: scores a batch of responses.
        val_reward_fn: scores validation responses; `reward_fn` where None.
        train_dataset: prompts to train on.
        val_dataset: prompts to validate on; None does without validation.
        identity: what model this is, compared when a run is resumed.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, Any] | None = None,
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
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.needs = Needs.of(config)
        self.reward_transform = RewardTransform(config.algorithm)
        self.health = HealthMonitor(config.trainer.health)
        prompts_per_epoch = len(self.train_loader) * generated_at_once
        self.pool = PromptPool(
            config.algorithm.filter_groups,
            prompts=config.data.train_batch_size,
            samples=config.actor_rollout_ref.rollout.n,
            prompts_in_data=prompts_per_epoch,
            pad_token_id=tokenizer.pad_token_id,
        )
        self._reward_columns: list[str] = []
        steps = total_training_steps(config, prompts_per_epoch)
        self.run = TrainingRun(config, config.trainer, steps, identity or {}, short_of_memory=SHORT_OF_MEMORY)
        self.memory = MemoryReport(self)

    def init_workers(self, groups: Mapping[Role, RayWorkerGroup] | None = None) -> None:
        """Start the worker processes, unless `groups` brings them started, and have each load its model."""
        self.groups = dict(
            groups
            or spawn_worker_groups(
                self.config, self.role_worker_mapping, self.resource_pool_manager, self.ray_worker_group_cls
            )
        )
        self.n_devices = sum({id(g.resource_pool): g.world_size for g in self.groups.values()}.values())
        self.actor_rollout = self.groups[Role.ActorRollout]
        self.critic = self.groups.get(Role.Critic)
        self.reference = self.groups.get(Role.RefPolicy)
        # A critic or reference of the same pool loads first: the actor, which generates, sees the memory that is left.
        for role, settings in (
            (Role.Critic, self.config.critic),
            (Role.RefPolicy, None),
            (Role.ActorRollout, self.config.actor_rollout_ref.actor),
        ):
            if role in self.groups:
                steps = self.run.total_steps
                if role is Role.ActorRollout:  # it learns, and its schedule begins, once the critic is warmed up
                    steps = max(steps - self.config.trainer.critic_warmup, 1)
                self.groups[role].init_model(steps, 1 if settings is None else self._updates_per_step(settings))
        self._start_rollout()

    def _start_rollout(self) -> None:
        """Start what generates, and see how much memory each phase has; the first `reshard` tells."""
        manager, trainer = self.resource_pool_manager, self.config.trainer
        own = manager is not None and Role.Rollout in manager.mapping
        loaded = self.memory.note("models loaded")
        self.rollout = start_rollout(
            self.config.actor_rollout_ref,
            self.actor_rollout,
            manager.get_resource_pool(Role.Rollout) if manager is not None and own else None,
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

    def fit(self) -> None:
        """Train until the last step, or until the user asks to stop; resume where an earlier run was left."""
        with self.run:
            resumed = self.restore()
            self.reshard()
            if self.config.trainer.val_only or not resumed:  # a checkpoint is written behind its step's validation
                self.validate_if_due()
            if self.config.trainer.val_only:
                return
            prompts = endless(self.train_loader)
            while not self.run.is_last:
                with self.step():
                    batch = self.collect(prompts)  # generate and score, until there are enough
                    self.rollout.release()  # its memory is for training now
                    batch = self.balance(batch)
                    batch = self.evaluate(batch)  # old_log_probs, ref_log_prob, values
                    batch = self.correct(batch)  # for what the sampler did otherwise than the trainer
                    batch = self.estimate_advantages(batch)
                    self.update(batch)  # critic, then actor
                    self.reshard()  # training weights -> generation weights
                    self.train_loader.after_step(batch)  # a curriculum decides from it which prompts come next
                self.watch()
                self.validate_if_due()
                self.save_if_due()
            self.save_if_due()  # a wish to stop may come between the last save and the end of the loop

    # ------------------------------------------------------------------ the phases of a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count and time a step; report it, and dump its samples where due, when it is done."""
        run, trainer = self.run, self.config.trainer
        self._updates: list[dict[str, list[Metric]]] = []
        before = {role: dict(group.method_seconds) for role, group in self.groups.items()}
        with run.measured_step():
            yield
        run.metrics["timing_s/workers"] = sum(
            seconds - before[role].get(method, 0.0)
            for role, group in self.groups.items()
            for method, seconds in group.method_seconds.items()
        )
        run.metrics |= self._step_metrics(self._trained)
        run.report(run.metrics)
        if run.due(trainer.dump_freq):
            samples = Samples(self.tokenizer)
            extra = {name: self._trained.non_tensor_batch[name].tolist() for name in self._reward_columns}
            samples.add(self._trained, self._trained.batch["token_level_scores"].sum(dim=-1).tolist(), extra)
            samples.write(run.rollout_folder, run.step)

    def _step_metrics(self, batch: DataProto) -> dict[str, Any]:
        """What the batch, the timers and the updates tell of a step."""
        run = self.run
        metrics: dict[str, Any] = {
            "training/global_step": run.step,
            "training/epoch": max(int(str(uid).split("-")[0]) for uid in batch.non_tensor_batch["uid"]),
        }
        metrics |= reduce_to_floats(
            merge_metrics({name: m} for part in self._updates for name, found in part.items() for m in found)
        )
        metrics |= self.health.measure(batch) | {"health/rollbacks": self.health.rollbacks}
        metrics |= self.rollout.metrics() | staleness_metrics(batch, self.run.step - 1)
        metrics |= compute_data_metrics(batch, use_critic=self.critic is not None)
        metrics |= compute_timing_metrics(batch, run.timing)
        return metrics | compute_throughout_metrics(batch, run.timing, n_gpus=self.n_devices)

    def collect(self, prompts: Iterator[DataProto]) -> DataProto:
        """`train_batch_size` prompts with their samples, generated and scored; see `PromptPool`."""

        def answered() -> DataProto:
            chosen = next(prompts)
            batch = self.score(self.generate(chosen))
            return self.with_greedy_rewards(chosen, batch) if self.needs.reward_baselines else batch

        batch, metrics = self.pool.take(answered)
        check_group_sizes(batch.non_tensor_batch["uid"], self.pool.samples)
        self.run.metrics |= metrics
        if self.run.step == 1 and self.config.algorithm.rollout_correction.probe_threshold is not None:
            self._probed = probe_rows(self, batch)
        return batch

    def generate(self, prompts: DataProto) -> DataProto:
        """`rollout.n` responses for each prompt, with the sampler's log-probabilities."""
        rollout = self.config.actor_rollout_ref.rollout
        with self.run.phase("gen"):
            return self.sample(repeat_for_sampling(prompts, rollout.n), validate=False)

    def sample(self, batch: DataProto, validate: bool, **sampling: Any) -> DataProto:
        """A response for each row. Only what generation reads travels to the workers, and only tensors come back.

        Args:
            sampling: settings of this call alone (`do_sample`, `top_p`, ...).
        """
        inputs = batch.select(
            batch_keys=["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["uid", "sample"]
        )
        inputs.meta_info = {"global_steps": self.run.step, "validate": validate, **sampling}
        output = trim(self.rollout.generate(inputs))
        output.non_tensor_batch = batch.non_tensor_batch
        output.meta_info = {"temperature": self.config.actor_rollout_ref.rollout.temperature}
        return output

    def score(self, batch: DataProto) -> DataProto:
        """`token_level_scores`: each response's reward on its last token; what else the function returned joins too."""
        with self.run.phase("reward"):
            result = self.reward_fn(batch, return_dict=True)
        batch.batch["token_level_scores"] = result["reward_tensor"]
        timeouts = self.run.metrics.get("reward/timeouts", 0.0)  # of this step's generation batches before
        self.run.metrics |= result["metrics"]
        self.run.metrics["reward/timeouts"] = timeouts + result["metrics"].get("reward/timeouts", 0.0)
        for name, values in result["reward_extra_info"].items():
            batch.non_tensor_batch[name] = object_array(values)
        self._reward_columns = list(result["reward_extra_info"])
        return batch

    def with_greedy_rewards(self, prompts: DataProto, batch: DataProto) -> DataProto:
        """`reward_baselines` [B]: what the prompt's greedy response scores (ReMax)."""
        with self.run.phase("gen_max"):
            greedy = self.sample(repeat_for_sampling(prompts, 1), validate=False, do_sample=False)
        with self.run.phase("reward"):
            baselines = self.reward_fn(greedy).sum(dim=-1)
        self.run.metrics["critic/reward_baselines/mean"] = baselines.mean().item()
        batch.batch["reward_baselines"] = baselines.repeat_interleave(self.pool.samples)
        return batch

    def balance(self, batch: DataProto) -> DataProto:
        """Order the rows so that every rank gets about the same work."""
        ranks = self.actor_rollout.dp_size("actor")
        if not self.config.trainer.balance_batch or ranks == 1 or len(batch) % ranks:
            return batch
        order = balanced_order(batch, ranks)
        lengths = batch.batch["attention_mask"].sum(dim=1)
        shards = [shard.tolist() for shard in order.chunk(ranks)]
        self.run.metrics |= log_seqlen_unbalance(lengths.tolist(), shards, prefix="global_seqlen")
        return batch.select_idxs(order)

    def evaluate(self, batch: DataProto) -> DataProto:
        """Log-probabilities before the update, reference log-probabilities and values, each where the algorithm needs
        it.

        All are asked for before the first is waited for, so that models on different devices compute side by side.
        """
        inputs = batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=[], meta_info_keys=["temperature"])
        pending = {}
        if self.needs.old_log_probs:
            inputs.meta_info["ref_kl"] = self.needs.ref_kl
            pending["old_log_prob"] = self.actor_rollout.compute_log_prob(inputs)
        if self.reference is not None and self.needs.ref_log_prob:
            pending["ref"] = self.reference.compute_ref_log_prob(inputs)
        if self.critic is not None:
            pending["values"] = self.critic.compute_values(inputs)
        for phase, future in pending.items():
            with self.run.phase(phase):
                batch = batch.union(future.get())
        if self.needs.old_log_probs:
            mask = batch.batch["response_mask"]
            entropy = batch.pop(batch_keys=["entropys"]).batch["entropys"]
            self.run.metrics["actor/entropy"] = masked_mean(entropy, mask).item()
        return batch

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs` of a few rows, under the present weights."""
        inputs = batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=[], meta_info_keys=["temperature"])
        found = self.actor_rollout.compute_log_prob(inputs).get()
        return found.select(batch_keys=["old_log_probs"])

    def correct(self, batch: DataProto) -> DataProto:
        """Measure how far sampler and trainer are apart, and correct for it as `algorithm.rollout_correction` says.

        On the first step a difference that no rounding explains ends the run.
        """
        settings = self.config.algorithm.rollout_correction
        with self.run.phase("rollout_corr"):
            if self.run.step == 1 and settings.probe_threshold is not None:
                self.run.metrics |= probe(self, batch, self._probed, settings.probe_threshold)
            self.run.metrics |= correct_rollout(batch, settings)
        return batch

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Rewards normalised, clipped and less a KL penalty where configured, then `advantages` and `returns`."""
        algorithm, fields = self.config.algorithm, batch.batch
        with self.run.phase("adv"):
            fields["token_level_rewards"], baselines = self.reward_transform(
                fields["token_level_scores"], fields["response_mask"], fields.get("reward_baselines", None)
            )
            if baselines is not None:
                fields["reward_baselines"] = baselines
            if algorithm.use_kl_in_reward:
                batch, metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)
                self.run.metrics |= metrics
            batch = compute_advantage(batch, algorithm.adv_estimator, algorithm.gamma, algorithm.lam, algorithm)
            if self.needs.values:
                self.run.metrics |= critic_metrics(batch, algorithm.gamma)
            return batch

    def update(self, batch: DataProto) -> None:
        """Every epoch of mini-batches of the critic, then, once it is warmed up, of the actor."""
        algorithm = self.config.algorithm
        self._trained = batch = in_canonical_order(batch)
        if algorithm.use_pf_ppo:
            seed = seed_of(self.config.actor_rollout_ref.actor.data_loader_seed, self.run.step)
            batch = draw_by_reward(batch, algorithm.pf_ppo, seed)
        pending: list[tuple[str, Any]] = []
        if self.critic is not None:
            fields = [*MODEL_INPUTS, "values", "returns"]
            for shard in self._update_batches(batch, self.config.critic, self.critic.dp_size("critic"), fields):
                pending.append(("update_critic", self.critic.update_critic(shard)))
        if self.run.step > self.config.trainer.critic_warmup:
            optional = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "rollout_is_weights")
            fields = [*MODEL_INPUTS, "advantages", *(name for name in optional if name in batch.batch.keys())]
            actor = self.config.actor_rollout_ref.actor
            for shard in self._update_batches(batch, actor, self.actor_rollout.dp_size("actor"), fields):
                pending.append(("update_actor", self.actor_rollout.update_actor(shard)))
        for phase, future in pending:
            with self.run.phase(phase), self.run.keeping_batch_on_error(batch):
                metrics = future.get().meta_info["metrics"]
            self.run.keep_if_skipped(batch, metrics)
            self._updates.append(metrics)

    def reshard(self) -> None:
        """The policy generates with its present weights from now on."""
        with self.run.phase("update_weights"):
            self.run.metrics |= self.rollout.update_weights(version=self.run.step)
        if not self.memory.told:
            self.memory.note("with new weights")
            self.memory.tell()

    def _updates_per_step(self, settings: Any) -> int:
        """Optimizer steps that a model takes in each training step."""
        return settings.ppo_epochs * -(-self.config.data.train_batch_size // settings.ppo_mini_batch_size)

    def _update_batches(self, batch: DataProto, settings: Any, dp_size: int, fields: list[str]) -> Iterator[DataProto]:
        """One batch an epoch, arranged for `ModelWorker.update`."""
        objects = batch.non_tensor_batch
        epochs = list(
            epochs_of_mini_batches(
                objects.get(SLOT, objects["uid"]),
                prompts_per_mini_batch=settings.ppo_mini_batch_size,
                epochs=settings.ppo_epochs,
                shuffle=settings.shuffle,
                seed=settings.data_loader_seed + self.run.step,
            )
        )
        chosen = batch.select(batch_keys=fields, non_tensor_batch_keys=[], meta_info_keys=[])
        if TRAINED_MASK in batch.batch.keys():
            chosen.batch["response_mask"] = batch.batch[TRAINED_MASK]
        chosen.batch[ROW_IDS] = torch.from_numpy(objects["row"].astype(np.int64))
        seed = partial(seed_of, settings.data_loader_seed, self.run.step)
        for epoch, mini_batches in enumerate(epochs):
            seeds = [seed(epoch, number) for number in range(len(mini_batches))]
            spread, planned = spread_over_ranks(chosen, mini_batches, dp_size, seeds)
            yield UpdatePlan(
                mini_batches=planned,
                dp_size=dp_size,
                updates=sum(map(len, epochs)),
                skip_nonfinite=self.config.trainer.on_nonfinite == "skip",
                response_length=self.config.actor_rollout_ref.rollout.response_length,
                temperature=self.config.actor_rollout_ref.rollout.temperature,
                rollout_correction=self.config.algorithm.rollout_correction,
            ).attach_to(spread)

    # ------------------------------------------------------------------ validation and run state

    def watch(self) -> None:
        """Look at the health of the run after a step, before its state is saved as a good one (`trainer.health`)."""
        if not self.health.act(self.run.step, self.run.metrics):
            return
        assert self.health.good is not None
        dropped = self.pool.drop()
        notify(
            f"step {self.run.step}: going on with the models of {self.health.good} and the next prompts; {dropped} "
            "prompts that were answered beforehand are dropped",
            "warning",
        )
        self.run.go_back(self.health.good, self.load_models)
        self.reshard()

    def load_models(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Weights, optimizers and schedules of a checkpoint, and what the rewards were changed by."""
        actor = self.config.actor_rollout_ref.actor.checkpoint
        self.actor_rollout.load_checkpoint(str(folder / "actor"), actor.load_contents)
        if self.critic is not None:
            self.critic.load_checkpoint(str(folder / "critic"), self.config.critic.checkpoint.load_contents)
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        self.reward_transform.load_state_dict(state["reward_transform"])

    def validate_if_due(self) -> None:
        """Greedy (or sampled, by `rollout.val_kwargs`) answers to the validation prompts, scored."""
        trainer, run = self.config.trainer, self.run
        if self.val_loader is None:
            return
        due = trainer.val_before_train if run.step == 0 else run.due(trainer.test_freq)
        if due or trainer.val_only:
            run.report(validate(self))

    def restore(self) -> bool:
        """Resume from the run's newest valid checkpoint, as `trainer.resume_mode` says; whether there was one."""

        def load(folder: Path, state: dict[str, Any]) -> None:
            self.load_models(folder, state)
            self.health.load_state_dict(state["health"], folder)
            self.train_loader.load_state_dict(state["train_loader"])
            self._reward_columns = state["reward_columns"]
            self.pool.load(folder)

        return self.run.restore(load)

    def save_if_due(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""

        def write(folder: Path) -> dict[str, Any]:
            actor = self.config.actor_rollout_ref.actor.checkpoint
            self.actor_rollout.save_checkpoint(str(folder / "actor"), actor.save_contents)
            if self.critic is not None:
                self.critic.save_checkpoint(str(folder / "critic"), self.config.critic.checkpoint.save_contents)
            self.pool.save(folder)
            self.health.saved = self.run.store.folder(self.run.step)
            return {
                "train_loader": self.train_loader.state_dict(),
                "kl_ctrl": self.kl_ctrl.state_dict(),
                "reward_transform": self.reward_transform.state_dict(),
                "reward_columns": self._reward_columns,
                "health": self.health.state_dict(),
            }

        self.run.store.spared = self.health.good
        self.run.save_if_due(write)
