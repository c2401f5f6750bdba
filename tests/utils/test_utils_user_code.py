"""A user's files and modules: found, loaded once, and their faults named by setting, file and line."""

import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import ray
from raising import raises_with

import hybridrl
from hybridrl.errors import DataError, UserError
from hybridrl.utils.user_code import load_class, load_module, load_object


@pytest.fixture
def mine(tmp_path):
    """Writes a file of the user's and returns its path."""

    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_every_spelling_loads(mine, monkeypatch, tmp_path):
    path = mine("class A: ...\nclass B(A): ...\n")
    assert load_class(path, "A", "k", "n").__name__ == "A"
    assert load_object(f"{path}:B", None, "k", "n").__name__ == "B"
    assert load_object("json:loads", None, "k", "n")("1") == 1
    assert load_object("pkg://json:loads", None, "k", "n")("2") == 2
    assert load_module("json.decoder", "k").__name__ == load_module("pkg://json.decoder", "k").__name__
    monkeypatch.chdir(tmp_path)
    assert load_module("mine.py", "k") is load_module(path, "k")


def test_a_folder_of_the_working_directory_is_a_package(monkeypatch, tmp_path):
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "__init__.py").write_text("WHAT = 'package'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_module("package_of_mine", "k").WHAT == "package"


def test_a_file_runs_once_until_it_changes(mine):
    path = mine("counter = []\n")
    load_module(path, "k").counter.append(1)
    assert load_module(path, "k").counter == [1]
    mine("counter = [5]\n")
    assert load_module(path, "k").counter == [5]


def test_files_of_one_name_are_apart_and_see_their_neighbours(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"near_{folder}.py").write_text(f"WHO = {folder!r}")
        (tmp_path / folder / "mine.py").write_text(f"from near_{folder} import WHO")
    found = [load_module(str(tmp_path / folder / "mine.py"), "k").WHO for folder in ("a", "b")]
    assert found == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "name", "texts"),
    [
        ("none.py", "A", ["k=none.py", "no such file"]),
        ("some/where", "A", ["k=some/where", "no such file"]),
        ("no_such_module_x.y", "A", ["k=no_such_module_x.y", "No module named 'no_such_module_x'"]),
        ("json", "Loads", ["n=Loads", "json"]),
        ("json", None, ["k=json", "n is not"]),
        ("no_such_module_x:A", None, ["k=no_such_module_x:A: ", "No module named"]),
        ("json:Loads", None, ["k=json:Loads: json defines no Loads"]),
    ],
)
def test_what_is_not_there_is_named(path, name, texts):
    with pytest.raises(DataError) as caught:
        load_object(path, name, "k", "n", DataError)
    assert all(text in str(caught.value) for text in texts)


def test_a_class_is_asked_for(mine):
    path = mine("class A: ...\ndef f(): ...\n")
    for name in ("A", "f"):
        with raises_with(UserError, f"n={name}", "builtins.dict"):
            load_class(path, name, "k", "n", dict)
    with raises_with(UserError, "n=Missing", "A, f"):
        load_class(path, "Missing", "k", "n")


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("x = 1\ndef broken(:\n", 2, "SyntaxError"),
        ("\n\nimport not_there_x", 3, "ModuleNotFoundError"),
        ("import json\n\njson.loads('{')\n", 3, "JSONDecodeError"),
        ("def f():\n    return 1 / 0\nf()\n", 2, "ZeroDivisionError"),
    ],
)
def test_faults_name_the_line_of_the_users_file(mine, text, line, error):
    path = mine(text)
    with pytest.raises(UserError) as caught:
        load_module(path, "some.key")
    assert str(caught.value).startswith(f"some.key={path}")
    assert f"{path}, line {line}" in str(caught.value)
    assert error in str(caught.value)
    assert not [name for name in sys.modules if name.startswith("hybridrl_user_mine") and "not_there" in name]


def test_a_file_that_failed_is_tried_again(mine):
    path = mine("import os\nif not os.environ.get('NOW_IT_WORKS'): raise OSError('not yet')\n")
    with pytest.raises(UserError, match="not yet"):
        load_module(path, "k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOW_IT_WORKS", "1")
        assert isinstance(load_module(path, "k"), types.ModuleType)


def test_objects_reach_ray_workers_which_have_not_loaded_the_file(mine, ray_session):
    path = mine(
        "class Money:\n    def __init__(self, n): self.amount = n\n    def twice(self): return 2 * self.amount\n"
    )

    @ray.remote
    def use(money: object) -> tuple[int, bool]:
        return money.twice(), "hybridrl_user_mine" in " ".join(sys.modules)

    @ray.remote
    def load_there(path: str) -> int:
        return load_class(path, "Money", "k", "n")(21).twice()

    money = load_class(path, "Money", "k", "n")(4)
    assert ray.get(use.remote(money)) == (8, False)
    assert ray.get(load_there.remote(path)) == 42
    assert pickle.loads(pickle.dumps(money)).amount == 4  # within this process, as for a fork that reads data


def test_objects_reach_workers_where_ray_was_imported_after_the_file(mine):
    path = mine("class Money:\n    pass\n")
    code = f"""
import pickle, sys
from hybridrl.utils.user_code import load_class
load_class({str(path)!r}, "Money", "k", "n")
import ray
money = ray.cloudpickle.dumps(load_class({str(path)!r}, "Money", "k", "n")())
for name in [name for name in sys.modules if name.startswith("hybridrl_user_")]:
    del sys.modules[name]
print(type(pickle.loads(money)).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "Money", done.stderr


def test_loading_is_light():
    code = "import sys, hybridrl.utils.user_code; print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


_HOOKED = "import sys\nassert 'hook_of_mine' in sys.modules\nassert sys.modules['hook_of_mine'].calls == 1\n"
_LOAD = "from hybridrl.utils.user_code import load_module; load_module({path!r}, 'k'); print('loaded')"


def test_installed_packages_may_hook_the_import_of_users_code(mine, tmp_path):
    mine("calls = 0\ndef hook():\n    global calls\n    calls += 1\n", "hook_of_mine.py")
    metadata = tmp_path / "hook_of_mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hook-of-mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hybridrl.import_hooks]\nmine = hook_of_mine:hook\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); " + _LOAD.format(path=mine(_HOOKED))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "loaded", done.stderr


def test_without_an_installation_a_missing_module_says_so(mine):
    source = str(Path(hybridrl.__file__).parents[1])
    code = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{source!r}]; "
    code += _LOAD.format(path=mine("import verl\n"))
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=120)
    assert "on the path but not installed" in done.stderr and "pip install" in done.stderr
