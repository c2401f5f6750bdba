"""From a scored batch to updated models. `Learner.learn` evaluates, corrects, estimates advantages and updates.

Shapes: B sequences, T response tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.algorithms import check_probe, get_kl_controller, masked_mean
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.prompt_values import PromptValues
from hybridrl.algorithms.sessions import sessions_of
from hybridrl.config import ModelConfig, PPOTrainerConfig
from hybridrl.errors import AlgorithmError, RolloutError
from hybridrl.models.prefix_tree import WORTHWHILE_SHARE, share_saved
from hybridrl.models.work import Work
from hybridrl.protocol import DataProto
from hybridrl.protocol.fields import check_fields
from hybridrl.protocol.names import IMAGE_DIGEST, IMAGE_MASK, MULTI_MODAL_INPUTS, ROUTED_EXPERTS
from hybridrl.protocol.packed import PackedProto
from hybridrl.single_controller import RayWorkerGroup
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.adapter_probe import AdapterProbe
from hybridrl.trainer.ppo.advantage import (
    SLOT,
    add_prompt_values,
    apply_kl_penalty,
    compute_advantage,
    critic_metrics,
    draw_by_reward,
)
from hybridrl.trainer.ppo.batching import (
    balanced_order,
    epochs_of_mini_batches,
    padded_batch,
    seed_of,
    sequence_work,
    spread_over_ranks,
)
from hybridrl.trainer.ppo.correction import PROBE_ROWS, TRAINED_MASK, correct_rollout
from hybridrl.trainer.ppo.memory import memory_advice
from hybridrl.trainer.ppo.reward_transform import RewardTransform
from hybridrl.trainer.ppo.role_groups import POLICY, ROLES, RoleSpec, Update, active_roles
from hybridrl.trainer.ppo.run_requirements import RunRequirements
from hybridrl.trainer.ppo.sampler import ScoredBatch
from hybridrl.trainer.ppo.teacher_rows import add_teacher_index
from hybridrl.utils.metrics import Metric, merge_metrics, reduce_to_floats
from hybridrl.utils.seqlen_balancing import log_seqlen_unbalance
from hybridrl.workers.distillation import Distillation
from hybridrl.workers.loss_prepass import ROW_IDS
from hybridrl.workers.losses import GROUP_IDS
from hybridrl.workers.update_plan import UpdatePlan

MODEL_INPUTS = ["responses", "input_ids", "attention_mask", "position_ids", "response_mask"]
OPTIONAL_INPUTS = [IMAGE_MASK]  # of models that read images


@dataclass(frozen=True)
class StepResult:
    """The result of one learning step.

    Attributes:
        step: the number of the step, from 1.
        batch: the batch that was learned from, with rows in the sampler's order and the fields computed on the way
            (`old_log_probs`, `ref_log_prob`, `teacher_log_probs`, `values`, `token_level_rewards`, `advantages`,
            `returns` [B, T]).
        metrics: metrics of evaluation, correction, advantages and updates.
        timing: seconds per phase: `old_log_prob`, `ref`, `teacher`, `values`, `rollout_corr`, `adv`, `update_critic`,
            `update_actor`.
    """

    step: int
    batch: DataProto
    metrics: dict[str, float]
    timing: dict[str, float]


class Learner:
    """Learns from scored batches; owns the worker groups, the KL controller and the reward transform.

    Args:
        config: the whole configuration.
        groups: the started worker groups, by role.
        failed_batches: keeps batches whose update failed.

    Attributes:
        roles: the roles that take part, in the order of evaluation; see `ROLES`.
        step: number of batches learned from.
        on_weights_change: called before the weights of any role change. Whatever generates with them adds
            `Rollout.weights_will_change`.
    """

    def __init__(
        self, config: PPOTrainerConfig, groups: Mapping[str, RayWorkerGroup], failed_batches: FailedBatches
    ) -> None:
        self.config = config
        self.groups = groups
        self.roles = [spec for spec in active_roles(config) if spec.name in groups]
        self.policy = groups[POLICY]
        self.failed_batches = failed_batches
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.reward_transform = RewardTransform(config.algorithm)
        self.prompt_values = PromptValues(config.algorithm.spo_rho)
        self.needs = RunRequirements.of(config)
        self.step = 0
        self.on_weights_change: list[Callable[[], None]] = []
        self._shares: dict[str, bool | None] = {}  # what the workers of a role answered
        self._works: dict[str, Work | None] = {}
        self.adapter_probe = AdapterProbe() if config.actor_rollout_ref.model.adapted else None

    def init_models(self, total_steps: int) -> None:
        """Have the workers build and load their models, with schedules of `total_steps` training steps."""
        for spec in reversed(self.roles):
            steps, updates = total_steps, 1
            if spec.update is not None:
                steps = max(total_steps - spec.update.after(self.config), 1)
                updates = self._updates_per_step(spec.settings_of(self.config))
            self.groups[spec.name].init_model(steps, updates)

    def learn(self, sampled: ScoredBatch) -> StepResult:
        """Run one step: evaluate, correct, estimate advantages, update."""
        self.step += 1
        timer = PhaseTimer(memory_advice())
        batch = padded_batch(sampled.batch)  # fields added here do not appear in the sampler's batch
        metrics = self.update(batch, timer, first=True)  # models that evaluate the batch once they have learned from it
        metrics |= self.evaluate(batch, timer)  # old_log_probs, ref_log_prob, values
        metrics |= self.probe_adapter(batch, timer)
        metrics |= self.correct(batch, sampled.probe, timer)  # for the mismatch between sampler and trainer
        metrics |= self.estimate_advantages(batch, timer)
        metrics |= self.update(batch, timer)  # critic, then actor
        return StepResult(self.step, batch, metrics, dict(timer.seconds))

    # ------------------------------------------------------------------ the phases; each adds to the batch

    def evaluate(self, batch: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """Add log-probabilities before the update, reference log-probabilities and values, each if it is needed.

        All passes are started before the first result is awaited, so that models on different devices compute in
        parallel. With `trainer.balance_batch` the rows are ordered so that every rank gets about the same work. The
        results are returned in the order of the batch.

        Raises:
            RolloutError: router replay needs the experts of the sampler, and the batch has none.
        """
        if self.needs.sampled_experts and ROUTED_EXPERTS not in batch.batch.keys():
            raise RolloutError(
                "actor_rollout_ref.actor.router_replay.mode replays the experts that tokens chose in generation, and "
                f"the rollout returned no field {ROUTED_EXPERTS} [B, S, L, K]; return it, by "
                f"Trajectory.{ROUTED_EXPERTS}, or set router_replay.mode to R2 or disabled"
            )
        add_teacher_index(batch, self.config)
        passes = [(spec, each) for spec in self.roles for each in spec.passes if each.needed(self.needs)]
        # Engines on devices of other roles answer before the models there begin, whose memory they need.
        passes.sort(key=lambda pair: not getattr(self.groups[pair[0].name], "blocking", False))
        inputs, back, metrics = self._balanced(
            _inputs(batch, [name for _, each in passes for name in each.optional]),
            self._families(batch, ROLES[POLICY]),
        )
        inputs.meta_info["ref_kl"] = self.needs.ref_kl
        pending = []
        for spec, each in passes:
            with timer.phase(each.phase):
                call = getattr(self.groups[spec.name], each.method)
                names = [name for name in _input_names(each.optional) if name in inputs.tensor_names()]
                pending.append((each.phase, call(inputs.select(names))))
        for phase, future in pending:
            with timer.phase(phase):
                result = future.get()
                batch.union(result if back is None else result.select_idxs(back))
        if "entropys" in batch.batch.keys():
            entropy = batch.pop(batch_keys=["entropys"]).batch["entropys"]
            metrics["actor/entropy"] = masked_mean(entropy, batch.batch["response_mask"]).item()
        return metrics | self._add_scores(batch)

    def _add_scores(self, batch: DataProto) -> dict[str, float]:
        """Add the scores of roles that compute scores to those of the reward function."""
        metrics: dict[str, float] = {}
        for spec in self.roles:
            if spec.scores is not None:
                scores = torch.where(batch.batch["response_mask"].bool(), spec.scores(batch), 0.0)
                batch.batch["token_level_scores"] = batch.batch["token_level_scores"] + scores
                metrics[f"{spec.name}/score/mean"] = scores.sum(dim=-1).mean().item()
        return metrics

    def _families(self, batch: DataProto, spec: RoleSpec) -> np.ndarray | None:
        """Return the prompt of each row if rows of a prompt are to stay on one rank; else None.

        They are if the role's engine computes tokens once that rows share: always, or where that saves enough tokens
        of this batch.
        """
        group = self.groups[spec.name]
        if group.dp_size(spec.mesh) == 1:
            return None
        if spec.name not in self._shares:
            ask = getattr(group, "shares_prefixes", None)  # of `ModelWorker`; a role's workers may have another base
            self._shares[spec.name] = False if ask is None else ask()[0]
        shares, prompts = self._shares[spec.name], batch.non_tensor_batch["uid"]
        if shares is None:
            fields = batch.batch
            shares = share_saved(fields["input_ids"], fields["attention_mask"], prompts) > WORTHWHILE_SHARE
        return prompts if shares else None

    def _work(self, spec: RoleSpec) -> Work | None:
        """Return what a sequence costs the role's model; None if it is not known here."""
        if spec.name not in self._works:
            model = getattr(spec.config_of(self.config), "model", None)
            self._works[spec.name] = sequence_work(model) if isinstance(model, ModelConfig) else None
        return self._works[spec.name]

    def _balanced(
        self, inputs: DataProto, families: np.ndarray | None
    ) -> tuple[PackedProto, torch.Tensor | None, dict[str, float]]:
        """Return the packed rows in balanced order, the inverse order (None: they keep theirs), and metrics."""
        ranks = self.policy.dp_size(ROLES[POLICY].mesh)
        if not self.config.trainer.balance_batch or ranks == 1 or len(inputs) % ranks:
            return PackedProto.of(inputs), None, {}
        order = balanced_order(inputs, ranks, families, self._work(ROLES[POLICY]))
        lengths = inputs.batch["attention_mask"].sum(dim=1)
        shards = [shard.tolist() for shard in order.chunk(ranks)]
        metrics = log_seqlen_unbalance(lengths.tolist(), shards, prefix="global_seqlen")
        return PackedProto.of(inputs).select_idxs(order), torch.argsort(order), metrics

    def probe_adapter(self, batch: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """With LoRA, until it is proven: check on a few rows that the sampler used the adapter; see `AdapterProbe`.

        Raises:
            RolloutError: it did not.
        """
        if self.adapter_probe is None or self.adapter_probe.done or "rollout_log_probs" not in batch.batch.keys():
            return {}
        with timer.phase("rollout_corr"):
            rows = batch[:PROBE_ROWS]
            inputs, log_probs = _inputs(rows, [ROUTED_EXPERTS]), {}
            for name, method in (("old_log_probs", "compute_log_prob"), ("ref_log_prob", "compute_ref_log_prob")):
                source = rows if name in rows.batch.keys() else getattr(self.policy, method)(inputs).get()
                log_probs[name] = source.batch[name]
            fields = rows.batch
            return self.adapter_probe.check(
                log_probs["old_log_probs"],
                log_probs["ref_log_prob"],
                fields["rollout_log_probs"],
                fields["response_mask"],
            )

    def correct(self, batch: DataProto, probe: DataProto | None, timer: PhaseTimer) -> dict[str, float]:
        """Measure the mismatch between sampler and trainer, and correct it as `algorithm.rollout_correction` says.

        On the first step, a difference that rounding cannot explain ends the run.
        """
        settings, metrics = self.config.algorithm.rollout_correction, {}
        with timer.phase("rollout_corr"):
            if self.step == 1 and settings.probe_threshold is not None:
                metrics = self.compare_with_sampler(batch if probe is None else probe, settings.probe_threshold)
            version = self.step - 1 if self.config.trainer.v1.staleness else None
            return metrics | correct_rollout(batch, settings, version)

    def compare_with_sampler(self, batch: DataProto, threshold: float) -> dict[str, float]:
        """Compare sampler and trainer with the same weights, on tokens sampled without top-p or top-k.

        Args:
            batch: as generated; log-probabilities are computed for a few of its rows if it has none.

        Returns:
            `rollout_corr/probe_*`.

        Raises:
            AlgorithmError: they differ by more than `threshold`, so they are not the same model.
        """
        if "old_log_probs" not in batch.batch.keys():
            batch = batch[:PROBE_ROWS]
            result = self.policy.compute_log_prob(_inputs(batch, [ROUTED_EXPERTS])).get()
            batch = batch.union(result.select(batch_keys=["old_log_probs"]))
        fields = batch.batch
        return check_probe(fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"], threshold)

    def estimate_advantages(self, batch: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """Add rewards (normalised, clipped and minus a KL penalty, as configured), `advantages` and `returns`."""
        algorithm, fields = self.config.algorithm, batch.batch
        metrics: dict[str, float] = {}
        with timer.phase("adv"):
            fields["token_level_rewards"], baselines = self._transformed_rewards(batch)
            if baselines is not None:
                fields["reward_baselines"] = baselines
            if algorithm.use_kl_in_reward:
                batch, metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)
            if self.needs.prompt_values:
                metrics |= add_prompt_values(batch, self.prompt_values)
            compute_advantage(batch, algorithm.adv_estimator, algorithm.gamma, algorithm.lam, algorithm)
            if self.needs.values:
                metrics |= critic_metrics(batch, algorithm.gamma)
        return metrics

    def _transformed_rewards(self, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores and baselines after `reward_transform`, for which the rows of a session are one sequence."""
        fields, width = batch.batch, batch.batch["responses"].shape[-1]
        scores, mask = fields["token_level_scores"], fields["response_mask"]
        baselines = fields.get("reward_baselines", None)
        sessions = sessions_of(batch)
        if sessions is None:
            return self.reward_transform(scores, mask, baselines)
        joined = None if baselines is None else sessions.join(baselines)
        rewards, baselines = self.reward_transform(sessions.join(scores), sessions.join(mask), joined)
        return sessions.split(rewards, width), None if baselines is None else baselines[sessions.groups.ids]

    def update(self, batch: DataProto, timer: PhaseTimer, first: bool = False) -> dict[str, float]:
        """Run all epochs of mini-batches for the critic and then, once the critic is warmed up, for the policy.

        Args:
            first: update only the roles that learn before the passes; see `Update`.
        """
        learning = [spec for spec in self.roles if spec.update is not None and spec.update.first(self.config) == first]
        if not learning:
            return {}
        self._announce_change()
        algorithm = self.config.algorithm
        if algorithm.use_pf_ppo and not first:
            if sessions_of(batch) is not None:
                raise AlgorithmError(
                    "algorithm.use_pf_ppo=True draws single rows, and an agent loop returned several trajectories for "
                    "a session; return one, or set algorithm.use_pf_ppo=False"
                )
            seed = seed_of(self.config.actor_rollout_ref.actor.data_loader_seed, self.step)
            batch = draw_by_reward(batch, algorithm.pf_ppo, seed)
        pending: list[tuple[str, Any]] = []
        for spec in reversed(learning):
            if spec.update is not None and self.step > spec.update.after(self.config):
                call = getattr(self.groups[spec.name], spec.update.method)
                pending += [
                    (spec.update.phase, call(shards)) for shards in self.update_batches(batch, spec, spec.update)
                ]
        parts: list[dict[str, Metric]] = []
        for phase, future in pending:
            with timer.phase(phase), self.failed_batches.keeping(batch, self.step):
                metrics = future.get().meta_info["metrics"]
            self.failed_batches.keep_if_skipped(batch, self.step, metrics)
            parts += [{name: metric} for name, of_ranks in metrics.items() for metric in of_ranks]
        return reduce_to_floats(merge_metrics(parts))

    def _announce_change(self) -> None:
        for call in self.on_weights_change:
            call()

    def _updates_per_step(self, settings: Any) -> int:
        """Return the number of optimizer steps that a model takes per training step."""
        return settings.ppo_epochs * -(-self.config.data.train_batch_size // settings.ppo_mini_batch_size)

    def update_batches(self, batch: DataProto, spec: RoleSpec, update: Update) -> Iterator[DataProto]:
        """Yield one batch per epoch, arranged for `ModelWorker.update`."""
        settings, dp_size = spec.settings_of(self.config), self.groups[spec.name].dp_size(spec.mesh)
        optional = [name for name in (*OPTIONAL_INPUTS, *update.optional) if name in batch.batch.keys()]
        fields = [*MODEL_INPUTS, *update.fields, *optional]
        objects, sessions = batch.non_tensor_batch, sessions_of(batch)
        if sessions is not None and not hasattr(settings, "loss_agg_mode"):
            raise AlgorithmError(
                f"the role {spec.name} learns from one response per sample, and an agent loop returned several "
                "trajectories for a session; return one, or leave the role out"
            )
        check_fields(f"{spec.name}.{update.method}", fields, set(map(str, batch.batch.keys())))
        epochs = list(
            epochs_of_mini_batches(
                objects.get(SLOT, objects["uid"]),
                prompts_per_mini_batch=settings.ppo_mini_batch_size,
                epochs=settings.ppo_epochs,
                shuffle=settings.shuffle,
                seed=settings.data_loader_seed + self.step,
            )
        )
        inputs = batch.select(batch_keys=fields, non_tensor_batch_keys=_images(batch), meta_info_keys=[])
        if TRAINED_MASK in batch.batch.keys():
            inputs.batch["response_mask"] = batch.batch[TRAINED_MASK]
        inputs.batch[ROW_IDS] = torch.arange(len(batch))
        inputs.batch[GROUP_IDS] = Groups(objects["uid"], torch.device("cpu")).ids
        packed = PackedProto.of(inputs)
        seed, families = partial(seed_of, settings.data_loader_seed, self.step), self._families(batch, spec)
        for epoch, mini_batches in enumerate(epochs):
            seeds = [seed(epoch, number) for number in range(len(mini_batches))]
            spread, planned = spread_over_ranks(
                packed,
                mini_batches,
                dp_size,
                seeds,
                families,
                sessions=None if sessions is None else sessions.groups.ids.numpy(),
                work=self._work(spec),
            )
            yield UpdatePlan(
                mini_batches=planned,
                dp_size=dp_size,
                updates=sum(map(len, epochs)),
                skip_nonfinite=self.config.trainer.on_nonfinite == "skip",
                response_length=self.config.actor_rollout_ref.rollout.response_length,
                temperature=self.config.actor_rollout_ref.rollout.temperature,
                rollout_correction=self.config.algorithm.rollout_correction,
                distillation=Distillation.of(self.config),
            ).attach_to(spread)

    # ------------------------------------------------------------------ state

    @property
    def background_writers(self) -> list[Any]:
        """The groups that go on writing after `save` has returned."""
        saved = [spec for spec in self.roles if spec.saved is not None]
        return [self.groups[spec.name] for spec in saved if spec.settings_of(self.config).checkpoint.async_save]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the models, and return the rest of the state."""
        for spec in self.roles:
            if spec.saved is not None:
                checkpoint = spec.settings_of(self.config).checkpoint
                how = {"in_background": True} if checkpoint.async_save else {}
                where = str(folder / spec.saved)
                self.groups[spec.name].save_checkpoint(where, checkpoint.save_contents, **how)
        return {
            "kl_ctrl": self.kl_ctrl.state_dict(),
            "reward_transform": self.reward_transform.state_dict(),
            "prompt_values": self.prompt_values.state_dict(),
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Load the weights, optimizers and schedules of a checkpoint, the KL coefficient, the reward statistics and
        the values of prompts."""
        self._announce_change()
        for spec in self.roles:
            if spec.saved is not None:
                contents = spec.settings_of(self.config).checkpoint.load_contents
                self.groups[spec.name].load_checkpoint(str(folder / spec.saved), contents)
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        self.reward_transform.load_state_dict(state["reward_transform"])
        self.prompt_values.load_state_dict(state.get("prompt_values", {}))  # earlier versions tracked none


def _inputs(batch: DataProto, optional: Sequence[str]) -> DataProto:
    """Return the rows with `MODEL_INPUTS` and those of the further fields that the batch has."""
    check_fields("each model of the run", MODEL_INPUTS, set(map(str, batch.batch.keys())))
    fields = [name for name in _input_names(optional) if name in MODEL_INPUTS or name in batch.batch.keys()]
    meta = [name for name in ("temperature", "ref_kl") if name in batch.meta_info]
    return batch.select(batch_keys=fields, non_tensor_batch_keys=_images(batch), meta_info_keys=meta)


def _input_names(optional: Sequence[str]) -> list[str]:
    """The names of `MODEL_INPUTS`, and of the further fields that a batch may have."""
    return [*MODEL_INPUTS, *dict.fromkeys([*OPTIONAL_INPUTS, *optional])]


def _images(batch: DataProto) -> list[str]:
    """The columns that the models of the run need of the rows' images, if they have any."""
    return [name for name in (MULTI_MODAL_INPUTS, IMAGE_DIGEST) if name in batch.non_tensor_batch]
