"""What README.md shows works. The word after a fence's language says how it is checked:

`run` is run, in one folder and in order; `compose` needs a hub or a GPU, so its settings are composed and its modules
found; `install` and `quickstart` call scripts, whose arguments are checked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import load_config

FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROOTS = {
    "hybridrl.trainer.main_ppo": "ppo_trainer",
    "hybridrl.trainer.main_sft": "sft_trainer",
    "hybridrl.trainer.main_generation": "generation",
    "hybridrl.trainer.main_eval": "evaluation",
}


@dataclass
class Snippet:
    language: str
    check: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def snippets(check: str | None = None) -> list[Snippet]:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    found = [Snippet(*match.groups()) for match in FENCE.finditer(text)]
    return [snippet for snippet in found if check is None or snippet.check == check]


def test_every_snippet_says_how_it_is_checked() -> None:
    for snippet in snippets():
        if snippet.language != "text":  # output, not code
            assert snippet.check in ("run", "compose", "install", "quickstart"), snippet.text


def test_settings_of_commands_for_other_machines_compose() -> None:
    programs = []
    for snippet in snippets("compose"):
        for python, flag, module, *words in snippet.commands:
            assert (python, flag) == ("python", "-m")
            assert importlib.util.find_spec(module) is not None, module
            if module in ROOTS:
                load_config(ROOTS[module], words)
                programs.append(module)
    assert "hybridrl.trainer.main_ppo" in programs


def test_settings_after_the_quickstart_compose() -> None:
    for snippet in snippets("quickstart"):
        for bash, script, *words in snippet.commands:
            assert (bash, script) == ("bash", "scripts/quickstart.sh")
            load_config("ppo_trainer", words)


def test_extras_of_the_installation_exist(repository: Path) -> None:
    import tomllib

    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for snippet in snippets("install"):
        for bash, script, *words in snippet.commands:
            assert (bash, script) == ("bash", "scripts/install.sh")
            assert set(words) <= {"cpu", "cuda", "auto", *extras}


def test_snippets_run_as_they_stand(tmp_path: Path, finish: Callable[..., Any]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    outputs = []
    for number, snippet in enumerate(snippets("run")):
        if snippet.language == "python":
            (tmp_path / f"snippet{number}.py").write_text(snippet.text)
            command = [sys.executable, f"snippet{number}.py"]
        else:
            command = ["bash", "-euc", snippet.text]
        ended = finish(command, cwd=tmp_path, env=environment)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        outputs.append(ended.stdout)
    assert (tmp_path / "demo/sft/global_step_4/model").is_dir()
    assert "step 4/4" in outputs[0]
    records = [json.loads(line) for line in (tmp_path / "demo/grpo/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert outputs[-1].strip().endswith("[1.0, 1.0, 2.0, 2.0]")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md"])
def test_links_to_files_lead_somewhere(repository: Path, page: str) -> None:
    file = repository / page
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text())
    assert targets or page == "CHANGELOG.md"
    for target in targets:
        if "://" not in target:
            assert (file.parent / target).exists(), target
