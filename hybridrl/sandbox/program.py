"""The programs, limits and results of every sandbox."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridrl.errors import RewardError
from hybridrl.scored import Reason, UnscoredError


@dataclass(frozen=True)
class Limits:
    """Resources that a program may use.

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
class Program:
    """A program and what it reads.

    Attributes:
        code: its source.
        language: a name from `LANGUAGES`.
        stdin: what it reads from the standard input.
        files: further files in its folder, by relative path.
        fetch: files of its folder that are wanted when it has ended, by relative path.
        one_stream: standard error is part of the standard output, in the order of writing.
        compile_s: seconds that compiling may take, where the language is compiled.
    """

    code: str
    language: str = "python"
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: Sequence[str] = ()
    one_stream: bool = False
    compile_s: float = 10.0


@dataclass(frozen=True)
class Ended:
    """The end of a program.

    Attributes:
        output: its standard output; with `one_stream` both streams together.
        errors: its standard error.
        code: its exit code; 128 and more: the signal that ended it.
        ended: why it was ended: "time", "output"; "" where it ended by itself.
        seconds: how long it ran. The time that it waited to be started does not count.
        isolated: "namespaces", or why there were none; a remote sandbox does not tell.
        files: those of `Program.fetch` that exist.
        compiled: how compiling ended, where the language is compiled. Where that failed, the program did not run and
            the other fields are those of the compiler.
    """

    output: str
    errors: str = ""
    code: int = 0
    ended: str = ""
    seconds: float = 0.0
    isolated: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    compiled: "Ended | None" = None

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.code == 0 and not self.ended


class SandboxError(UnscoredError, RewardError):
    """The sandbox failed, and not the program: the sample has no score.

    A reward function, tool or loop that lets it pass has none, either.

    Args:
        detail: what happened, for people.
        reason: `infra` or `timeout`.
    """

    def __init__(self, detail: str, reason: Reason = Reason.INFRA) -> None:
        super().__init__(reason, detail)

    def __str__(self) -> str:
        return self.unscored.detail


class Sandbox(ABC):
    """Runs programs. All methods may be called from several threads and processes at once."""

    @abstractmethod
    def run(self, program: Program, limits: Limits | None = None) -> Ended:
        """Run a program to its end. Everything that it started ends with it.

        It waits until fewer programs run than may run at once. Neither this wait nor the run counts against a limit of
        the caller's own time (`hybridrl.utils.clock`): the program has its own.

        Args:
            limits: None: those of the sandbox.

        Raises:
            SandboxError: the sandbox failed, and not the program.
        """

    @abstractmethod
    def check(self) -> str:
        """Run a small program.

        Returns:
            Why programs are not isolated; "" where they are, or where the sandbox does not tell.

        Raises:
            SandboxError: no program runs.
        """
