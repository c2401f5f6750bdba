"""Asynchronous against synchronous training where the lengths of responses have a long tail, on two pools.

    python benchmarks/async.py [--steps 12] [--staleness 1 2] [--json]

One process trains, another generates. Tokens come by the clock (`paced_engine.py`: 100 per second and response, at most
16 responses at a time, log-normal lengths), so that generation has a device of its own on any machine. Everything else
is real: ledger, feeder, scheduler, replica, Ray, updates of a small model, and the transfer of its weights. The ideal
T* is that of docs/simulate.md, with the lengths, the updates and the transfers that the asynchronous run measured.
Controller: (step - waiting for responses - slowest rank inside worker methods - transfer of weights) / step.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from paced_engine import LONGEST, TOKENS_PER_S

from hybridrl.config import load_config
from hybridrl.data.preprocess.sort import write_sort_data
from hybridrl.models.tiny import build_tiny_model
from hybridrl.simulation.world import World, ideal_step_s
from hybridrl.trainer.callbacks import RunEvent, calling
from hybridrl.trainer.ppo.ledger import AdmissionSchedule
from hybridrl.trainer.ppo.run_ppo import run_ppo

PROMPTS, SAMPLES, PLACES = 8, 4, 16
WARM_UP = 2  # steps that are not measured
GOALS = {"speed": 1.5, "of_ideal": 0.85, "controller": 0.05}
LEARNING = ("old_log_prob", "rollout_corr", "adv", "update_actor")


@dataclass(frozen=True)
class Measured:
    """Means over the steps of a run.

    Attributes:
        step_s: seconds from one step's end to the next one's.
        wait_s, learn_s, publish_s: waiting for responses, learning, transfer of weights.
        generation_s, longest_s: of all responses of a step, and of its longest.
        controller: share of the controller.
        age: mean age of the tokens, in updates.
    """

    name: str
    staleness: float
    step_s: float
    wait_s: float
    learn_s: float
    publish_s: float
    generation_s: float
    longest_s: float
    controller: float
    age: float

    @property
    def ideal_s(self) -> float:
        """T*."""
        schedule = AdmissionSchedule(PROMPTS, self.staleness, lot=1 if self.staleness else PROMPTS)
        world = World(schedule, replicas=1, places=PLACES, reward_s=0.0, learn_s=self.learn_s, publish_s=self.publish_s)
        return ideal_step_s(world, self.generation_s, self.longest_s)


def measure(folder: Path, name: str, words: list[str], staleness: float, steps: int) -> Measured:
    """Run and measure one schedule."""
    run, ends = folder / name.replace("=", ""), []
    engine = Path(__file__).with_name("paced_engine.py")
    common = [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.rollout.name={engine}:PacedEngine",
        "actor_rollout_ref.rollout.full_determinism=True",
        f"actor_rollout_ref.rollout.max_num_seqs={PLACES}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=1",
        f"data.train_files={folder / 'data' / 'train.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=32",
        f"data.max_response_length={LONGEST}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "trainer.threads_per_worker=1",
        "trainer.logger=[file]",
        "trainer.report=False",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={run}",
    ]

    def note(event: RunEvent) -> None:
        if event.kind == "step":
            ends.append(time.monotonic())

    with calling([note]):
        run_ppo(load_config("ppo_trainer", [*common, *words]))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "timing_s/step" in line][WARM_UP:]

    def mean(*names: str) -> float:
        return statistics.mean(sum(line.get(name, 0.0) for name in names) for line in lines)

    wait, publish, step = (
        mean("timing_s/gen", "timing_s/reward"),
        mean("timing_s/update_weights"),
        mean("timing_s/step"),
    )
    return Measured(
        name,
        staleness,
        (ends[-1] - ends[WARM_UP - 1]) / len(lines),
        wait,
        mean(*(f"timing_s/{phase}" for phase in LEARNING)),
        publish,
        mean("response_length/mean") * PROMPTS * SAMPLES / TOKENS_PER_S,
        mean("response_length/max") / TOKENS_PER_S,
        (step - wait - mean("timing_s/workers") - publish) / step,
        mean("rollout/staleness/mean"),
    )


def ahead(staleness: float) -> list[str]:
    """Settings of a run that reads ahead."""
    return [
        "trainer.v1.trainer_mode=separate_async",
        f"trainer.v1.separate_async.num_warmup_batches={staleness:g}",
        "data.gen_batch_size=1",
    ]


def main() -> int:
    """Measure the schedules, print the table; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=float, nargs="+", default=[1.0, 2.0], help="values of S; the first counts")
    parser.add_argument("--hidden", type=int, default=128, help="of the model; longer updates where it is larger")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with (folder / "output.log").open("w") as output, redirect_stdout(output), redirect_stderr(output):
            build_tiny_model(folder / "model", hidden=args.hidden, layers=args.layers)
            write_sort_data(folder / "data", train_size=256, test_size=8)
            (folder / "reward.py").write_text(
                "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                "    return sum(char < 'm' for char in solution_str) / max(len(solution_str), 1)\n"
            )
            runs = [measure(folder, "sync", [], 0, args.steps)]
            runs += [measure(folder, f"S={value:g}", ahead(value), value, args.steps) for value in args.staleness]
    first = runs[1]
    reached = {
        "speed": runs[0].step_s / first.step_s,
        "of_ideal": first.ideal_s / first.step_s,
        "controller": first.controller,
    }
    if args.json:
        print(
            json.dumps({"runs": [asdict(run) | {"ideal_s": run.ideal_s} for run in runs], "reached": reached}, indent=2)
        )
    else:
        print(
            "| run | s/step | speed | T* | of T* | waiting | update | weights | controller | age |\n"
            + "|---" * 10
            + "|"
        )
        for run in runs:
            print(
                f"| {run.name} | {run.step_s:.2f} | {runs[0].step_s / run.step_s:.2f} | {run.ideal_s:.2f} | "
                f"{run.ideal_s / run.step_s:.2f} | {run.wait_s:.2f} | {run.learn_s:.2f} | {run.publish_s:.2f} | "
                f"{run.controller:.1%} | {run.age:.2f} |"
            )
        print(", ".join(f"{name} {value:.3g} (goal {GOALS[name]:g})" for name, value in reached.items()))
    good = reached["speed"] >= GOALS["speed"] and reached["of_ideal"] >= GOALS["of_ideal"]
    return 0 if good and reached["controller"] < GOALS["controller"] else 1


if __name__ == "__main__":
    sys.exit(main())
