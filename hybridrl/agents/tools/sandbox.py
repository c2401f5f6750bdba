"""Python code of the model, in a process tree of its own with limits, without network and without this run's files."""

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.agents.tools.base import BaseTool, ToolResponse, in_thread
from hybridrl.agents.tools.builtin import register_tool
from hybridrl.errors import RolloutError
from hybridrl.notify import notify

_JAIL = Path(__file__).with_name("jail.py")
_GRACE_S = 5.0


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        wall_s, cpu_s: seconds in all, and of processor time per process.
        memory_mb: address space per process.
        processes: processes and threads at once.
        files_mb: size of a file, and of /tmp.
        output_kb: what it may print.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 1024
    processes: int = 32
    files_mb: int = 64
    output_kb: int = 256


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        output: what it printed, both streams together.
        code: its exit code; 128 and more: the signal that ended it.
        ended: why it was ended: "time", "output"; "" where it ended by itself.
        isolated: "namespaces", or why there were none.
    """

    output: str
    code: int
    ended: str
    isolated: str


def run_python(code: str, limits: Limits, ways: Sequence[str] = ("root", "user")) -> Outcome:
    """Run a program to its end. Everything that it started ends with it.

    Args:
        ways: to get namespaces: "root", where this process is that; "user", by a user namespace. The first that works
            is taken.
    """
    folder = tempfile.mkdtemp(prefix="hybridrl-sandbox-")
    report, write = os.pipe()
    settings = {
        **{name: getattr(limits, name) for name in ("wall_s", "cpu_s", "memory_mb", "processes", "files_mb")},
        "folder": folder,
        "executable": sys.executable,
        "python": [sys.base_prefix, sys.prefix, os.path.realpath(sys.base_prefix)],
        "report": write,
        "ways": list(ways),
    }
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(_JAIL), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(write,), env={}, cwd="/", start_new_session=True,
        ) as process:  # fmt: skip
            os.close(write)
            try:
                output, ended = _talk(process, code.encode("utf-8", "replace"), limits)
            finally:
                _end(process)
        isolated, *more = os.read(report, 1000).decode().splitlines() or ["the sandbox did not start"]
        return Outcome(
            output.decode("utf-8", "replace"), process.returncode, ended or ("time" if more else ""), isolated
        )
    finally:
        os.close(report)
        shutil.rmtree(folder, ignore_errors=True)


def _talk(process: "subprocess.Popen[bytes]", program: bytes, limits: Limits) -> tuple[bytes, str]:
    """Send the program, and read what it prints until its end, the limit of output or that of time."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(program)
        process.stdin.close()
    output, deadline = b"", time.monotonic() + limits.wall_s + _GRACE_S
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            return output, ""
        output += part
        if len(output) > limits.output_kb * 1024:
            return output[: limits.output_kb * 1024], "output"
    return output, "time"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have the jail end all that is left, and wait for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@register_tool("python")
class PythonTool(BaseTool):
    """Runs Python code in a sandbox. Each call is a program of its own, whose files are gone at its end.

    Config: the fields of `Limits`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        given = {name: value for name, value in config.items() if name != "type"}
        try:
            self._limits = Limits(**given)
        except TypeError:
            raise RolloutError(
                f"python: config has {', '.join(given)}; known are {', '.join(Limits.__dataclass_fields__)}"
            ) from None
        tried = run_python("print(6 * 7)", self._limits)
        if tried.output.strip() != "42":
            raise RolloutError(f"python: no program runs in the sandbox: {tried.output.strip() or tried}")
        if tried.isolated != "namespaces":
            notify(
                f"tool python: the kernel refuses namespaces ({tried.isolated}): programs of the model run with limits,"
                " but they reach the network and what their user may read",
                "warning",
            )

    def get_openai_tool_schema(self) -> Any:
        """The description for the model."""
        what = {"type": "string", "description": "a program; it prints what you want to see"}
        parameters = {"type": "object", "properties": {"code": what}, "required": ["code"]}
        function = {"name": "python", "description": "Run a Python program.", "parameters": parameters}
        return {"type": "function", "function": function}

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """What the program prints, and how it ended where that was not by itself."""
        found = await in_thread(lambda: run_python(str(parameters["code"]), self._limits))
        ends = {"time": f"[ended after {self._limits.wall_s:g} s]", "output": "[ended: it printed too much]"}
        note = ends.get(found.ended, f"[exit code {found.code}]" if found.code else "")
        return ToolResponse("\n".join(filter(None, (found.output.rstrip("\n"), note)))), None, {"code": found.code}
