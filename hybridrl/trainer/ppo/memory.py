"""Device memory of each phase of a step, reported before the first step, and advice for when it runs out."""

from hybridrl.notify import notify
from hybridrl.single_controller import RayWorkerGroup
from hybridrl.trainer.ppo.roles import ROLES

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR_OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload and optimizer_offload"
_GENERATION = (
    f"lower {_ROLLOUT}.max_num_seqs or {_ROLLOUT}.gpu_memory_utilization, raise tensor_model_parallel_size, "
    f"or set {_ACTOR_OFFLOAD}"
)
#: the fraction of an engine's memory that may stay allocated after a release (graphs, the library itself)
_MAY_STAY = 0.25


def memory_advice() -> dict[str, str]:
    """Return what to change if a phase runs out of memory, by phase."""
    advice = {
        "gen": _GENERATION,
        "gen_max": _GENERATION,
        "testing": _GENERATION,
        "update_weights": (
            f"lower {_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes or gpu_memory_utilization"
        ),
    }
    for spec in ROLES.values():
        advice |= {one.phase: one.advice for one in spec.passes if one.advice}
        if spec.update is not None and spec.update.advice:
            advice[spec.update.phase] = spec.update.advice
    return advice


class MemoryReport:
    """Used device memory at several points, in GiB on the fullest device.

    Args:
        group: the policy's worker group, on whose devices everything runs.
    """

    def __init__(self, group: RayWorkerGroup) -> None:
        self._group = group
        self._points: list[tuple[str, float]] = []
        self._total = 0.0
        self.printed = False

    def note(self, what: str) -> float:
        """Measure now and record the result under this name."""
        facts = self._group.device_memory()
        used = max(fact["total_gb"] - fact["free_gb"] for fact in facts)
        self._total = max(fact["total_gb"] for fact in facts)
        self._points.append((what, used))
        return used

    def print(self) -> None:
        """Print the recorded values."""
        self.printed = True
        where = "device" if getattr(self._group.resource_pool, "use_gpu", False) else "this machine's"
        points = ", ".join(f"{what} {used:.1f}" for what, used in self._points)
        notify(f"{where} memory in use, GiB of {self._total:.1f}: {points}")

    def check_released(self, before: float, awake: float, asleep: float) -> None:
        """Warn of an engine that keeps its memory after it was told to release it."""
        taken = awake - before
        if taken > 0 and asleep - before > _MAY_STAY * taken:
            notify(
                f"the rollout engine took {taken:.1f} GiB and gave only {awake - asleep:.1f} back when it was "
                f"told to sleep; training has to do with less. See {_ROLLOUT}.free_cache_engine and engine_kwargs",
                "warning",
            )
