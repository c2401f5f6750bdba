"""The files of examples/multi_node: their syntax, their settings, and what node.sh does on a node.

`ray` and `python` are replaced by scripts that record how they are called: every other test on this machine would join
a second Ray cluster.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.config import load_config

FOLDER = Path(__file__).parents[2] / "examples" / "multi_node"
NODE = FOLDER / "node.sh"


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_have_no_syntax_error(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def programs() -> Iterator[tuple[str, str]]:
    """The shell text of each file that holds a command of ours."""
    kube = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    yield "kuberay.yaml", kube["spec"]["entrypoint"]
    sky = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    yield "skypilot.yaml", sky["run"]
    dstack = yaml.safe_load((FOLDER / "train.dstack.yml").read_text())
    yield "train.dstack.yml", "\n".join(dstack["commands"])
    yield "slurm.sh", (FOLDER / "slurm.sh").read_text()


@pytest.mark.parametrize(("name", "text"), list(programs()))
def test_the_settings_in_them_compose(name: str, text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    words = shlex.split(text.replace("\\\n", " ").replace("(", " ").replace(")", " "), comments=True)
    groups = ("algorithm.", "data.", "actor_rollout_ref.", "trainer.")
    settings = [word for word in words if word.startswith(groups)]
    assert len(settings) >= 3
    counts = {"trainer.nnodes": 0, "trainer.n_gpus_per_node": 0}
    given = []
    for word in settings:
        key, value = word.split("=", 1)
        if key in counts:
            counts[key] += 1
            value = "2" if "$" in value else value
        given.append(f"{key}='{value}'" if "$" in value else f"{key}={value}")
    assert set(counts.values()) == {1}
    config: Any = load_config("ppo_trainer", given)
    assert config.trainer.nnodes == 2 and config.trainer.default_local_dir


def test_the_two_groups_of_pods_are_alike() -> None:
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    assert group["template"] == spec["headGroupSpec"]["template"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1
    assert spec["authOptions"] == {"mode": "token"}


# ---------------------------------------------------------------- node.sh


@pytest.fixture
def stage(tmp_path: Path) -> dict[str, str]:
    """An environment in which `ray` listens on the port, as a head does, and records its arguments."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ray").write_text(
        f'#!/bin/bash\necho "$RAY_AUTH_MODE $*" >> {tmp_path}/ray.txt\n'
        'if [ "$2" != --head ]; then exit 3; fi\n'
        'exec /usr/bin/env python3 -c "import signal, socket; '
        "s = socket.create_server(('127.0.0.1', $RAY_PORT)); signal.pause()\"\n"
    )
    (tools / "python").write_text(
        f'#!/bin/bash\ncat > {tmp_path}/wait.py\necho "$RAY_ADDRESS $*" > {tmp_path}/python.txt\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = {"PATH": f"{tools}:{os.environ['PATH']}", "RAY_PORT": str(port), "RAY_AUTH_TOKEN": "secret"}
    return {**os.environ, **path, "JOIN_SECONDS": "20"}


def node(stage: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(NODE), *words], env=stage, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def is_open(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.parametrize("status", [0, 75])
def test_the_head_runs_the_program_and_ends_with_its_status(stage: dict[str, str], tmp_path: Path, status: int) -> None:
    program = f'echo "ran with $RAY_ADDRESS"; exit {status}'
    run = node(stage, "0", "2", "127.0.0.1", "bash", "-c", program)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == status, output
    address = f"127.0.0.1:{stage['RAY_PORT']}"
    assert f"ran with {address}" in output
    assert f"token start --head --port={stage['RAY_PORT']} " in (tmp_path / "ray.txt").read_text()
    assert (tmp_path / "python.txt").read_text().strip() == f"{address} - 2 20", "waits for two nodes"
    compile((tmp_path / "wait.py").read_text(), "wait.py", "exec")
    assert not is_open(stage["RAY_PORT"]), "Ray ends with the program"


def test_a_stop_request_reaches_the_program(stage: dict[str, str], tmp_path: Path) -> None:
    program = f'trap "sleep 1; echo saved; exit 75" TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done'
    run = node(stage, "0", "1", "127.0.0.1", "bash", "-c", program)
    while not (tmp_path / "ready").exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 75 and "saved" in output
    assert not is_open(stage["RAY_PORT"])


def test_another_node_joins_once_the_head_is_there(stage: dict[str, str], tmp_path: Path) -> None:
    run = node(stage, "1", "2", "127.0.0.1", "never", "run", "here")
    time.sleep(0.5)
    assert run.poll() is None and not (tmp_path / "ray.txt").exists()
    with socket.create_server(("127.0.0.1", int(stage["RAY_PORT"]))):
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    assert (tmp_path / "ray.txt").read_text() == f"token start --address=127.0.0.1:{stage['RAY_PORT']} --block\n"


def test_what_is_missing_is_told(stage: dict[str, str]) -> None:
    output, _ = node(stage, "0", "1", "127.0.0.1").communicate(timeout=30)
    assert "RANK NODES HEAD_ADDRESS COMMAND" in output
    without = {name: value for name, value in stage.items() if name != "RAY_AUTH_TOKEN"}
    output, _ = node(without, "0", "1", "127.0.0.1", "true").communicate(timeout=30)
    assert "RAY_AUTH_TOKEN" in output
    run = node({**stage, "JOIN_SECONDS": "1"}, "1", "2", "127.0.0.1", "true")
    output, _ = run.communicate(timeout=30)
    assert run.returncode == 1 and "nothing answers at 127.0.0.1" in output
