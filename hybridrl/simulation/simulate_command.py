"""`hybridrl simulate`: the speed of synchronous and asynchronous schedules, from the latencies of a run.

Each schedule is run under a virtual clock by the ledger and the feeder, on devices that are shared by generation and
training or split between them. The same responses are drawn for every schedule.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hybridrl.errors import DataError, UserError
from hybridrl.simulation.measured_run import MeasuredRun, chosen_from, read_run
from hybridrl.simulation.virtual_loop import run_virtual
from hybridrl.simulation.world import Simulation, World, ideal_step_s
from hybridrl.trainer.ppo.ledger import AdmissionSchedule

_SECONDS_PER_TOKEN = 0.02
_CLOSE = 1.03  # a schedule within 3 % of the fastest is as good, if it reads less ahead
_HEADERS = (
    *("devices", "S", "W", "s/step", "responses/s", "speed", "of ideal"),
    *("generation idle", "training idle", "waste", "age", "oldest"),
)


@dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule and its results.

    Attributes:
        generating: devices that only generate; 0: all devices take turns at generating and training.
        staleness, window: of the schedule.
        step_s: mean seconds of a step.
        ideal_s: the shortest possible; see `ideal_step_s`.
        responses_per_s: responses that are trained on.
        generation_idle, training_idle: shares of time that the places and the training devices stand still.
        waste: share of the seconds of generation whose responses are not trained on: void groups, aborted requests.
        mean_age, oldest: versions between admission and training.
    """

    generating: int
    staleness: float
    window: int
    step_s: float
    ideal_s: float
    responses_per_s: float
    generation_idle: float
    training_idle: float
    waste: float
    mean_age: float
    oldest: int

    def cells(self, devices: int, synchronous_s: float) -> tuple[str, ...]:
        """Return the row of the printed table."""
        split = f"{self.generating} + {devices - self.generating}" if self.generating else f"{devices} shared"
        return (
            split,
            f"{self.staleness:g}",
            str(self.window),
            f"{self.step_s:.2f}",
            f"{self.responses_per_s:.1f}",
            f"{synchronous_s / self.step_s:.2f}",
            f"{self.ideal_s / self.step_s:.2f}",
            f"{self.generation_idle:.0%}",
            f"{self.training_idle:.0%}",
            f"{self.waste:.0%}",
            f"{self.mean_age:.2f}",
            str(self.oldest),
        )


def simulate(world: World, devices: int, generating: int, schedule: AdmissionSchedule, seed: int) -> SimulatedSchedule:
    """Run one schedule.

    Args:
        world: the latencies; `learn_s` is the time of an update on all devices.
        devices: number of devices; a device that generates has `world.places` places.
        generating: devices that only generate; 0: all devices take turns.
        schedule: what is run.
        seed: of the latencies.
    """
    own = {
        "replicas": generating or devices,
        "learn_s": world.learn_s * devices / ((devices - generating) if generating else devices),
        "shared": not generating,
        "schedule": schedule,
    }
    world = World(**{**vars(world), **own})
    simulation = Simulation(world, seed)
    _, seconds = run_virtual(simulation.run())
    results = simulation.results
    ideal = ideal_step_s(world, results.generated_s / world.steps, results.longest_s / world.steps)
    return SimulatedSchedule(
        generating,
        schedule.staleness,
        schedule.window,
        seconds / world.steps,
        ideal,
        schedule.prompts * world.samples * world.steps / seconds,
        1 - results.busy_s / (seconds * world.replicas * world.places),
        1 - results.learn_s / seconds,
        (results.lost_s + results.void_s) / results.busy_s,
        sum(results.ages) / len(results.ages),
        max(results.ages),
    )


def best(rows: Iterable[SimulatedSchedule]) -> SimulatedSchedule:
    """Return the schedule that reads least ahead, among those within 3 % of the fastest."""
    rows = list(rows)
    fastest = min(row.step_s for row in rows)
    close = [row for row in rows if row.step_s <= _CLOSE * fastest]
    return min(close, key=lambda row: (row.staleness, row.window, row.step_s))


def response_times(path: Path, seconds_per_token: float) -> Callable[[Random], float]:
    """Return a function that draws the generation times of a file's responses.

    Args:
        path: JSONL; each line has `seconds`, or `response_length` in tokens.
        seconds_per_token: of a response that is given in tokens.

    Raises:
        DataError: the file cannot be read, or a line has neither.
    """
    seconds = list(_seconds(path, seconds_per_token))
    if not seconds:
        raise DataError(f"{path} has no lines; give a line for each response, such as {{'seconds': 2.5}}")
    return chosen_from(seconds)


def _seconds(path: Path, seconds_per_token: float) -> Iterator[float]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            value = float(row["seconds"] if "seconds" in row else row["response_length"] * seconds_per_token)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}, line {number}: no number `seconds` or `response_length` ({error!r}): {line[:80]}"
            ) from error
        if not (math.isfinite(value) and value > 0):
            raise DataError(f"{path}, line {number}: a response takes {value:g} s; it has to be more than 0")
        yield value


def schedules(prompts: int, staleness: Sequence[float], windows: Sequence[int]) -> Iterator[AdmissionSchedule]:
    """Yield every combination that is possible; without read-ahead a step is one lot."""
    for ahead in staleness:
        for window in windows if ahead else [1]:
            if window <= math.floor(ahead * prompts) + 1:
                yield AdmissionSchedule(prompts, ahead, window, lot=1 if ahead else prompts)


def main(argv: Sequence[str] | None = None, command: str = "python -m hybridrl.simulation.simulate_command") -> int:
    """Run the command line.

    Returns:
        0, or 2 with one message where something is wrong.
    """
    args = _arguments(argv, command)
    args.measured = None
    try:
        if args.run is not None:
            _read_run(args)
        world = _world(args)
        plans = list(schedules(args.prompts, args.staleness, args.window))
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    synchronous = simulate(world, args.devices, 0, AdmissionSchedule(args.prompts, lot=args.prompts), args.seed)
    rows = [synchronous]
    for plan in plans:
        splits = range(args.devices if plan.staleness else 0)  # 0: all devices are shared
        rows += [simulate(world, args.devices, generating, plan, args.seed) for generating in splits]
    _print(rows, args, synchronous.step_s)
    return 0


_OF_RUN = {
    "devices": "devices",
    "places": "places",
    "prompts": "prompts",
    "samples": "samples",
    "learn": "learn_s",
    "publish": "publish_s",
    "reward": "reward_s",
}
_DEFAULTS = {"devices": 8, "places": 16, "prompts": 64, "samples": 8, "learn": 30.0, "publish": 2.0, "reward": 0.5}


def _read_run(args: argparse.Namespace) -> None:
    """Fill in what is not given from the run's folder, and say what was read.

    Raises:
        UserError: the folder lacks something, or the run was asynchronous and the seconds of a token are not given.
    """
    run = read_run(args.run)
    for name, field in _OF_RUN.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(run, field))
    if args.lengths is None:
        if args.seconds_per_token is None and not run.synchronous:
            raise DataError(
                f"--run {args.run}: it generated ahead of training, so timing_s/gen is not the time of generation; "
                "add --seconds-per-token"
            )
        args.seconds_per_token = args.seconds_per_token or run.seconds_per_token()
        args.measured = run
    source = "recorded lengths" if run.recorded else "log-normal lengths with the mean and maximum of the metrics"
    print(
        f"{args.run}: {args.prompts} prompts x {args.samples}, {args.devices} devices x {args.places} places; update "
        f"{args.learn:.3g} s, weights {args.publish:.3g} s, score {args.reward:.3g} s; {source}, "
        f"{args.seconds_per_token or 0:.3g} s per token\n"
    )


def _world(args: argparse.Namespace) -> World:
    for name, value in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    per_token = _SECONDS_PER_TOKEN if args.seconds_per_token is None else args.seconds_per_token
    positive = {"--devices": args.devices, "--prompts": args.prompts, "--samples": args.samples, "--steps": args.steps}
    positive |= {"--places": args.places, "--learn": args.learn, "--seconds-per-token": per_token}
    positive |= {f"--window {value}": value for value in args.window}
    if args.replica_lost is not None:
        positive["--replica-lost"] = args.replica_lost
    for name, value in positive.items():
        if value <= 0:
            raise ValueError(f"{name}: {value:g} is given; it has to be more than 0")
    if not 0 <= args.uniform < 1:
        raise ValueError(f"--uniform: {args.uniform:g} is given; it has to be at least 0 and less than 1")
    others = {"--publish": args.publish, "--reward": args.reward, "--spread": args.spread}
    for name, value in {**others, **{f"--staleness {value:g}": value for value in args.staleness}}.items():
        if value < 0:
            raise ValueError(f"{name}: {value:g} is given; it has to be at least 0")
    if args.lengths is not None:
        response_s = response_times(args.lengths, per_token)
    elif args.measured is not None:
        run: MeasuredRun = args.measured

        def response_s(random: Random) -> float:
            return run.length(random) * per_token
    elif args.median > 0:
        center, spread = math.log(args.median), args.spread

        def response_s(random: Random) -> float:
            return random.lognormvariate(center, spread)
    else:
        raise ValueError(f"--median: {args.median:g} is given; it has to be more than 0")
    return World(
        AdmissionSchedule(args.prompts),
        places=args.places,
        samples=args.samples,
        steps=args.steps,
        response_s=response_s,
        reward_s=args.reward,
        learn_s=args.learn,
        publish_s=args.publish,
        uniform=args.uniform,
        replica_lost_s=args.replica_lost,
    )


def _print(rows: Sequence[SimulatedSchedule], args: argparse.Namespace, synchronous_s: float) -> None:
    ranked = sorted(rows, key=lambda row: (row.step_s, row.staleness))
    choice = best(rows)
    listed = ranked[: args.rows] + [row for row in (choice, rows[0]) if row not in ranked[: args.rows]]
    table = [_HEADERS, *(row.cells(args.devices, synchronous_s) for row in listed)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEADERS))]
    for cells in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    print(
        f"\nproposed: {choice.step_s:.2f} s per step, {synchronous_s / choice.step_s:.2f} times the synchronous "
        "schedule (it reads least ahead, among those within 3 % of the fastest)"
    )
    print("  " + " ".join(run_settings(choice, args.devices)))


def run_settings(choice: SimulatedSchedule, devices: int) -> list[str]:
    """Return the settings of a run with a schedule, on machines of which one holds all devices."""
    if not choice.staleness:
        return ["trainer.v1.trainer_mode=sync"]
    mode = "separate_async" if choice.generating else "colocate_async"
    words = [
        f"trainer.v1.trainer_mode={mode}",
        f"trainer.v1.{mode}.num_warmup_batches={choice.staleness:g}",
        f"trainer.v1.window={choice.window}",
        "data.gen_batch_size=1",
        f"trainer.n_gpus_per_node={devices - choice.generating}",
    ]
    if choice.generating:
        words += ["rollout.nnodes=1", f"rollout.n_gpus_per_node={choice.generating}"]
    return words


def _arguments(argv: Sequence[str] | None, command: str) -> Any:
    parser = argparse.ArgumentParser(
        prog=command,
        description="Compare synchronous and asynchronous schedules of generation and training, from latencies.",
        epilog="S: steps of prompts that are answered ahead; W: at most W - 1 groups pass an unfinished one.",
    )
    parser.add_argument("--run", type=Path, help="folder of a run, whose sizes and times are taken where none is given")
    parser.add_argument("--devices", type=int, help="devices in all; each generates --places responses (8)")
    parser.add_argument("--places", type=int, help="responses that a device generates at a time (16)")
    parser.add_argument("--prompts", type=int, help="prompts per step, data.train_batch_size (64)")
    parser.add_argument("--samples", type=int, help="responses per prompt, rollout.n (8)")
    parser.add_argument("--lengths", type=Path, help="JSONL with `seconds` or `response_length` of responses")
    parser.add_argument("--seconds-per-token", type=float, help="for lengths in tokens (0.02, or from --run)")
    parser.add_argument("--median", type=float, default=10.0, help="without lengths: median seconds of a response")
    parser.add_argument("--spread", type=float, default=0.8, help="and the standard deviation of their logarithm")
    parser.add_argument("--reward", type=float, help="mean seconds until a response is scored (0.5)")
    parser.add_argument("--learn", type=float, help="seconds of an update on all devices (30)")
    parser.add_argument("--publish", type=float, help="seconds of sending new weights (2)")
    parser.add_argument("--uniform", type=float, default=0.0, help="share of groups that filter_groups drops")
    parser.add_argument("--replica-lost", type=float, help="mean seconds between losses of a replica; none by default")
    parser.add_argument("--staleness", type=float, nargs="+", default=[1.0, 2.0], help="values of S to compare")
    parser.add_argument("--window", type=int, nargs="+", default=[1, 8], help="values of W to compare")
    parser.add_argument("--steps", type=int, default=20, help="steps of each simulated run")
    parser.add_argument("--rows", type=int, default=12, help="rows of the table")
    parser.add_argument("--seed", type=int, default=0, help="of the latencies")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
