"""The processes that run the tests, and their Ray: one that dies costs the test in which it died, and no more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from shared_ray import SharedRay

CONFTEST = """
import os, sys
sys.path.insert(0, {tests!r})

def pytest_configure(config):
    from scheduling import LostProcesses
    config.pluginmanager.register(LostProcesses())

def pytest_sessionfinish():
    if os.environ.get("PYTEST_XDIST_WORKER") == os.environ.get("DIES_AT_ITS_END"):
        os._exit(1)

def pytest_xdist_make_scheduler(config, log):
    from scheduling import Groups
    return Groups(config, log, lambda nodeid: nodeid.split("::")[0])
"""

OTHERS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_passes(number):
    pass
"""

# The last group: by the time that it dies, the other process has been told that no test is left.
DIES = """
import os, time

def test_before():
    pass

def test_dies():
    time.sleep(1)
    os._exit(1)

def test_after():
    pass

def test_last():
    pass
"""


@pytest.fixture
def run(finish: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Runs files of tests in two processes."""

    def run_files(files: dict[str, str], **environment: str) -> Any:
        (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(Path(__file__).parents[1])))
        (tmp_path / "pytest.ini").write_text("[pytest]")
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "xdist", "-p", "no:cacheprovider"]
        outside |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "DIES_AT_ITS_END": "none"}
        return finish(command, limit=120, cwd=tmp_path, env=outside | environment)

    return run_files


@pytest.mark.slow(10)
def test_a_process_that_dies_is_one_failure_and_all_other_tests_run(run: Callable[..., Any]) -> None:
    done = run({"test_a": OTHERS, "test_b": OTHERS, "test_c": DIES})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 11 passed" in done.stdout, done.stdout
    assert "crashed while running 'test_c.py::test_dies'" in done.stdout


@pytest.mark.slow(10)
def test_a_process_that_dies_after_its_last_test_fails_the_run(run: Callable[..., Any]) -> None:
    done = run({"test_a": OTHERS, "test_b": OTHERS}, DIES_AT_ITS_END="gw0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "8 passed" in done.stdout and "node down" in done.stdout, done.stdout


@pytest.mark.slow(15)
def test_a_test_that_ends_the_shared_ray_fails_and_the_next_one_finds_another(shared_ray: SharedRay) -> None:
    """A minute later Ray would have ended this process."""
    import ray

    (gcs,) = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
    gcs.kill()
    psutil.wait_procs([gcs], timeout=30)
    with pytest.raises(AssertionError, match=r"^gcs_server of the Ray that all tests share ended"):
        shared_ray.check()
    shared_ray.check()
    assert ray.get(ray.remote(lambda: 42).remote()) == 42
