"""A run that is killed and resumed ends, bitwise, as one never killed: weights, optimizer state and metrics."""

import json
import signal
from pathlib import Path

import torch
from e2e_tools import records, without_timing
from safetensors.torch import load_file

STEPS = 6  # 4 an epoch: the run ends in the middle of the second


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert files
    found: dict[str, list[torch.Tensor]] = {}
    for file in files:  # which rank writes what several hold may differ: the shards of a tensor, in the ranks' order
        for name, tensor in load_file(file).items():
            found.setdefault(f"{file.parent.relative_to(checkpoint)}:{name}", []).append(tensor.flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


def overrides(run: list[str], folder: Path) -> list[str]:
    return [
        *run,
        f"trainer.default_local_dir={folder}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.dump_freq=1",
        "trainer.report=False",
        # What carries state from step to step, beside the weights: schedule, adaptive KL, critic, epochs with a
        # shuffle.
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "critic.model.path=" + next(o.split("=", 1)[1] for o in run if o.startswith("actor_rollout_ref.model.path")),
        "critic.optim.lr=1e-3",
    ]


def test_killed_twice_and_resumed_equals_never_killed(start, sort_run, tmp_path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    job = start(*overrides(sort_run, whole))
    assert job.wait() == 0, job.output[-4000:]

    # In the middle of an epoch, with a step behind the checkpoint that has to be undone ...
    job = start(*overrides(sort_run, torn))
    job.wait_for(lambda: any(record["step"] == 3 for record in records(torn)))
    job.kill()
    assert json.loads((torn / "latest_checkpointed_iteration.txt").read_text()) == 2
    # ... and at the end of the epoch, right behind its checkpoint.
    job = start(*overrides(sort_run, torn))
    job.wait_for(lambda: (torn / "global_step_4" / "manifest.json").exists())
    job.kill()
    job = start(*overrides(sort_run, torn))
    assert job.wait() == 0, job.output[-4000:]
    assert "resumed from" in job.output and "step 4 of 6" in job.output

    first, second = tensors_of(whole / "global_step_6"), tensors_of(torn / "global_step_6")
    assert first.keys() == second.keys()
    assert any("optimizer" in name for name in first) and any("critic" in name for name in first)
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    assert not unequal
    assert [without_timing(r) for r in records(whole)] == [without_timing(r) for r in records(torn)]
    for kind in ("rollouts", "validation"):
        names = sorted(path.name for path in (whole / kind).iterdir())
        assert names == sorted(path.name for path in (torn / kind).iterdir())
        assert all((whole / kind / name).read_bytes() == (torn / kind / name).read_bytes() for name in names)


def test_a_signal_saves_at_the_next_step_and_the_run_goes_on_later(start, sort_run, tmp_path) -> None:
    folder = tmp_path / "run"
    arguments = [*sort_run, f"trainer.default_local_dir={folder}", "trainer.report=False"]
    job = start(*arguments, "trainer.total_training_steps=100000")
    job.wait_for(lambda: any(record["step"] >= 2 for record in records(folder)))
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.output[-4000:]
    stopped_at = json.loads((folder / "latest_checkpointed_iteration.txt").read_text())
    assert stopped_at == records(folder)[-1]["step"] and "SIGTERM" in job.output

    job = start(*arguments, f"trainer.total_training_steps={stopped_at + 1}")
    assert job.wait() == 0, job.output[-4000:]
    assert [record["step"] for record in records(folder)] == list(range(1, stopped_at + 2))


def test_a_second_signal_ends_the_run_at_once(start, sort_run, tmp_path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    time.sleep(600)\n"
    )
    job = start(
        *sort_run,
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"reward.custom_reward_function.path={slow}",
        "reward.timeout_s=3000",
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    job.wait_for(metrics.exists)  # signals are handled before it is there
    job.wait_for(lambda: "generating with" in job.output)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(lambda: "once more" in job.output)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() != 0
    assert not list((tmp_path / "run").glob("global_step_*"))
