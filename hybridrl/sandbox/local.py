"""Programs on this machine, in process trees of their own, with limits, without network and this run's files."""

import base64
import contextlib
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from hybridrl.sandbox import cgroups
from hybridrl.sandbox.languages import command, language_of
from hybridrl.sandbox.program import Ended, Limits, Program, Sandbox, SandboxError
from hybridrl.sandbox.slots import Slots
from hybridrl.utils import clock
from hybridrl.utils.cores import available_cores

_JAIL = Path(__file__).with_name("jail.py")
#: the environment variable that allows programs without isolation, by the value 1
UNISOLATED_VARIABLE = "HYBRIDRL_SANDBOX_ALLOW_UNISOLATED"
#: what such a program can reach
EXPOSURE = (
    "such a program reaches the network, every file that its user may read or write, the environment of that user's "
    "other processes (keys and tokens, in /proc/PID/environ), can send these processes signals, and can fill shared "
    "memory; only its time and the memory of each process are limited"
)
_SETUP_S, _GRACE_S = 35.0, 5.0  # beyond the limits of the jail itself
_TICK_S, _END_S = 0.25, 5.0
_RUNS = 3  # of a program whose end may have come from outside
#: programs that print 42 and do what programs do, by language
_PROBES = {
    "python": """
import os, threading
block = bytearray(2**26)
if PROCESSES > 1:
    thread = threading.Thread(target=block.__setitem__, args=(0, 1))
    thread.start()
    thread.join()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(42)
""",
    "bash": "(echo 42) | cat",
    "cpp": '#include <cstdio>\n#include <vector>\nint main() { std::vector<int> x(1 << 20); puts("42"); }',
}
_OWN_MEMORY_MB = 64  # of the processes that watch the program, in its control group
_BUILD_MEMORY_MB, _BUILD_FILES_MB = 4096, 64


class LocalSandbox(Sandbox):
    """Runs programs on this machine.

    Args:
        limits: where `run` gets none.
        max_concurrent: programs that run at once, over all processes of this user on the machine that use this limit;
            None: one per core that this process may use.
        ways: to get namespaces: "root", where this process is that; "user", by a user namespace. The first that works
            is taken.
        allow_unisolated: programs run also where the kernel gives no namespaces; None: where the environment variable
            HYBRIDRL_SANDBOX_ALLOW_UNISOLATED is 1.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        max_concurrent: int | None = None,
        ways: Sequence[str] = ("root", "user"),
        allow_unisolated: bool | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.slots = Slots(max_concurrent or available_cores(), "local")
        self._ways = tuple(ways)
        self._unisolated = allow_unisolated or (allow_unisolated is None and os.environ.get(UNISOLATED_VARIABLE) == "1")

    def run(self, program: Program, limits: Limits | None = None) -> Ended:
        limits, language = limits or self.limits, language_of(program.language)
        check_paths([*program.files, *program.fetch])
        files = {language.source: program.code.encode("utf-8", "replace"), **program.files}
        with clock.stopped(), self.slots.acquired():
            compiled = None
            if language.build:
                wide = replace(
                    limits,
                    wall_s=program.compile_s,
                    cpu_s=max(1, round(program.compile_s)),
                    memory_mb=max(limits.memory_mb, _BUILD_MEMORY_MB),
                    files_mb=max(limits.files_mb, _BUILD_FILES_MB),
                )
                building = Program("", files=files, fetch=[language.product])
                compiled = self._run(command(language.build), building, wide)
                if not compiled.succeeded:
                    return replace(compiled, compiled=compiled)
                if language.product not in compiled.files:
                    raise SandboxError(f"the compiler of {program.language} ended without {language.product}")
                files = {**files, language.product: compiled.files[language.product]}
            ended = self._run(command(language.run), replace(program, files=files), limits)
            return replace(ended, compiled=compiled and replace(compiled, files={}))

    def check(self, languages: Sequence[str] = ("python",)) -> str:
        isolated = "namespaces"
        for name in languages:
            # Whoever runs no such programs may use a limit of memory that is too small for this one.
            limits = replace(self.limits, memory_mb=max(self.limits.memory_mb, 256), wall_s=30.0, cpu_s=30)
            program = _PROBES.get(name)
            if program is None:
                continue
            code = program.replace("PROCESSES", str(limits.processes)) if name == "python" else program
            result = self.run(Program(code, name, compile_s=60.0), limits)
            if result.output.strip() != "42":
                output = f"{result.output.strip()} {result.errors.strip()}".strip() or f"exit code {result.code}"
                raise SandboxError(f"a small {name} program fails in the sandbox: {output[-1000:]}")
            isolated = result.isolated
        return "" if isolated == "namespaces" else isolated

    def _run(self, words: Sequence[str], program: Program, limits: Limits) -> Ended:
        """Run a command with the program's files.

        A program that a signal ended or stopped which may have come from outside runs again: if it was its own doing,
        it ends so every time.
        """
        for _ in range(_RUNS):
            ended, in_doubt = self._run_once(words, program, limits)
            if not in_doubt:
                break
        return ended

    def _run_once(self, words: Sequence[str], program: Program, limits: Limits) -> tuple[Ended, bool]:
        """Run a command; return its end, and whether that may have come from outside."""
        try:
            with tempfile.TemporaryDirectory(prefix="hybridrl-sandbox-out-", ignore_cleanup_errors=True) as out:
                folder = tempfile.mkdtemp(prefix="hybridrl-sandbox-")
                try:
                    with cgroups.memory_group(limits.memory_mb + limits.files_mb + _OWN_MEMORY_MB) as group:
                        return self._run_in(folder, out, words, program, limits, group)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        except TimeoutError:  # of a signal handler of the caller
            raise
        except (OSError, MemoryError) as error:  # out of descriptors, processes, disk or memory
            raise SandboxError(f"the sandbox failed: {type(error).__name__}: {error}") from error

    def _run_in(
        self, folder: str, out: str, words: Sequence[str], program: Program, limits: Limits, group: Path | None
    ) -> tuple[Ended, bool]:
        report, write = _pipe()
        settings = {
            **{name: getattr(limits, name) for name in ("wall_s", "cpu_s", "memory_mb", "processes", "files_mb")},
            "folder": folder,
            "out": out,
            "command": list(words),
            "fetch": list(program.fetch),
            "one_stream": program.one_stream,
            "python": [sys.base_prefix, sys.prefix, os.path.realpath(sys.base_prefix)],
            "report": write,
            "ways": list(self._ways),
            "unisolated": self._unisolated,
            "group": group and str(group),
            "counters": cgroups.shortage_counters(group),
        }
        seal = secrets.token_hex(16)
        payload = {
            "files": {path: base64.b64encode(data).decode() for path, data in program.files.items()},
            "stdin": base64.b64encode(program.stdin).decode(),
            "seal": seal,
        }
        try:
            # A file, not a pipe: nobody waits here for a process that may be stopped.
            with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else _memory() as sent:
                sent.write(json.dumps(payload).encode())
                sent.seek(0)
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_JAIL), json.dumps(settings)],
                    stdin=sent, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    pass_fds=(write,), env={}, cwd="/", start_new_session=True,
                )  # fmt: skip
            os.close(write)
            write = -1
            talk = _Talk(process, report, seal, limits)
            with process:
                try:
                    talk.listen()
                finally:
                    _end(process, ended="end" in talk.reports)
        finally:
            os.close(report)
            if write >= 0:
                os.close(write)
        ended = talk.ended(_fetched(out, program.fetch))
        return ended, bool(talk.reports.get("end", {}).get("doubt")) and ended.ended != "output" and not talk.over_cpu


def check_paths(paths: Iterable[str]) -> None:
    """Refuse paths that lead out of the program's folder.

    Raises:
        SandboxError: one does.
    """
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path or "/".join(parts) != path:
            raise SandboxError(f"file {path!r}: give a path relative to the program's folder, without '..'")


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of the standard streams, also where the caller has closed those."""
    ends = os.pipe()
    moved: list[int] = []
    try:
        for descriptor in ends:
            moved.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
    except OSError:
        for descriptor in moved:
            os.close(descriptor)
        raise
    finally:
        for descriptor in ends:
            os.close(descriptor)
    return moved[0], moved[1]


def _memory() -> IO[bytes]:
    """A file in memory."""
    return os.fdopen(os.memfd_create("hybridrl-sandbox"), "w+b")


class _Talk:
    """Reads what the program prints and what the jail reports, until their end, the limit of output or that of time.

    Attributes:
        said: what the jail reported.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", report: int, seal: str, limits: Limits) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.reports: dict[str, Any] = {}
        self._seal, self._limits, self._report = seal, limits, report
        self._streams = {process.stdout.fileno(): 0, process.stderr.fileno(): 1}
        self._output, self._lines = [b"", b""], b""
        self._full = False
        self._started_at = self._full_at = time.monotonic()

    def listen(self) -> None:
        """Read until there is no more to come."""
        poll = select.poll()
        open_ends = {self._report, *self._streams}
        for descriptor in open_ends:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + _SETUP_S
        while open_ends and not self._full:
            events = poll.poll(1000 * min(_TICK_S, max(0.0, deadline - time.monotonic())))
            for descriptor, _ in events:
                part = os.read(descriptor, 65536)
                if not part:
                    poll.unregister(descriptor)
                    open_ends.discard(descriptor)
                elif descriptor == self._report:
                    deadline = self._reported(part, deadline)
                else:
                    self._printed(self._streams[descriptor], part)
            if not events and time.monotonic() >= deadline:
                return
            if not events and self._report not in open_ends and "end" not in self.reports:
                return  # the jail has died, and others may hold its streams

    def _printed(self, which: int, part: bytes) -> None:
        rest = self._limits.output_kb * 1024 - len(self._output[0]) - len(self._output[1])
        self._output[which] += part[:rest]
        if len(part) > rest and not self._full:
            self._full, self._full_at = True, time.monotonic()

    def _reported(self, part: bytes, deadline: float) -> float:
        """Take the messages of the jail; returns the new deadline."""
        *lines, self._lines = (self._lines + part).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):  # such a line is not the jail's
                message = json.loads(line)
                if isinstance(message, dict) and message.pop("seal", None) == self._seal:
                    self.reports |= message
                    if "started" in message:
                        self._started_at = time.monotonic()
                    if "started" in message or "more" in message:
                        deadline = time.monotonic() + message.get("more", self._limits.wall_s) + _GRACE_S
        return deadline

    @property
    def over_cpu(self) -> bool:
        """Whether the kernel ended the program because of its processor time."""
        end = self.reports.get("end", {})
        killed = end.get("code") == 128 + signal.SIGKILL and end.get("cpu", 0.0) >= self._limits.cpu_s
        return killed or end.get("code") == 128 + signal.SIGXCPU

    def ended(self, files: dict[str, bytes]) -> Ended:
        """Return the program's end.

        Raises:
            SandboxError: the jail does not say so.
        """
        output, errors = (stream.decode("utf-8", "replace") for stream in self._output)
        isolated, end = self.reports.get("isolated"), self.reports.get("end")
        if "failed" in self.reports and not self._full:
            raise SandboxError(f"the sandbox failed: {self.reports['failed']}")
        if isolated not in (None, "namespaces") and not self.reports.get("unisolated"):
            raise SandboxError(
                f"the kernel gives the sandbox no namespaces ({isolated}), so programs would not be isolated: "
                f"{EXPOSURE}. Run as root or allow user namespaces, or run programs on another machine "
                f"(reward.sandbox_fusion.url; url of a tool). If you accept this, set {UNISOLATED_VARIABLE}=1, "
                "reward.sandbox_fusion.allow_unisolated=true, allow_unisolated of the tool, or --allow-unisolated of "
                "the server"
            )
        if isolated is None or (end is None and not self._full):
            reason = errors.strip()[-1000:] or "it died, or was stopped"
            raise SandboxError(f"the sandbox failed: it did not report how the program ended: {reason}")
        end = end or {"code": 128 + signal.SIGKILL, "seconds": self._full_at - self._started_at}
        return Ended(
            output=output,
            errors=errors,
            code=end["code"],
            ended="output" if self._full else "time" if end.get("time") or self.over_cpu else "",
            seconds=end["seconds"],
            isolated=isolated,
            files=files,
        )


def _fetched(out: str, paths: Sequence[str]) -> dict[str, bytes]:
    files = {}
    for number, path in enumerate(paths):
        with contextlib.suppress(OSError), open(os.open(f"{out}/{number}", os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            files[path] = file.read()
    return files


def _end(process: "subprocess.Popen[bytes]", ended: bool) -> None:
    """Have the jail end all that is left, and wait for it; where it cannot, end it."""
    if process.poll() is None and not ended:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        ended = False
    if not ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
