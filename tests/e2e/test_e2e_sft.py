"""`main_sft` as a process: killed and resumed it ends bitwise as if it never was; faults end in one message."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_tools import Job, records, without_timing
from safetensors.torch import load_file

MODULE = "hybridrl.trainer.main_sft"
Start = Callable[..., Job]


@pytest.fixture(scope="module")
def sft_run(micro_model: Path, sort_data: Path) -> list[str]:
    """Overrides of a small run on two ranks: 4 steps an epoch, 6 steps, a checkpoint every second one."""
    return [
        f"model.path={micro_model}",
        f"data.train_files={sort_data / 'sft_train.parquet'}",
        f"data.val_files={sort_data / 'sft_val.parquet'}",
        "data.train_batch_size=16",
        "data.micro_batch_size_per_gpu=4",
        "optim.lr=1e-2",
        "optim.lr_scheduler_type=cosine",
        "trainer.total_training_steps=6",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.report=False",
        "trainer.n_gpus_per_node=2",
        "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ]


def weights(folder: Path) -> list[tuple[str, str, str]]:
    """(part of the checkpoint, tensor, digest) of every stored piece; which file of a part holds it may differ."""
    pieces = []
    for file in folder.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            pieces.append((file.parent.name, name, digest))
    return sorted(pieces)


def test_killed_and_resumed_equals_never_killed(
    start: Start, start_real: Start, sft_run: list[str], tmp_path: Path
) -> None:
    """The first run's processes have other hash seeds than those of the others."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    job = start_real(*sft_run, f"trainer.default_local_dir={whole}", module=MODULE)
    assert job.wait() == 0, job.output[-4000:]

    # One step behind the checkpoint of the end of the epoch: that step is undone and done again.
    job = start(*sft_run, f"trainer.default_local_dir={torn}", module=MODULE)
    job.wait_for(lambda: any(record["step"] == 5 for record in records(torn)))
    job.kill()
    resumed_from = json.loads((torn / "latest_checkpointed_iteration.txt").read_text())
    assert resumed_from in (4, 6)
    job = start(*sft_run, f"trainer.default_local_dir={torn}", module=MODULE)
    assert job.wait() == 0, job.output[-4000:]
    assert f"step {resumed_from} of 6" in job.output

    expected = weights(whole / "global_step_6")
    assert {part for part, _, _ in expected} == {"model", "optimizer", "hf_model"}
    assert weights(torn / "global_step_6") == expected
    assert weights(whole / "global_step_4") != expected
    found = [without_timing(record) for record in records(torn)]
    assert found == [without_timing(record) for record in records(whole)]
    assert [record["step"] for record in found if "val/loss" in record] == [2, 4, 6]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("data.messages_key=conversation", "conversation"),
        ("data.max_length=10", "max_length"),
        ("data.train_batch_size=4096", "data.train_batch_size=4096"),
        ("trainer.logger=[console,wandbb]", "wandb"),
    ],
)
def test_a_fault_of_the_user_is_one_message(
    start: Start, sft_run: list[str], tmp_path: Path, wrong: str, message: str
) -> None:
    job = start(*sft_run, f"trainer.default_local_dir={tmp_path / 'run'}", wrong, module=MODULE)
    assert job.wait() == 2, job.output[-4000:]
    errors = [line for line in job.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in job.output
    assert "Traceback" not in job.output


def torchrun(start: Start, *words: str, nodes: int = 1, node: int = 0, port: int = 0) -> Job:
    """`torchrun --nproc_per_node=2 -m hybridrl.trainer.main_sft` with these settings, on one of its nodes."""
    where = ["--standalone"] if nodes == 1 else ["--master_addr=127.0.0.1", f"--master_port={port}"]
    options = [*where, f"--nnodes={nodes}", f"--node_rank={node}", "--nproc_per_node=2", "-m", MODULE]
    return start(*options, *words, module="torch.distributed.run")


@pytest.fixture
def forked_ranks(forked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked)  # what `torchrun` starts its ranks with


@pytest.mark.usefixtures("forked_ranks")
def test_torchrun_leaves_the_work_to_its_rank_0(start_with_ray: Start, sft_run: list[str], tmp_path: Path) -> None:
    """As verl's commands start it. The other rank ends at once, and workers form a process group of their own."""
    words = [word for word in sft_run if not word.startswith("trainer.n_gpus_per_node")]
    words = [*words, "trainer.total_training_steps=2"]
    plain, launched = tmp_path / "plain", tmp_path / "launched"
    job = start_with_ray(*words, f"trainer.default_local_dir={plain}", "trainer.n_gpus_per_node=2", module=MODULE)
    assert job.wait() == 0, job.output[-4000:]
    job = torchrun(start_with_ray, *words, f"trainer.default_local_dir={launched}")
    assert job.wait() == 0, job.output[-4000:]
    assert job.output.count("notice: torchrun started this program") == 1
    assert "2 per node (trainer.n_gpus_per_node) on 1 node (trainer.nnodes)" in job.output
    assert weights(launched / "global_step_2") == weights(plain / "global_step_2")
    assert "n_gpus_per_node: 2" in (launched / "config.yaml").read_text()
    found = [without_timing(record) for record in records(launched)]
    assert found == [without_timing(record) for record in records(plain)]


@pytest.mark.usefixtures("forked_ranks")
def test_torchrun_on_two_nodes_has_one_controller(start_with_ray: Start, sft_run: list[str], tmp_path: Path) -> None:
    """Both agents of torchrun are on this machine, whose CPUs Ray takes for one node with room for all workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word for word in sft_run if not word.startswith("trainer.n_gpus_per_node")]
    words += ["trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}"]
    jobs = [torchrun(start_with_ray, *words, nodes=2, node=node, port=port) for node in (0, 1)]
    assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.output[-4000:] for job in jobs)
    controller, other = (job.output for job in jobs)
    assert "2 per node (trainer.n_gpus_per_node) on 2 nodes (trainer.nnodes)" in controller
    assert controller.count("notice: torchrun") == other.count("notice: torchrun") == 1
    assert "rank 0 on another node" in other and "step 1/1" not in other
    assert {record["step"] for record in records(tmp_path / "run")} == {1}
    assert "nnodes: 2" in (tmp_path / "run" / "config.yaml").read_text()
