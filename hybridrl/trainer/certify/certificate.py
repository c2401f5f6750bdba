"""Carries out the runs of a certificate, and compares their weights."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from safetensors.torch import load_file

from hybridrl.config import load_config
from hybridrl.errors import UserError, WorkerError
from hybridrl.rollout.rollout import ReplicatedRollout
from hybridrl.single_controller.ray import init_ray, shutdown_ray
from hybridrl.trainer.certify.certified_runs import SAVED_STEP, STEPS, CertifiedRun, Incident
from hybridrl.trainer.ppo.ledger import GroupState
from hybridrl.trainer.ppo.ledger_journal import JOURNAL, read_journal

_REWARD = '''"""Scores a response by the share of its early letters, so that random weights learn something."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(char < "m" for char in solution_str) / max(len(solution_str), 1)
'''
_PROMPTS = 4  # of a step
_PLACES = 4  # of Ray: a training process or two, and replicas


@dataclass(frozen=True)
class CertificateRow:
    """The result of a run.

    Attributes:
        run: what was run.
        weights: the first digits of the hash of all weights after the last step; empty where the run failed.
        largest_difference: of a weight, from the reference; None without a reference or weights.
        seconds: of the run.
        error: why there are no weights.
    """

    run: CertifiedRun
    weights: str
    largest_difference: float | None
    seconds: float
    error: str = ""

    @property
    def holds(self) -> bool:
        """Whether the row is as it has to be."""
        return not self.error and (not self.run.must_equal or self.largest_difference == 0)

    @property
    def result(self) -> str:
        """The result in words."""
        if self.error:
            return f"failed: {self.error}"
        if self.run.reference is None:
            return "reference"
        if self.largest_difference == 0:
            return f"equal here; may differ: {self.run.exempt}" if self.run.exempt else "equal"
        differs = f"differs by at most {self.largest_difference:.1e}"
        return f"{differs}: {self.run.exempt}" if self.run.exempt else f"{differs.upper()}, and has to be equal"


def run_words(folder: Path, model: Path, run: CertifiedRun) -> list[str]:
    """Return the settings of a run."""
    return [
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.name={run.engine}",
        "actor_rollout_ref.rollout.full_determinism=True",
        f"data.train_files={folder / 'data' / 'train.parquet'}",
        f"reward.custom_reward_function.path={folder / 'early_letters.py'}",
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={_PROMPTS}",
        "data.max_prompt_length=64",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.logger=[file]",
        "trainer.report=False",
        "trainer.threads_per_worker=1",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVED_STEP}",
        "trainer.record=True",
        "trainer.journal=True",
        f"trainer.default_local_dir={run_folder(folder, run.name)}",
        *run.words,
    ]


def run_folder(folder: Path, name: str) -> Path:
    """Return the folder of a run."""
    return folder / "".join(char if char.isalnum() else "_" for char in name)


def certify(
    runs: Sequence[CertifiedRun],
    folder: Path,
    model: Path | None = None,
    python: str = sys.executable,
    show: Callable[[CertificateRow], None] = lambda row: None,
) -> list[CertificateRow]:
    """Carry out runs one after the other, on one Ray, and compare their weights.

    Args:
        runs: each after its reference.
        folder: of the data, the runs and their output. It is empty.
        model: None: a random model of 0.36 M parameters.
        python: runs the program that is killed.
        show: is called with each row.
    """
    from hybridrl.data.preprocess.sort import write_sort_data
    from hybridrl.models.tiny import build_tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    write_sort_data(folder / "data", train_size=64, test_size=16)
    (folder / "early_letters.py").write_text(_REWARD)
    path = model or build_tiny_model(folder / "model")
    rows: dict[str, CertificateRow] = {}
    with ExitStack() as stack:
        output = stack.enter_context((folder / "output.log").open("w"))
        if not ray.is_initialized():
            with redirect_stdout(output), redirect_stderr(output):
                init_ray({"num_cpus": _PLACES, "include_dashboard": False, "log_to_driver": False})
            stack.callback(shutdown_ray)
        for run in runs:
            began, error = time.monotonic(), ""
            try:
                with redirect_stdout(output), redirect_stderr(output):
                    _carry_out(run, folder, path, python)
                _check_journal(run, folder)
            except (UserError, WorkerError) as fault:
                error = str(fault).splitlines()[0]
            if not error and run.reference is not None and rows[run.reference].error:
                error = f"there is nothing to compare it with: {run.reference} failed"
            rows[run.name] = _row(run, folder, time.monotonic() - began, error)
            show(rows[run.name])
    return list(rows.values())


def _carry_out(run: CertifiedRun, folder: Path, model: Path, python: str) -> None:
    from hybridrl.trainer.ppo.run_ppo import started_trainer

    words = run_words(folder, model, run)
    if run.incident is Incident.KILLED:
        _run_until_killed(words, folder, python)
    if run.incident is Incident.REPLAYED:
        assert run.reference is not None
        words += [
            "trainer.record=False",
            "trainer.journal=False",
            f"trainer.replay={run_folder(folder, run.reference)}",
        ]
    with started_trainer(load_config("ppo_trainer", words)) as trainer:
        if run.incident is Incident.REPLICA_LOST:
            assert isinstance(trainer.rollout, ReplicatedRollout)
            supervisor, updates = trainer.rollout.supervisor, 0

            def lose() -> None:
                nonlocal updates
                updates += 1
                if updates == SAVED_STEP:  # the next prompts are in flight
                    ray.kill(supervisor.replicas[0].actor)

            trainer.learner.on_weights_change.append(lose)
        trainer.fit()


def _check_journal(run: CertifiedRun, folder: Path) -> None:
    """Read the journal of a run's ledger: each prompt was trained on once or is void.

    Raises:
        UserError: it was not, or the steps had other numbers of prompts.
    """
    if run.incident is Incident.REPLAYED:
        return  # it has no ledger of its own
    states = Counter(read_journal(run_folder(folder, run.name) / JOURNAL).states.values())
    if (trained := states[GroupState.RELEASED]) != STEPS * _PROMPTS or states[GroupState.TAKEN]:
        raise UserError(f"{trained} prompts were trained on in {STEPS} steps of {_PROMPTS}: {dict(states)}")


def _run_until_killed(words: Sequence[str], folder: Path, python: str) -> None:
    """Have another process run until it kills itself in the middle."""
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with (folder / "killed.log").open("a") as output:
        killed = subprocess.run(
            [python, "-m", "hybridrl.trainer.certify.killed_run", json.dumps(list(words))],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if killed.returncode not in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise UserError(f"the run that kills itself ended with status {killed.returncode}; see {folder / 'killed.log'}")


def _row(run: CertifiedRun, folder: Path, seconds: float, error: str) -> CertificateRow:
    if error:
        return CertificateRow(run, "", None, seconds, error)
    weights = _weights(run_folder(folder, run.name))
    difference = None
    if run.reference is not None:
        reference = _weights(run_folder(folder, run.reference))
        if weights.keys() != reference.keys():
            return CertificateRow(run, "", None, seconds, "its weights have other names than those of the reference")
        difference = max(_difference(weights[name], reference[name]) for name in weights)
    return CertificateRow(run, _hash(weights), difference, seconds)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted((folder / f"global_step_{STEPS}" / "actor" / "hf_model").glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def _difference(weight: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors; 0 only where all bits are equal."""
    if weight.dtype == other.dtype and torch.equal(weight.view(torch.uint8), other.view(torch.uint8)):
        return 0.0
    largest = (weight.double() - other.double()).abs().max().item()
    return largest if largest == largest and largest > 0 else float("inf")


def _hash(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
