"""Right programs are right: with what programs usually find, on a busy machine, and when others kill or stop them."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_sandbox_killed import command_of

from hybridrl.processes.supervisor import descendants
from hybridrl.sandbox import Ended, Limits, LocalSandbox, Program, SandboxError

WAYS = ["root", "user"]
USUAL = {
    "pool": "from multiprocessing import Pool\nwith Pool(2) as pool: print(sum(pool.map(int, '42')) * 7)",
    "executor": "from concurrent.futures import ProcessPoolExecutor as P\nwith P(2) as p: print(*p.map(int, ['42']))",
    "queue": "import multiprocessing as m\nq = m.Queue()\nm.Process(target=q.put, args=(42,)).start()\nprint(q.get())",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory as S\n"
    "m = S(create=True, size=100)\nm.buf[0] = 42\nsame = S(m.name)\nprint(same.buf[0])\nm.unlink()",
    "stdin": "print(open('/dev/stdin').read())",
    "descriptor": "print(open('/dev/fd/0').read())",
    "stdout": "open('/dev/stdout', 'w').write('42')",
    "full": "try: open('/dev/full', 'w', 0 + 1).write('x\\n')\nexcept OSError: print(42)",
    "user": "import getpass, os, pwd\n"
    "assert getpass.getuser() == pwd.getpwuid(os.getuid()).pw_name == 'program'\nprint(42)",
    "own servers": "import socket\ns = socket.create_server(('localhost', 0))\n"
    "c = socket.create_connection(s.getsockname())\ns.accept()[0].send(b'42')\nprint(c.recv(2).decode())",
}


def run(code: str, limits: Limits, way: str = "root", language: str = "python", **program: bytes) -> Ended:
    """Run a program; where the kernel gives no namespaces by a way, the test is skipped."""
    try:
        return LocalSandbox(max_concurrent=16, ways=[way]).run(Program(code, language, **program), limits)
    except SandboxError as error:
        if "no namespaces" in str(error) or "Permission denied" in str(error):  # Python is in a folder of root alone
            pytest.skip(str(error)[:100])
        raise


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", USUAL)
def test_what_python_programs_usually_find(name: str, way: str) -> None:
    ended = run(USUAL[name], Limits(wall_s=30), way, stdin=b"42")
    assert (ended.output.strip(), ended.code) == ("42", 0), ended


@pytest.mark.parametrize("code", ["cat <(echo 42)", "cat /dev/stdin", "echo 42 > /dev/stdout", "awk '{print $1}'"])
def test_what_shell_programs_usually_find(code: str) -> None:
    if code.startswith("awk") and shutil.which("awk", path="/usr/bin:/bin") is None:
        pytest.skip("this machine has no awk")
    assert run(code, Limits(wall_s=30), language="bash", stdin=b"42").output.strip() == "42"


def test_shared_memory_of_programs_is_bounded_and_their_own() -> None:
    code = "for n in range(20): open(f'/dev/shm/{n}', 'xb').write(bytes(2**20))"
    for _ in range(2):
        ended = run(code, Limits(files_mb=8))
        assert ended.code == 1 and "No space left" in ended.errors


RIGHT = "import time\ntime.sleep(0.4)\nprint(int(input()) + 1)"


@pytest.mark.parametrize("way", [*WAYS, ""])
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGSTOP"])
def test_programs_that_others_kill_or_stop_run_again(way: str, sent: str) -> None:
    """Batch systems send SIGTERM to every process of a job, and daemons kill for memory. The third end counts."""
    sandbox = LocalSandbox(max_concurrent=16, ways=[way], allow_unisolated=True)
    draw, hits = random.Random(f"{way} {sent}"), 0
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(sandbox.run, Program(RIGHT, stdin=b"41"), Limits(wall_s=3.0)) for _ in range(4)]
        while hits < 2 and not all(run.done() for run in runs):
            time.sleep(draw.uniform(0.05, 0.3))
            victims = [pid for pid in descendants(os.getpid()) if " -u main.py" in command_of(pid)[:200]]
            if victims:
                hits += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(victims), getattr(signal, sent))
    for one in runs:
        try:
            assert one.result().output == "42\n"
        except SandboxError as error:
            assert "Permission denied" in str(error) or "no namespaces" in str(error)


@pytest.mark.parametrize(
    ("code", "code_and_end"),
    [
        ("import os\nos.kill(os.getpid(), 9)", (137, "")),
        ("import os\nos.kill(os.getpid(), 15)", (143, "")),
        ("import os\nos.kill(os.getpid(), 19)", (137, "time")),
        ("import os\nos.abort()", (134, "")),
    ],
)
def test_what_a_program_does_to_itself_is_its_end(code: str, code_and_end: tuple[int, str]) -> None:
    ended = run(code, Limits(wall_s=1.0))
    assert (ended.code, ended.ended) == code_and_end


COMPUTES = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\nprint(42)"


@pytest.fixture
def one_core() -> Iterator[None]:
    """This thread, and what it starts, has one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_time_in_which_a_program_waits_for_a_core_is_not_its_time(one_core: None) -> None:
    """Six programs of 0.6 s on one core, with 1.5 s each: all were ended for their time, and scored 0."""
    with ThreadPoolExecutor(6) as pool:
        ends = list(pool.map(lambda _: run(COMPUTES, Limits(wall_s=1.5)), range(6)))
    assert [ended.output for ended in ends] == ["42\n"] * 6
    assert all(ended.seconds <= 1.7 for ended in ends), ends


@pytest.mark.parametrize("begin", ["import os\nfor _ in range(4): os.fork()\n", "import os\nos.nice(19)\n"])
def test_a_program_that_makes_itself_wait_has_had_its_time(one_core: None, begin: str) -> None:
    """By many processes that compute, or by a low priority next to another program that computes: it is a verdict."""
    with contextlib.ExitStack() as stack:
        if "nice" in begin:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        assert run(f"{begin}while True: pass", Limits(wall_s=1.0, cpu_s=60)).ended == "time"


@pytest.mark.parametrize(
    "state",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "[signal.signal(number, signal.SIG_IGN) for number in signal.valid_signals() - {9, 19}]",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "[os.close(descriptor) for descriptor in (0, 1, 2)]",
        "os.umask(0o777)",
        "resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))",
        "os.environ.update(PYTHONHOME='/none', LD_PRELOAD='/none.so')",
    ],
)
def test_what_the_caller_has_does_not_reach_the_sandbox(state: str) -> None:
    """Ray ignores SIGCHLD in some of its processes: no program had a verdict there."""
    script = (
        "import os, resource, signal\nout = os.fdopen(os.dup(1), 'w')\nfrom hybridrl.sandbox import *\n"
        f"{state}\nfor code in ('print(42)', 'raise SystemExit(3)', 'import time; time.sleep(60)'):\n"
        "    ended = LocalSandbox(allow_unisolated=True).run(Program(code), Limits(wall_s=1))\n"
        "    print(ended.output.strip(), ended.code, ended.ended, file=out, flush=True)\nos._exit(0)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout == "42 0 \n 3 \n 137 time\n", ran
