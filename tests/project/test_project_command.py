"""The command `hybridrl`, the programs behind it, and what `import hybridrl` offers; in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hybridrl.programs import COMMANDS, PROGRAMS


def python(*words: str, folder: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def setting(tree: str, *path: str) -> object:
    node = yaml.safe_load(tree)
    for name in path:
        node = node[name]
    return node


def test_help_names_every_command(tmp_path: Path) -> None:
    done = python("-m", "hybridrl", folder=tmp_path)
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in (*PROGRAMS, *COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_with_options_of_its_own(tmp_path: Path, name: str) -> None:
    done = python("-m", "hybridrl", name, "--help", folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: hybridrl {name} ")


def test_an_unknown_command_is_refused_by_name(tmp_path: Path) -> None:
    done = python("-m", "hybridrl", "grop", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "grop" in done.stderr and "grpo" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["grpo", "sft", "generate", "eval"])
def test_the_help_of_a_command_is_its_own(tmp_path: Path, name: str) -> None:
    done = python("-m", "hybridrl", name, "--help", folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: hybridrl {name} ")


def test_defaults_of_grpo_give_way_to_files_and_words(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref: {rollout: {n: 4}}\nalgorithm: {adv_estimator: rloo}\n")
    show = ("-m", "hybridrl", "grpo", "--cfg", "job", "--resolve")
    n, estimator = ("actor_rollout_ref", "rollout", "n"), ("algorithm", "adv_estimator")
    plain = python(*show, folder=tmp_path).stdout
    assert (setting(plain, *n), setting(plain, *estimator)) == (8, "grpo")
    assert setting(plain, "actor_rollout_ref", "actor", "rollout_n") == 8, "what follows a default follows ours"
    filed = python(*show, "-cp", ".", "-cn", "mine", folder=tmp_path).stdout
    assert (setting(filed, *n), setting(filed, *estimator)) == (4, "rloo")
    worded = python(*show, "-cp", ".", "-cn", "mine", f"{'.'.join(n)}=1", folder=tmp_path).stdout
    assert setting(worded, *n) == 1
    assert setting(python("-m", "hybridrl", "ppo", "--cfg", "job", folder=tmp_path).stdout, *estimator) == "gae"


@pytest.mark.parametrize(
    "words",
    [("-m", "hybridrl", "grpo"), ("-m", "hybridrl", "report", "run"), ("-m", "hybridrl.trainer.main_sft", "--help")],
)
def test_a_python_without_the_packages_says_so_in_one_line(
    repository: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = python(*words, folder=tmp_path, options=("-S",))  # finds nothing but the standard library and the checkout
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert sys.executable in done.stderr and "scripts/install.sh" in done.stderr


def test_the_package_shows_what_it_has_and_imports_it_late(tmp_path: Path) -> None:
    code = (
        "import sys, hybridrl\n"
        "names = dir(hybridrl)\n"
        "assert {'grpo', 'ppo', 'sft', 'Trainer', 'DataProto', 'load_config'} <= set(names), names\n"
        "late = {'torch', 'ray', 'omegaconf', 'numpy', 'transformers', 'pandas'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
        "hybridrl.grpo, hybridrl.Trainer\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
        "assert all(hasattr(hybridrl, name) for name in names)\n"
    )
    done = python("-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
