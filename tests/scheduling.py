"""Which process of pytest-xdist runs which tests: whole groups, also after one of the processes has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_WAITS_WITH = 1  # a process begins its last test when it knows the next one, or that there is none


class Groups(LoadScopeScheduling):
    """Gives whole groups of tests to the processes, in the order of the collection.

    pytest-xdist's own scheduling gives a process that replaces a dead one all groups of that, those first that are
    done. The new process gets no test then, and as nothing ends that would give it the next group, the run waits
    without end. Here it gets what is left, without the test in which the other one died.

    Args:
        config: pytest's.
        log: pytest-xdist's.
        group: returns the group of a test by its id.
    """

    def __init__(self, config: pytest.Config, log: Any, group: Callable[[str], str]) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._group = group

    def _split_scope(self, nodeid: str) -> str:
        return self._group(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Forget a process, and return the test in which it died; None if it had no more tests."""
        work = self.assigned_work.pop(node)
        left = [(unit, name) for unit in work.values() for name, done in unit.items() if not done]
        if not left:
            return None
        unit, died_in = left[0]
        unit[died_in] = True  # it is reported as failed; again, it would end the next process
        self.workqueue.update({name: unit for name, unit in work.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _reschedule(self, node: Any) -> None:
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) <= _WAITS_WITH:
            super()._reschedule(node)


class LostProcesses:
    """Hooks of pytest: a run that lost a process fails, also where that had no test to run any more."""

    def __init__(self) -> None:
        self._lost = 0

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, error: object | None) -> None:
        self._lost += error is not None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._lost and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
