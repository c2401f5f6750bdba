"""What the recipes, the examples and the pages show has no setting that cannot act."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.config.checks.idle import check_idle
from hybridrl.config.compose import compose_config
from hybridrl.programs import PROGRAMS

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in REPOSITORY.glob("recipes/*/run.sh"))
PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for pattern in ("README.md", "docs/*.md", "recipes/**/*.md", "examples/**/*", "scripts/*.sh")
    for path in REPOSITORY.glob(pattern)
    if path.is_file() and path.suffix in (".md", ".sh", ".yaml", ".yml")
    if path.name != "extending.md"  # its commands need the modules that it writes, and its own test runs them
)
MODULES = {
    "main_ppo": "ppo_trainer",
    "main_sft": "sft_trainer",
    "main_dpo": "dpo_trainer",
    "main_kto": "kto_trainer",
    "main_rm": "rm_trainer",
    "main_generation": "generation",
    "main_eval": "evaluation",
}
_SETTING = re.compile(r"\+{0,2}[a-z_]+(\.\w+)+=\S.*|(?:placement|engine|model_engine)=\w+")


def idle(
    root: str, words: Sequence[str], folder: Path | None = None, name: str | None = None, **more: Any
) -> list[str]:
    faults, notices = check_idle(compose_config(root, words, folder, name, **more).config)
    return [*faults, *notices]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_URL", "http://h:1")
    root = f"{name}_trainer" if name in ("dpo", "kto", "rm") else "ppo_trainer"
    assert idle(root, ["data.val_files=[a.parquet]"], REPOSITORY / "recipes" / name, name) == []


def choices() -> Iterator[tuple[str, str]]:
    """The words that choose each file of `configs/`, with the tree that has the group."""
    for root in MODULES.values():
        tree = yaml.safe_load((REPOSITORY / "configs" / f"{root}.yaml").read_text())
        for group in (next(iter(entry)) for entry in tree["defaults"] if isinstance(entry, dict)):
            if "@" not in group and not group.startswith("/"):
                for file in sorted((REPOSITORY / "configs" / group).glob("*.yaml")):
                    yield root, f"{group}={file.stem}"


@pytest.mark.parametrize(("root", "word"), sorted(set(choices())))
def test_files_of_configs(root: str, word: str) -> None:
    assert idle(root, [word]) == []


def commands(page: str) -> Iterator[tuple[str, list[str], Mapping[str, Any]]]:
    """The tree, the settings and the defaults of each command line of a page."""
    text = (REPOSITORY / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        found = re.search(r"-m hybridrl\.trainer\.(main_\w+)\s+(.*)|(?:^|[\s`])hybridrl ([a-z]+) (.*)", line)
        if found is None:
            continue
        program = PROGRAMS.get(found[3] or "")
        if program is not None and program.with_suites is not None and re.match("--suite|suite ", found[4]):
            program = PROGRAMS[program.with_suites]
        root = program.tree if program is not None else MODULES.get(found[1] or "", "")
        try:
            words = shlex.split((found[2] or found[4] or "").split("`")[0].split(" | ")[0], comments=True)
        except ValueError:  # a sentence
            continue
        settings = [word for word in words if _SETTING.fullmatch(word) and "..." not in word]
        if root and settings:
            defaults = program.defaults if program is not None else {}
            yield root, [re.sub(r"\$\{?\w+\}?", "1", word) for word in settings], defaults


def test_commands_of_pages() -> None:
    shown = [(page, *command) for page in PAGES for command in commands(page)]
    assert len(shown) > 50
    told = {}
    for page, root, words, defaults in shown:
        if texts := idle(root, words, defaults=defaults):
            told[page, " ".join(words)] = texts
    assert told == {}
