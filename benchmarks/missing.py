"""Does a run with 5 % of its samples lost learn like one without losses, and how much does it generate again?

    python benchmarks/missing.py [--only none ...] [--seeds 0 1 2] [--steps 60] [--out FOLDER] [--again] [--write]

The quickstart's model after 60 supervised steps learns to sort five digits with GRPO, 16 prompts with 8 samples per
step. What is lost is drawn by the operating system's random numbers, with probability 0.05 per attempt:

    none      nothing
    reward    the reward function ends its own process (`os._exit`)
    session   the agent loop of the sample raises, after it has generated; `agent.retries=0`, so that it is refilled
    zero      the reward function raises, with `reward.on_error=zero`: what false zeros cost

The table has, per variant, the sampled reward (its mean over all steps, and over the last five), the greedy validation
accuracy at the end, and the share of samples that were generated again. Noise is the standard error over the seeds. The
script exits with 1 if `reward` or `session` differs from `none` by more than three standard errors of the difference,
in the mean over all steps, or generates more than 6 % again.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from learning_runs import REPOSITORY, WINDOW, Result, Run, mean, run_once, write_sections

PROMPTS, SAMPLES, SHARE = 16, 8, 0.05
MOST_REFILLED, STANDARD_ERRORS = 0.06, 3.0
_FAULT = f"random.SystemRandom().random() < {SHARE}"
_REWARD = """
import os, random, time
from hybridrl.reward.score import default_compute_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    if {fault}:
        {action}
    return default_compute_score(data_source, solution_str, ground_truth, extra_info)
"""
# A call takes a while so that a process has sent what it has scored: else that is scored again, and may end it again.
_DIES = {"seconds": 0.01, "action": "os._exit(1)"}
_RAISES = {"seconds": 0, "action": "raise ConnectionError('the judge is gone')"}
_LOOP = f"""
import random
from hybridrl.agents import register
from hybridrl.agents.loops.single_turn import SingleTurnAgentLoop

@register("dies")
class Dies(SingleTurnAgentLoop):
    async def run(self, sampling_params, **row):
        output = await super().run(sampling_params, **row)
        if not row["validate"] and {_FAULT}:
            raise ConnectionError("the session was killed")
        return output
"""
_AGENT = "actor_rollout_ref.rollout.agent"


def variants(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """The settings of each variant, whose files are written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    reward, raising, loop = (folder / f"{name}.py" for name in ("dying_reward", "raising_reward", "dying_loop"))
    reward.write_text(_REWARD.format(fault=_FAULT, **_DIES))
    raising.write_text(_REWARD.format(fault=_FAULT, **_RAISES))
    loop.write_text(_LOOP)
    return {
        "none": (),
        "reward": (f"reward.custom_reward_function.path='{reward}'", "reward.num_workers=2"),
        "session": (
            f"actor_rollout_ref.model.external_lib='{loop}'",
            f"{_AGENT}.default_agent_loop=dies",
            f"{_AGENT}.retries=0",
        ),
        "zero": (
            f"reward.custom_reward_function.path='{raising}'",
            "reward.on_error=zero",
            "reward.max_error_rate=1.0",
        ),
    }


def run_of(name: str, words: Sequence[str], seed: int, steps: int) -> Run:
    """GRPO on the sorting task with one of the variants."""
    return Run(
        f"missing_{name}",
        "grpo",
        seed,
        steps,
        (
            f"data.train_batch_size={PROMPTS}",
            "data.max_response_length=8",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            "trainer.save_freq=-1",
            f"trainer.test_freq={steps}",
            *words,
        ),
    )


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error (0 for one seed)."""
    middle, count = mean(values), len(values)
    if count < 2:
        return middle, 0.0
    return middle, math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1) / count)


def whole(result: Result) -> float:
    """The mean sampled reward of all steps."""
    return mean(list(result.rewards.values()))


def refilled(result: Result) -> float:
    """The share of samples that were generated again."""
    return mean(list(result.curve("missing/refilled").values()))


def table(results: Mapping[str, list[Result]]) -> str:
    """A row for each variant."""
    lines = [
        "| lost | seeds | steps | sampled reward, all steps | last steps | greedy validation | generated again |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        cells = [
            over_seeds([whole(result) for result in found]),
            over_seeds([mean(list(result.rewards.values())[-WINDOW:]) for result in found]),
            over_seeds([list(result.accuracy.values())[-1] for result in found]),
        ]
        told = " | ".join(f"{middle:.3f} ± {error:.3f}" for middle, error in cells)
        again = mean([refilled(result) for result in found])
        lines.append(f"| `{name}` | {len(found)} | {found[0].run.steps} | {told} | {100 * again:.1f} % |")
    return "\n".join(lines)


def faults(results: Mapping[str, list[Result]]) -> list[str]:
    """What is not as it should be."""
    found = []
    for name in {"reward", "session"} & results.keys():
        again = mean([refilled(result) for result in results[name]])
        if again > MOST_REFILLED:
            found.append(f"{name}: {100 * again:.1f} % of the samples were generated again")
        if "none" in results and len(results[name]) > 1:
            (plain, of_plain), (here, of_here) = (over_seeds([whole(r) for r in results[n]]) for n in ("none", name))
            noise = math.hypot(of_plain, of_here)
            if abs(here - plain) > STANDARD_ERRORS * noise:
                found.append(f"{name}: {here:.3f} and {plain:.3f} without losses, standard error {noise:.3f}")
    return found


def main() -> int:
    """Run what has no result yet, print the table and the curves, judge them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("none", "reward", "session", "zero"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("outputs/missing"))
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument("--write", action="store_true", help="write the table to docs/missing.md")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    chosen = {name: words for name, words in variants(out).items() if name in (arguments.only or variants(out))}
    results: dict[str, list[Result]] = {name: [] for name in chosen}
    for seed in arguments.seeds:
        for name, words in chosen.items():
            results[name].append(run_once(run_of(name, words, seed, arguments.steps), out, again=arguments.again))
            print(f"{name}, seed {seed}: {results[name][-1].seconds:.0f} s", flush=True)
    print(table(results))
    for name, found in results.items():
        curves = [list(result.rewards.values()) for result in found]
        tenths = [mean([mean(curve[at : at + 10]) for curve in curves]) for at in range(0, arguments.steps, 10)]
        print(f"{name}: sampled reward, means of ten steps: {' '.join(f'{value:.3f}' for value in tenths)}")
    if arguments.write:
        write_sections(REPOSITORY / "docs", {"missing samples": table(results)}, page="missing.md")
    told = faults(results)
    for fault in told:
        print(fault, file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
