"""A run that is killed and resumed ends, bitwise, as one never killed: weights, optimizer state and metrics."""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from e2e_tools import records, without_timing
from safetensors.torch import load_file

from hybridrl.models.tiny import build_tiny_model
from hybridrl.utils.termination import COPY_S

STEPS = 6  # 4 per epoch: the run ends in the middle of the second
PLAIN_ENGINE = Path(__file__).parents[1] / "rollout" / "plain_engine.py"

#: The actor in tensor-parallel and the critic in pipeline-parallel processes, each response with a seed of its own.
MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "critic.megatron.pipeline_model_parallel_size=2",
    f"actor_rollout_ref.rollout.name={PLAIN_ENGINE}:PlainEngine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.full_determinism=True",
)

# Estimators that wait forever before they estimate advantages for the `HOLD_AT`-th time in their process, to be killed
# there. Without them, how far a run comes before it is killed would depend on how busy the machine is.
HELD = """
import os
import time

from hybridrl.algorithms import get_adv_estimator_fn, register_adv_est

gae, prime, calls = get_adv_estimator_fn("gae"), get_adv_estimator_fn("prime"), 0


def hold():
    global calls
    calls += 1
    while str(calls) == os.environ.get("HOLD_AT"):
        time.sleep(1)


@register_adv_est("held_gae", needs=("values",))
def held_gae(token_level_rewards, values, response_mask, gamma, lam):
    hold()
    return gae(
        token_level_rewards=token_level_rewards, values=values, response_mask=response_mask, gamma=gamma, lam=lam
    )


@register_adv_est("held_prime", needs=("process_rewards",), compares_samples=True, alone=True)
def held_prime(token_level_rewards, response_mask, index, process_rewards, config):
    hold()
    return prime(token_level_rewards, response_mask, index, process_rewards, config)
"""


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert files
    found: dict[str, list[torch.Tensor]] = {}
    for file in files:  # which rank writes what several hold may differ: the shards of a tensor, in the ranks' order
        for name, tensor in load_file(file).items():
            found.setdefault(f"{file.parent.relative_to(checkpoint)}:{name}", []).append(tensor.flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


def overrides(run: list[str], model: Path, folder: Path) -> list[str]:
    return [
        *run,
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        f"trainer.default_local_dir={folder}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.dump_freq=1",
        "reward.timeout_s=600",  # a reward that is late on a busy machine would be generated again, in one run only
        # What carries state from step to step besides the weights: schedule, adaptive KL, critic, epochs with a
        # shuffle.
        f"actor_rollout_ref.model.external_lib={folder.parent / 'held.py'}",
        "algorithm.adv_estimator=held_gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "critic.optim.lr=1e-3",
    ]


def equal_runs(whole: Path, killed: Path, step: int, *kinds: str) -> dict[str, torch.Tensor]:
    """Compare all that two runs wrote up to a step, with dumps of these kinds; the tensors of its checkpoint."""
    first, second = tensors_of(whole / f"global_step_{step}"), tensors_of(killed / f"global_step_{step}")
    assert first.keys() == second.keys()
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    assert not unequal
    assert [without_timing(r) for r in records(whole)] == [without_timing(r) for r in records(killed)]
    for kind in kinds:
        names = sorted(path.name for path in (whole / kind).iterdir())
        assert names
        assert names == sorted(path.name for path in (killed / kind).iterdir())
        assert all((whole / kind / name).read_bytes() == (killed / kind / name).read_bytes() for name in names)
    return first


@pytest.mark.slow(60)
@pytest.mark.parametrize(("words", "kills"), [((), 2), (MEGATRON, 1)], ids=["fsdp2", "megatron"])
def test_killed_and_resumed_equals_never_killed(
    start, start_apart, sort_run, tmp_path, monkeypatch, words: tuple[str, ...], kills: int
) -> None:
    """The first run's processes have other hash seeds than those of the others."""
    (tmp_path / "held.py").write_text(HELD)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    model = build_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=2)
    job = start_apart(*overrides([*sort_run, *words], model, whole))
    assert job.wait() == 0, job.output[-4000:]

    # In the middle of step 4 and of an epoch: step 3, after the checkpoint, has to be undone ...
    again = overrides([*sort_run, *words], model, killed)
    monkeypatch.setenv("HOLD_AT", "4")
    job = start(*again)
    job.wait_for(lambda: any(record["step"] == 3 for record in records(killed)))
    job.kill()
    assert json.loads((killed / "latest_checkpointed_iteration.txt").read_text()) == 2
    if kills == 2:
        # ... and at the end of the epoch, right after its checkpoint: of steps 3, 4 and 5 the third is held.
        monkeypatch.setenv("HOLD_AT", "3")
        job = start(*again)
        job.wait_for(lambda: (killed / "global_step_4" / "manifest.json").exists())
        job.kill()
    monkeypatch.delenv("HOLD_AT")
    job = start(*again)
    assert job.wait() == 0, job.output[-4000:]
    assert "resumed from" in job.output and f"step {2 * kills} of {STEPS}" in job.output

    first = equal_runs(whole, killed, STEPS, "rollouts", "validation")
    assert any("optimizer" in name for name in first) and any("critic" in name for name in first)


@pytest.mark.slow(20)
def test_prime_with_a_teacher_killed_and_resumed_equals_never_killed(
    start, start_apart, sort_run, tmp_path, monkeypatch
) -> None:
    """The model of the process rewards learns along with the policy, and the frozen ones are found again."""
    (tmp_path / "held.py").write_text(HELD)
    models = [build_tiny_model(tmp_path / f"m{seed}", hidden=32, heads=2, kv_heads=2, seed=seed) for seed in range(4)]
    policy, process, frozen, teacher = models
    words = [
        *sort_run,
        f"actor_rollout_ref.model.path={policy}",
        f"actor_rollout_ref.model.external_lib={tmp_path / 'held.py'}",
        "algorithm.adv_estimator=held_prime",
        f"roles.prime.model.path={process}",
        f"roles.prime.ref_path={frozen}",
        "roles.prime.ppo_mini_batch_size=8",
        "roles.prime.shuffle=True",
        "roles.prime.optim.lr=1e-3",
        "roles.prime.optim.lr_scheduler_type=cosine",
        "distillation.enabled=True",
        f"distillation.teacher_models.one.model_path={teacher}",
        "distillation.distillation_loss.loss_mode=forward_kl_topk_tail",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.dump_freq=1",
        "reward.timeout_s=600",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job = start_apart(*words, f"trainer.default_local_dir={whole}")
    assert job.wait() == 0, job.output[-4000:]

    monkeypatch.setenv("HOLD_AT", "4")
    job = start(*words, f"trainer.default_local_dir={killed}")
    job.wait_for(lambda: any(record["step"] == 3 for record in records(killed)))
    job.kill()
    monkeypatch.delenv("HOLD_AT")
    job = start(*words, f"trainer.default_local_dir={killed}")
    assert job.wait() == 0, job.output[-4000:]
    assert "resumed from" in job.output and "step 2 of 4" in job.output

    first = equal_runs(whole, killed, 4, "rollouts")
    before = tensors_of(whole / "global_step_2")
    learned = [name for name in first if name.startswith("prime/model")]
    assert learned and all(not torch.equal(first[name], before[name]) for name in learned if "norm" not in name)
    assert all(record["distillation/loss"] > 0 and record["prime/loss"] > 0 for record in records(whole))


def test_a_signal_saves_at_the_next_step_and_the_run_goes_on_later(start, sort_run, tmp_path) -> None:
    folder = tmp_path / "run"
    arguments = [*sort_run, f"trainer.default_local_dir={folder}"]
    job = start(*arguments, "trainer.total_training_steps=100000")
    job.wait_for(lambda: any(record["step"] >= 2 for record in records(folder)))
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output[-4000:]
    assert "stopped by SIGTERM" in job.output and "run the same command again" in job.output
    stopped_at = json.loads((folder / "latest_checkpointed_iteration.txt").read_text())
    assert stopped_at == records(folder)[-1]["step"] and "SIGTERM" in job.output

    job = start(*arguments, f"trainer.total_training_steps={stopped_at + 1}")
    assert job.wait() == 0, job.output[-4000:]
    assert [record["step"] for record in records(folder)] == list(range(1, stopped_at + 2))
    assert "trainer.total_training_steps was 100000" in job.output
    assert "is finished" in job.output and (folder / f"global_step_{stopped_at + 1}").is_dir()


@pytest.mark.slow(25)
def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(sort_run, tmp_path) -> None:
    """As the kernel does it: SIGHUP to every process of the terminal, whose output has no reader any more."""
    folder = tmp_path / "run"
    arguments = [*sort_run, f"trainer.default_local_dir={folder}", "trainer.total_training_steps=100000"]
    keeper, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridrl.trainer.main_ppo", *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(terminal)
        shown, deadline = b"", time.monotonic() + 400
        while not any(record["step"] >= 2 for record in records(folder)):
            assert process.poll() is None and time.monotonic() < deadline, shown[-4000:].decode(errors="replace")
            if select.select([keeper], [], [], 0.05)[0]:
                shown += os.read(keeper, 65536)
        os.close(keeper)
        assert process.wait(300) == 75
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    saved = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert saved == records(folder)[-1]["step"]
    assert "stopped by SIGHUP" in (folder / "after_hangup.log").read_text()


def test_a_second_signal_ends_the_run_at_once(start_with_ray, sort_run, tmp_path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    time.sleep(600)\n"
    )
    job = start_with_ray(
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
    time.sleep(COPY_S[signal.SIGINT] + 0.1)  # one that follows sooner is a copy of the first
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT
    assert not list((tmp_path / "run").glob("global_step_*"))
