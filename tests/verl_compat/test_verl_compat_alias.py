"""`import verl` in programs, and what it says about names that are missing. Every program runs as its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(3)


def run(*arguments: str | Path, folder: Path, status: int = 0) -> str:
    """What a Python process printed on both streams."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def program(folder: Path, text: str, name: str = "program.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_program_imports_verl_in_every_usual_way(tmp_path: Path) -> None:
    program(tmp_path / "code", "import verl.utils.seqlen_balancing as balancing\n", "helper.py")
    file = program(
        tmp_path / "code",
        """
import sys

import helper
import verl
import verl.trainer.ppo.core_algos as imported
import verl.utils.torch_functional as VF
from verl import DataProto
from verl.protocol import DataProto as SameDataProto
from verl.trainer.ppo import core_algos
from verl.utils.reward_score.gsm8k import compute_score

assert DataProto is SameDataProto and DataProto.__module__.startswith("hybridrl.")
assert imported is core_algos is verl.trainer.ppo.core_algos is sys.modules["verl.trainer.ppo.core_algos"]
assert helper.balancing.ceildiv(7, 2) == 4
print(__name__, sys.argv[1:], compute_score("#### 42", "42"))
""",
    )
    printed = run("-m", "hybridrl.verl_compat", "run", file, "--steps", "3", folder=tmp_path)
    assert "__main__ ['--steps', '3'] 1.0" in printed


def test_module_run_under_the_alias(tmp_path: Path) -> None:
    program(tmp_path, "import sys\nfrom verl import DataProto\nprint(sys.argv[1:], len(DataProto()))", "mine.py")
    assert "['a=1'] 0" in run("-m", "hybridrl.verl_compat", "run", "-m", "mine", "a=1", folder=tmp_path)
    helped = run("-m", "hybridrl.verl_compat", "run", "-m", "verl.trainer.main_ppo", "--help", folder=tmp_path)
    assert "actor_rollout_ref" in helped


def test_notebook_runs_cell_by_cell(tmp_path: Path) -> None:
    cells = ["!pip install verl\nfrom verl import DataProto", "rows = len(DataProto())", "print('rows', rows)"]
    text = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    text["cells"].insert(1, {"cell_type": "markdown", "source": ["not code"]})
    file = program(tmp_path, json.dumps(text), "tutorial.ipynb")
    printed = run("-m", "hybridrl.verl_compat", "run", file, folder=tmp_path)
    assert "rows 0" in printed
    assert "cell 1: left out !pip install verl" in printed


def test_notebook_cells_are_a_main_module_of_their_own(tmp_path: Path) -> None:
    """A cell's annotations are evaluated, its functions are found in `__main__`, and a `%` within Python stays."""
    cells = [
        "import pickle, sys\nclass A:\n    x: int\nassert A.__annotations__ == {'x': int}",
        "def f(): return 5\nassert pickle.loads(pickle.dumps(f))() == 5 and sys.modules['__main__'].f is f",
        "text = '''a\n%s\n! b\n''' \\\n% 3\nrest = (7\n  % 4)\nprint(repr(text), rest)",
        "%matplotlib inline\nif True:\n    !ls\n%%time\nprint('end')",
        "%%bash\necho never",
    ]
    text = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    file = program(tmp_path, json.dumps(text), "tutorial.ipynb")
    printed = run("-m", "hybridrl.verl_compat", "run", file, folder=tmp_path)
    assert r"'a\n3\n! b\n' 3" in printed and "end" in printed.splitlines()
    left_out = [line.split("left out ")[1] for line in printed.splitlines() if "left out" in line]
    assert left_out == ["%matplotlib inline", "!ls", "%%time", "%%bash", "echo never"]


def test_a_folder_without_a_package_is_no_verl(tmp_path: Path) -> None:
    """A clone in the working directory is importable as a namespace; a package is the user's verl."""
    program(tmp_path, "", "verl/setup.py")
    text = "{first}\nfrom hybridrl.verl_compat.alias import allow\nallow()\nfrom verl import DataProto\n"
    text += "from verl.protocol import DataProto as Same\nprint(DataProto is Same, DataProto.__module__)"
    for first in ("", "import verl"):
        assert "True hybridrl.protocol" in run(program(tmp_path, text.format(first=first)), folder=tmp_path)
    as_verl = "import verl\nimport hybridrl.verl_compat.as_verl\nfrom verl import DataProto\nprint('found')"
    assert "found" in run(program(tmp_path, as_verl), folder=tmp_path)
    program(tmp_path, "DataProto = int", "verl/__init__.py")
    program(tmp_path, "DataProto = int", "verl/protocol.py")
    assert "True builtins" in run(program(tmp_path, text.format(first="")), folder=tmp_path)


def test_import_of_as_verl_comes_before_a_verl_in_the_folder(tmp_path: Path) -> None:
    program(tmp_path, "raise RuntimeError('the other verl')", "verl/__init__.py")
    text = "import hybridrl.verl_compat.as_verl\nfrom verl import DataProto\nprint(DataProto.__module__)"
    assert "hybridrl.protocol" in run(program(tmp_path, text), folder=tmp_path)


def test_alias_after_another_verl_is_refused(tmp_path: Path) -> None:
    program(tmp_path, "", "verl/__init__.py")
    printed = run(program(tmp_path, "import verl\nimport hybridrl.verl_compat.as_verl"), folder=tmp_path, status=1)
    assert str(tmp_path / "verl") in printed and "hybridrl.verl_compat run" in printed


def test_children_of_every_kind_import_verl(tmp_path: Path) -> None:
    file = program(
        tmp_path,
        """
import multiprocessing, subprocess, sys
from verl.utils.seqlen_balancing import ceildiv

def work(queue):
    from verl.utils.seqlen_balancing import roundup_divisible
    queue.put(roundup_divisible(5, 4))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print("spawned", queue.get(timeout=200))
    child.join()
    code = "from verl.utils.seqlen_balancing import ceildiv; print('started', ceildiv(9, 2))"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
""",
    )
    printed = run("-m", "hybridrl.verl_compat", "run", file, folder=tmp_path)
    assert "spawned 8" in printed and "started 5" in printed


#: an import that fails -> what the error names
MISSING = {
    "import verl.workers.megatron_workers": ["verl.workers.megatron_workers", "Megatron is not supported"],
    "from verl.workers import megatron_workers": ["verl.workers.megatron_workers", "Megatron is not supported"],
    "from verl.experimental.agent_loop import utils": ["verl.experimental.agent_loop", "docs/agents.md"],
    "from verl.utils.nothing import x": ["verl.utils.nothing", "docs/compat.md"],
    "from verl.utils.seqlen_balancing import ceil_div": ["verl.utils.seqlen_balancing", "ceil_div", "ceildiv"],
}


def test_missing_names_are_explained(tmp_path: Path) -> None:
    text = f"""
import hybridrl.verl_compat.as_verl
for line in {list(MISSING)}:
    try:
        exec(line)
    except ImportError as error:
        print("refused:", error)
import verl.utils.seqlen_balancing
print(hasattr(verl.utils.seqlen_balancing, "ceil_div"))
"""
    *refused, last = [
        line
        for line in run(program(tmp_path, text), folder=tmp_path).splitlines()
        if line.startswith(("refused:", "False"))
    ]
    assert last == "False"
    for (line, words), said in zip(MISSING.items(), refused, strict=True):
        assert all(word in said for word in words), (line, said)


def test_unknown_command_and_missing_program(tmp_path: Path) -> None:
    assert "'walk'" in run("-m", "hybridrl.verl_compat", "walk", folder=tmp_path, status=2)
    assert "none.py: no such file" in run("-m", "hybridrl.verl_compat", "run", "none.py", folder=tmp_path, status=2)
    assert "run" in run("-m", "hybridrl.verl_compat", "--help", folder=tmp_path)


def test_importing_the_package_changes_nothing(tmp_path: Path) -> None:
    text = """
import os, sys
before = list(sys.meta_path), os.environ.get("PYTHONPATH")
import hybridrl.verl_compat
assert (list(sys.meta_path), os.environ.get("PYTHONPATH")) == before
assert "torch" not in sys.modules
"""
    assert os.environ.get("RAY_RUNTIME_ENV_HOOK") is None
    run(program(tmp_path, text), folder=tmp_path)


def test_hooks_of_the_user_stay_in_force(tmp_path: Path) -> None:
    program(tmp_path, "def env(given):\n    return {**(given or {}), 'env_vars': {'MINE': '1'}}", "hooks.py")
    text = """
import os, sys
os.environ["RAY_RUNTIME_ENV_HOOK"] = "hooks.env"
import hybridrl.verl_compat.as_verl
from ray._private.worker import _maybe_modify_runtime_env

ran = []
plain = _maybe_modify_runtime_env(None, False)
assert plain["env_vars"] == {"MINE": "1"}
assert plain["worker_process_setup_hook"] == "hybridrl.verl_compat.alias.activate"
both = _maybe_modify_runtime_env({"worker_process_setup_hook": lambda: ran.append(1)}, False)
both["worker_process_setup_hook"]()
print("hooks", ran)
"""
    assert "hooks [1]" in run(program(tmp_path, text), folder=tmp_path)
