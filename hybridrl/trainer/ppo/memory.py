"""Memory of each phase of a step, reported before the first step, and advice for when it runs out."""

import math
from collections.abc import Mapping

from hybridrl.notify import notify
from hybridrl.single_controller import RayWorkerGroup
from hybridrl.trainer.memory_peaks import ExpectedMemory, PhasePeaks
from hybridrl.trainer.ppo.role_groups import ROLES
from hybridrl.utils.metrics import Metric, merge_metrics, reduce_to_floats

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR_OFFLOAD = "param_offload and optimizer_offload in actor_rollout_ref.actor.fsdp_config (or .megatron)"
_GENERATION = (
    f"lower {_ROLLOUT}.max_num_seqs or {_ROLLOUT}.gpu_memory_utilization, raise tensor_model_parallel_size, "
    f"or set {_ACTOR_OFFLOAD}"
)
#: the phase whose forecast lacks the cache of `rollout.name=hf`
_GENERATE = "gen"
#: the fraction of an engine's memory that may stay allocated after a release (graphs, the library itself)
_MAY_STAY = 0.25
#: GiB for the contexts of CUDA and for buffers of collectives
_RESERVE = 2.0


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
        advice |= {each.phase: each.advice for each in spec.passes if each.advice}
        if spec.scoring is not None and spec.scoring.advice:
            advice[spec.scoring.phase] = spec.scoring.advice
        if spec.update is not None and spec.update.advice:
            advice[spec.update.phase] = spec.update.advice
    return advice


def phase_peaks(groups: Mapping[str, RayWorkerGroup], forecast: ExpectedMemory | None = None) -> PhasePeaks:
    """Return the object that measures the peak of memory in each phase of a step.

    Args:
        groups: worker groups by role.
        forecast: what was expected of the run.
    """
    measured = [(group, _phases_of(name)) for name, group in groups.items()]
    return PhasePeaks(measured, forecast, apart=(_GENERATE,))


def pass_metrics(groups: Mapping[str, RayWorkerGroup]) -> dict[str, float]:
    """Return `perf/shared_flops_frac/<phase>` and the like, of the passes since the last call, over all ranks.

    Passes within an update are left out.
    """
    parts: list[dict[str, Metric]] = []
    for name, group in groups.items():
        phases = _phases_of(name)
        for of_methods in group.pop_pass_metrics() if hasattr(group, "pop_pass_metrics") else []:
            for method, metrics in of_methods.items():
                if method in phases and method != "update":
                    parts.append({f"perf/{metric}/{phases[method]}": value for metric, value in metrics.items()})
    return reduce_to_floats(merge_metrics(parts))


def _phases_of(role: str) -> dict[str, str]:
    """The phase of each method of a role's workers that computes with its model."""
    spec = ROLES.get(role)
    phases = {"send_weights": "update_weights", "generate_sequences": _GENERATE}
    if spec is not None:
        phases |= {each.method: each.phase for each in spec.passes}
        phases |= {spec.scoring.method: spec.scoring.phase} if spec.scoring is not None else {}
        phases |= {"update": spec.update.phase} if spec.update is not None else {}
    return phases


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

    def note(self, point: str) -> float:
        """Measure now and record the result under this name."""
        devices = self._group.device_memory()
        used = max(device["total_gb"] - device["free_gb"] for device in devices)
        self._total = max(device["total_gb"] for device in devices)
        self._points.append((point, used))
        return used

    def print(self) -> None:
        """Print the recorded values."""
        self.printed = True
        where = "device" if getattr(self._group.resource_pool, "use_gpu", False) else "this machine's"
        points = ", ".join(f"{point} {used:.1f}" for point, used in self._points)
        notify(f"{where} memory in use, GiB of {self._total:.1f}: {points}")

    def check_fits(self, models: float, states: float, utilization: float) -> None:
        """Warn if training and an engine on the same device need more than it has.

        Args:
            models: memory in use once the models are loaded.
            states: what the optimizers' states will take besides, and keep.
            utilization: the share of the device that the engine takes.
        """
        engine = utilization * self._total
        needed = models + states + engine + _RESERVE
        if needed > self._total:
            lower = math.floor(100 * max(0.0, 1 - (needed - engine) / self._total)) / 100
            notify(
                f"a device has {self._total:.1f} GiB, and {needed:.1f} are needed while the policy generates: "
                f"{models:.1f} for loaded models, {states:.1f} for optimizer states, {engine:.1f} for the engine "
                f"({_ROLLOUT}.gpu_memory_utilization={utilization:g}), {_RESERVE:.1f} in reserve. Lower it to "
                f"{lower:.2f} or less, or set {_ACTOR_OFFLOAD}",
                "warning",
            )

    def check_released(self, before: float, awake: float, asleep: float) -> None:
        """Warn of an engine that keeps its memory after a release."""
        of_engine = awake - before
        if of_engine > 0 and asleep - before > _MAY_STAY * of_engine:
            notify(
                f"the rollout engine took {of_engine:.1f} GiB and released only {awake - asleep:.1f}, so training has "
                f"less memory. See {_ROLLOUT}.free_cache_engine and engine_kwargs",
                "warning",
            )
