"""A sandbox whose processes are killed or stopped: there is no verdict, and never a wrong one."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_tools import started_server

from hybridrl.processes.supervisor import descendants
from hybridrl.reward.score.programs import compute_score
from hybridrl.sandbox import Limits, LocalSandbox, Program, RemoteSandbox, SandboxError, local

RIGHT = "import time\ntime.sleep(0.4)\nprint(sum(map(int, input().split())))"
WRONG = "import time\ntime.sleep(0.4)\nprint(sum(map(int, input().split())) + 1)"


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def jails() -> list[int]:
    """The processes of sandboxes below this one, without the programs."""
    return [pid for pid in descendants(os.getpid()) if "sandbox/jail.py" in command_of(pid)]


def wait_for_jails(count: int) -> list[int]:
    deadline = time.monotonic() + 30
    while len(found := jails()) < count and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def outcome_of(sandbox: LocalSandbox, code: str, seconds: float) -> bool | None:
    """Whether the program answers right; None: no verdict."""
    try:
        found = sandbox.run(Program(code, stdin=b"40 2"), Limits(wall_s=seconds))
    except SandboxError:
        return None
    return found.succeeded and found.output == "42\n"


@pytest.mark.parametrize("ways", [("root",), ("user",), ()], ids=["root", "user", "none"])
def test_random_kills_and_stops_never_change_a_verdict(ways) -> None:
    """Twelve right and twelve wrong programs, while processes of their sandboxes are killed, stopped, continued."""
    sandbox = LocalSandbox(max_concurrent=24, ways=ways, allow_unisolated=True)
    draw = random.Random(repr(ways))
    with ThreadPoolExecutor(24) as pool:
        runs = [pool.submit(outcome_of, sandbox, RIGHT if number % 2 else WRONG, 3.0) for number in range(24)]
        stopped: list[int] = []
        while not all(run.done() for run in runs):
            time.sleep(draw.uniform(0.02, 0.3))
            victims = jails()
            if not victims:
                continue
            pid, number = draw.choice(victims), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                stopped.append(pid)
            if stopped and draw.random() < 0.7:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped.pop(), signal.SIGCONT)
    found = [run.result() for run in runs]
    assert set(found[1::2]) <= {True, None} and set(found[0::2]) <= {False, None}, found
    assert None in found and {True, False} & set(found)
    assert not jails()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("which", ["jail", "first process"])
def test_each_process_of_the_sandbox(which, number) -> None:
    """Once the program runs: by then a death was taken for the program's, and a stop for its time limit."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(outcome_of, LocalSandbox(), RIGHT.replace("0.4", "1"), 3.0)
        pids = sorted(wait_for_jails(2))
        while not [pid for pid in descendants(os.getpid()) if "main.py" in command_of(pid).split("{")[0]]:
            time.sleep(0.002)
        time.sleep(0.1)  # until the jail has said so
        jail = next(pid for pid in pids if parent_of(pid) == os.getpid())
        os.kill(jail if which == "jail" else next(pid for pid in jails() if pid != jail), number)
        assert run.result() is None


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_pause_of_the_whole_sandbox_is_not_the_programs_time() -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(outcome_of, LocalSandbox(), RIGHT, 2.0)
        wait_for_jails(2)
        group = os.getpgid(next(pid for pid in jails() if parent_of(pid) == os.getpid()))
        os.killpg(group, signal.SIGSTOP)
        time.sleep(2.5)
        os.killpg(group, signal.SIGCONT)
        assert run.result()


def test_limits_of_the_program_itself_are_verdicts() -> None:
    """Its own kill, memory, processor time, wall time and output: the program failed, and not the sandbox."""
    sandbox, limits = LocalSandbox(), Limits(wall_s=60, cpu_s=1, memory_mb=200, output_kb=16)
    cases = {
        "import os\nos.kill(os.getpid(), 9)": (137, ""),
        "x = bytearray(2**30)": (1, ""),
        "while True: pass": (128 + signal.SIGXCPU, "time"),
        "import signal\nsignal.signal(24, lambda *_: None)\nwhile True: pass": (137, "time"),
        "import time\ntime.sleep(60)": (137, "time"),
        "while True: print('x' * 1000)": (137, "output"),
        "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 9)": (1, ""),
    }
    for code, end in cases.items():
        found = sandbox.run(Program(code), Limits(wall_s=1) if "sleep" in code else limits)
        assert (found.code, found.ended) == end, code


def test_a_program_cannot_report_its_own_end() -> None:
    """Neither over a descriptor that it inherits, nor over one of a process that it sees, also without namespaces."""
    forge = (
        "import glob, json, os\n"
        "end = json.dumps({'isolated': 'namespaces', 'end': {'code': 0, 'seconds': 0}}) + '\\n'\n"
        "for path in ['/proc/self/fd/%d' % n for n in range(3, 300)] + glob.glob('/proc/[0-9]*/fd/*'):\n"
        "    try:\n"
        "        if os.readlink(path).startswith('pipe:') and '/self/' not in path or '/self/fd/1' > path:\n"
        "            os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), end.encode())\n"
        "    except OSError: pass\nprint(42)\nraise SystemExit(3)"
    )
    for ways in (("root",), ("user",), ()):
        try:
            found = LocalSandbox(ways=ways, allow_unisolated=True).run(Program(forge))
        except SandboxError:
            continue  # no verdict: it may have confused the sandbox, and gains nothing
        assert found.code == 3


def test_the_time_for_the_start_is_not_that_of_the_program(monkeypatch) -> None:
    monkeypatch.setattr(local, "_SETUP_S", 1.0)
    assert outcome_of(LocalSandbox(), RIGHT.replace("0.4", "2"), 5.0)


def test_what_the_caller_lacks_is_unscored(tmp_path, monkeypatch) -> None:
    """Out of descriptors, and no room for the program's folder."""
    sandbox = LocalSandbox()
    assert outcome_of(sandbox, RIGHT, 5.0)
    script = (
        "import os, resource\nfrom hybridrl.sandbox import LocalSandbox, Program, SandboxError\n"
        "sandbox = LocalSandbox()\nresource.setrlimit(resource.RLIMIT_NOFILE, (MOST, MOST))\n"
        "try: print(sandbox.run(Program('print(42)')).output.strip())\nexcept SandboxError: print('none')"
    )
    for limit in range(3, 24):
        ran = subprocess.run(
            [sys.executable, "-c", script.replace("MOST", str(limit))], capture_output=True, text=True, check=False
        )
        assert ran.stdout.strip() in ("42", "none"), ran
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(SandboxError):
        sandbox.run(Program("print(1)"))


def test_more_descriptors_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("the limit of descriptors is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert outcome_of(LocalSandbox(), RIGHT, 5.0)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_scorer_and_the_server_give_unscored() -> None:
    truth = {"inputs": ["40 2"], "outputs": ["42"]}
    stop = threading.Event()

    def kill(server: int | None) -> None:
        while not stop.wait(0.01):
            for pid in jails() if server is None else descendants(server):
                if "sandbox/jail.py" in command_of(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, args=(None,))
    with started_server() as url:
        remote = RemoteSandbox(url, attempts=2, pause_s=0.01)
        assert remote.run(Program(RIGHT, stdin=b"40 2")).output == "42\n"
        killer.start()
        try:
            with pytest.raises(SandboxError):
                compute_score(f"```python\n{RIGHT}\n```", truth)
            with pytest.raises(SandboxError):
                remote.run(Program(RIGHT, stdin=b"40 2"))
        finally:
            stop.set()
            killer.join()
        assert compute_score(f"```python\n{RIGHT}\n```", truth)["score"] == 1
