"""Programs in the sandbox, on this machine and behind the server: what they may use, and what they cannot reach."""

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
import venv
from pathlib import Path

import pytest
from raising import raises_with
from sandbox_tools import started_server

from hybridrl.sandbox import Limits, LocalSandbox, Program, RemoteSandbox, SandboxError, jail

LIMITS = Limits(wall_s=20, cpu_s=5, memory_mb=300, processes=16, files_mb=8, output_kb=64)
WAYS = ("root", "user")
SECRET = {"SECRET_KEY": "hunter2"}


def run_python(code, limits=LIMITS, ways=WAYS):
    return LocalSandbox(ways=ways, allow_unisolated=True).run(Program(code, one_stream=True), limits)


def has_namespaces(way: str) -> bool:
    return run_python("", LIMITS, [way]).isolated == "namespaces"


@pytest.fixture(scope="module")
def server():
    """The included server, as a program of its own."""
    with started_server("--max-processes", "16", "--max-files-mb", "8", "--max-output-kb", "64", env=SECRET) as url:
        yield url


@pytest.fixture(params=[*WAYS, "server"])
def isolated(request):
    """Runs a program in namespaces, which were made in one of two ways, or by the server."""
    if request.param == "server":
        if not has_namespaces("root") and not has_namespaces("user"):
            pytest.skip("the kernel gives this user no namespaces")
        sandbox = RemoteSandbox(request.getfixturevalue("server"))
        return lambda code, limits=LIMITS: sandbox.run(Program(code, one_stream=True), limits)
    if not has_namespaces(request.param):
        pytest.skip(f"the kernel gives this user no namespaces by the way {request.param!r}")
    return lambda code, limits=LIMITS: run_python(code, limits, [request.param])


class Limited:
    """Runs a program with limits: here, or by the server."""

    def __init__(self, sandbox):
        self.sandbox = sandbox

    def __call__(self, code, limits=LIMITS):
        return self.sandbox.run(Program(code, one_stream=True), limits)


@pytest.fixture(params=["local", "server"])
def limited(request):
    remote = request.param == "server"
    return Limited(RemoteSandbox(request.getfixturevalue("server")) if remote else LocalSandbox())


def test_a_program_prints_fails_and_leaves(isolated) -> None:
    assert isolated("print(6 * 7)").output == "42\n"
    failed = isolated("import sys\nprint('ä', flush=True)\n1 / 0")
    assert failed.code == 1 and failed.output.startswith("ä\n") and "line 3" in failed.output
    assert (isolated("raise SystemExit(124)").code, isolated("raise SystemExit(124)").ended) == (124, "")
    assert isolated("import numpy; print(numpy.arange(3).sum())", Limits()).output == "3\n"


def test_it_sees_neither_environment_nor_processes_nor_files_of_the_run(isolated, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(*next(iter(SECRET.items())))
    (tmp_path / "secret").write_text("hunter2")
    seen = isolated(
        "import glob, os\nprint(dict(os.environ), os.getuid(), sorted(os.listdir('.')))\n"
        "for path in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try: print(path, open(path).read())\n    except OSError as error: print(error)\n"
        f"print(os.path.exists({str(tmp_path)!r}), os.path.exists({__file__!r}))\n"
        "print(len(glob.glob('/proc/[0-9]*')))"
    ).output
    to_python = {Path(path).parts[2] for path in (sys.prefix, sys.base_prefix) if path.startswith("/tmp/")}
    assert "hunter2" not in seen and "False False" in seen and str(sorted({"main.py", *to_python})) in seen
    assert int(seen.split()[-1]) <= 2  # itself, and the first process of the namespace


@pytest.mark.parametrize("way", WAYS)
def test_python_may_be_in_a_temporary_folder(way, monkeypatch) -> None:
    if not has_namespaces(way):
        pytest.skip(f"the kernel gives this user no namespaces by the way {way!r}")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        os.chmod(folder, 0o755)
        monkeypatch.setattr(sys, "prefix", folder)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        found = run_python(
            f"import os, sys\nprint(sys.prefix)\nopen('own', 'w')\nopen({folder!r} + '/escaped', 'w')", LIMITS, [way]
        )
        assert found.output.startswith(f"{folder}\n") and "Read-only file system" in found.output, found
        assert "/escaped" in found.output


def test_it_reaches_no_network(isolated) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        assert "ConnectionRefusedError" in isolated(code).output  # its own 127.0.0.1, where nobody listens
        assert "OSError" in isolated("import socket\nsocket.create_connection(('1.1.1.1', 53), 5)").output


@pytest.mark.parametrize("path", ["/usr/escaped", "/etc/escaped", "/escaped", "/proc/sys/kernel/hostname"])
def test_it_writes_nowhere_else(isolated, path) -> None:
    assert isolated(f"open({path!r}, 'w').write('x')").code == 1
    assert not Path(path).exists() or path.startswith("/proc")


def test_signals_reach_nothing_outside(isolated) -> None:
    assert isolated(f"import os\nos.kill({os.getpid()}, 0)").code == 1
    isolated("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.kill(os.getppid(), 9)")
    assert isolated("print(1)").output == "1\n"


def test_it_has_no_capabilities(isolated) -> None:
    status = isolated("print(*[line for line in open('/proc/self/status') if line[:6] == 'CapEff'])").output
    assert "0000000000000000" in status
    code = "import ctypes; print(ctypes.CDLL(None).mount(b't', b'/tmp', b'tmpfs', 0, 0))"
    assert isolated(code).output == "-1\n"


def test_its_user_is_one_that_the_user_namespace_knows() -> None:
    """As root of a container whose user namespace has 65536 users, at once or in parts, or root alone."""
    everyone = "         0          0 4294967295\n"
    assert 1_000_000_000 <= jail.own_user(everyone, everyone) < 1_500_000_000
    small = "0 100000 65536\n"
    assert 32768 <= jail.own_user(small, small) < 49152
    parts = "0 1000 1\n1 100000 65536\n"
    assert 32769 <= jail.own_user(parts, parts) < 49153
    for maps in (("0 1000 1\n", "0 1000 1\n"), (small, "0 1000 1\n")):
        with pytest.raises(OSError, match="knows no users besides its own"):
            jail.own_user(*maps)


@pytest.mark.parametrize("ways", [("root",), ("user",), ()], ids=["root", "user", "none"])
def test_what_it_started_ends_with_it(ways, tmp_path) -> None:
    if ways and not has_namespaces(ways[0]):
        pytest.skip("the kernel gives this user no namespaces in this way")
    mark = f"{time.time_ns()}"
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', {mark!r}], start_new_session=True,\n"
        "    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\nprint('left')"
    )
    try:
        assert run_python(code, LIMITS, ways).output == "left\n"
    except SandboxError as error:
        assert "Permission" in str(error) and not ways  # this Python is in a folder of root alone
    assert mark not in running()


def test_what_it_started_ends_with_it_on_the_server(isolated) -> None:
    mark = f"{time.time_ns()}"
    code = (
        "import os\nread, write = os.pipe()\nif os.fork() == 0:\n    os.setsid()\n"
        f"    try: os.execv({sys.executable!r}, ['python', '-c', 'import time; time.sleep(300)', {mark!r}])\n"
        "    finally: os.write(write, b'failed')\n"
        "os.close(write)\nexecuted = os.read(read, 1) == b''  # which closes the pipe\n"
        "os.close(1); os.close(2)\nraise SystemExit(not executed or os.waitpid(-1, os.WNOHANG) != (0, 0))"
    )
    assert isolated(code).code == 0
    assert mark not in running()


def running() -> str:
    """The commands of all processes."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{name}/cmdline").read_text(errors="replace"))
    return " ".join(found)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("x = bytearray(2**30)", "MemoryError"),
        ("f = open('big', 'wb')\nfor _ in range(20): f.write(b'x' * 2**20)", "OSError"),
        ("fs = [open('/dev/null') for _ in range(100)]", "Too many open files"),
        ("import os, sys\nfor n in range(40):\n    if os.fork() == 0: os.read(os.pipe()[0], 1)", "unavailable"),
    ],
    ids=["memory", "disk", "files", "processes"],
)
def test_limits_hold(limited, code, word) -> None:
    if not has_namespaces("root") and os.geteuid() == 0:
        pytest.skip("root without namespaces")
    assert word in limited(code, LIMITS).output


def test_endless_programs_are_ended(limited) -> None:
    printed = limited("while True: print('x' * 1000)", LIMITS)
    assert printed.ended == "output" and len(printed.output) == 64 * 1024
    assert 0 <= printed.seconds < LIMITS.wall_s, "it was ended before its time was over"
    short = Limits(wall_s=1.0)
    ended = limited("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)", short)
    assert ended.ended == "time"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert limited(bomb, Limits(wall_s=1.0, processes=16)).ended == "time"
    assert limited("print(1)", LIMITS).output == "1\n"


def test_streams_input_and_files(limited) -> None:
    code = (
        "import os, sys\nprint(sys.stdin.read().upper())\nprint('to errors', file=sys.stderr)\n"
        "open('in/out.txt', 'w').write(open('in/a.txt').read() * 2)\n"
        "os.symlink('/etc/hostname', 'link'); os.mkfifo('pipe')"
    )
    wanted = ("in/out.txt", "missing", "link", "pipe")
    program = Program(code, stdin=b"question", files={"in/a.txt": b"ab"}, fetch=wanted)
    found = limited.sandbox.run(program, LIMITS)
    assert (found.output, found.errors, found.code) == ("QUESTION\n", "to errors\n", 0)
    assert dict(found.files) == {"in/out.txt": b"abab"}  # no link is followed, no pipe is waited for


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a//b"])
def test_files_stay_in_the_programs_folder(limited, path) -> None:
    for program in (Program("", files={path: b"x"}), Program("", fetch=[path])):
        with pytest.raises(SandboxError, match="relative"):
            limited.sandbox.run(program, LIMITS)


def test_a_compiled_language(limited) -> None:
    if shutil.which("g++") is None:
        pytest.skip("this machine has no g++")
    source = '#include <cstdio>\nint main() { int a; scanf("%d", &a); printf("%d\\n", 2 * a); return 3; }'
    found = limited.sandbox.run(Program(source, "cpp", stdin=b"21"), LIMITS)
    assert (found.output, found.code) == ("42\n", 3) and found.compiled.succeeded
    broken = limited.sandbox.run(Program("int main() {", "cpp"), LIMITS)
    assert not broken.compiled.succeeded and "error" in broken.compiled.errors
    with raises_with(SandboxError, "language 'cobol'", "python"):
        limited.sandbox.run(Program("", "cobol"), LIMITS)
