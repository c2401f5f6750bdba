"""What the pages name exists: links, anchors, files, modules, names and settings. Nothing is downloaded."""

from __future__ import annotations

import ast
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import yaml

from hybridrl.config.verl.keys import KeyBook

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(REPOSITORY))
    for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.md", "tests/*.md", "examples/*.md")
    for page in REPOSITORY.glob(pattern)
)
CURRENT = [page for page in PAGES if page != "CHANGELOG.md"]  # the changelog speaks of what was, too
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ROOTS = ("ppo_trainer", "sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer", "generation", "evaluation")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@lru_cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(anchor(line.lstrip("#")) for line in FENCED.sub("", text_of(page)).splitlines() if line[:1] == "#")


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue  # the network
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.is_file() or not file.is_relative_to(REPOSITORY):
            yield f"{target}: no such file"
        elif fragment and fragment not in anchors(file):
            yield f"{target}: no such heading"


def faults(find: Callable[[Path], Iterable[str]], pages: Iterable[str] = PAGES) -> dict[str, list[str]]:
    """Page -> what is wrong in it, for the pages where something is."""
    found = {page: sorted(set(find(REPOSITORY / page))) for page in pages}
    return {page: wrong for page, wrong in found.items() if wrong}


def test_links_lead_somewhere() -> None:
    assert not faults(broken_links)


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    (tmp_path / "there.md").write_text("# Off-policy correction: `algorithm.rollout_correction`\n")
    page = tmp_path / "page.md"
    good = "[a](there.md#off-policy-correction-algorithmrollout_correction) [b](there.md) [c](https://arxiv.org/x)"
    page.write_text(f"# A\n{good} [d](#a)\n```text\n[no](link)\n```\n")
    assert not list(broken_links(page))
    page.write_text("# A\n[a](there.md#off) ![b](gone.png) [c](#b) [d](../outside.md)\n")
    assert len(list(broken_links(page))) == 4


def mentions(page: Path) -> Iterator[str]:
    """What a page quotes as code: between backticks, word by word, and in its snippets."""
    text = text_of(page)
    for quoted in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)):
        yield from re.split(r"[\s,;()]+", quoted)
    for block in FENCED.findall(text):
        yield from re.split(r"[\s,;()'\"]+", block)


FOLDERS = "benchmarks|configs|constraints|docker|docs|examples|hybridrl|packages|recipes|scripts|tests"
PATHS = re.compile(rf"(?:{FOLDERS})/(?!(?:sort|calculator|colours)$)[\w/.-]*\w/?")  # data sources


def missing_files(page: Path) -> Iterator[str]:
    return (word for word in mentions(page) if PATHS.fullmatch(word) and not (REPOSITORY / word).exists())


def test_files_that_a_page_names_exist() -> None:
    assert not faults(missing_files, CURRENT)


def defined(module: Path) -> set[str]:
    """The names that a module defines or imports at its top level, and its lazy ones (strings of its tables)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text_of(module))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def exists_in_the_package(dotted: str) -> bool:
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        place = REPOSITORY.joinpath(*parts[:end])
        module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if module.is_file():
            return end == len(parts) or parts[end] in defined(module)
    return False


def missing_names(page: Path) -> Iterator[str]:
    dotted = (word.rstrip(".:") for word in mentions(page) if re.fullmatch(r"hybridrl(\.\w+)+[.:]?", word))
    return (name for name in dotted if not exists_in_the_package(name))


def test_pages_that_messages_and_comments_name_exist() -> None:
    """Of the library, its scripts and its examples: a user who is sent to a page finds it."""
    missing = [
        f"{path.relative_to(REPOSITORY)}: {page}"
        for folder in ("hybridrl", "scripts", "recipes", "examples", "benchmarks")
        for path in sorted((REPOSITORY / folder).rglob("*"))
        if path.suffix in (".py", ".sh", ".yaml")
        for page in re.findall(r"docs/[\w/]+\.md", path.read_text(encoding="utf-8"))
        if not (REPOSITORY / page).is_file()
    ]
    assert not missing


def test_modules_and_names_that_a_page_gives_exist() -> None:
    assert not faults(missing_names, CURRENT)
    assert exists_in_the_package("hybridrl.protocol.DataProto")
    assert not exists_in_the_package("hybridrl.protocol.DataProtocol")


@lru_cache
def settings() -> tuple[frozenset[str], frozenset[str]]:
    """Every key of every program, and the groups and free mappings that keys stand in."""
    keys = frozenset(key for root in ROOTS for key in KeyBook(root).fields)
    parents = frozenset(".".join(key.split(".")[:end]) for key in keys for end in range(1, key.count(".") + 1))
    return keys, parents


def is_setting(name: str) -> bool:
    keys, parents = settings()
    return name in keys | parents or any(name.startswith(key + ".") for key in keys)


KEY = re.compile(
    r"(?<![\w./-])(?:actor_rollout_ref|algorithm|critic|data|placement|reward|trainer)(?:\.[a-z_0-9]+)+(?![\w(./])"
)
FILES = (".json", ".jsonl", ".parquet", ".pt", ".py", ".yaml")


def missing_settings(page: Path) -> Iterator[str]:
    text = text_of(page)
    quoted = re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    blocks = [block for block in FENCED.findall(text) if not block.startswith("```python")]
    strings = [words for block in FENCED.findall(text) for words in re.findall(r'"([^"\n]+)"', block)]
    for name in KEY.findall("\n".join([*quoted, *blocks, *strings])):
        if not name.endswith(FILES) and not is_setting(name):
            yield name


def test_settings_that_a_page_names_exist() -> None:
    # The page of defaults also names verl's spelling, that of limits what is not there; that about extensions has
    # settings of its examples.
    others = ("docs/defaults.md", "docs/extending.md", "docs/limits.md")
    assert not faults(missing_settings, [page for page in CURRENT if page not in others])
    assert is_setting("actor_rollout_ref.actor.optim.override_optimizer_config.momentum")
    assert not is_setting("actor_rollout_ref.actor.optim.momentum")


def navigation() -> list[str]:
    """The pages of the site's navigation: those of mkdocs.yml, and those that docs/README.md lists."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    hooks = runpy.run_path(str(REPOSITORY / "scripts" / "docs_hooks.py"))
    nav = yaml.load(text_of(REPOSITORY / "mkdocs.yml"), Loader)["nav"]
    return list(hooks["_paths"](hooks["with_sections"](nav, text_of(REPOSITORY / "docs" / "README.md"))))


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == PAGES


def test_the_programming_model_is_the_first_concept_and_architecture_is_for_contributors() -> None:
    sections = re.split(r"^## ", text_of(REPOSITORY / "docs" / "README.md"), flags=re.MULTILINE)
    first = {
        section.split("\n")[0]: re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", section, re.MULTILINE) for section in sections
    }
    assert first["Concepts"][0] == "programming_model.md"
    assert "architecture.md" in first["Contributing"]


def packages() -> set[str]:
    """The packages of hybridrl, and the modules next to them."""
    found = {path.stem for path in (REPOSITORY / "hybridrl").iterdir() if (path / "__init__.py").is_file()}
    return found | {path.stem for path in (REPOSITORY / "hybridrl").glob("*.py") if not path.stem.startswith("__")}


def test_every_package_has_a_page_in_the_api_reference() -> None:
    for package in packages():
        page = REPOSITORY / "docs" / "api" / f"{package}.md"
        assert page.is_file(), f"docs/api/{package}.md with '::: hybridrl.{package}' and a line in mkdocs.yml"
        assert f"::: hybridrl.{package}\n" in text_of(page)


def test_the_layout_in_the_architecture_page_is_the_real_one() -> None:
    layout = text_of(REPOSITORY / "docs" / "architecture.md").split("    hybridrl/\n")[1].split("\n\n")[0]
    assert set(re.findall(r"^ {6}(\w+)(?:/|\.py)", layout, re.MULTILINE)) == packages()


def test_the_computed_sizes_are_what_the_page_computes() -> None:
    page = text_of(REPOSITORY / "docs" / "sizing.md")
    (program,), (output,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == output
    sizes = {"0.5": 0.49, "1.5": 1.54, "3": 3.09, "7": 7.62, "14": 14.77, "32": 32.76, "72": 72.7}  # Qwen2.5, in 1e9
    rows = re.findall(r"^\| ([\d.]+) B \| ([\d,]+) GB \| (\d+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(sizes)
    for name, states, gpus in rows:
        total = 16 * sizes[name]
        assert round(total) == int(states.replace(",", ""))
        assert math.ceil(total / 40) == int(gpus), name
