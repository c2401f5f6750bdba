"""The one way to tell the user something outside the console table, the report and the exceptions."""

import sys
from typing import Literal

_told: set[str] = set()


def notify(text: str, level: Literal["notice", "warning", "error"] = "notice", *, once: bool = False) -> None:
    """Write one message to the standard error, which Ray forwards from workers to the driver.

    Args:
        text: the message; it names the setting and what to change, where there is one.
        level: `notice` for what the user may want to know, `warning` for what may spoil the run, `error` for what
            failed while the run goes on.
        once: leave the message out where this process has already written the same one with `once`.
    """
    if once:
        if text in _told:
            return
        _told.add(text)
    print(f"{level}: {text}", file=sys.stderr, flush=True)
