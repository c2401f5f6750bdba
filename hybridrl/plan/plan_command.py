"""`hybridrl plan grpo key=value ... devices=64xH100`: placements and layouts, with predicted seconds and bytes."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from hybridrl.config.compose import compose_config, print_notices
from hybridrl.errors import PlacementError, UserError
from hybridrl.plan.calibration import CalibrationRun, calibrated, read_run, settings_of
from hybridrl.plan.devices import DEVICES, Cluster, read_devices
from hybridrl.plan.factors import FITTED, STEP_ERROR
from hybridrl.plan.overrides import overrides
from hybridrl.plan.run_plan import ROLLOUT, PlanRequest, RunPlan, is_tie, plans, request_for, why_none_fits
from hybridrl.plan.seconds import CostFactors
from hybridrl.programs import PROGRAMS

_GIB = 1024**3
_PROGRAMS = ("grpo", "ppo")
_HEADERS = ("", "placement", "training", "generation", "s/step", "gen", "prepare", "update", "GiB", "fullest phase")
WARNING = (
    "Seconds and bytes are predictions. Factors are fitted to step times that other projects have published; no run of "
    "this library on several GPUs is among them (docs/plan.md)."
)


def main(argv: Sequence[str] | None = None, command: str = "python -m hybridrl.plan.plan_command") -> int:
    """Run the command line.

    Returns:
        0; or 2 with one message where something is wrong or nothing fits.
    """
    args = _arguments(argv, command)
    try:
        run = None if args.run is None else read_run(args.run)
        factors = FITTED if run is None else calibrated(run)
        request = read_request(args.program, args.words, run)
        proposals = plans(request, factors)
        if not proposals:
            raise PlacementError(why_none_fits(request))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    more = _with_more(request, factors)
    if args.json:
        data = as_data(request, proposals, more)
        print(json.dumps(data if run is None else {**data, "run": _run_data(run)}, indent=2))
    else:
        lines = [] if run is None else [*run_lines(run), ""]
        print("\n".join([*lines, *as_lines(request, proposals[: args.rows], more)]))
    return 0


def run_lines(run: CalibrationRun) -> list[str]:
    """Return the seconds of a run's phases next to the predicted ones."""
    cluster = run.request.cluster
    heading = f"{run.folder}, {run.steps} steps on {cluster.count} x {cluster.device.name}: seconds (predicted)"
    rows = [f"  {phase}: {seconds:.1f} ({predicted:.1f})" for phase, seconds, predicted in run.rows()]
    return [heading, *rows, "The factors of the plans below are calibrated by it."]


def _run_data(run: CalibrationRun) -> dict[str, Any]:
    rows = {phase: {"measured": seconds, "predicted": predicted} for phase, seconds, predicted in run.rows()}
    return {"folder": str(run.folder), "steps": run.steps, "seconds": rows, "factors": asdict(calibrated(run))}


def read_request(program: str, words: Sequence[str], run: CalibrationRun | None = None) -> PlanRequest:
    """Return what the words of a command line ask for: `devices`, `machine`, `response`, `prompt`, and settings.

    Args:
        run: its devices, mean lengths and experiment are the defaults of what the words do not say.

    Raises:
        UserError: a word, a setting or a model is wrong.
    """
    defaults = dict(PROGRAMS[program].defaults)
    if run is not None:
        step = run.request.step
        defaults |= {**settings_of(run), "placement.response": step.response, "placement.prompt": step.prompt}
    composed = compose_config(PROGRAMS[program].tree, words, defaults=defaults)
    config: Any = composed.config
    placement = config.placement
    if placement.devices is not None:
        cluster = read_devices(placement.devices, placement.machine)
    elif run is not None:
        cluster = run.request.cluster
    else:
        raise PlacementError(f"devices is not set; write for example devices=64xH100, of {', '.join(DEVICES)}")
    print_notices(composed.notices)
    return request_for(config, cluster)


def _with_more(request: PlanRequest, factors: CostFactors) -> tuple[Cluster, RunPlan] | None:
    """The first plan with one machine more."""
    larger = replace(request.cluster, count=request.cluster.count + request.cluster.machine)
    proposals = plans(replace(request, cluster=larger), factors)
    return (larger, proposals[0]) if proposals else None


def training_words(plan: RunPlan) -> str:
    """The training layout of the actor in a few words."""
    layout = plan.layouts["actor"]
    if plan.sharded:
        parts = ["fsdp2" if layout.shards == plan.devices_of("actor") else f"fsdp2 x{layout.shards}"]
        parts += [f"ulysses {layout.context}"] * (layout.context > 1)
        parts += [f"ep {layout.expert}"] * (layout.expert > 1)
    else:
        sizes = {"tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context, "ep": layout.expert}
        parts = ["megatron", *(f"{name}{size}" for name, size in sizes.items() if size > 1)]
    parts += ["offload"] * (layout.offload > 0) + ["no recompute"] * (not layout.recompute)
    return " ".join([*parts, f"{layout.micro_tokens} tokens"])


def _stage(plan: RunPlan, *names: str) -> float:
    return sum(value for name, value in plan.seconds.items() if name in names)


def _cells(number: int, plan: RunPlan, fastest: float) -> tuple[str, ...]:
    fullest = max(plan.memory, key=lambda name: plan.memory[name])
    replicas = plan.replicas
    return (
        f"{number}{'=' if is_tie(plan, fastest) else ' '}",
        " | ".join(f"{'+'.join(roles)} {size}" for roles, size in plan.sets),
        training_words(plan),
        f"{plan.devices_of(ROLLOUT) // replicas.tensor} x tp{replicas.tensor}",
        f"{plan.step_s:.0f}",
        f"{_stage(plan, 'gen', 'weights'):.0f}",
        f"{_stage(plan, 'old_log_prob', 'ref', 'values', 'reward_model'):.0f}",
        f"{_stage(plan, 'update_actor', 'update_critic'):.0f}",
        f"{plan.memory[fullest] / _GIB:.0f}",
        fullest,
    )


def limits(request: PlanRequest, plan: RunPlan) -> list[str]:
    """Describe the limits of a plan: its longest phase, and its fullest one."""
    own = {name: value for name, value in plan.seconds.items() if name not in ("step", "rest")}
    longest, fullest = (max(part, key=lambda name: part[name]) for part in (own, plan.memory))
    device = request.cluster.device
    remedies = {
        "gen": "shorter responses, more devices, or fewer samples (rollout.n)",
        "weights": "fewer, larger steps (data.train_batch_size)",
    }
    remedy = remedies.get(longest, "more devices, or fewer tokens per step")
    share = plan.memory[fullest] / (device.memory_gb * 1e9)
    return [
        f"time: {longest} is {own[longest] / plan.step_s:.0%} of the step; {remedy} would shorten it",
        f"memory: {fullest} takes {plan.memory[fullest] / _GIB:.0f} GiB per device, {share:.0%} of it",
    ]


def as_lines(request: PlanRequest, proposals: Sequence[RunPlan], more: tuple[Cluster, RunPlan] | None) -> list[str]:
    """Return the printed text."""
    cluster, first = request.cluster, proposals[0]
    fastest = min(plan.step_s for plan in proposals)
    table = [_HEADERS, *(_cells(number, plan, fastest) for number, plan in enumerate(proposals, start=1))]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEADERS))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table]
    lines = [
        f"{cluster.count} x {cluster.device.name}, {cluster.machines} x {cluster.machine}; "
        f"{request.step.samples} samples per step, {request.step.updates} updates",
        *(f"assumed: {text}" for text in request.assumed),
        "",
        *rows,
        "",
        f"= tied with the fastest: within {STEP_ERROR:.0%}, the error of the prediction. Simplest first.",
        WARNING,
        "",
        "settings of plan 1:",
        *_block(overrides(request, first)),
        "",
        *limits(request, first),
    ]
    if more is not None:
        larger, plan = more
        gain = first.step_s / plan.step_s
        lines.append(
            f"one machine more ({larger.count} devices): {plan.step_s:.0f} s per step, {gain:.2f} times as fast"
        )
    return lines


def _block(words: dict[str, str]) -> list[str]:
    """The settings as words for a shell, one a line."""
    quoted = [f"'{key}={value}'" if set(value) & set("{[") else f"{key}={value}" for key, value in words.items()]
    return [f"    {word} \\" for word in quoted[:-1]] + [f"    {quoted[-1]}"]


def as_data(request: PlanRequest, proposals: Sequence[RunPlan], more: tuple[Cluster, RunPlan] | None) -> dict[str, Any]:
    """Return what `--json` prints: seconds, and bytes per device."""
    fastest = min(plan.step_s for plan in proposals)
    listed = [
        {
            "placement": [{"roles": list(roles), "devices": size} for roles, size in plan.sets],
            "engine": "fsdp2" if plan.sharded else "megatron",
            "layouts": {role: asdict(layout) for role, layout in plan.layouts.items()},
            "generation": asdict(plan.replicas),
            "predicted_seconds": dict(plan.seconds),
            "predicted_bytes": dict(plan.memory),
            "tie": is_tie(plan, fastest),
            "overrides": overrides(request, plan),
        }
        for plan in proposals
    ]
    result = {
        "devices": {"name": request.cluster.device.name, "count": request.cluster.count},
        "assumed": list(request.assumed),
        "relative_error": STEP_ERROR,
        "note": WARNING,
        "plans": listed,
        "limits": limits(request, proposals[0]),
    }
    if more is not None:
        result["one_machine_more"] = {"devices": more[0].count, "predicted_step_seconds": more[1].step_s}
    return result


def _arguments(argv: Sequence[str] | None, command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command,
        usage="%(prog)s {grpo,ppo} [options] devices=NxDEVICE key=value ...\n"
        "       %(prog)s --from RUN [key=value ...]",
        description="Predict which placement and layouts are the fastest for a run, in the run's own settings.",
        epilog=f"devices: {', '.join(DEVICES)}. machine=N: devices per machine. response=MEAN, prompt=MEAN: mean "
        "tokens. A setting that is given is kept; the others are chosen.",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="the program, devices=, and settings of the run")
    parser.add_argument(
        "--from",
        dest="run",
        metavar="RUN",
        help="folder of a run of grpo or ppo, whose seconds calibrate the predictions; what it trains is planned for",
    )
    parser.add_argument("--rows", type=int, default=8, help="rows of the table")
    parser.add_argument("--json", action="store_true", help="print plans as JSON, with their settings")
    args = parser.parse_intermixed_args(argv)
    named = [word for word in args.words if word in _PROGRAMS]
    if len(named) != 1 and (named or args.run is None):
        parser.error(f"name one program of {', '.join(_PROGRAMS)}")
    args.program = named[0] if named else _PROGRAMS[-1]  # with --from: the run says which estimator
    args.words = [word for word in args.words if word not in _PROGRAMS]
    return args


if __name__ == "__main__":
    sys.exit(main())
