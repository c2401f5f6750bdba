"""The words of the code: a class per name, no empty names, docstrings that begin with a verb or name the thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hybridrl.utils.python_source import parsed

PACKAGE = Path(__file__).parents[2] / "hybridrl"
VERL_NAMES = "verl_compat"  # its classes have the names of verl
#: names that say nothing about what they hold
EMPTY_WORDS = frozenset(
    [
        "found",
        "one",
        "asked",
        "kept",
        "known",
        "chosen",
        "told",
        "said",
        "spent",
        "given",
        "wanted",
        "seen",
        "made",
        "left",
        "taken",
        "lost",
        "tried",
        "shown",
        "meant",
        "held",
        "counted",
        "what",
        "mine",
    ]
)
#: the answers of a preference pair are `chosen` and `rejected` wherever such data is described
PAIR_FILES = ("data/preference_dataset.py", "workers/objectives.py")

_ENGINES = "the engines name their parts alike"
_SCHEMA = "the settings of a part have the part's name"
_DATA_SETS = "a data set's preparation and its scorer have the data set's name"
#: base names that several files have, with the reason; at most 20
REPEATED_FILES = {
    "checkpoint.py": _ENGINES,
    "colours.py": _DATA_SETS,
    "compat.py": _ENGINES,
    "critic.py": _SCHEMA,
    "distillation.py": _SCHEMA,
    "engine.py": _ENGINES,
    "forward.py": _ENGINES,
    "geo3k.py": _DATA_SETS,
    "gsm8k.py": _DATA_SETS,
    "images.py": _ENGINES,
    "mappings.py": "each package has the readers of its mappings in the module `mappings`",
    "offload.py": _ENGINES,
    "prime.py": _SCHEMA,
    "programs.py": "the programs of hybridrl, and programs as answers that are scored",
    "rollout.py": _SCHEMA,
    "search_r1.py": _DATA_SETS,
    "state.py": _ENGINES,
    "trainer.py": _SCHEMA,
    "verifiers.py": "the environment of verifiers, and the command that prepares its tasks",
    "worker_group.py": "the interface, and Ray's implementation of it",
}


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    """Yield the package, path and syntax tree of each module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        yield parts[0] if len(parts) > 1 else "", path, parsed(path.read_bytes(), path)


def names_in(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from names_in(element)
    elif isinstance(target, ast.Starred):
        yield from names_in(target.value)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that is assigned or declared as a parameter, with its line."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(
            node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For | ast.AsyncFor | ast.comprehension
        ):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        for target in targets:
            for name in names_in(target):
                yield name, target.lineno


def docstrings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or "", getattr(node, "lineno", 1)


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for package, path, tree in modules():
        if package != VERL_NAMES:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_names_say_what_they_hold() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package, path, tree in modules():
        for name, line in bound_names(tree):
            if name in EMPTY_WORDS and not (name == "chosen" and str(path.relative_to(PACKAGE)) in PAIR_FILES):
                places[package].append(f"{path.relative_to(PACKAGE)}:{line} {name}")
    for package, lines in places.items():
        assert not lines, f"names without a meaning in {package or 'hybridrl'}: {lines}"


def test_docstrings_begin_with_a_verb_or_name_the_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package, path, tree in modules():
        for text, line in docstrings(tree):
            if text.split(" ")[0] in ("What", "How"):
                places[package].append(f"{path.relative_to(PACKAGE)}:{line} {text.splitlines()[0]}")
    for package, lines in places.items():
        assert not lines, f"in {package or 'hybridrl'}: {lines}"


def test_files_have_unique_names() -> None:
    assert len(REPEATED_FILES) <= 20
    homes: dict[str, list[str]] = defaultdict(list)
    for package, path, _ in modules():
        if package != VERL_NAMES and path.name != "__init__.py":
            homes[path.name].append(str(path.relative_to(PACKAGE)))
    repeated = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in repeated.items() if name not in REPEATED_FILES} == {}
    assert REPEATED_FILES.keys() <= repeated.keys(), "names that do not repeat any more"
