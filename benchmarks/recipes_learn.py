"""Do the recipes learn? Each is run on the sorting task, and the page that tells is written.

    python benchmarks/recipes_learn.py [--only grpo ppo] [--seeds 0 1 2] [--steps 40] [--out FOLDER] [--again]
    python benchmarks/recipes_learn.py --critic     # PPO's critic instead: benchmarks/critic_at_work.py

A run is `python -m hybridrl.trainer.main_ppo -cp recipes/NAME -cn NAME` with the recipe's own YAML, 256 samples a step,
on one thread, from one model that 60 supervised steps warm-started. A run that has a result is not run again, unless
with `--again`. The table is printed; docs/recipes_learn.md and its picture are written when every recipe has a result,
or into the folder that `--page` names from whatever results there are. Exits with 1 if the sampled reward of a
recipe did not rise.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import critic_at_work
from learning_runs import REPOSITORY, Result, Run, find, make_data, mean, run_once, warm_start, write_sections
from matplotlib.figure import Figure

from hybridrl.config import load_config

RECIPES = REPOSITORY / "recipes"
NAMES = sorted(file.parent.name for file in RECIPES.glob("*/run.sh"))
LENGTHS = (5,)  # digits of a prompt
SAMPLES = 256  # a step, whatever the recipe's rollout.n
MINI_BATCHES = 4  # updates of a batch, as recipes/common.sh has it, except where the recipe is on-policy
RISE = 0.05  # of the sampled reward; what is less may be noise
#: settings that the task or its size asks for, beside those of every recipe
EXTRA: Mapping[str, tuple[str, ...]] = {
    "dapo": ("reward.reward_kwargs.overlong_buffer_cfg.len=2",),
    "gdpo": ("reward.custom_reward_function.path=recipes/gdpo/reward.py",),
    "pf_ppo": ("critic.optim.lr=1e-3",),
    "ppo": ("critic.optim.lr=1e-3",),
}


def recipe_run(name: str, seed: int, steps: int) -> Run:
    """The recipe at this benchmark's size."""
    config = load_config("ppo_trainer", [], RECIPES / name, name)
    prompts = SAMPLES // config.actor_rollout_ref.rollout.n
    words = ["data.max_response_length=12", f"data.train_batch_size={prompts}", *EXTRA.get(name, ())]
    if config.actor_rollout_ref.actor.ppo_mini_batch_size != config.data.train_batch_size:
        words.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // MINI_BATCHES}")
    return Run(name, name, seed, steps, tuple(words))


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
        prompts = int(found[0].run.words[1].split("=")[1])
        besides = " ".join(f"`{word}`" for word in EXTRA.get(name, ()))
        lines.append(
            f"| [{name}](../recipes/{name}/README.md) | {' '.join(str(result.run.seed) for result in found)} | "
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


def in_order(runs: Iterable[Run], results: Mapping[Run, Result]) -> dict[str, list[Result]]:
    """Recipe -> the results of its seeds."""
    chosen: dict[str, list[Result]] = {}
    for run in runs:
        if run in results:
            chosen.setdefault(run.name, []).append(results[run])
    return chosen


def train(arguments: argparse.Namespace) -> dict[Run, Result]:
    """Run what `--only` names; results that lie there already of the others are taken, too."""
    out = arguments.out
    make_data(out / "data", LENGTHS, train_size=8000, test_size=256)
    model = arguments.model or warm_start(out, out / "data", LENGTHS)
    results = {}
    for name in NAMES:
        for seed in arguments.seeds:
            run = recipe_run(name, seed, arguments.steps)
            folder = out / f"{run.name}_seed{seed}"
            if arguments.only and name not in arguments.only:
                found = find(run, folder)
            else:
                found = run_once(run, out, model, out / "data", LENGTHS, arguments.again)
                start, end = found.sampled
                print(f"{name} seed {seed}: {start:.3f} -> {end:.3f} in {found.seconds:.0f} s", file=sys.stderr)
            if found is not None:
                results[run] = found
    return results


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

    results = in_order((recipe_run(n, s, arguments.steps) for n in NAMES for s in arguments.seeds), train(arguments))
    told = table(results)
    print(told)
    whole = results.keys() >= set(NAMES)
    if arguments.page or whole:
        docs = arguments.page or REPOSITORY / "docs"
        write_sections(docs, {"recipes": told})
        picture(results, docs / "recipes_learn.png")
    flat = [name for name, found in results.items() if min(result.rise for result in found) < RISE]
    if flat:
        print(f"\nthe sampled reward rose by less than {RISE}: {', '.join(flat)}", file=sys.stderr)
    return 1 if flat else 0


if __name__ == "__main__":
    sys.exit(main())
