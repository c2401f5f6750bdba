"""Where the kernel gives no namespaces: refused unless allowed, and as another user programs still fork and thread."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from raising import raises_with

from hybridrl.agents.tools.sandbox import PythonTool
from hybridrl.errors import RolloutError
from hybridrl.reward import RewardError
from hybridrl.reward.score import programs
from hybridrl.sandbox import LANGUAGES, Language, Limits, LocalSandbox, Program, SandboxError, cgroups
from hybridrl.utils.control_groups import PROC

NOBODY = 70_000 + os.getpid() % 30_000  # a user of this process alone: the kernel counts all processes of a user
FORKS = "import os, threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()\n"
FORKS += "p = os.fork()\nif p == 0: os._exit(0)\nos.waitpid(p, 0)\nprint(42)"
BOMB = "import os\nn = 0\ntry:\n    while n < 300:\n        if os.fork() == 0: os.read(os.pipe()[0], 1)\n"
BOMB += "        n += 1\nexcept OSError: pass\nprint(n)"


def test_it_is_refused_unless_it_is_allowed(monkeypatch) -> None:
    refused = LocalSandbox(ways=())
    for call in (lambda: refused.run(Program("print(1)")), refused.check):
        with raises_with(SandboxError, "network", "/proc/PID/environ", "signals", "ALLOW_UNISOLATED=1"):
            call()
    assert LocalSandbox(ways=(), allow_unisolated=True).check() == "they are switched off"
    monkeypatch.setenv("HYBRIDRL_SANDBOX_ALLOW_UNISOLATED", "1")
    assert LocalSandbox(ways=()).run(Program("print(1)")).output == "1\n"
    with pytest.raises(SandboxError):
        LocalSandbox(ways=(), allow_unisolated=False).run(Program("print(1)"))


def test_settings_of_scorers_and_tools(monkeypatch) -> None:
    """Both say at the start what such a program reaches, and refuse it by default."""
    shown: list[str] = []
    for module in ("hybridrl.reward.score.programs", "hybridrl.agents.tools.sandbox"):
        monkeypatch.setattr(f"{module}.notify", lambda text, *_: shown.append(text))
    monkeypatch.setattr(LocalSandbox.__init__, "__defaults__", (None, None, (), None))
    programs.sandbox_of.cache_clear()
    try:
        with raises_with(RewardError, "allow_unisolated=true"):
            programs.check_machine()
        with raises_with(RolloutError, "allow_unisolated"):
            PythonTool({})
        programs.check_machine(allow_unisolated=True)
        PythonTool({"allow_unisolated": True})
        with pytest.raises(RolloutError, match="true or false"):
            PythonTool({"allow_unisolated": "yes"})
    finally:
        programs.sandbox_of.cache_clear()
    assert len(shown) == 2
    for text in shown:
        assert all(word in text for word in ("network", "file", "environ", "signals", "shared memory")), text


@pytest.mark.parametrize("limits", [Limits(memory_mb=60), Limits(files_mb=1), Limits(processes=1)], ids=str)
def test_small_limits_of_the_users_own_pass_the_check(limits) -> None:
    assert LocalSandbox(limits, allow_unisolated=True).check() in ("", "they are switched off")


def test_the_check_finds_a_compiler_that_fails(monkeypatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("this machine has no g++")
    assert LocalSandbox().check(("python", "bash", "cpp")) == ""
    broken = Language("main.cpp", ("./main",), ("g++", "-no-such-option", "main.cpp"), "main")
    monkeypatch.setitem(LANGUAGES, "cpp", broken)
    with pytest.raises(SandboxError, match="cpp program fails"):
        LocalSandbox().check(("cpp",))


def as_nobody(tmp: Path, calls: str, left: int | None = None) -> list:
    """What a script prints that runs as another user, with ten further processes of that user.

    Args:
        left: further processes that the user may start; None: no limit.
    """
    library = tmp / "library"
    shutil.copytree(Path(programs.__file__).parents[3] / "hybridrl", library / "hybridrl")
    for path in [tmp, *tmp.parents[: len(tmp.parents) - 2]]:
        os.chmod(path, 0o755)
    home = tmp / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    script = textwrap.dedent(
        f"""
        import json, os, resource, sys, time
        sys.path.insert(0, {str(library)!r})
        os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
        os.environ.update(TMPDIR={str(home)!r}, HOME={str(home)!r}, SECRET="hunter2")
        children = []
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                time.sleep(600); os._exit(0)
            children.append(pid)
        from hybridrl.sandbox import Limits, LocalSandbox, Program, SandboxError, jail
        if {left!r} is not None:
            deadline = time.monotonic() + 60
            while jail._tasks({NOBODY}) > 1 + len(children) and time.monotonic() < deadline:
                time.sleep(0.1)  # processes of the test before are still ending
            most = jail._tasks({NOBODY}) + {left!r}
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        def tried(call):
            try: return call()
            except SandboxError as error: return f"none: {{error}}"
        try:
            print(json.dumps([tried(call) for call in ({calls})]))
        finally:
            for pid in children: os.kill(pid, 9)
        """
    )
    python = os.path.realpath(sys.executable)
    ran = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture
def other_user(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    if subprocess.run(["true"], user=NOBODY, check=False).returncode or not os.path.realpath(sys.executable).startswith(
        "/usr"
    ):
        pytest.skip("another user cannot start this Python")
    return tmp_path


@pytest.mark.parametrize("ways", [(), ("user",)], ids=["none", "user"])
def test_another_user_may_fork_and_start_threads(other_user, ways) -> None:
    """The kernel counts the other processes of the user too, and the limit holds all the same."""
    sandbox = f"LocalSandbox(Limits(processes=8), ways={ways!r}, allow_unisolated=True)"
    calls = f"{sandbox}.check, lambda: {sandbox}.run(Program({FORKS!r})).output, "
    calls += f"lambda: {sandbox}.run(Program({BOMB!r})).output"
    check, forks, bomb = as_nobody(other_user, calls)
    if ways and check:
        pytest.skip("the kernel gives this user no namespaces")
    assert not check.startswith("none") and forks == "1\n42\n"
    counts = [int(line) for line in bomb.split()]
    assert counts and max(counts) <= 12, counts


def test_a_limit_of_the_machine_that_is_used_up_is_found_at_the_start(other_user) -> None:
    calls = "lambda: LocalSandbox(ways=(), allow_unisolated=True).check(),"
    (check,) = as_nobody(other_user, calls, left=2)
    assert check.startswith("none:")


def test_a_program_of_the_same_user_cannot_forge_its_end(other_user) -> None:
    """It may write into the pipe of the report, which it finds at the caller, but does not know the secret."""
    forge = (
        "import glob, json, os\nfor path in glob.glob('/proc/[0-9]*/fd/*'):\n    try:\n"
        "        if os.readlink(path).startswith('pipe:') and path.split('/')[2] != str(os.getpid()):\n"
        "            d = os.open(path, os.O_WRONLY | os.O_NONBLOCK)\n"
        "            end = {'isolated': 'namespaces', 'end': {'code': 0, 'seconds': 0}}\n"
        "            os.write(d, (json.dumps(end) + chr(10)).encode())\n    except OSError: pass\n"
        "os.kill(os.getppid(), 9)\nimport time\ntime.sleep(5)"
    )
    calls = f"lambda: LocalSandbox(ways=(), allow_unisolated=True).run(Program({forge!r})).code,"
    (code,) = as_nobody(other_user, calls)
    assert code != 0 and str(code).startswith("none")


def test_system_v_memory_is_bounded() -> None:
    """Segments that are not attached are in no process's address space."""
    code = (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
        "print(sum(c.shmget(0, 2**25, 0o1600) >= 0 for _ in range(40)))"
    )
    sandbox = LocalSandbox(Limits(memory_mb=256), ways=("root",))
    try:
        found = sandbox.run(Program(code))
    except SandboxError:
        pytest.skip("the kernel gives no namespaces to root")
    assert 1 <= int(found.output) <= 8


@pytest.mark.parametrize("ways", [("root",), ("user",), ()], ids=["root", "user", "none"])
def test_a_control_group_bounds_files_in_memory(ways) -> None:
    """No process's address space holds them. The program failed, and not the sandbox."""
    with cgroups.memory_group(64) as group:
        if group is None:
            pytest.skip("this process may make no control group that limits memory")
    code = (
        "import os\nheld = [os.memfd_create('x') for _ in range(40)]\n"
        "for one in held:\n    for _ in range(16): os.write(one, bytes(2**20))\nprint('all')"
    )
    sandbox = LocalSandbox(ways=ways, allow_unisolated=True)
    try:
        assert sandbox.run(Program(code), Limits(memory_mb=1024, files_mb=64)).output == "all\n"
        found = sandbox.run(Program(code), Limits(memory_mb=128, files_mb=64))
    except SandboxError as error:
        assert "Permission" in str(error)  # Python is in a folder of root alone
        return
    assert (found.output, found.code) == ("", 137)
    assert not [
        left for parent, _ in cgroups.group_parents(PROC) for left in parent.glob(f"hybridrl-sandbox-{os.getpid()}-*")
    ]
