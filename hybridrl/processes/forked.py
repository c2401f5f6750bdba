"""Handlers of signals, which processes that are forked from one of ours must not inherit.

A process that handles SIGTERM, so that it ends in order, hands this on to every process that the user's code forks:
`multiprocessing.Process.terminate` would then do nothing, and `join` would wait for ever. Programs that are executed
begin with the defaults in any case. Light: imported by the processes of reward functions.
"""

import os
import signal
import threading
from collections.abc import Iterable

_ours: set[signal.Signals] = set()
_mask = threading.local()


def default_in_children(numbers: Iterable[signal.Signals]) -> None:
    """From now on, processes that are forked handle these signals as a new Python does, and block none of them."""
    _ours.update(numbers)


def inherited_by_children(numbers: Iterable[signal.Signals]) -> None:
    """Undo `default_in_children`."""
    _ours.difference_update(numbers)


def keep_blocked_in_children(numbers: Iterable[signal.Signals]) -> None:
    """Let what this thread forks from now on block these signals as it does, also after `default_in_children`."""
    _mask.kept = frozenset(numbers)


def restore_defaults(numbers: Iterable[signal.Signals], blocked: frozenset[signal.Signals] = frozenset()) -> None:
    """Handle these signals as a new Python does, and unblock them; those that this process ignores stay ignored.

    Args:
        blocked: those that stay blocked.
    """
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(numbers) - blocked)


def _before() -> None:
    """Hold back signals: one that arrives in the child before it has its own handlers would be lost."""
    if _ours:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _ours)


def _in_parent() -> None:
    if (mask := _mask.__dict__.pop("before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    if (mask := _mask.__dict__.pop("before", None)) is not None:
        signal.set_wakeup_fd(-1)  # of the parent's event loop
        numbers = tuple(_ours)
        _ours.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask | set(numbers))
        restore_defaults(numbers, getattr(_mask, "kept", frozenset()) & mask)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
