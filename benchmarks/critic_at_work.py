"""PPO's critic on a task where it can help: each digit is rewarded when it is written, and nothing after an error
is.

    python benchmarks/recipes_learn.py --critic [--seeds 0 1 2] [--steps 60]

Lists of 3 to 9 digits to sort, with rewards by examples/token_rewards.py: the remaining reward of a token depends on
the prompt, on the position and on whether there was an error before it. The recipe is `ppo`; only the critic is
trained in the first 10 steps. Measured over the last quarter of the steps: the share of the returns' variance that
the critic explains, and the variance of the advantages with the critic, with a constant baseline and with the best
baseline that knows only the position. Exits with 1 if a seed's critic explains half of the returns or less, or if
the advantages have more variance than with a constant baseline.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from learning_runs import MIXED, REPOSITORY, Result, Run, mean, run_once, write_sections
from matplotlib.figure import Figure

sys.path.insert(0, str(REPOSITORY / "examples"))
from token_rewards import prefix_rewards

WARM_UP = 10
EXPLAINED, EXPLAINED_MC = "critic/vf_explained_var", "critic/vf_explained_var_mc"
WITH_CRITIC, CONSTANT = "critic/advantages/var", "critic/advantages/var_constant_baseline"
TOKEN_REWARDS = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.module.path=examples/token_rewards.py",
    "reward.reward_manager.module.name=PrefixRewards",
    "trainer.dump_freq=1",
)
WORDS = (
    "data.max_response_length=16",
    "data.train_batch_size=256",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "critic.optim.lr=1e-3",
    f"trainer.critic_warmup={WARM_UP}",
    *TOKEN_REWARDS,
)


def returns_by_place(rollouts: Path) -> dict[int, list[float]]:
    """Place in the response -> what the samples of a step still earned from there, from their texts."""
    found: dict[int, list[float]] = defaultdict(list)
    for line in rollouts.read_text().splitlines():
        sample = json.loads(line)
        tokens = re.findall("####|.", sample["output"], flags=re.DOTALL)
        rewards = [*prefix_rewards(tokens, sample["gts"]), 0.0]  # the end token earns nothing
        to_go = 0.0
        for place in reversed(range(len(rewards))):
            to_go += rewards[place]
            found[place].append(to_go)
    return found


def place_baseline_variance(rollouts: Path) -> float:
    """Variance of the returns less the mean of their place: what a baseline leaves that knows no more."""
    by_place = returns_by_place(rollouts).values()
    left = [value - mean(values) for values in by_place for value in values]
    return statistics.pvariance(left)


def last_quarter(result: Result, metric: str) -> float:
    """The metric's mean over the last quarter of the steps."""
    curve = result.curve(metric)
    return mean([value for step, value in curve.items() if step > result.run.steps * 3 // 4])


def places_left(result: Result) -> float:
    """`place_baseline_variance` over the last quarter."""
    first = result.run.steps * 3 // 4 + 1
    steps = range(first, result.run.steps + 1)
    return mean([place_baseline_variance(result.folder / "rollouts" / f"{step}.jsonl") for step in steps])


def table(results: Sequence[Result]) -> str:
    """A row a seed."""
    lines = [
        "| seed | steps | seconds | sampled reward | explained variance of rewards to go, steps 1 and 10 | "
        "at the end | of returns, at the end | advantages' variance: constant | by place | critic |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        explained = result.curve(EXPLAINED_MC)
        start, end = result.sampled
        lines.append(
            f"| {result.run.seed} | {result.run.steps} | {result.seconds:.0f} | {start:.3f} -> {end:.3f} | "
            f"{explained[1]:.2f}, {explained[min(WARM_UP, result.run.steps)]:.2f} | "
            f"{last_quarter(result, EXPLAINED_MC):.2f} | {last_quarter(result, EXPLAINED):.2f} | "
            f"{last_quarter(result, CONSTANT):.4f} | {places_left(result):.4f} | "
            f"{last_quarter(result, WITH_CRITIC):.4f} |"
        )
    return "\n".join(lines)


def picture(results: Sequence[Result], file: Path) -> None:
    """Explained variance, the advantages' variance and the reward, over the steps; a line a seed."""
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    panels = (
        ("variance explained", ((EXPLAINED, "of returns"), (EXPLAINED_MC, "of rewards to go"))),
        ("variance of advantages", ((CONSTANT, "constant baseline"), (WITH_CRITIC, "critic"))),
        ("sampled reward", (("critic/score/mean", ""),)),
    )
    for axis, (title, lines) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for (metric, label), colour in zip(lines, ("#2563eb", "#ea580c"), strict=False):
            for number, result in enumerate(results):
                points = zip(*result.curve(metric).items(), strict=True)
                axis.plot(*points, color=colour, linewidth=0.9, label=label if number == 0 else None)
        axis.axvspan(1, WARM_UP, color="#e4e7eb", zorder=0)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("step; grey: critic alone", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        if lines[0][1]:
            axis.legend(fontsize=7, frameon=False)
    figure.axes[0].set_ylim(-0.5, 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)


def main(arguments: argparse.Namespace) -> int:
    """Run the seeds, print the table, write its section of the page, judge."""
    runs = [Run("ppo", "ppo", seed, arguments.steps, WORDS, MIXED) for seed in arguments.seeds]
    results = [run_once(run, arguments.out, arguments.model, arguments.again) for run in runs]
    told = table(results)
    print(told)
    docs = arguments.page or REPOSITORY / "docs"
    write_sections(docs, {"critic": told})
    picture(results, docs / "recipes_learn_critic.png")
    weak = [
        result.run.seed
        for result in results
        if last_quarter(result, EXPLAINED) <= 0.5 or last_quarter(result, WITH_CRITIC) >= last_quarter(result, CONSTANT)
    ]
    if weak:
        print(f"\nthe critic is of no use with seeds {weak}", file=sys.stderr)
    return 1 if weak else 0
