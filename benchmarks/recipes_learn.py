"""Do the recipes learn? Runs each on the sorting task and writes the page with the results.

    python benchmarks/recipes_learn.py [--only grpo ppo] [--seeds 0 1 2] [--steps 40] [--out FOLDER] [--again]
    python benchmarks/recipes_learn.py --critic     # PPO's critic instead: benchmarks/critic_at_work.py

Each run is `python -m hybridrl.trainer.main_ppo -cp recipes/NAME -cn NAME` with the recipe's own YAML, 256 samples
per step, on one thread, from one model that was warm-started with 60 supervised steps. Runs that already have a
result are skipped, unless `--again` is given. The table is printed. docs/recipes_learn.md and its figure are written
when every recipe has a result, or into the folder that `--page` names from the results there are. Exits with 1 if
the sampled reward of a recipe did not rise.
"""

import argparse
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import critic_at_work
from learning_runs import MIXED, REPOSITORY, WINDOW, Result, Run, find, mean, run_once, write_sections
from matplotlib.figure import Figure

from hybridrl.config import PPOTrainerConfig, load_config

RECIPES = REPOSITORY / "recipes"
#: learn from something else than this task's reward: from teachers (benchmarks/distillation_learns.py), from pairs of
#: answers, from conversations with a language model
ELSEWHERE = ("collabllm", "distillation", "dpo", "rm")
NAMES = sorted(file.parent.name for file in RECIPES.glob("*/run.sh") if file.parent.name not in ELSEWHERE)
SAMPLES = 256  # a step, whatever the recipe's rollout.n
MINI_BATCHES = 4  # updates of a batch, as recipes/common.sh has it, except where the recipe is on-policy
RISE = 0.05  # of the sampled reward; what is less may be noise
BEST_OF_GROUP = "grpo_passk"  # with rewards of 0 and 1 it learns from next to nothing: not judged on that task
#: settings that the task or its size asks for, beside those of every recipe
EXTRA: Mapping[str, tuple[str, ...]] = {
    "dapo": ("reward.reward_kwargs.overlong_buffer_cfg.len=2",),
    "gdpo": ("reward.custom_reward_function.path=recipes/gdpo/reward.py",),
    "pf_ppo": ("critic.optim.lr=1e-3",),
    "ppo": ("critic.optim.lr=1e-3",),
}


@functools.cache
def recipe_config(name: str) -> PPOTrainerConfig:
    return load_config("ppo_trainer", [], RECIPES / name, name)


def recipe_runs(name: str, seed: int, steps: int) -> list[Run]:
    """The recipe at this benchmark's size, and where another task says more, that one, too."""
    config = recipe_config(name)
    prompts = SAMPLES // config.actor_rollout_ref.rollout.n
    words = [f"data.train_batch_size={prompts}", *EXTRA.get(name, ())]
    if config.actor_rollout_ref.actor.ppo_mini_batch_size != config.data.train_batch_size:
        words.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // MINI_BATCHES}")
    runs = [Run(name, name, seed, steps, ("data.max_response_length=12", *words))]
    if name == BEST_OF_GROUP:
        more = ("data.max_response_length=16", *words, *critic_at_work.TOKEN_REWARDS)
        runs.append(Run(f"{name}_9_digits", name, seed, steps, more, MIXED, (9,)))
    return runs


def table(results: Mapping[str, list[Result]]) -> str:
    """A row a recipe; numbers are means over its seeds, and the rise of the worst of them."""
    lines = [
        "| recipe | seeds | steps | seconds | sampled reward | least rise of a seed | greedy validation | "
        "prompts x samples | besides |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        start, end = (mean([result.sampled[place] for result in found]) for place in (0, 1))
        first, last = (mean([list(result.accuracy.values())[place] for result in found]) for place in (0, -1))
        seconds = mean([result.seconds for result in found])
        least = min(result.rise for result in found)
        prompts = int(found[0].run.setting("data.train_batch_size"))
        besides = " ".join(f"`{word}`" for word in EXTRA.get(name, ()))
        if found[0].run.lengths:
            best = (mean([best_of_group(result)[place] for result in found]) for place in (0, 1))
            besides = "a reward a digit; of the best of 8: {:.3f} -> {:.3f}".format(*best)
        seeds = " ".join(str(result.run.seed) for result in found)
        lines.append(
            f"| [{name}](../recipes/{found[0].run.recipe}/README.md) | {seeds} | "
            f"{found[0].run.steps} | {seconds:.0f} | {start:.3f} -> {end:.3f} | {least:+.3f} | "
            f"{first:.3f} -> {last:.3f} | {prompts} x {SAMPLES // prompts} | {besides} |"
        )
    return "\n".join(lines)


def picture(results: Mapping[str, list[Result]], file: Path) -> None:
    """A small chart a recipe: sampled reward, a line a seed, and the greedy validation as dots."""
    columns = min(len(results), 6)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(2.1 * columns, 1.6 * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
    for axis, (name, found) in zip(axes, results.items(), strict=False):
        for result in found:
            axis.plot(*zip(*result.rewards.items(), strict=True), color="#2563eb", linewidth=0.8, alpha=0.7)
            axis.plot(*zip(*result.accuracy.items(), strict=True), "o", color="#ea580c", markersize=2.5)
        axis.set_title(name, fontsize=8, loc="left")
        axis.tick_params(labelsize=6)
        axis.grid(alpha=0.3)
    for axis in axes[len(results) :]:
        axis.set_axis_off()
    figure.supxlabel("step", fontsize=8)
    figure.suptitle("sampled reward (line a seed) and greedy validation accuracy (dots)", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)


def best_of_group(result: Result) -> tuple[float, float]:
    """The reward of each prompt's best sample, mean over prompts, over the first and over the last steps."""
    means = []
    for step in range(1, result.run.steps + 1):
        best: dict[str, float] = defaultdict(float)
        for line in (result.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines():
            sample = json.loads(line)
            best[sample["uid"]] = max(best[sample["uid"]], sample["score"])
        means.append(mean(list(best.values())))
    return mean(means[:WINDOW]), mean(means[-WINDOW:])


def train(arguments: argparse.Namespace) -> dict[str, list[Result]]:
    """Run what `--only` names; of the others the results that lie there are taken, too. Name of a run -> its seeds."""
    results: dict[str, list[Result]] = {}
    there = {file.parent.name.rpartition("_seed")[0] for file in arguments.out.glob("*/*_seed*/result.json")}
    wanted = [
        name for name in NAMES if name in (arguments.only or NAMES) or any(other.startswith(name) for other in there)
    ]
    for run in (run for name in wanted for seed in arguments.seeds for run in recipe_runs(name, seed, arguments.steps)):
        if arguments.only and run.recipe not in arguments.only:
            found = find(run, arguments.out)
        else:
            found = run_once(run, arguments.out, arguments.model, arguments.again)
            start, end = found.sampled
            print(f"{run.name} seed {run.seed}: {start:.3f} -> {end:.3f} in {found.seconds:.0f} s", file=sys.stderr)
        if found is not None:
            results.setdefault(run.name, []).append(found)
    return dict(sorted(results.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the page, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="RECIPE", help="these recipes (all)")
    parser.add_argument("--critic", action="store_true", help="PPO's critic at work, in place of the recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="40; with --critic 60")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "outputs" / "recipes_learn", help="folder of the runs")
    parser.add_argument("--page", type=Path, help="folder for the page and its pictures (docs, once all is there)")
    parser.add_argument("--model", type=Path, help="start from this model in place of the warm-started one")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    arguments = parser.parse_args(argv)
    arguments.out = arguments.out.absolute()
    arguments.steps = arguments.steps or (60 if arguments.critic else 40)
    if arguments.critic:
        return critic_at_work.main(arguments)

    results = train(arguments)
    told = table(results)
    print(told)
    whole = results.keys() >= set(NAMES)
    if arguments.page or whole:
        docs = arguments.page or REPOSITORY / "docs"
        write_sections(docs, {"recipes": told})
        picture(results, docs / "recipes_learn.png")
    judged = {name: found for name, found in results.items() if name != BEST_OF_GROUP}
    flat = [name for name, found in judged.items() if mean([result.rise for result in found]) < RISE]
    if flat:
        print(f"\nthe sampled reward rose by less than {RISE}: {', '.join(flat)}", file=sys.stderr)
    return 1 if flat else 0


if __name__ == "__main__":
    sys.exit(main())
