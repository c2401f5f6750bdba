"""What counts as code of an experiment: modules however they are imported, files that code names, and no layout."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import PPOTrainerConfig, load_config
from hybridrl.trainer.experiment import Definition, changed_keys, changed_parts, definition_of

KEY = "reward.custom_reward_function.path"
AGENT = "actor_rollout_ref.rollout.agent"
TURNS = "actor_rollout_ref.rollout.multi_turn"
SCORE = "\n\ndef compute_score(solution_str):\n    return 0.5\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with code in a folder `own`, which is not on the path."""
    for folder in ("own/lib", "own/pack/inner", "shared", "world/.git"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("own/near.py", "own/lib/far.py", "shared/common.py", "own/pack/inner/deep.py", "own/other.py"):
        (tmp_path / file).write_text("LIMIT = 3\n")
    for file in ("own/pack/__init__.py", "own/pack/inner/__init__.py"):
        (tmp_path / file).write_text("")
    (tmp_path / "own/pack/score.py").write_text(f"from . import side\nfrom .inner import deep{SCORE}")
    (tmp_path / "own/pack/side.py").write_text("LIMIT = 3\n")
    for file in ("own/rubric.txt", "own/rules.json", "own/rules.yaml", "own/table.csv", "shared/words.txt", "cwd.txt"):
        (tmp_path / file).write_text("a: 1")
    (tmp_path / "own/run.sh").write_text("python agent.py\n")
    (tmp_path / "world/server.py").write_text("SIZE = 4\n")
    (tmp_path / "world/.git/index").write_text("1")
    (tmp_path / "world/data.bin").write_text("1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != tmp_path])
    yield tmp_path


@functools.cache
def settings() -> PPOTrainerConfig:
    return load_config("ppo_trainer", ["actor_rollout_ref.model.path=a"])


def definition(key: str, value: object, config: PPOTrainerConfig | None = None) -> Definition:
    """The definition of a run with one more setting."""
    config = copy.deepcopy(settings()) if config is None else config
    *groups, name = key.split(".")
    setattr(functools.reduce(getattr, groups, config), name, value)
    return definition_of(config)


def of_reward(code: str, function: str = SCORE) -> Definition:
    """The definition of a run whose reward is `own/r.py` with this code before the function."""
    Path("own/r.py").write_text(code + function)
    return definition(KEY, "own/r.py")


READS = {
    "import": ("import near", "own/near.py"),
    "import as, in a function": ("def f():\n    import near as n", "own/near.py"),
    "from import": ("from near import LIMIT", "own/near.py"),
    "from package import module": ("from pack.inner import deep", "own/pack/inner/deep.py"),
    "a package's relative import": ("import pack.score", "own/pack/inner/deep.py"),
    "from . import": ("import pack.score", "own/pack/side.py"),
    "the package itself": ("import pack.score", "own/pack/__init__.py"),
    "__import__": ("near = __import__('near')", "own/near.py"),
    "import_module": ("import importlib\nnear = importlib.import_module('near')", "own/near.py"),
    "import_module of a constant": (
        "from importlib import import_module\nNAME = 'near'\nnear = import_module(NAME)",
        "own/near.py",
    ),
    "import_module by keyword": ("import importlib\nnear = importlib.import_module(name='near')", "own/near.py"),
    "import_module, relative": (
        "import importlib\nimportlib.import_module('.deep', 'pack.inner')",
        "own/pack/inner/deep.py",
    ),
    "sys.path, literal": ("import sys\nsys.path.insert(0, 'shared')\nimport common", "shared/common.py"),
    "sys.path, from __file__": (
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))\nimport far",
        "own/lib/far.py",
    ),
    "sys.path, by pathlib": (
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).resolve().parent.parent / "
        "'shared'))\nfrom common import LIMIT",
        "shared/common.py",
    ),
    "sys.path, by +=": ("import sys\nsys.path += ['shared']\nimport common", "shared/common.py"),
    "site": ("import site\nsite.addsitedir('shared')\nimport common", "shared/common.py"),
    "run_path": ("import runpy\nrunpy.run_path('own/other.py')", "own/other.py"),
    "spec_from_file_location": (
        "import importlib.util\nfrom pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('o', Path(__file__).with_name('other.py'))",
        "own/other.py",
    ),
    "open next to the file": (
        "import os\nTEXT = open(os.path.join(os.path.dirname(__file__), 'rubric.txt')).read()",
        "own/rubric.txt",
    ),
    "open from the working directory": ("def f():\n    return open('cwd.txt').read()", "cwd.txt"),
    "a default argument": ("def f(path='own/rubric.txt'):\n    return open(path).read()", "own/rubric.txt"),
    "pathlib": (
        "from pathlib import Path\nTEXT = (Path(__file__).parent / 'rubric.txt').read_text()",
        "own/rubric.txt",
    ),
    "a folder's name first": (
        "from pathlib import Path\nHERE = Path(__file__).parents[1]\nWORDS = HERE / 'shared' / 'words.txt'",
        "shared/words.txt",
    ),
    "an f-string": ("HERE = 'own'\nTEXT = open(f'{HERE}/rubric.txt').read()", "own/rubric.txt"),
    "json": ("import json\nRULES = json.load(open('own/rules.json'))", "own/rules.json"),
    "yaml": ("import yaml\nRULES = yaml.safe_load(open('own/rules.yaml'))", "own/rules.yaml"),
    "a library that reads": ("import pandas\nTABLE = pandas.read_csv('own/table.csv')", "own/table.csv"),
    "a file of an imported module": ("import reader", "own/rubric.txt"),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_reward_reads_belongs_to_the_experiment(name: str) -> None:
    code, file = READS[name]
    Path("own/reader.py").write_text("TEXT = open('own/rubric.txt').read()\n")
    first = of_reward(code)
    assert changed_keys(first, of_reward(code)) == []
    Path(file).write_text(Path(file).read_text() + "\nLIMIT = 4\n")
    second = of_reward(code)
    assert changed_keys(first, second) == [KEY]
    assert len(changed_parts(KEY, first, second)) == 1, "the message names the file"


#: code that writes a file, which it may also read: it is what a run leaves, and no part of it
WRITES = {
    "open": "LOG = 'cwd.txt'\ndef note(text):\n    with open(LOG, 'a') as file:\n        file.write(text)",
    "open by keyword": "def note(text):\n    open('cwd.txt', mode='w').write(text)",
    "gzip": "import gzip\ndef note(text):\n    gzip.open('cwd.txt', 'wt').write(text)",
    "pathlib": "from pathlib import Path\nCACHE = Path('cwd.txt')\n"
    "def f():\n    text = CACHE.read_text()\n    CACHE.write_text(text)",
    "Path.open": "from pathlib import Path\ndef note(text):\n    Path('cwd.txt').open('a').write(text)",
    "logging": "import logging\nlogging.getLogger().addHandler(logging.FileHandler('cwd.txt'))",
    "a table": "def f(table):\n    table.to_csv('cwd.txt')",
    "sqlite": "import sqlite3\nDB = sqlite3.connect('cwd.txt')",
    "a lock": "LOCK = 'own/x.lock'",
}


#: code that asks whether a file is there, and reads nothing of it
PROBES = {
    "exists": "from pathlib import Path\ndef f():\n    return (Path(__file__).parents[1] / 'cwd.txt').exists()",
    "os.path": "import os\ndef f():\n    return os.path.isfile('cwd.txt')",
    "a name": "from pathlib import Path\nFLAG = Path('cwd.txt')\ndef f():\n    return FLAG.is_file()",
}


@pytest.mark.parametrize("name", PROBES)
def test_what_a_reward_only_looks_for_does_not(name: str) -> None:
    first = of_reward(PROBES[name])
    Path("cwd.txt").write_text("more")
    assert changed_keys(first, of_reward(PROBES[name])) == []
    Path("cwd.txt").unlink()
    assert changed_keys(first, of_reward(PROBES[name])) == []
    Path("cwd.txt").write_text("again")
    reading = PROBES[name] + "\nTEXT = open('cwd.txt').read()"
    first = of_reward(reading)
    Path("cwd.txt").write_text("and again")
    assert changed_keys(first, of_reward(reading)) == [KEY]


@pytest.mark.parametrize("name", WRITES)
def test_what_a_reward_writes_does_not(name: str) -> None:
    Path("own/x.lock").write_text("1")
    first = of_reward(WRITES[name])
    Path("cwd.txt").write_text("a: 1 and more")
    Path("own/x.lock").write_text("2")
    assert changed_keys(first, of_reward(WRITES[name])) == []


#: code that lists a folder: files that change, come and go there are part of the experiment
LISTS = {
    "Path.glob": "for p in (Path(__file__).parent / 'rubrics').glob('*.txt'):\n    p.read_text()",
    "Path.rglob": "HERE = Path(__file__).resolve().parent\nTEXTS = [p.read_text() for p in HERE.rglob('*.txt')]",
    "Path.iterdir": "FOLDER = Path(__file__).with_name('rubrics')\ndef f():\n    return sorted(FOLDER.iterdir())",
    "os.listdir": "FOLDER = os.path.join(os.path.dirname(__file__), 'rubrics')\nNAMES = os.listdir(FOLDER)",
    "os.scandir": "def f():\n    return [entry.path for entry in os.scandir('own/rubrics')]",
    "os.walk": "def f(folder='own'):\n    return list(os.walk('own'))",
    "glob": "TEXTS = [open(path).read() for path in sorted(glob.glob('own/rubrics/*.txt'))]",
    "glob, of a folder": "TEXTS = glob.glob(os.path.join(os.path.dirname(__file__), 'rubrics', '*'))",
    "glob, below": "TEXTS = glob.glob('own/**/*.txt', recursive=True)",
    "glob, with a root": "TEXTS = glob.glob('*.txt', root_dir='own/rubrics')",
    "glob, folders by a pattern": "TEXTS = glob.iglob('own/rub*/?.txt')",
    "next to what it writes": "HERE = Path(__file__).parent\n(HERE / 'o.log2').write_text('1')\n"
    "TEXTS = [p.read_text() for p in (HERE / 'rubrics').iterdir()]",
}
IMPORTS = "import glob, os\nfrom pathlib import Path\n"


@pytest.mark.parametrize("name", LISTS)
def test_the_files_of_folders_that_a_reward_lists_belong_to_the_experiment(name: str) -> None:
    code, folder = IMPORTS + LISTS[name], Path("own/rubrics")
    folder.mkdir()
    (folder / "a.txt").write_text("1")
    (folder / ".hidden.txt").write_text("1")
    first = of_reward(code)
    (folder / ".hidden.txt").write_text("2")
    (folder / "run.log").write_text("2")
    assert changed_keys(first, of_reward(code)) == []
    (folder / "a.txt").write_text("2")
    changed = of_reward(code)
    assert changed_keys(first, changed) == [KEY]
    (folder / "b.txt").write_text("3")
    assert changed_keys(changed, of_reward(code)) == [KEY]
    (folder / "a.txt").unlink()
    (folder / "b.txt").unlink()
    assert changed_keys(changed, of_reward(code)) == [KEY]


#: code that lists what it writes: a cache, which is no part of the experiment
CACHES = {
    "open": "FOLDER = 'own/rubrics'\ndef f(name):\n    open(os.path.join(FOLDER, name), 'w').write('1')\n"
    "    return os.listdir(FOLDER)",
    "pathlib": "FOLDER = Path('own/rubrics')\ndef f(name):\n    (FOLDER / name).write_text('1')\n"
    "    return list(FOLDER.glob('*.txt'))",
    "an f-string": "def f(name):\n    with open(f'own/rubrics/{name}.txt', 'a') as file:\n        file.write('1')\n"
    "    return glob.glob('own/rubrics/*')",
    "a folder that it makes": "FOLDER = Path('own/rubrics')\nFOLDER.mkdir(exist_ok=True)\nOLD = list(FOLDER.iterdir())",
}


@pytest.mark.parametrize("name", CACHES)
def test_a_folder_that_a_reward_lists_and_writes_does_not(name: str) -> None:
    Path("own/rubrics").mkdir()
    Path("own/rubrics/a.txt").write_text("1")
    first = of_reward(IMPORTS + CACHES[name])
    Path("own/rubrics/a.txt").write_text("2")
    Path("own/rubrics/b.txt").write_text("2")
    assert changed_keys(first, of_reward(IMPORTS + CACHES[name])) == []


def test_modules_of_a_folder_that_a_reward_lists_count_as_code() -> None:
    code = IMPORTS + "import runpy\nPARTS = [runpy.run_path(str(p)) for p in Path('own/pack').rglob('*.py')]"
    first = of_reward(code)
    Path("own/pack/side.py").write_text("# a limit\nLIMIT = 3\n")
    assert changed_keys(first, of_reward(code)) == []
    Path("own/pack/side.py").write_text("LIMIT = 4\n")
    assert [name.removesuffix(".py") for name in changed_parts(KEY, first, of_reward(code))] == ["side"]


PLAIN = """
import near


class Grader:
    weight = 2

    def grade(self, text):
        return len(text) > near.LIMIT


def compute_score(solution_str):
    return 0.5 if Grader().grade(solution_str) else 0.0
"""
#: the same code, written otherwise
SAME = {
    "comments": PLAIN.replace("    weight = 2", "    # half\n    weight = 2  # of all"),
    "docstrings": '"""Scores."""\n'
    + PLAIN.replace("class Grader:", 'class Grader:\n    """Grades."""').replace(
        "def compute_score(solution_str):", 'def compute_score(solution_str):\n    """Return the score."""'
    ),
    "layout": PLAIN.replace("0.5 if", "(0.5\n        if")
    .replace("else 0.0", "else 0.0\n    )")
    .replace("\n\n\n", "\n\n"),
    "ends of lines": PLAIN.replace("\n", "\r\n"),
    "a text that stands alone": PLAIN.replace("    weight = 2", "    weight = 2\n    'of all'"),
}
#: other code
OTHER = {
    "a number": PLAIN.replace("0.5", "0.25"),
    "an operator": PLAIN.replace(">", ">="),
    "a default": PLAIN.replace("score(solution_str):", "score(solution_str, limit=3):"),
    "a class attribute": PLAIN.replace("weight = 2", "weight = 3"),
    "a decorator": PLAIN.replace("def compute_score", "@print\ndef compute_score"),
    "an order": PLAIN.replace("0.5 if", "0.0 if").replace("else 0.0", "else 0.5"),
}


def test_comments_docstrings_and_layout_are_not_compared_and_code_is() -> None:
    first = of_reward("", PLAIN)
    for name, code in SAME.items():
        assert code != PLAIN and changed_keys(first, of_reward("", code)) == [], name
    for name, code in OTHER.items():
        assert code != PLAIN and changed_keys(first, of_reward("", code)) == [KEY], name
    reads = 'PROMPT = f"{__doc__}"\n'
    first = of_reward('"""Be strict."""\n' + reads)
    assert changed_keys(first, of_reward('"""Be kind."""\n' + reads)) == [KEY], "its docstring is its prompt"


def test_descriptions_of_tools_for_the_model_are_compared() -> None:
    """`function_tool` makes the tool's description, which the model reads, of the docstring."""
    text = 'from hybridrl.agents import function_tool\n\n\n@function_tool\ndef buy(item: str) -> str:\n    """Buy."""\n'
    key = f"{TURNS}.function_tool_path"
    Path("own/tools.py").write_text(text)
    first = definition(key, "own/tools.py")
    Path("own/tools.py").write_text(text.replace("Buy.", "Sell."))
    assert changed_keys(first, definition(key, "own/tools.py")) == [key]
    Path("own/tools.py").write_text(text.replace('"""Buy."""', '"""Buy."""  # at once'))
    assert changed_keys(first, definition(key, "own/tools.py")) == []


#: a setting, its value or the content of a YAML file that it names, and a file that is read in the end
SETTINGS: dict[str, tuple[str, Any, str]] = {
    "tool": (f"{TURNS}.tool_config_path", "tools: [{class_name: 'own/near.py:Tool', config: {}}]", "own/near.py"),
    "file of a tool": (
        f"{TURNS}.tool_config_path",
        "tools: [{class_name: a.B, config: {table: own/table.csv}}]",
        "own/table.csv",
    ),
    "simulated user": (
        f"{TURNS}.interaction_config_path",
        "interaction: [{name: a, class_name: x.Y, config: {template: own/rubric.txt}}]",
        "own/rubric.txt",
    ),
    "environment in a folder": (
        f"{AGENT}.environment_config_path",
        "environments: [{name: a, class_name: openenv, config: {folder: world, app: 'server:app'}}]",
        "world/server.py",
    ),
    "agent loop": (f"{AGENT}.agent_loop_config_path", "[{name: a, _target_: common.Loop}]", "shared/common.py"),
    "agent's function": (f"{AGENT}.function", "own/near.py:agent", "own/near.py"),
    "agent's module": (f"{AGENT}.command", "python -m common --fast", "shared/common.py"),
    "agent's program": (f"{AGENT}.command", "bash own/run.sh", "own/run.sh"),
    "agent's settings": (f"{AGENT}.command", "python own/near.py --rules own/rules.json", "own/rules.json"),
    "judge's template": ("reward.reward_model.judge.template", "own/rubric.txt", "own/rubric.txt"),
    "judge's parser": ("reward.reward_model.judge.parse.path", "own/near.py", "own/near.py"),
    "reward's arguments": (
        "reward.custom_reward_function.reward_kwargs",
        {"table": "own/table.csv", "n": 3},
        "own/table.csv",
    ),
    "reward's folder": ("reward.custom_reward_function.reward_kwargs", {"folder": "world"}, "world/server.py"),
    "manager": ("reward.reward_manager.module.path", "own/near.py", "own/near.py"),
    "one of several rewards": ("reward.functions", {"a": {"path": "own/near.py"}}, "own/near.py"),
    "dataset": ("data.custom_cls.path", "own/near.py", "own/near.py"),
    "sampler": ("data.sampler.class_path", "own/near.py", "own/near.py"),
    "losses, estimators, filters": ("actor_rollout_ref.model.external_lib", "json,own/near.py", "own/near.py"),
    "optimizer": ("actor_rollout_ref.actor.optim.optimizer_impl", "own/near.py", "own/near.py"),
    "template of the chat": ("actor_rollout_ref.model.custom_chat_template", "own/rubric.txt", "own/rubric.txt"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_file_of_the_user_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("shared")
    key, value, file = SETTINGS[name]
    if key.endswith("_config_path"):
        Path("given.yaml").write_text(value)
        value = "given.yaml"

    def current() -> Definition:
        config = copy.deepcopy(settings())
        config.reward.reward_model.enable = True
        return definition(key, value, config)

    first = current()
    Path("world/.git/index").write_text("2")  # neither is code
    Path("world/data.bin").write_text("2")
    assert changed_keys(first, current()) == []
    Path(file).write_text(Path(file).read_text() + "\nLIMIT = 4\n")
    assert changed_keys(first, current()) == [key]


PROGRAM = """
import sys
from hybridrl.reward import reward_settings
RULES = "own/rules.json"

def score(solution_str):
    "{doc}"
    return float(solution_str in open("own/rubric.txt").read() + open(RULES).read())

print(reward_settings(score, sys.argv[1])["custom_reward_function"]["path"])
"""


def test_functions_of_programs_are_compared_with_the_files_that_they_name() -> None:
    def saved(doc: str) -> str:
        Path("program.py").write_text(PROGRAM.format(doc=doc))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "program.py", "out"], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    file = saved("Return the score.")
    first = definition(KEY, file)
    assert changed_keys(first, definition(KEY, saved("Return whether the rubric holds the answer."))) == []
    for read in ("own/rubric.txt", "own/rules.json"):
        text = Path(read).read_text()
        Path(read).write_text("b: 2")
        assert changed_keys(first, definition(KEY, file)) == [KEY], read
        Path(read).write_text(text)
