"""What a user can get wrong, and what can break: the whole job ends in one clear message and loses nothing.

The runs are command lines of `main_ppo`, given one after the other to one process (`many_runs.py`) that
has Ray already: each of its own would spend most of its time on starting. What is about the process as a whole
(Ctrl-C, an address where no Ray is) gets one of its own.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from e2e_tools import Job, records
from safetensors.torch import load_file

from hybridrl.checkpoint import verify
from hybridrl.protocol import DataProto

LIMIT_S = 400
MARK = "HYBRIDRL_TEST_RUN"

# Registered by the user's own module, in the workers and on the controller.
FAULTS = '''
import os, resource, signal

import torch
from hybridrl.algorithms import get_policy_loss_fn, register_adv_est, register_policy_loss
from hybridrl.engine import saved_parts

calls = 0  # of the loss in this process: one a step, since a micro-batch holds the whole batch


def breaks_in_step_two(name):
    """A policy loss that is the usual one, until the decorated function is called with it in the second step."""

    def decorate(fault):
        @register_policy_loss(name)
        def loss(**inputs):
            global calls
            calls += 1
            value, metrics = get_policy_loss_fn("vanilla")(**inputs)
            return (fault(value) if calls == 2 else value), metrics

    return decorate


@breaks_in_step_two("nan_loss")
def _(loss):
    return loss * float("nan")


@breaks_in_step_two("nan_gradient")
def _(loss):
    return loss + (loss - loss.detach()).sqrt()  # the square root of 0 has an infinite slope


@breaks_in_step_two("small_disk")
def _(loss):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 * 1024, resource.RLIM_INFINITY))
    return loss


@breaks_in_step_two("killed_while_saving")
def _(loss):
    if torch.distributed.get_rank() == 1:
        saved_parts.write_slices = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return loss


@register_adv_est("quarter")
def quarter(token_level_rewards, response_mask, **kwargs):
    advantages = 0.25 * response_mask
    return advantages, advantages
'''

REWARDS = """
import math, time


def raises(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("my own mistake")


def hangs(data_source, solution_str, ground_truth, extra_info):
    time.sleep(1000)


def is_nan(data_source, solution_str, ground_truth, extra_info):
    return math.nan
"""


@dataclass
class Outcome:
    """How a run ended."""

    status: int
    output: str
    folder: Path
    left: list[str] = field(default_factory=list)

    def assert_one_message(self, *texts: str, status: int = 2) -> None:
        """It ended with `status`, after one message that holds `texts`, no traceback, and nothing of it is left."""
        assert self.status == status, self.output[-4000:]
        assert sum(line.startswith("error:") for line in self.output.splitlines()) == 1, self.output[-4000:]
        for text in texts:
            assert text in self.output, self.output[-4000:]
        assert "Traceback" not in self.output, self.output[-4000:]
        assert self.left == []


class Runner:
    """One process that takes command lines; another where that has died."""

    def __init__(self, python: str, folder: Path, common: list[str]) -> None:
        self.python = python
        self.folder = folder
        self.common = common
        self.mark = uuid.uuid4().hex
        self._log = open(folder / "runner.log", "w")  # noqa: SIM115  (open as long as the process)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(self.folder), os.environ["PYTHONPATH"]]
        own = {"PYTHONPATH": os.pathsep.join(paths), "RUNS_FOLDER": str(self.folder), MARK: self.mark}
        return subprocess.Popen(
            [self.python, str(Path(__file__).with_name("many_runs.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self.folder,
            env={**os.environ, **own, "CUDA_VISIBLE_DEVICES": ""},
            text=True,
            start_new_session=True,
        )

    def __call__(
        self, name: str, *words: str, trainer: str = "ppo_trainer", common: list[str] | None = None
    ) -> Outcome:
        """Run in the folder `name`."""
        log = self.folder / f"{name}.log"
        given = [*(self.common if common is None else common), f"trainer.default_local_dir={self.folder / name}"]
        case = {"trainer": trainer, "words": [*given, *words], "log": str(log)}
        if self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        answered, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        answer = self.process.stdout.readline() if answered else ""
        output = log.read_text(errors="replace") if log.exists() else (self.folder / "runner.log").read_text()
        if not answer:
            self._kill()  # a late answer would be taken for that of the next
            raise AssertionError(f"it died, or there was no end within {LIMIT_S} s:\n{output[-4000:]}")
        return Outcome(output=output, folder=self.folder / name, **json.loads(answer))

    def _kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        try:
            self.process.communicate(timeout=120)
        finally:
            self._kill()
            self._log.close()


def processes_of(mark: str) -> list[str]:
    """Processes that were started, at whatever remove, with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_all_end(mark: str) -> None:
    """What Ray has told to end has a moment for it."""
    deadline = time.monotonic() + 40
    while left := processes_of(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.fixture(scope="module")
def grpo(sort_run: list[str]) -> list[str]:
    return [
        *sort_run,
        "trainer.device=cpu",
        "trainer.logger=[]",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "reward.num_workers=1",
    ]


@pytest.fixture(scope="module")
def run(grpo: list[str], forked: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "faults_of_mine.py").write_text(FAULTS)
    (folder / "rewards_of_mine.py").write_text(REWARDS)
    runner = Runner(forked, folder, grpo)
    yield runner
    runner.close()
    assert_all_end(runner.mark)


def alone(words: list[str], folder: Path, python: str = sys.executable) -> Job:
    """A process of its own for one run."""
    module = ["-m", "hybridrl.trainer.main_ppo"]
    return Job([python, *module, *words, f"trainer.default_local_dir={folder / 'run'}"], folder / "log")


def broken_loss(name: str, *words: str) -> list[str]:
    return [
        "actor_rollout_ref.model.external_lib=faults_of_mine",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={name}",
        "trainer.save_freq=1",
        *words,
    ]


# ---------------------------------------------------------------- refused before a model is loaded


def _garbage(path: Path, good: Path) -> None:
    path.write_bytes(b"PAR1 this is no parquet")


def _empty(path: Path, good: Path) -> None:
    pd.read_parquet(good).iloc[:0].to_parquet(path)


def _no_prompt(path: Path, good: Path) -> None:
    pd.read_parquet(good).rename(columns={"prompt": "question"}).to_parquet(path)


def _text_prompt(path: Path, good: Path) -> None:
    frame = pd.read_parquet(good)
    frame["prompt"] = [{"text": "Sort: 31"} for _ in range(len(frame))]
    frame.to_parquet(path)


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (_garbage, ["cannot be read"]),
        (_empty, ["no rows"]),
        (_no_prompt, ["data.prompt_key", "question"]),
        (_text_prompt, ["row 0", "role", "content"]),
    ],
)
def test_data_that_cannot_be_used(run: Runner, sort_data: Path, damage: Callable, texts: list[str]) -> None:
    file = run.folder / f"{damage.__name__}.parquet"
    damage(file, sort_data / "train.parquet")
    run(f"data{damage.__name__}", f"data.train_files={file}").assert_one_message(str(file), *texts)


def _edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _no_weights(model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()


def _no_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def _lossy_tokenizer(model: Path) -> None:
    """A tokenizer that drops spaces; its class is one that takes tokenizer.json as it stands."""
    _edit_json(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    content = json.loads((model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": ""}
    (model / "tokenizer.json").write_text(json.dumps(content))


def _small_vocabulary(model: Path) -> None:
    """The tokenizer of another model."""
    _edit_json(model / "config.json", vocab_size=20)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_no_weights, "holds no weights"),
        (_no_tokenizer, "holds no tokenizer"),
        (_lossy_tokenizer, "does not give text back"),
        (_small_vocabulary, "do not belong together"),
    ],
)
def test_model_that_cannot_be_used(run: Runner, micro_model: Path, damage: Callable, text: str) -> None:
    model = run.folder / f"model{damage.__name__}"
    shutil.copytree(micro_model, model)
    damage(model)
    outcome = run(f"with{damage.__name__}", f"actor_rollout_ref.model.path={model}")
    outcome.assert_one_message(str(model), text)


def test_critic_with_another_tokenizer(run: Runner, micro_model: Path) -> None:
    """Its token ids would mean other text."""
    critic = run.folder / "critic_with_swapped_tokens"
    shutil.copytree(micro_model, critic)
    content = json.loads((critic / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (critic / "tokenizer.json").write_text(json.dumps(content))
    gae = "algorithm.adv_estimator=gae"
    ones = run("critic_model", gae, f"critic.model.path={critic}")
    ones.assert_one_message("critic.model", str(critic), "'1'")
    named = run("critic_tokenizer", gae, f"critic.model.path={micro_model}", f"critic.model.tokenizer_path={critic}")
    named.assert_one_message("critic.model", str(critic), "'1'")


def test_more_workers_than_there_are_devices(run: Runner) -> None:
    run("crowded", "trainer.n_gpus_per_node=64").assert_one_message("64 slots of 1 CPU", "Ask for at most 4 slots")
    run("no_gpu", "trainer.device=cuda").assert_one_message("trainer.device=cuda", "use trainer.device=cpu")


@pytest.mark.parametrize(
    ("code", "words", "texts"),
    [
        ("import no_such_thing", [], ["model.external_lib=mine_0", "no_such_thing"]),
        ("x = 1\ny = x.missing", [], ["model.external_lib=mine_1", "mine_1.py, line 2"]),
        ("", ["algorithm.adv_estimator=mine"], ["algorithm.adv_estimator=mine", "register_adv_est"]),
        ("", ["actor_rollout_ref.actor.policy_loss.loss_mode=mine"], ["loss_mode=mine", "register_policy_loss"]),
    ],
)
def test_own_module_that_cannot_be_used(
    run: Runner, request: pytest.FixtureRequest, code: str, words: list[str], texts: list[str]
) -> None:
    name = f"mine_{request.node.callspec.indices['code']}"
    (run.folder / f"{name}.py").write_text(code)
    run(name, f"actor_rollout_ref.model.external_lib={name}", *words).assert_one_message(*texts)


def test_port_where_something_else_than_ray_listens(grpo: list[str], tmp_path: Path, monkeypatch, forked: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        job = alone(grpo, tmp_path, forked)
        try:
            status = job.wait()
        finally:
            job.close()
    Outcome(status, job.output, tmp_path / "run").assert_one_message(f"no Ray cluster answers at {address!r}")


# ---------------------------------------------------------------- in the middle of a run


@pytest.mark.parametrize(
    ("name", "texts"),
    [("raises", ["my own mistake"]), ("hangs", ["reward.timeout_s=0.5", "it hangs"]), ("is_nan", ["nan"])],
)
def test_reward_function_that_fails(run: Runner, name: str, texts: list[str]) -> None:
    outcome = run(
        f"reward_{name}",
        f"reward.custom_reward_function.path={run.folder / 'rewards_of_mine.py'}",
        f"reward.custom_reward_function.name={name}",
        "reward.timeout_s=0.5",
    )
    assert outcome.status == 2, outcome.output[-4000:]
    assert sum(line.startswith("error:") for line in outcome.output.splitlines()) == 1
    for text in ("rewards_of_mine.py", "Sort:", *texts):  # the sample is shown
        assert text in outcome.output, outcome.output[-4000:]
    assert 'File "' not in outcome.output.replace(f'File "{run.folder}', "")  # of tracebacks the user's part alone
    assert outcome.left == []


def test_nan_in_the_loss_stops_the_run_and_its_batch_is_kept(run: Runner) -> None:
    outcome = run("nan_stop", *broken_loss("nan_loss"))
    outcome.assert_one_message("the loss of this step is not finite", "failed_batch_step_2 (DataProto.load_from_disk)")
    batch = DataProto.load_from_disk(outcome.folder / "failed_batch_step_2")
    assert batch.batch["advantages"].shape == batch.batch["responses"].shape and len(batch) == 32
    assert len(set(batch.non_tensor_batch["uid"])) == 16
    verify(outcome.folder / "global_step_1")
    assert not (outcome.folder / "global_step_2").exists()
    assert [record["step"] for record in records(outcome.folder)] == [1]


#: a run of three steps with an infinite gradient in the second, and an estimator of the user's own
SKIPPED = broken_loss(
    "nan_gradient", "trainer.on_nonfinite=skip", "trainer.total_training_steps=3", "algorithm.adv_estimator=quarter"
)


@pytest.fixture(scope="module")
def skipped(run: Runner) -> Outcome:
    return run("skipped", *SKIPPED)


def test_nan_in_the_gradient_skips_the_step_and_its_batch_is_kept(skipped: Outcome) -> None:
    assert skipped.status == 0, skipped.output[-4000:]
    assert [record["actor/skipped_steps"] for record in records(skipped.folder)] == [0, 1, 0]
    assert "step 2: loss or gradient is not finite" in skipped.output
    assert [path.name for path in skipped.folder.glob("failed_batch_step_*")] == ["failed_batch_step_2"]
    assert len(DataProto.load_from_disk(skipped.folder / "failed_batch_step_2")) == 32
    first, second, third = (weights_of(skipped.folder, step) for step in (1, 2, 3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(second[name], third[name]) for name in first)


def test_estimator_of_the_users_own_module_acts_on_the_controller(skipped: Outcome) -> None:
    assert skipped.status == 0, skipped.output[-4000:]
    for record in records(skipped.folder):
        assert record["critic/advantages/min"] == record["critic/advantages/max"] == 0.25


def weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (folder / f"global_step_{step}" / "actor" / "model").glob("*.safetensors")
    return load_file(file)


# ---------------------------------------------------------------- checkpoints


def test_full_disk_while_saving_keeps_the_checkpoint_before(run: Runner) -> None:
    outcome = run("small_disk", *broken_loss("small_disk"))
    outcome.assert_one_message(
        "the checkpoint of step 2 could not be written", "global_step_1 is untouched", "make room"
    )
    verify(outcome.folder / "global_step_1")
    assert [path.name for path in outcome.folder.glob("global_step_*")] == ["global_step_1"]
    assert [record["step"] for record in records(outcome.folder)] == [1, 2]


def test_worker_killed_while_saving_is_named_and_the_checkpoint_before_is_whole(run: Runner) -> None:
    outcome = run("killed_while_saving", *broken_loss("killed_while_saving", "trainer.n_gpus_per_node=2"))
    outcome.assert_one_message(
        "actor_rollout rank 1 of 2 died in save_checkpoint", "SIGKILL", "global_step_1 is untouched", status=1
    )
    verify(outcome.folder / "global_step_1")
    assert [path.name for path in outcome.folder.glob("global_step_*")] == ["global_step_1"]


@pytest.fixture
def torn(run: Runner, skipped: Outcome) -> Path:
    """A run's folder whose newest checkpoint has one bit turned over."""
    assert skipped.status == 0, skipped.output[-4000:]
    folder = run.folder / "torn"
    if not folder.exists():
        shutil.copytree(skipped.folder, folder)
        file = next((folder / "global_step_3" / "actor" / "model").glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    return folder


def test_torn_checkpoint_is_refused_where_it_was_asked_for(run: Runner, torn: Path) -> None:
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={torn / 'global_step_3'}"]
    run("resume_torn", *words).assert_one_message("global_step_3", "safetensors")


def test_torn_checkpoint_is_passed_over_by_auto_with_a_notice(run: Runner, torn: Path) -> None:
    outcome = run("torn", *SKIPPED)
    assert outcome.status == 0, outcome.output[-4000:]
    assert f"RESUMING FROM THE OLDER {torn / 'global_step_2'} INSTEAD" in outcome.output
    assert "step 2 of 3" in outcome.output
    assert [record["step"] for record in records(torn)] == [1, 2, 3]
    verify(torn / "global_step_3")


def test_checkpoint_of_another_model_is_refused(run: Runner, skipped: Outcome, tiny_model: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in skipped.folder.rglob("*") if path.name != ".lock"}
    outcome = run("skipped", f"actor_rollout_ref.model.path={tiny_model}")
    outcome.assert_one_message("hidden_size", "128", "32")
    assert {path: path.stat().st_mtime_ns for path in skipped.folder.rglob("*") if path.name != ".lock"} == before


def test_another_experiment_in_the_folder_of_a_run_is_refused(run: Runner, skipped: Outcome) -> None:
    before = (skipped.folder / "config.yaml").read_text()
    outcome = run("skipped", "trainer.total_training_steps=5")
    outcome.assert_one_message(
        "algorithm.adv_estimator was 'quarter', now 'grpo'",
        "actor_rollout_ref.actor.policy_loss.loss_mode was 'nan_gradient', now 'vanilla'",
        "trainer.default_local_dir",
        "trainer.resume_mode=disable",
    )
    assert (skipped.folder / "config.yaml").read_text() == before


def test_a_finished_run_says_so_and_what_is_different_now(run: Runner, skipped: Outcome) -> None:
    """It trained nothing, without a word."""
    lr = "actor_rollout_ref.actor.optim.lr"
    before, done = (skipped.folder / "config.yaml").read_text(), records(skipped.folder)
    outcome = run("skipped", *SKIPPED, f"{lr}=5e-4")
    assert outcome.status == 0, outcome.output[-4000:]
    assert "is finished (step 3 of 3)" in outcome.output and "nothing was trained" in outcome.output
    assert "trainer.total_training_steps" in outcome.output
    assert f"{lr} was 0.001, now 0.0005" in outcome.output
    assert records(skipped.folder) == done and (skipped.folder / "config.yaml").read_text() == before
    assert lr in (skipped.folder / "config_changes.yaml").read_text()


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("moment", "number", "ending", "status"),
    [
        ("ray starts", signal.SIGINT, "interrupted", 130),
        ("ray starts", signal.SIGTERM, "ended by SIGTERM", -signal.SIGTERM),
        ("workers start", signal.SIGTERM, "ended by SIGTERM", -signal.SIGTERM),
    ],
)
def test_a_signal_before_the_first_step_ends_at_once_and_leaves_nothing(
    grpo: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    number: int,
    ending: str,
    status: int,
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    job = alone(grpo, tmp_path)
    try:
        if moment == "ray starts":
            job.wait_for(lambda: "generating with" in job.output)
        else:
            job.wait_for(lambda: any("ray::" in name and "IDLE" not in name for name in processes_of(mark)), every=0.25)
        os.killpg(job.process.pid, number)  # as a terminal and `timeout` do: to the whole group
        assert job.wait() == status, job.output[-4000:]
    finally:
        job.close()
    assert job.output.rstrip().endswith(ending) and "Traceback" not in job.output
    assert not list((tmp_path / "run").glob("global_step_*"))
    assert_all_end(mark)
