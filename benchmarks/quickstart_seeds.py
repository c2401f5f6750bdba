"""Does the quickstart learn with every seed, and how long does it take?

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--out outputs/quickstart_seeds] [--python PATH]

Runs scripts/quickstart.sh once per seed, one after the other, and prints a table: greedy validation accuracy at the
start and the end of GRPO, the first step at which it is at least 0.9, the sampled reward (mean of the first and last
ten steps), and wall-clock seconds from the command to the report, without the installation. Exits with 1 if a seed
stays below 0.9 or takes more than four minutes.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GOAL = 0.9
LIMIT_S = 240.0
ACCURACY = "val-core/hybridrl/sort/acc/mean@1"
REWARD = "critic/score/mean"


@dataclass
class Outcome:
    """What one seed came to."""

    seed: int
    accuracy: dict[int, float]
    rewards: list[float]
    seconds: float

    @property
    def reached(self) -> int | None:
        """The first step with the goal's accuracy."""
        return next((step for step, value in sorted(self.accuracy.items()) if value >= GOAL), None)

    @property
    def final(self) -> float:
        return self.accuracy[max(self.accuracy)]

    def row(self) -> str:
        start, tail = self.rewards[:10], self.rewards[-10:]
        return (
            f"| {self.seed} | {self.accuracy[min(self.accuracy)]:.3f} -> {self.final:.3f} | "
            f"{'never' if self.reached is None else f'step {self.reached}'} | "
            f"{sum(start) / len(start):.3f} -> {sum(tail) / len(tail):.3f} | {self.seconds:.0f} |"
        )


def run_seed(seed: int, out: Path, python: str) -> Outcome:
    """One quickstart in a folder of its own."""
    started = time.perf_counter()
    command = [
        "bash",
        str(REPOSITORY / "scripts/quickstart.sh"),
        f"--out={out}",
        f"--seed={seed}",
        f"--python={python}",
    ]
    if (status := subprocess.run(command).returncode) != 0:
        raise SystemExit(f"seed {seed}: the quickstart failed with status {status}, see above")
    seconds = time.perf_counter() - started
    records = [json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        seed=seed,
        accuracy={record["step"]: record[ACCURACY] for record in records if ACCURACY in record},
        rewards=[record[REWARD] for record in records if REWARD in record],
        seconds=seconds,
    )


def main() -> int:
    """Run the seeds, print the table, judge it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart_seeds"))
    parser.add_argument("--python", default=sys.executable, help="interpreter with hybridrl (this one)")
    arguments = parser.parse_args()
    outcomes = [run_seed(seed, arguments.out.absolute() / f"seed{seed}", arguments.python) for seed in arguments.seeds]
    print("\n| seed | greedy validation, start to end | first at 0.9 | sampled reward | seconds in all |")
    print("|---|---|---|---|---|")
    for outcome in outcomes:
        print(outcome.row())
    failed = [outcome.seed for outcome in outcomes if outcome.final < GOAL or outcome.seconds > LIMIT_S]
    if failed:
        print(f"\nbelow {GOAL} or over {LIMIT_S:.0f} s: seeds {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
