"""Does a policy learn from a teacher? Distillation on the sorting task, without rewards, with several losses.

    python benchmarks/distillation_learns.py [--only k1 ...] [--seeds 0] [--steps 40] [--out FOLDER] [--again] [--write]

The teacher is the quickstart's model after 400 supervised steps, the policy the same model after 60. Each run is
`python -m hybridrl.trainer.main_ppo` with the YAML of `recipes/distillation`, 128 samples per step and no reward in the
loss; `reward` is the same number of samples with GRPO and the reward alone. Runs that already have a result are
skipped. The table is printed, and written to docs/distillation.md with `--write`. Exits with 1 if the validation
accuracy of a run with a teacher rises by less than 0.05.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from learning_runs import FIVE_DIGITS, REPOSITORY, Result, Run, mean, run_once, write_sections

PROMPTS, SAMPLES = 32, 4
TEACHER_STEPS = 400
RISE = 0.05
_LOSS = "distillation.distillation_loss"
#: name -> what it is, and its settings beside the recipe's
LOSSES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "reverse_kl_topk_tail": ("the recipe: the teacher's 64 most likely tokens and the rest", ()),
    "forward_kl": ("the whole vocabulary, in the policy's process", (f"{_LOSS}.loss_mode=forward_kl",)),
    "k2": ("the sampled token", (f"{_LOSS}.loss_mode=k2",)),
    "k1": ("the sampled token, as a reward", (f"{_LOSS}.loss_mode=k1", f"{_LOSS}.use_policy_gradient=True")),
    "reward": ("no teacher: GRPO with the reward", ("distillation.enabled=False",)),
}


def run_of(name: str, seed: int, steps: int, teacher: Path) -> Run:
    """The recipe with one of the losses."""
    words = (
        f"data.train_batch_size={PROMPTS}",
        "data.max_response_length=12",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 4}",
        f"distillation.teacher_models.teacher.model_path='{teacher}'",
        "distillation.fsdp_config.dtype=float32",
        *LOSSES[name][1],
    )
    return Run(f"distillation_{name}", "distillation", seed, steps, words)


def table(results: Mapping[str, list[Result]]) -> str:
    """A row for each loss; numbers are means over its seeds."""
    lines = [
        "| loss | what it reads | seeds | steps | seconds | distillation/loss | greedy validation |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        first, last = (mean([list(result.accuracy.values())[place] for result in found]) for place in (0, -1))
        curves = [list(result.curve("distillation/loss").values()) for result in found]
        ends = "-" if not curves[0] else " -> ".join(f"{mean([curve[at] for curve in curves]):.3f}" for at in (0, -1))
        seeds = " ".join(str(result.run.seed) for result in found)
        seconds = mean([result.seconds for result in found])
        lines.append(
            f"| `{name}` | {LOSSES[name][0]} | {seeds} | {found[0].run.steps} | {seconds:.0f} | {ends} | "
            f"{first:.3f} -> {last:.3f} |"
        )
    return "\n".join(lines)


def gained(result: Result) -> float:
    """The rise of the validation accuracy."""
    values = list(result.accuracy.values())
    return values[-1] - values[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LOSSES, metavar="LOSS", default=list(LOSSES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--teacher-steps", type=int, default=TEACHER_STEPS, help="supervised steps of the teacher")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "outputs" / "recipes_learn", help="folder of the runs")
    parser.add_argument("--model", type=Path, help="start from this model in place of the warm-started one")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument("--write", action="store_true", help="write the table to docs/distillation.md")
    arguments = parser.parse_args(argv)
    out = arguments.out.absolute()
    FIVE_DIGITS.make_data(out)
    teacher = FIVE_DIGITS.model(out, arguments.teacher_steps)
    results: dict[str, list[Result]] = {}
    for name in arguments.only:
        for seed in arguments.seeds:
            run = run_of(name, seed, arguments.steps, teacher)
            results.setdefault(name, []).append(run_once(run, out, arguments.model, arguments.again))
    told = table(results)
    print(told)
    if arguments.write:
        write_sections(REPOSITORY / "docs", {"distillation": told}, page="distillation.md")
    rises = {name: mean([gained(one) for one in found]) for name, found in results.items() if name != "reward"}
    flat = [name for name, rise in rises.items() if rise < RISE]
    if flat:
        print(f"\nthe validation accuracy rose by less than {RISE}: {', '.join(flat)}", file=sys.stderr)
    return 1 if flat else 0


if __name__ == "__main__":
    sys.exit(main())
