"""The working folder of Ray's workers, which on a cluster that a run joins is the one of `ray start`."""

import contextlib
import os


def of_program() -> str | None:
    """Return the folder that this process works in; None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def enter(folder: str | None) -> None:
    """Make the folder of the run's program that of this worker, so that relative paths mean the same in both.

    A node that does not have it keeps its own, and so does a worker that Ray has given a copy of a `working_dir`.

    Args:
        folder: absolute; None changes nothing.
    """
    if folder is None:
        return
    import ray

    if ray.get_runtime_context().runtime_env.get("working_dir"):
        return
    with contextlib.suppress(OSError):
        os.chdir(folder)
