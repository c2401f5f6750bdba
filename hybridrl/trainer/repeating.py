"""Repeats what a run has lost when one of several ranks ran out of memory, with smaller micro-batches.

The ranks of a model compute in step, and a rank that fails in the middle of a micro-batch leaves the others in
collectives. So all processes end, and the run begins again from its last checkpoint with half as many tokens per
micro-batch. Its results are those of a run with these micro-batches from there on.
"""

import copy
from typing import TypeVar

from hybridrl.config.dotted import set_key
from hybridrl.errors import MicroBatchError, WorkerUserError
from hybridrl.notify import notify
from hybridrl.trainer.run import TrainingRun

Config = TypeVar("Config")


def settings_to_repeat(config: Config, longest: int, run: TrainingRun, error: WorkerUserError) -> Config:
    """Return the settings with which a run that ended with this error is to begin again, and tell so.

    Args:
        longest: tokens of the longest sequence that the settings allow, for which a micro-batch must have room.

    Raises:
        WorkerUserError: `error`, if it has another cause, or smaller micro-batches are not possible. Also if the run
            has complete steps and no checkpoint, because all of them would be lost. A note tells what is left.
    """
    shortage, checkpoint = error.__cause__, run.outcome.checkpoint
    if not isinstance(shortage, MicroBatchError):
        raise error
    limit = max(shortage.half, -(-longest // shortage.ranks) if shortage.by_tokens else 0)
    again = copy.deepcopy(config)
    if shortage.key:
        set_key(again, shortage.key, limit)
    # A setting that has this value already did not help.
    possible = limit < shortage.tokens and again != config
    if not possible or (checkpoint is None and run.step > 1):
        if checkpoint is not None:
            error.add_note(f"The last checkpoint is {checkpoint}; trainer.resume_mode=auto goes on from there")
        elif run.step > 1:
            error.add_note(f"The {run.step - 1} steps before have no checkpoint (trainer.save_freq) and are lost")
        raise error
    if checkpoint is not None:
        set_key(again, "trainer.resume_mode", "resume_path")
        set_key(again, "trainer.resume_from_path", str(checkpoint))
    start = "its beginning" if checkpoint is None else checkpoint
    notify(
        f"step {run.step}: {str(error).splitlines()[0]}. All processes end, and the run begins again from {start} with "
        f"{shortage.key}={limit}",
        "warning",
    )
    return again
