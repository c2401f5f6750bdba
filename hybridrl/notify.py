"""The one way to tell the user something outside the console table, the report and the exceptions."""

import contextlib
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

_sent_once: set[str] = set()
_listener: Callable[[str, str], None] | None = None
_unsent: deque[tuple[str, str]] = deque(maxlen=200)  # messages from before there was a listener
_fallback: Path | None = None  # the file for output that has no reader any more


@contextlib.contextmanager
def keeping_output(path: Path) -> Iterator[None]:
    """Within the block, standard output and error go on in a file once their terminal or pipe is gone."""
    global _fallback
    before, _fallback = _fallback, path
    try:
        yield
    finally:
        _fallback = before


def redirect_lost_output() -> bool:
    """Send standard output and error to the file of `keeping_output` if nothing reads them: each write would fail.

    Returns:
        Whether one of them was redirected.
    """
    redirected = False
    if _fallback is None:
        return False
    for number in (1, 2):
        waiting = select.poll()
        waiting.register(number, select.POLLOUT)
        if any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in waiting.poll(0)):
            file = os.open(_fallback, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if file != number:  # it is, if the descriptor was closed
                os.dup2(file, number)
                os.close(file)
            redirected = True
    return redirected


def write_out(write: Callable[[], None]) -> None:
    """Call `write`, which prints something. A terminal that has closed does not end a run (`keeping_output`).

    Raises:
        OSError: the output is lost, and there is no other place for it.
    """
    try:
        write()
    except OSError:  # the write may fail before SIGHUP arrives
        if not redirect_lost_output():
            raise
        write()


@contextlib.contextmanager
def listening(listener: Callable[[str, str], None]) -> Iterator[None]:
    """Pass every message of this process to `listener(text, level)`, first those that had no listener.

    A run records its messages this way, including those of the checks before its folder was opened.
    """
    global _listener
    before, _listener = _listener, listener
    try:
        while _unsent:
            listener(*_unsent.popleft())
        yield
    finally:
        _listener = before
        forget()


def forget() -> None:
    """Forget earlier messages, those without a listener and those sent `once`, before the next run of the process."""
    _unsent.clear()
    _sent_once.clear()


def notify(text: str, level: Literal["notice", "warning", "error"] = "notice", *, once: bool = False) -> None:
    """Write one message to the standard error, which Ray forwards from workers to the driver.

    Args:
        text: the message; it names the setting and what to change, where there is one.
        level: `notice` for what the user may want to know, `warning` for what may spoil the run, `error` for what
            failed while the run goes on.
        once: leave the message out where this process has already written the same one with `once`.
    """
    if once:
        if text in _sent_once:
            return
        _sent_once.add(text)
    line = f"{level}: {text}"
    try:
        write_out(lambda: print(line, file=sys.stderr, flush=True))
    except RuntimeError:  # a signal handler tells something while its thread is writing
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))
    if _listener is None:
        _unsent.append((text, level))
    else:
        _listener(text, level)
