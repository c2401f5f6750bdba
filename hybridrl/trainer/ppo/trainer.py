"""PPO and its relatives as one controller program: `RayPPOTrainer.fit` is the algorithm.

The controller owns the order of things and the small numbers; worker groups own the models. A new algorithm registers a
function (`register_adv_est`, `register_policy_loss`) or replaces one of the methods that `fit` names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.algorithms import get_kl_controller, masked_mean
from hybridrl.algorithms.rollout_correction import rollout_probs_diff_metrics
from hybridrl.config import PPOTrainerConfig
from hybridrl.data import create_train_loader, create_val_loader
from hybridrl.data.loader import object_array
from hybridrl.observe.metrics import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from hybridrl.protocol import DataProto
from hybridrl.reward import RewardManager
from hybridrl.single_controller import RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.ppo.advantage import apply_kl_penalty, compute_advantage
from hybridrl.trainer.ppo.batching import (
    balanced_order,
    epochs_of_mini_batches,
    in_canonical_order,
    repeat_for_sampling,
    spread_over_ranks,
    trim,
)
from hybridrl.trainer.ppo.roles import Role, spawn_worker_groups
from hybridrl.trainer.ppo.samples import Samples
from hybridrl.trainer.ppo.validation import validate
from hybridrl.trainer.run import TrainingRun
from hybridrl.utils.metrics import Metric, merge_metrics, reduce_to_floats
from hybridrl.utils.seqlen_balancing import log_seqlen_unbalance

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
        self.train_loader = create_train_loader(config.data, train_dataset)
        self.val_loader = None if val_dataset is None else create_val_loader(config.data, val_dataset)
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.recompute_old_log_prob = needs_old_log_prob(config)
        steps = total_training_steps(config, len(self.train_loader))
        self.run = TrainingRun(config, config.trainer, steps, identity=identity or {})

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

    def fit(self) -> None:
        """Train until the last step, or until the user asks to stop; resume where an earlier run was left."""
        with self.run:
            resumed = self.restore()
            if self.config.trainer.val_only or not resumed:  # a checkpoint is written behind its step's validation
                self.validate_if_due()
            if self.config.trainer.val_only:
                return
            for batch in self.run.batches(self.train_loader):
                with self.step():
                    batch = self.generate(batch)
                    batch = self.score(batch)
                    batch = self.balance(batch)
                    batch = self.evaluate(batch)  # old_log_probs, ref_log_prob, values
                    batch = self.estimate_advantages(batch)
                    self.update(batch)  # critic, then actor
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
            "training/epoch": (run.step - 1) // len(self.train_loader),
        }
        metrics |= reduce_to_floats(
            merge_metrics({name: m} for part in self._updates for name, found in part.items() for m in found)
        )
        metrics |= compute_data_metrics(batch, use_critic=self.critic is not None)
        metrics |= compute_timing_metrics(batch, run.timing)
        return metrics | compute_throughout_metrics(batch, run.timing, n_gpus=self.n_devices)

    def generate(self, prompts: DataProto) -> DataProto:
        """`rollout.n` responses for each prompt, with the sampler's log-probabilities."""
        rollout = self.config.actor_rollout_ref.rollout
        with self.run.phase("gen"):
            return self.sample(repeat_for_sampling(prompts, rollout.n), validate=False)

    def sample(self, batch: DataProto, validate: bool) -> DataProto:
        """A response for each row. Only what generation reads travels to the workers, and only tensors come back."""
        inputs = batch.select(
            batch_keys=["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["uid", "sample"]
        )
        inputs.meta_info = {"global_steps": self.run.step, "validate": validate}
        output = trim(self.actor_rollout.generate_sequences(inputs))
        output.non_tensor_batch = batch.non_tensor_batch
        output.meta_info = {"temperature": self.config.actor_rollout_ref.rollout.temperature}
        return output

    def score(self, batch: DataProto) -> DataProto:
        """`token_level_scores`: each response's reward on its last token; what else the function returned joins too."""
        with self.run.phase("reward"):
            result = self.reward_fn(batch, return_dict=True)
        batch.batch["token_level_scores"] = result["reward_tensor"]
        self.run.metrics |= result["metrics"]
        for name, values in result["reward_extra_info"].items():
            batch.non_tensor_batch[name] = object_array(values)
        self._reward_columns = list(result["reward_extra_info"])
        return batch

    def balance(self, batch: DataProto) -> DataProto:
        """Order the rows so that every rank gets about the same work."""
        ranks = self.actor_rollout.world_size
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
        if self.recompute_old_log_prob:
            pending["old_log_prob"] = self.actor_rollout.compute_log_prob(inputs)
        if self.reference is not None:
            pending["ref"] = self.reference.compute_ref_log_prob(inputs)
        if self.critic is not None:
            pending["values"] = self.critic.compute_values(inputs)
        for phase, future in pending.items():
            with self.run.phase(phase):
                batch = batch.union(future.get())
        if self.recompute_old_log_prob:
            mask = batch.batch["response_mask"]
            entropy = batch.pop(batch_keys=["entropys"]).batch["entropys"]
            self.run.metrics["actor/entropy"] = masked_mean(entropy, mask).item()
            self.run.metrics |= rollout_probs_diff_metrics(
                batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], mask
            )
        return batch

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """KL penalty in the reward where configured, then `advantages` and `returns`."""
        algorithm = self.config.algorithm
        with self.run.phase("adv"):
            if algorithm.use_kl_in_reward:
                batch, metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)
                self.run.metrics |= metrics
            else:
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            return compute_advantage(batch, algorithm.adv_estimator, algorithm.gamma, algorithm.lam, algorithm)

    def update(self, batch: DataProto) -> None:
        """Every epoch of mini-batches of the critic, then, once it is warmed up, of the actor."""
        batch = in_canonical_order(batch)
        self._trained = batch
        pending: list[tuple[str, Any]] = []
        if self.critic is not None:
            fields = [*MODEL_INPUTS, "values", "returns"]
            for shard in self._update_batches(batch, self.config.critic, self.critic.world_size, fields):
                pending.append(("update_critic", self.critic.update_critic(shard)))
        if self.run.step > self.config.trainer.critic_warmup:
            optional = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "rollout_is_weights")
            fields = [*MODEL_INPUTS, "advantages", *(name for name in optional if name in batch.batch.keys())]
            actor = self.config.actor_rollout_ref.actor
            for shard in self._update_batches(batch, actor, self.actor_rollout.world_size, fields):
                pending.append(("update_actor", self.actor_rollout.update_actor(shard)))
        for phase, future in pending:
            with self.run.phase(phase), self.run.keeping_batch_on_error(batch):
                metrics = future.get().meta_info["metrics"]
            self.run.keep_if_skipped(batch, metrics)
            self._updates.append(metrics)

    def _updates_per_step(self, settings: Any) -> int:
        """Optimizer steps that a model takes in each training step."""
        return settings.ppo_epochs * -(-self.config.data.train_batch_size // settings.ppo_mini_batch_size)

    def _update_batches(self, batch: DataProto, settings: Any, ranks: int, fields: list[str]) -> Iterator[DataProto]:
        """One batch an epoch, arranged for `ModelWorker.update`."""
        epochs = list(
            epochs_of_mini_batches(
                batch.non_tensor_batch["uid"],
                prompts_per_mini_batch=settings.ppo_mini_batch_size,
                epochs=settings.ppo_epochs,
                shuffle=settings.shuffle,
                seed=settings.data_loader_seed + self.run.step,
            )
        )
        chosen = batch.select(batch_keys=fields, non_tensor_batch_keys=[], meta_info_keys=["temperature"])
        chosen.meta_info |= {
            "updates": sum(len(mini_batches) for mini_batches in epochs),
            "response_length": self.config.actor_rollout_ref.rollout.response_length,
            "on_nonfinite": self.config.trainer.on_nonfinite,
        }
        for mini_batches in epochs:
            yield spread_over_ranks(chosen, mini_batches, ranks)

    # ------------------------------------------------------------------ validation and run state

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
            actor = self.config.actor_rollout_ref.actor.checkpoint
            self.actor_rollout.load_checkpoint(str(folder / "actor"), actor.load_contents)
            if self.critic is not None:
                self.critic.load_checkpoint(str(folder / "critic"), self.config.critic.checkpoint.load_contents)
            self.train_loader.load_state_dict(state["train_loader"])
            self.kl_ctrl.load_state_dict(state["kl_ctrl"])

        return self.run.restore(load)

    def save_if_due(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""

        def write(folder: Path) -> dict[str, Any]:
            actor = self.config.actor_rollout_ref.actor.checkpoint
            self.actor_rollout.save_checkpoint(str(folder / "actor"), actor.save_contents)
            if self.critic is not None:
                self.critic.save_checkpoint(str(folder / "critic"), self.config.critic.checkpoint.save_contents)
            return {"train_loader": self.train_loader.state_dict(), "kl_ctrl": self.kl_ctrl.state_dict()}

        self.run.save_if_due(write)


def needs_old_log_prob(config: PPOTrainerConfig) -> bool:
    """Whether log-probabilities are computed once before the first update of a batch.

    With one update a batch the policy that is updated is the one that sampled, so its detached current
    log-probabilities are the old ones and the extra pass can be spared; `actor.recompute_old_log_prob=always` takes it
    nevertheless. A KL penalty in the reward needs them early.
    """
    actor = config.actor_rollout_ref.actor
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    return actor.recompute_old_log_prob == "always" or not one_update or config.algorithm.use_kl_in_reward


def total_training_steps(config: PPOTrainerConfig, batches_per_epoch: int) -> int:
    """`trainer.total_training_steps`, or the steps of `trainer.total_epochs`."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return batches_per_epoch * config.trainer.total_epochs
