"""Time of the planner's search: PPO with a reference and a reward model, five models to place, dense and of experts.

    python benchmarks/plan.py [--rounds 3]

Goals on two cores: under 1 s for 128 devices, under 10 s for 1,024. Each round is a new request, with nothing cached.
It also prints how the paper's choices (arXiv 2409.19256, section 8; 16 to 128 A100) compare with the planner's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from hybridrl.config import load_config
from hybridrl.plan.devices import read_devices
from hybridrl.plan.run_plan import RunPlan, is_tie, plans, request_for

REPOSITORY = Path(__file__).resolve().parents[1]
FACTS = json.loads((REPOSITORY / "tests" / "plan" / "public_models.json").read_text(encoding="utf-8"))
#: model of actor and reference, model of critic and reward, and the devices of a search that is timed
SEARCHED = {("llama-13b", "llama-13b"): "A100", ("qwen3-235b-a22b", "qwen3-30b-a3b"): "H100"}
#: model of actor and reference, model of critic and reward, devices, and the sets that the paper found best
PAPER = [
    *(("llama-13b", "llama-13b", n, "colocated") for n in (16, 32, 64)),
    ("llama-13b", "llama-13b", 96, "split"),
    ("llama-13b", "llama-13b", 128, "standalone"),
    *(("llama-34b", "llama-34b", n, "colocated") for n in (32, 64)),
    *(("llama-34b", "llama-34b", n, "split") for n in (96, 128)),
    ("llama-13b", "llama-70b", 64, "colocated"),
    ("llama-13b", "llama-70b", 96, "split"),
    ("llama-13b", "llama-70b", 128, "critic apart"),
]


def of(actor: str, critic: str, devices: str, folder: Path) -> list[RunPlan]:
    """The plans for the paper's step: 1,024 prompts, 1,024 tokens each way, 8 updates."""
    for name in {actor, critic}:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(FACTS[name]), encoding="utf-8")
    words = {
        "actor_rollout_ref.model.path": folder / actor,
        "critic.model.path": folder / critic,
        "reward.reward_model.enable": True,
        "reward.reward_model.model.path": folder / critic,
        "algorithm.use_kl_in_reward": True,
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 1024,
        "placement.response": 1024,
        "placement.prompt": 1024,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    }
    config = load_config("ppo_trainer", [f"{key}={value}" for key, value in words.items()])
    return plans(request_for(config, read_devices(devices)))


def kind(plan: RunPlan) -> str:
    """The paper's name of a placement; generation belongs to the actor."""
    sets = {frozenset(role for role in roles if role != "rollout") for roles, _ in plan.sets} - {frozenset()}
    if any(roles == ("rollout",) for roles, _ in plan.sets):
        return "generation apart"
    names = {
        frozenset({frozenset({"actor", "ref", "critic", "reward_model"})}): "colocated",
        frozenset({frozenset({"actor", "ref"}), frozenset({"critic", "reward_model"})}): "split",
        frozenset(frozenset({role}) for role in ("actor", "ref", "critic", "reward_model")): "standalone",
        frozenset({frozenset({"actor", "ref", "reward_model"}), frozenset({"critic"})}): "critic apart",
    }
    return names.get(frozenset(sets), "another")


def main() -> None:
    """Print the times, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that each search is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("| actor, critic | devices | best s of search |\n|---|---|---|")
        for (actor, critic), kind_of_device in SEARCHED.items():
            for count in (128, 1024):
                times = []
                for _ in range(options.rounds):
                    start = time.perf_counter()
                    of(actor, critic, f"{count}x{kind_of_device}", folder)
                    times.append(time.perf_counter() - start)
                print(f"| {actor}, {critic} | {count}x{kind_of_device} | {min(times):.2f} |", flush=True)
        print("\n| actor, critic | devices | paper | planner | paper's choice / fastest |\n|---|---|---|---|---|")
        tied = 0
        for actor, critic, n, best in PAPER:
            found = of(actor, critic, f"{n}xA100", folder)
            fastest = min(plan.step_s for plan in found)
            chosen = next((plan for plan in sorted(found, key=lambda p: p.step_s) if kind(plan) == best), None)
            tied += chosen is not None and is_tie(chosen, fastest)
            ratio = "" if chosen is None else f"{chosen.step_s / fastest:.2f}"
            print(f"| {actor}, {critic} | {n} | {best} | {kind(found[0])} | {ratio} |", flush=True)
        print(f"\nthe paper's choice is within the tie band in {tied} of {len(PAPER)} settings")


if __name__ == "__main__":
    main()
