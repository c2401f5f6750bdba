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
from hybridrl.simulation.virtual_loop import run_virtual
from hybridrl.simulation.world import Simulation, World, ideal_step_s
from hybridrl.trainer.ppo.ledger import AdmissionSchedule

_CLOSE = 1.03  # a schedule within 3 % of the fastest is as good, if it reads less ahead
_HEADERS = ("devices", "S", "W", "s/step", "speed", "of ideal", "generation idle", "training idle", "age", "oldest")


@dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule and its results.

    Attributes:
        generating: devices that only generate; 0: all devices take turns at generating and training.
        staleness, window: of the schedule.
        step_s: mean seconds of a step.
        ideal_s: the shortest possible; see `ideal_step_s`.
        generation_idle, training_idle: shares of time that the places and the training devices stand still.
        mean_age, oldest: versions between admission and training.
    """

    generating: int
    staleness: float
    window: int
    step_s: float
    ideal_s: float
    generation_idle: float
    training_idle: float
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
            f"{synchronous_s / self.step_s:.2f}",
            f"{self.ideal_s / self.step_s:.2f}",
            f"{self.generation_idle:.0%}",
            f"{self.training_idle:.0%}",
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
        1 - results.busy_s / (seconds * world.replicas * world.places),
        1 - results.learn_s / seconds,
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
    return lambda random: random.choice(seconds)


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
    try:
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


def _world(args: argparse.Namespace) -> World:
    positive = {"--devices": args.devices, "--prompts": args.prompts, "--samples": args.samples, "--steps": args.steps}
    positive |= {"--places": args.places, "--learn": args.learn, "--seconds-per-token": args.seconds_per_token}
    positive |= {f"--window {value}": value for value in args.window}
    for name, value in positive.items():
        if value <= 0:
            raise ValueError(f"{name}: {value:g} is given; it has to be more than 0")
    others = {"--publish": args.publish, "--reward": args.reward, "--spread": args.spread}
    for name, value in {**others, **{f"--staleness {value:g}": value for value in args.staleness}}.items():
        if value < 0:
            raise ValueError(f"{name}: {value:g} is given; it has to be at least 0")
    if args.lengths is not None:
        response_s = response_times(args.lengths, args.seconds_per_token)
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
    )


def _print(rows: Sequence[SimulatedSchedule], args: argparse.Namespace, synchronous_s: float) -> None:
    ranked = sorted(rows, key=lambda row: (row.step_s, row.staleness))
    choice = best(rows)
    listed = ranked[: args.rows] + [row for row in (choice, rows[0]) if row not in ranked[: args.rows]]
    table = [_HEADERS, *(row.cells(args.devices, synchronous_s) for row in listed)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEADERS))]
    for cells in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    split = (
        f"{choice.generating} of {args.devices} devices generate"
        if choice.generating
        else f"all {args.devices} devices take turns"
    )
    print(
        f"\nproposed: staleness {choice.staleness:g}, window {choice.window}, {split}: "
        f"{choice.step_s:.2f} s per step, {synchronous_s / choice.step_s:.2f} times the synchronous schedule"
    )
    print("(the schedule that reads least ahead, among those within 3 % of the fastest)")


def _arguments(argv: Sequence[str] | None, command: str) -> Any:
    parser = argparse.ArgumentParser(
        prog=command,
        description="Compare synchronous and asynchronous schedules of generation and training, from latencies.",
        epilog="S: steps of prompts that are answered ahead; W: at most W - 1 groups pass an unfinished one.",
    )
    parser.add_argument("--devices", type=int, default=8, help="devices in all; each generates --places responses")
    parser.add_argument("--places", type=int, default=16, help="responses that a device generates at a time")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step (data.train_batch_size)")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt (rollout.n)")
    parser.add_argument("--lengths", type=Path, help="JSONL with `seconds` or `response_length` of responses")
    parser.add_argument("--seconds-per-token", type=float, default=0.02, help="for lengths in tokens")
    parser.add_argument("--median", type=float, default=10.0, help="without --lengths: median seconds of a response")
    parser.add_argument("--spread", type=float, default=0.8, help="and the standard deviation of their logarithm")
    parser.add_argument("--reward", type=float, default=0.5, help="mean seconds until a response is scored")
    parser.add_argument("--learn", type=float, default=30.0, help="seconds of an update on all devices")
    parser.add_argument("--publish", type=float, default=2.0, help="seconds of sending new weights")
    parser.add_argument("--staleness", type=float, nargs="+", default=[1.0, 2.0], help="values of S to compare")
    parser.add_argument("--window", type=int, nargs="+", default=[1, 8], help="values of W to compare")
    parser.add_argument("--steps", type=int, default=20, help="steps of each simulated run")
    parser.add_argument("--rows", type=int, default=12, help="rows of the table")
    parser.add_argument("--seed", type=int, default=0, help="of the latencies")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
