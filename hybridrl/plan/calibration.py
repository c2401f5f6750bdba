"""Seconds of a run as they were measured: next to the predictions, and factors that are calibrated by them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from hybridrl.config.compose import compose_config
from hybridrl.config.differences import differences
from hybridrl.errors import PlacementError, UserError
from hybridrl.observe.run_folder import CONFIG
from hybridrl.observe.run_history import RunHistory, load_history
from hybridrl.plan.configured import configured_plan
from hybridrl.plan.devices import DEVICES, Cluster, device_called
from hybridrl.plan.factors import FITTED
from hybridrl.plan.run_plan import PlanRequest, described_run
from hybridrl.plan.seconds import CostFactors

#: phases of a run that have another name in a plan
_NAMES = {"weights": "update_weights"}
_LENGTHS = {"response": "response_length/mean", "prompt": "prompt_length/mean"}
_STEP = "timing_s/step"
#: what a run trains, and not how: a plan for its devices begins with these settings
_EXPERIMENT = (
    *("data.", "algorithm.", "reward.", "model_engine", "critic.enable", "critic.model.path"),
    *("actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n"),
    *(f"actor_rollout_ref.actor.{name}" for name in ("ppo_mini_batch_size", "ppo_epochs", "use_kl_loss")),
)
_ROUNDS = 12
#: factors by which the seconds of generation, and of training, are multiplied or divided
_GENERATION = {
    **dict.fromkeys(("decode_flops", "decode_memory"), -1),
    **dict.fromkeys(("decode_layer_s", "decode_expert_layer_s", "reduce_s", "network_reduce_s", "sequence_s"), 1),
}
_TRAINING = {"mfu": -1, "all_to_all": -1, "tensor": -1, "layer_s": 1, "expert_layer_s": 1}


@dataclass(frozen=True)
class CalibrationRun:
    """A run with the seconds of its phases.

    Attributes:
        folder: of the run.
        request: its settings, devices and mean lengths.
        steps: number of steps that were measured.
        seconds: median seconds of each phase of its plan, of `rest` and of `step`.
    """

    folder: Path
    request: PlanRequest
    steps: int
    seconds: Mapping[str, float]

    def predicted(self, factors: CostFactors = FITTED) -> dict[str, float]:
        """Predicted seconds of the same phases."""
        return dict(configured_plan(self.request, factors).seconds)

    def rows(self, factors: CostFactors = FITTED) -> list[tuple[str, float, float]]:
        """Return each phase with its measured and its predicted seconds."""
        predicted = self.predicted(factors)
        return [(phase, seconds, predicted[phase]) for phase, seconds in self.seconds.items()]


def read_run(folder: str | Path) -> CalibrationRun:
    """Return the measurements in a run's folder.

    Raises:
        UserError: the folder lacks something, which the message names, or nothing is predicted for such a run.
        PlacementError: its devices have no data sheet.
    """
    history = load_history(folder)
    config = _settings_of(history)
    request = described_run(config, _cluster(history, config))
    steps = [step for step in history.steps() if _STEP in step]
    steps = steps[1:] if len(steps) > 2 else steps  # the first one compiles, allocates and warms up
    predicted = configured_plan(request).seconds
    phases = [phase for phase in predicted if phase not in ("rest", "step")]
    metrics = {phase: f"timing_s/{_NAMES.get(phase, phase)}" for phase in phases}
    needed = [_STEP, *_LENGTHS.values(), *metrics.values()]
    if missing := [name for name in needed if not any(name in step for step in steps)]:
        raise UserError(
            f"{history.folder}: metrics.jsonl has no {', '.join(missing)}, which a calibration needs; name a run of "
            "grpo or ppo with at least one complete step"
        )
    medians = {name: median(step[name] for step in steps if name in step) for name in needed}
    seconds = {phase: medians[name] for phase, name in metrics.items()}
    seconds["rest"] = max(medians[_STEP] - sum(seconds.values()), 0.0)
    data, step = config.data, request.step
    mean_response = min(medians[_LENGTHS["response"]], data.max_response_length)
    mean_prompt = min(medians[_LENGTHS["prompt"]], data.max_prompt_length)
    request = replace(request, step=replace(step, response=mean_response, prompt=mean_prompt), assumed=())
    return CalibrationRun(history.folder, request, len(steps), {**seconds, "step": medians[_STEP]})


def _settings_of(history: RunHistory) -> Any:
    if "actor_rollout_ref" not in history.config or "algorithm" not in history.config:
        reason = f"there is no {CONFIG}" if not history.config else f"{CONFIG} is of another program"
        raise UserError(f"{history.folder}: {reason}; name the folder of a run of grpo or ppo")
    return compose_config("ppo_trainer", [], history.folder, Path(CONFIG).stem).config


def _cluster(history: RunHistory, config: Any) -> Cluster:
    """The devices of a run."""
    device = history.versions.get("device") or {}
    names = list(device.get("names") or ())
    sheet = device_called(str(names[0])) if names else None
    if sheet is None:
        kind = names[0] if names else device.get("kind") or "an unknown device (versions.json names none)"
        raise PlacementError(
            f"{history.folder}: it ran on {kind}, which has no data sheet; runs on {', '.join(DEVICES)} can be compared"
        )
    rollout, per_node = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    count = sum(map(sum, config.placement.pools.values())) if len(config.placement.pools) > 1 else 0
    count = max(count, config.trainer.nnodes * per_node) + rollout.nnodes * rollout.n_gpus_per_node
    machine = per_node if count % per_node == 0 else count
    return Cluster(sheet, count, machine)


def calibrated(run: CalibrationRun, factors: CostFactors = FITTED) -> CostFactors:
    """Return factors by which the phases of a run are predicted as they were measured.

    All factors of generation are changed by the same ratio, and those of training by another one, because one run does
    not tell them apart. What does not depend on a factor, such as offloaded bytes, keeps its seconds.
    """
    phases = [phase for phase in run.seconds if phase not in ("rest", "step")]
    updates = [phase for phase in phases if phase.startswith("update_")]
    passes = [phase for phase in phases if phase not in (*updates, "gen", "weights")]
    for _ in range(_ROUNDS):
        predicted = run.predicted(factors)

        def ratio(names: list[str], now: Mapping[str, float] = predicted) -> float:
            expected, measured = (sum(values[name] for name in names) for values in (now, run.seconds))
            return measured / expected if min(expected, measured) > 0 else 1.0

        changed = {name: getattr(factors, name) * ratio(["gen"]) ** sign for name, sign in _GENERATION.items()}
        changed |= {name: getattr(factors, name) * ratio(updates) ** sign for name, sign in _TRAINING.items()}
        if passes:
            changed["pass_factor"] = factors.pass_factor * ratio(passes) / ratio(updates)
        changed["refit_bytes_s"] = factors.refit_bytes_s / ratio(["weights"])
        changed["fixed_s"] = run.seconds["rest"]
        factors = replace(factors, **changed)
    return factors


def settings_of(run: CalibrationRun) -> dict[str, Any]:
    """Return what a run trains, as values by key, without how it computes."""
    history = load_history(run.folder)
    return {item.key: item.value for item in differences(history.config) if item.key.startswith(_EXPERIMENT)}


def compare(folder: str | Path) -> list[tuple[str, float, float]]:
    """Return the phases of a run with measured and predicted seconds; nothing where no prediction is made."""
    try:
        return read_run(folder).rows()
    except UserError:
        return []
