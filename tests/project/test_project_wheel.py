"""The wheel: built, installed into an environment of its own, and run far from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, text=True, capture_output=True, timeout=240
    )


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = run(*pip, "--wheel-dir", folder, repository, cwd=folder)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("hybridrl-*.whl")
    return found


@pytest.fixture(scope="module")
def installed_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel installed and finds the dependencies where these tests have them."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    installing = run(
        sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", wheel, cwd=folder
    )
    assert installing.returncode == 0, installing.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def test_wheel_holds_package_and_configs_but_no_tests(wheel: Path, repository: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "hybridrl"]
    listed = subprocess.run(tracked, cwd=repository, text=True, capture_output=True, check=True).stdout.splitlines()
    assert not [name for name in listed if (repository / name).exists() and name not in names]
    assert "hybridrl/py.typed" in names  # type checkers read the annotations of an installed package only with it
    shipped = {name for name in names if name.startswith("hybridrl/_configs/")}
    configs = repository / "configs"
    assert shipped == {
        f"hybridrl/_configs/{file.relative_to(configs)}" for file in configs.rglob("*") if file.is_file()
    }
    assert not [name for name in names if not name.startswith(("hybridrl/", "hybridrl-"))]


def test_the_tests_distribution_has_the_version_of_the_package(repository: Path, tmp_path: Path) -> None:
    import hybridrl

    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = run(*pip, "--wheel-dir", tmp_path, repository / "packages" / "hybridrl-testing", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (file,) = tmp_path.glob("*.whl")
    assert file.name.startswith(f"hybridrl_testing-{hybridrl.__version__}-")
    names = zipfile.ZipFile(file).namelist()
    assert "hybridrl_testing/gpu_packages/torchvision/__init__.py" in names and "hybridrl_testing/py.typed" in names


IMPORT_ALL = """
import importlib, sys
missing = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing.setdefault(error.name.split(".")[0], []).append(name)
for package, modules in missing.items():
    print(package, *modules)
"""
#: programs, and what runs under another Python or needs an engine's own process
NOT_IMPORTED = ("__main__", "hybridrl.verl_compat.path", "hybridrl.agents.environments.bridges")


@pytest.mark.slow(20)
def test_what_the_wheel_holds_imports_without_the_tests_distribution(
    wheel: Path, installed_python: Path, tmp_path: Path
) -> None:
    files = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    modules = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    modules = [name for name in modules if not any(part in name for part in NOT_IMPORTED)]
    assert len(modules) > 500
    away = run(installed_python, "-c", "import hybridrl_testing", cwd=tmp_path)
    assert "No module named 'hybridrl_testing'" in away.stderr
    imported = run(installed_python, "-c", IMPORT_ALL, *sorted(modules), cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    missing = {line.split()[0]: line.split()[1:] for line in imported.stdout.splitlines()}
    assert missing.keys() <= {"sglang", "vllm", "megatron", "triton"}, missing


def test_without_the_tests_distribution_its_stand_ins_are_refused_by_name(
    installed_python: Path, tmp_path: Path
) -> None:
    ask = "from hybridrl.rollout.sglang.compat import use_stand_ins; use_stand_ins()"
    refused = run(installed_python, "-c", ask, cwd=tmp_path)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("hybridrl.errors.RolloutError: actor_rollout_ref.rollout.name=sglang ")
    assert "hybridrl_testing" in last and "scripts/install.sh cpu sglang" in last


def test_installed_package_takes_no_configs_of_others(installed_python: Path, tmp_path: Path) -> None:
    """Neither beside its own YAML nor in place of it, should that be gone."""
    (site,) = installed_python.parents[1].glob("lib/python*/site-packages")
    foreign, own, away = site / "configs", site / "hybridrl" / "_configs", site / "hybridrl" / "_away"
    foreign.mkdir()
    try:
        (foreign / "ppo_trainer.yaml").write_text("trainer: {total_epochs: 99}\n")
        ask = [installed_python, "-c", "from hybridrl.config.compose import configs_folder; print(configs_folder())"]
        assert run(*ask, cwd=tmp_path).stdout.strip() == str(own)
        own.rename(away)
        assert "the YAML files of hybridrl are missing" in run(*ask, cwd=tmp_path).stderr
    finally:
        if away.exists():
            away.rename(own)
        shutil.rmtree(foreign)


def test_the_command_is_installed(installed_python: Path, tmp_path: Path) -> None:
    asked = run(installed_python.with_name("hybridrl"), "--version", cwd=tmp_path)
    assert asked.returncode == 0 and asked.stdout.startswith("hybridrl "), asked.stderr
    assert "usage: hybridrl sft" in run(installed_python.with_name("hybridrl"), "sft", "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("program", "root", "word", "line"),
    [
        ("main_ppo", "actor_rollout_ref", "trainer.total_epochs=7", "  total_epochs: 7"),
        ("main_sft", "optim", "trainer.total_epochs=7", "  total_epochs: 7"),
        ("main_generation", "actor_rollout_ref", "data.n_samples=7", "  n_samples: 7"),
        ("main_eval", "reward", "data.response_key=answers", "  response_key: answers"),
    ],
)
def test_installed_program_composes_its_configuration_anywhere(
    installed_python: Path, tmp_path: Path, program: str, root: str, word: str, line: str
) -> None:
    where = run(installed_python, "-c", "import hybridrl; print(hybridrl.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed_python.parents[1]), where.stdout + where.stderr

    printed = run(installed_python, "-m", f"hybridrl.trainer.{program}", "--cfg", "job", word, cwd=tmp_path)
    assert printed.returncode == 0, printed.stdout + printed.stderr
    lines = printed.stdout.splitlines()
    assert f"{root}:" in lines
    assert line in lines
    assert not list(tmp_path.iterdir()), "printing the configuration leaves files behind"


def test_version_of_the_wheel_is_that_of_the_package(wheel: Path) -> None:
    import hybridrl

    assert wheel.name.startswith(f"hybridrl-{hybridrl.__version__}-")
