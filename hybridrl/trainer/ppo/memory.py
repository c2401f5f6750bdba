"""Device memory of each phase of a step: told before the first, with what to change where it is short."""

from typing import TYPE_CHECKING

from hybridrl.notify import notify

if TYPE_CHECKING:
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TRAINING = (
    "{0}.ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu with use_dynamic_bsz), set "
    "enable_gradient_checkpointing, or offload with {1}.param_offload and optimizer_offload; a rollout "
    f"engine keeps its memory while {_ROLLOUT}.free_cache_engine=False"
)
_GENERATION = (
    f"lower {_ROLLOUT}.max_num_seqs or {_ROLLOUT}.gpu_memory_utilization, raise tensor_model_parallel_size, "
    f"or set {_ACTOR}.fsdp_config.param_offload and optimizer_offload"
)
#: what to change where a phase runs out of memory
SHORT_OF_MEMORY = {
    "gen": _GENERATION,
    "gen_max": _GENERATION,
    "testing": _GENERATION,
    "update_weights": f"lower {_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes or gpu_memory_utilization",
    "old_log_prob": f"lower {_ROLLOUT}.log_prob_micro_batch_size_per_gpu (or log_prob_max_token_len_per_gpu)",
    "ref": "lower actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu (or log_prob_max_token_len_per_gpu)",
    "values": "lower critic.forward_micro_batch_size_per_gpu",
    "update_critic": "lower " + _TRAINING.format("critic", "critic.fsdp"),
    "update_actor": "lower " + _TRAINING.format(_ACTOR, f"{_ACTOR}.fsdp_config"),
}
#: of what an engine took, this share may stay when it was told to release it (graphs, the library itself)
_MAY_STAY = 0.25


class MemoryReport:
    """Used device memory at several points, in GiB on the fullest device.

    Args:
        trainer: with worker groups.
    """

    def __init__(self, trainer: "RayPPOTrainer") -> None:
        self._trainer = trainer
        self._points: list[tuple[str, float]] = []
        self._total = 0.0
        self.told = False

    def note(self, what: str) -> float:
        """Look now, and remember under this name."""
        facts = self._trainer.actor_rollout.device_memory()
        used = max(fact["total_gb"] - fact["free_gb"] for fact in facts)
        self._total = max(fact["total_gb"] for fact in facts)
        self._points.append((what, used))
        return used

    def tell(self) -> None:
        """Print what was noted."""
        self.told = True
        pool = self._trainer.actor_rollout.resource_pool
        where = "device" if getattr(pool, "use_gpu", False) else "this machine's"
        points = ", ".join(f"{what} {used:.1f}" for what, used in self._points)
        notify(f"{where} memory in use, GiB of {self._total:.1f}: {points}")

    def check_released(self, before: float, awake: float, asleep: float) -> None:
        """Warn of an engine that keeps its memory although it was told to release it."""
        taken = awake - before
        if taken > 0 and asleep - before > _MAY_STAY * taken:
            notify(
                f"the rollout engine took {taken:.1f} GiB and gave only {awake - asleep:.1f} back when it was "
                f"told to sleep; training has to do with less. See {_ROLLOUT}.free_cache_engine and engine_kwargs",
                "warning",
            )
