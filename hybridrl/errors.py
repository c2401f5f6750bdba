"""Every exception that hybridrl raises on purpose for its caller, in one module without dependencies.

An error that the user can fix derives from `UserError`: the command line prints it as one message, without a traceback,
and exits with status 2.
"""

import re
from collections.abc import Sequence
from typing import Any

_OUT_OF_MEMORY = re.compile(
    r"out.of.memory|OutOfMemory|MemoryError|Can(no|')t allocate memory|_ALLOC_FAILED", re.IGNORECASE
)


class UserError(Exception):
    """Something that the user set or supplied cannot work; the message says what was found and what to change."""


class ConfigError(UserError):
    """The configuration cannot be used; `faults` lists every reason, each naming its key and what to change.

    Args:
        faults: one fault, or all that were found; each is a complete sentence for the user.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: list[str] = [faults] if isinstance(faults, str) else list(faults)
        super().__init__(self.faults)

    def __str__(self) -> str:
        if len(self.faults) == 1:
            return self.faults[0]
        return f"{len(self.faults)} faults in the configuration:\n" + "\n".join(f"  - {fault}" for fault in self.faults)


class MissingFieldError(UserError, ValueError):
    """A dataflow passes a batch on without a field that the next stage reads; the message names both."""


class AlgorithmError(UserError, ValueError):
    """An algorithm was given a setting or data it cannot work with.

    The message names the setting or the tensor at fault, the value found, what is allowed and what to change. It is a
    `ValueError` because code written for verl expects one.
    """


class DataError(UserError):
    """A data file, row, dataset class or sampler cannot be used; the message names it and says what to change."""


class ModelError(UserError):
    """A model directory, tokenizer or checkpoint cannot be used as asked; the message says which and what to change."""


class MicroBatchError(ModelError):
    """A rank ran out of memory, and others wait for it in collectives. With smaller micro-batches it may have enough.

    Attributes:
        key: the setting that limits the tokens of a micro-batch; empty if the caller of the engine did not name it.
        tokens: those of the rank's largest micro-batch of several sequences, on each of the ranks that share them.
        ranks: number of these ranks.
        by_tokens: whether nothing but the number of tokens limits micro-batches.
    """

    def __init__(self, message: str, key: str, tokens: int, ranks: int, by_tokens: bool) -> None:
        super().__init__(message)
        self.key = key
        self.tokens = tokens
        self.ranks = ranks
        self.by_tokens = by_tokens

    @property
    def half(self) -> int:
        """A limit that cuts the largest micro-batch in two."""
        return max(1, self.tokens // 2)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.key, self.tokens, self.ranks, self.by_tokens)


class RewardError(UserError):
    """A reward function, manager or score cannot be used; the message names the sample or file and what to change."""


class RolloutError(UserError):
    """A rollout engine is not available or cannot do what is asked."""


class TooFewReplicasError(RolloutError):
    """Replicas have left a run, and none has joined in time."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, is incomplete, or belongs to another model; the message says what to do."""


class DiskFullError(UserError):
    """A file could not be written, because a disk or a quota has no space left."""


class RemoteFileError(UserError):
    """A file behind an address cannot be read or written; the message begins with the address."""


class PlacementError(UserError):
    """The processes that were requested do not fit on the available devices."""


class BatchError(ValueError, AssertionError):
    """Batches that cannot be joined or cut as asked. verl raises an AssertionError for these."""


class WorkerError(Exception):
    """A worker method failed on some rank, or a worker died; the message holds the worker's own traceback.

    Attributes:
        role: the name of the worker group, e.g. `"actor"`.
        rank: the rank that failed first.
        method: the worker method that was running; `"__init__"` while the worker was being built.
        node: address of the worker's node.
        pid: the worker's process id on that node.
        remote_traceback: the traceback text of the worker's exception; empty when the process died without one.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        rank: int = -1,
        method: str = "",
        node: str = "",
        pid: int = 0,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.method = method
        self.node = node
        self.pid = pid
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], {**self.__dict__})


class WorkerUserError(WorkerError, UserError):
    """A worker refused something that the user can fix: the worker's message, without a traceback."""


class WorkerDiedError(WorkerError):
    """A worker's process ended: killed, out of memory, or crashed.

    Attributes:
        out_of_memory: a lack of memory is known to be the cause.
    """

    out_of_memory: bool = False


class WorkerTimeoutError(WorkerError, TimeoutError):
    """Some ranks did not answer in time; `missing` lists them."""

    missing: tuple[int, ...] = ()


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a lack of memory is the cause. The text of a worker's death also names it as a possible one."""
    if isinstance(error, WorkerDiedError):
        return error.out_of_memory
    return _OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}") is not None


def _rebuild(cls: type[WorkerError], message: str, fields: dict[str, Any]) -> WorkerError:
    error = cls(message)
    error.__dict__.update(fields)
    return error
