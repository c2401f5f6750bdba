"""Does a model learn to use a tool? GRPO on the calculator task with sessions of several turns.

    python benchmarks/calculator_learns.py [--engine vllm] [--through tool_agent] [--seeds 0 1 2] [--steps 20]

A tiny model is warm-started on examples, of which 30 % solve their prompt with the calculator and the others give up.
Each seed is then a run of `main_ppo` from this model: sampling and the order of prompts differ. Sessions are held by
the loop `tool_agent`, or by an OpenAI client that knows nothing of training (`--through gateway_agent`:
examples/calculator_client.py). The table has the sampled reward and the calls per session over the first and the last
steps, and the greedy validation accuracy before and after. It is written to docs/agents_tutorial.md if that page has a
place for it. Exits with 1 if a
seed does not learn, or calls the tool hardly more at the end than at the start. It takes some minutes on two free
cores.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_runs import REPOSITORY, command, mean, write_sections

from hybridrl.data.preprocess.calculator import TOOLS, WORDS, write_calculator
from hybridrl.models.tiny import build_tiny_model

WARM_START_STEPS = 800
WINDOW = 3  # steps at the start and at the end over which is averaged
GOAL, MORE_CALLS = 0.3, 0.3  # rise of the sampled reward and of the calls per session
ACCURACY = "val-core/hybridrl/calculator/acc/mean@1"
PAGE = "agents_tutorial.md"
ROLLOUT = "actor_rollout_ref.rollout"
THROUGH = ("tool_agent", "gateway_agent")


@dataclass(frozen=True)
class Outcome:
    """What one run came to: a line of metrics a step, and wall seconds of the whole command."""

    seed: int
    records: list[dict[str, Any]]
    seconds: float

    def ends(self, metric: str) -> tuple[float, float]:
        """The metric over the first and over the last steps."""
        values = [record[metric] for record in self.records if metric in record]
        return mean(values[:WINDOW]), mean(values[-WINDOW:])

    @property
    def calls(self) -> tuple[float, float]:
        """Calls per session over the first and over the last steps.

        Where an agent of one's own runs the tool, each of the model's turns but the last is one.
        """
        counted, turns = self.ends("tool_call_counts/mean"), self.ends("num_turns/mean")
        return counted if any(counted) else (turns[0] / 2 - 1, turns[1] / 2 - 1)

    @property
    def accuracy(self) -> tuple[float, float]:
        """Greedy validation before and after training."""
        values = [record[ACCURACY] for record in self.records if ACCURACY in record]
        return values[0], values[-1]

    @property
    def learned(self) -> bool:
        reward, calls = self.ends("critic/score/mean"), self.calls
        return reward[1] - reward[0] > GOAL and calls[1] - calls[0] > MORE_CALLS

    def row(self) -> str:
        pairs = (self.ends("critic/score/mean"), self.calls, self.accuracy)
        cells = " | ".join(f"{first:.3f} -> {last:.3f}" for first, last in pairs)
        step = mean([record["timing_s/step"] for record in self.records if "timing_s/step" in record])
        return f"| {self.seed} | {cells} | {step:.2f} | {self.seconds:.0f} |"


def warm_start(out: Path) -> Path:
    """A random model after supervised steps; made once."""
    model = out / "warm_start" / f"global_step_{WARM_START_STEPS}" / "model" / "hf_model"
    if (model / "config.json").exists():
        return model
    data = write_calculator(out / "data")
    build_tiny_model(out / "model", words=json.loads((data / WORDS).read_text()))
    words = [
        f"model.path='{out / 'model'}'",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files='{data / 'sft_train.parquet'}'",
        f"data.val_files='{data / 'sft_val.parquet'}'",
        "data.max_length=160",
        "data.train_batch_size=64",
        "data.micro_batch_size_per_gpu=64",
        "engine.dtype=float32",
        "optim.lr=2e-3",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        "checkpoint.save_contents=[hf_model]",
        f"trainer.default_local_dir='{out / 'warm_start'}'",
        "trainer.threads_per_worker=1",
        f"trainer.total_training_steps={WARM_START_STEPS}",
        f"trainer.save_freq={WARM_START_STEPS}",
        "trainer.resume_mode=disable",
    ]
    command(["hybridrl.trainer.main_sft", *words], out / "warm_start.log")
    return model


def sessions_of(through: str, data: Path) -> list[str]:
    """The words that choose who holds the sessions."""
    if through == "tool_agent":
        return [
            f"{ROLLOUT}.multi_turn.enable=True",
            f"{ROLLOUT}.multi_turn.tool_config_path='{data / TOOLS}'",
            f"{ROLLOUT}.multi_turn.max_assistant_turns=4",
        ]
    return [
        f"{ROLLOUT}.agent.default_agent_loop={through}",
        f"{ROLLOUT}.agent.function='{REPOSITORY / 'examples' / 'calculator_client.py'}:solve'",
        f"{ROLLOUT}.server.enable=True",
        f"{ROLLOUT}.server.host=127.0.0.1",
    ]


def settings(data: Path, model: Path, folder: Path, seed: int, steps: int, engine: str, through: str) -> list[str]:
    """The words of a run."""
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path='{model}'",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=5",
        f"{ROLLOUT}.name={engine}",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.seed={seed}",
        f"{ROLLOUT}.max_num_seqs=128",
        *sessions_of(through, data),
        f"data.train_files='{data / 'train.parquet'}'",
        f"data.val_files='{data / 'test.parquet'}'",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=80",
        f"data.seed={seed}",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        "trainer.save_last=False",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir='{folder}'",
    ]


def run_seed(out: Path, seed: int, steps: int, engine: str, through: str) -> Outcome:
    """One run from the warm start."""
    model, folder = warm_start(out), out / f"{through}_{engine}_seed{seed}"
    words = settings(out / "data", model, folder, seed, steps, engine, through)
    started = time.perf_counter()
    command(["hybridrl.trainer.main_ppo", *words], folder.with_suffix(".log"))
    seconds = time.perf_counter() - started
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Outcome(seed, records, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds, print the table, write the page, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="vllm", help="rollout.name (vllm)")
    parser.add_argument("--through", default="tool_agent", choices=THROUGH, help="who holds the sessions (tool_agent)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (20)")
    parser.add_argument("--out", type=Path, default=Path("outputs/calculator_learns"), help="folder of the runs")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs", help="folder of the page with the table")
    arguments = parser.parse_args(argv)
    outcomes = []
    lines = [
        "| seed | sampled reward | calls per session | greedy validation | seconds per step | seconds in all |",
        "|---|---|---|---|---|---|",
    ]
    for seed in arguments.seeds:
        outcomes.append(run_seed(arguments.out.absolute(), seed, arguments.steps, arguments.engine, arguments.through))
        lines.append(outcomes[-1].row())
        print("\n".join(lines) if len(outcomes) == 1 else lines[-1], flush=True)
    section = f"{arguments.through} {arguments.engine}"
    if f"<!-- {section} -->" in (REPOSITORY / "docs" / PAGE).read_text():
        write_sections(arguments.page, {section: "\n".join(lines)}, PAGE)
    failed = [outcome.seed for outcome in outcomes if not outcome.learned]
    if failed:
        print(
            f"\nthe reward rose by less than {GOAL}, or calls by less than {MORE_CALLS}: seeds {failed}",
            file=sys.stderr,
        )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
