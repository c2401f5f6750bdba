"""Does a run learn the same with every engine? GRPO on the sorting task with each engine and layout, of training too.

    python benchmarks/engines_learn.py [--only hf vllm_1x1 ...] [--seeds 0 1 2] [--steps 40] [--out FOLDER] [--again]

Each run is `python -m hybridrl.trainer.main_ppo` with the YAML of `recipes/grpo`, 256 samples per step, from one
model that was warm-started with 60 supervised steps. Only the settings of the rollout differ, and in two layouts the
strategy of training, which is fsdp2 in all others. Run SGLang with the interpreter of its own environment:
`.venv-sglang/bin/python benchmarks/engines_learn.py --only sglang_1x1`, with the same `--out`. Runs that already have
a result are skipped. The table is written to docs/rollout.md, and the curves next to it. Exits with 1 if the sampled
reward of a layout ends further from that of hf than the noise allows.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from learning_runs import REPOSITORY, WINDOW, Result, Run, find, mean, run_once, write_sections
from matplotlib.figure import Figure

SAMPLES, PROMPTS = 8, 32
NOISE = 0.05  # of the sampled reward over the last steps against hf's with the same seed, mean over the seeds
_TWO = ("trainer.n_gpus_per_node=2",)
_NAME, _TP = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MEGATRON = ("actor_rollout_ref.actor.strategy=megatron", f"{_NAME}=vllm", f"{_TP}=2", *_TWO)
_SPLIT = "actor_rollout_ref.actor.megatron"
#: name -> what it is, and its settings
LAYOUTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "hf": ("in place, 1 worker", (f"{_NAME}=hf",)),
    "vllm_1x1": ("vLLM: 1 worker, 1 replica", (f"{_NAME}=vllm",)),
    "vllm_tp2": ("vLLM: 2 workers, 1 replica of TP=2", (f"{_NAME}=vllm", f"{_TP}=2", *_TWO)),
    "vllm_2x1": ("vLLM: 2 workers, 2 replicas", (f"{_NAME}=vllm", *_TWO)),
    "megatron_tp2": (
        "Megatron-core of TP=2, vLLM: 1 replica of TP=2",
        (*_MEGATRON, f"{_SPLIT}.tensor_model_parallel_size=2"),
    ),
    "megatron_pp2": (
        "Megatron-core of PP=2, vLLM: 1 replica of TP=2",
        (*_MEGATRON, f"{_SPLIT}.pipeline_model_parallel_size=2"),
    ),
    "sglang_1x1": ("SGLang: 1 worker, 1 replica", (f"{_NAME}=sglang",)),
    "sglang_tp2": ("SGLang: 2 workers, 1 replica of TP=2", (f"{_NAME}=sglang", f"{_TP}=2", *_TWO)),
    "sglang_2x1": ("SGLang: 2 workers, 2 replicas", (f"{_NAME}=sglang", *_TWO)),
}


def run_of(name: str, seed: int, steps: int) -> Run:
    """GRPO with this layout."""
    words = (
        f"data.train_batch_size={PROMPTS}",
        "data.max_response_length=8",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.rollout.max_num_seqs=256",
        *LAYOUTS[name][1],
    )
    return Run(f"engine_{name}", "grpo", seed, steps, words)


def table(results: Mapping[str, list[Result]]) -> str:
    """A row a layout: means over its seeds, and of the end also each seed's value."""
    lines = [
        "| what generates | seeds | sampled reward | at the end, by seed | greedy validation | seconds per step |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        start, end = (mean([result.sampled[place] for result in found]) for place in (0, 1))
        first, last = (mean([list(result.accuracy.values())[place] for result in found]) for place in (0, -1))
        ends = ", ".join(f"{result.sampled[1]:.3f}" for result in found)
        step = mean([mean(list(result.curve("timing_s/step").values())) for result in found])
        seeds = " ".join(str(result.run.seed) for result in found)
        lines.append(
            f"| {LAYOUTS[name][0]} | {seeds} | {start:.3f} -> {end:.3f} | {ends} | {first:.3f} -> {last:.3f} | "
            f"{step:.2f} |"
        )
    return "\n".join(lines)


def picture(results: Mapping[str, list[Result]], file: Path) -> None:
    """The sampled reward by step, mean over the seeds and a few steps, a line a layout."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    for name, found in results.items():
        curves = [list(result.rewards.values()) for result in found]
        every = [mean([curve[step] for curve in curves]) for step in range(min(map(len, curves)))]
        smooth = [mean(every[max(0, step - WINDOW + 1) : step + 1]) for step in range(len(every))]
        axis.plot(range(1, len(smooth) + 1), smooth, linewidth=1.2, label=LAYOUTS[name][0])
    axis.set_xlabel("step")
    axis.set_ylabel("sampled reward")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    figure.savefig(file, dpi=80)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the page, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, metavar="LAYOUT", help="these (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "outputs" / "recipes_learn", help="folder of the runs")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs", help="folder for the page and its picture")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    arguments = parser.parse_args(argv)
    out = arguments.out.absolute()
    results: dict[str, list[Result]] = {}
    for seed in arguments.seeds:
        for name in LAYOUTS:
            run = run_of(name, seed, arguments.steps)
            if arguments.only and name not in arguments.only:
                found = find(run, out)
            else:
                found = run_once(run, out, again=arguments.again)
                print(f"{name} seed {seed}: {found.sampled} in {found.seconds:.0f} s", file=sys.stderr, flush=True)
            if found is not None:
                results.setdefault(name, []).append(found)
    results = {name: results[name] for name in LAYOUTS if name in results}
    told = table(results)
    print(told)
    write_sections(arguments.page, {"engines": told}, page="rollout.md")
    picture(results, arguments.page / "rollout_engines.png")
    if "hf" not in results:
        return 0
    in_place = {result.run.seed: result.sampled[1] for result in results["hf"]}
    far = []
    for name, found in results.items():
        apart = [result.sampled[1] - in_place[result.run.seed] for result in found if result.run.seed in in_place]
        if apart and abs(mean(apart)) > NOISE:
            far.append(name)
    if far:
        print(f"\nends further than {NOISE} from hf: {', '.join(far)}", file=sys.stderr)
    return int(bool(far))


if __name__ == "__main__":
    raise SystemExit(main())
