"""Programs on this machine, in process trees of their own, with limits, without network and this run's files."""

import base64
import contextlib
import json
import os
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
from typing import Any

from hybridrl.sandbox.languages import command, language_of
from hybridrl.sandbox.program import Ended, Limits, Program, Sandbox, SandboxError
from hybridrl.sandbox.slots import Slots
from hybridrl.utils import clock
from hybridrl.utils.cores import available_cores

_JAIL = Path(__file__).with_name("jail.py")
_GRACE_S = 5.0
_BUILD_MEMORY_MB, _BUILD_FILES_MB = 4096, 64


class LocalSandbox(Sandbox):
    """Runs programs on this machine.

    Args:
        limits: where `run` gets none.
        max_concurrent: programs that run at once, over all processes of this user on the machine that use this limit;
            None: one per core that this process may use.
        ways: to get namespaces: "root", where this process is that; "user", by a user namespace. The first that works
            is taken.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        max_concurrent: int | None = None,
        ways: Sequence[str] = ("root", "user"),
    ) -> None:
        self.limits = limits or Limits()
        self.slots = Slots(max_concurrent or available_cores(), "local")
        self._ways = tuple(ways)

    def run(self, program: Program, limits: Limits | None = None) -> Ended:
        limits, language = limits or self.limits, language_of(program.language)
        check_paths([*program.files, *program.fetch])
        files = {language.source: program.code.encode("utf-8", "replace"), **program.files}
        with clock.stopped(), self.slots.taken():
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

    def check(self) -> str:
        found = self.run(Program("print(6 * 7)"), Limits())
        if found.output.strip() != "42":
            raise SandboxError(f"no program runs in the sandbox: {found.output.strip()} {found.errors.strip()}")
        return "" if found.isolated == "namespaces" else found.isolated

    def _run(self, words: Sequence[str], program: Program, limits: Limits) -> Ended:
        """Run a command with the program's files."""
        with tempfile.TemporaryDirectory(prefix="hybridrl-sandbox-out-", ignore_cleanup_errors=True) as out:
            folder = tempfile.mkdtemp(prefix="hybridrl-sandbox-")
            try:
                return self._run_in(folder, out, words, program, limits)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _run_in(self, folder: str, out: str, words: Sequence[str], program: Program, limits: Limits) -> Ended:
        report, write = os.pipe()
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
        }
        payload = {
            "files": {path: base64.b64encode(data).decode() for path, data in program.files.items()},
            "stdin": base64.b64encode(program.stdin).decode(),
        }
        started = time.monotonic()
        try:
            with subprocess.Popen(
                [sys.executable, "-I", "-S", str(_JAIL), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=(write,), env={}, cwd="/", start_new_session=True,
            ) as process:  # fmt: skip
                os.close(write)
                try:
                    streams, ended = _talk(process, json.dumps(payload).encode(), limits)
                finally:
                    _end(process)
            isolated, found = _report_of(report)
        finally:
            os.close(report)
        if isolated is None or "failed" in found:
            what = found.get("failed") or streams[1].decode("utf-8", "replace").strip() or "it did not start"
            raise SandboxError(f"the sandbox failed: {what}")
        return Ended(
            output=streams[0].decode("utf-8", "replace"),
            errors=streams[1].decode("utf-8", "replace"),
            code=process.returncode,
            ended=ended or ("time" if found.get("time") or process.returncode == 128 + signal.SIGXCPU else ""),
            seconds=found.get("seconds", time.monotonic() - started),
            isolated=isolated,
            files=_fetched(out, program.fetch),
        )


def check_paths(paths: Iterable[str]) -> None:
    """Refuse paths that lead out of the program's folder.

    Raises:
        SandboxError: one does.
    """
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path or "/".join(parts) != path:
            raise SandboxError(f"file {path!r}: give a path relative to the program's folder, without '..'")


def _talk(process: "subprocess.Popen[bytes]", sent: bytes, limits: Limits) -> tuple[list[bytes], str]:
    """Send the program, and read what it prints until its end, the limit of output or that of time."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(sent)
        process.stdin.close()
    output, deadline = [b"", b""], time.monotonic() + limits.wall_s + _GRACE_S
    numbers = {process.stdout.fileno(): 0, process.stderr.fileno(): 1}
    while numbers and (left := deadline - time.monotonic()) > 0:
        for descriptor in select.select(list(numbers), [], [], left)[0]:
            part = os.read(descriptor, 65536)
            if not part:
                del numbers[descriptor]
                continue
            which, rest = numbers[descriptor], limits.output_kb * 1024 - len(output[0]) - len(output[1])
            output[which] += part[:rest]
            if len(part) > rest:
                return output, "output"
    return output, "time" if numbers else ""


def _report_of(report: int) -> tuple[str | None, dict[str, Any]]:
    """What the jail reported: how the program is isolated, and how it ended."""
    os.set_blocking(report, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(report, 65536):
            data += part
    lines = data.decode("utf-8", "replace").splitlines()
    found: dict[str, Any] = {}
    for line in lines[1:]:
        found |= json.loads(line)
    return lines[0] if lines else None, found


def _fetched(out: str, paths: Sequence[str]) -> dict[str, bytes]:
    found = {}
    for number, path in enumerate(paths):
        with contextlib.suppress(OSError), open(os.open(f"{out}/{number}", os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            found[path] = file.read()
    return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have the jail end all that is left, and wait for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
