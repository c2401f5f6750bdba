"""The journal of a run's ledger: each transition of a group of samples as a line of `ledger.jsonl`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.errors import CheckpointError
from hybridrl.trainer.ppo.ledger import GroupState, Ledger

JOURNAL = "ledger.jsonl"
_RESUMED = "resume"
#: transition: states from which a group may make it, and its state after it
_TRANSITIONS = {
    "ready": ((GroupState.INFLIGHT,), GroupState.READY),
    "void": ((GroupState.INFLIGHT, GroupState.READY), GroupState.VOID),
    "take": ((GroupState.READY,), GroupState.TAKEN),
    "give_back": ((GroupState.TAKEN,), GroupState.READY),
    "release": ((GroupState.TAKEN,), GroupState.RELEASED),
}


class LedgerJournal:
    """Appends transitions to a file. Each line is handed to the operating system before the run goes on.

    What was written after a checkpoint is cut off when a run resumes from it: those groups are generated again.

    Args:
        file: of the run. One of an earlier run, which this one does not resume, is replaced with the first line.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._has_begun = False

    def __call__(self, event: str, **fields: Any) -> None:
        """Write a line: the event, the seconds since the epoch, and its fields."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields}, separators=(",", ":"))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with open(self._file, "a" if self._has_begun else "w", encoding="utf-8") as journal:
            journal.write(line + "\n")
        self._has_begun = True

    @property
    def size(self) -> int:
        """Bytes of the journal so far, which a checkpoint keeps."""
        return self._file.stat().st_size if self._has_begun else 0

    def resume(self, size: int, ledger: Ledger) -> None:
        """Cut the journal to what it was at a checkpoint, and note the groups with which the run goes on.

        Args:
            size: of the journal, as the checkpoint has it. A shorter one is of another folder, and is written anew.
            ledger: as it was loaded.
        """
        if self._file.exists():
            with open(self._file, "r+b") as journal:
                journal.truncate(size if self._file.stat().st_size >= size else 0)
            self._has_begun = True
        live = [[group.seq, group.state.value, group.admitted] for group in ledger.live.values()]
        self(_RESUMED, version=ledger.version, admitted=ledger.admitted, live=live)


@dataclass
class JournalSummary:
    """Contents of a journal.

    Attributes:
        states: the state of each group at the end, by `seq`.
        voided: number of void groups by reason.
        ages: versions between admission and training of the groups that were trained on.
        resumed: how often the run resumed.
    """

    states: dict[int, GroupState] = field(default_factory=dict)
    voided: Counter[str] = field(default_factory=Counter)
    ages: list[int] = field(default_factory=list)
    resumed: int = 0


def read_journal(file: Path) -> JournalSummary:
    """Read a journal and check it: every group is admitted once, and ends once as trained on or as void.

    Raises:
        CheckpointError: a line is no transition that its group could make; the message names both.
    """
    summary, admitted = JournalSummary(), dict[int, int]()
    states = summary.states

    def wrong(number: int, fault: str) -> CheckpointError:
        return CheckpointError(f"{file}, line {number}: {fault}")

    for number, line in _lines(file):
        event = line["event"]
        if event == _RESUMED:
            live = {seq: GroupState(state) for seq, state, _ in line["live"]}
            ended = {seq for seq, state in states.items() if state in (GroupState.RELEASED, GroupState.VOID)}
            if states and {seq: state for seq, state in states.items() if seq not in ended} != live:
                raise wrong(number, f"the run goes on with other groups than those of the lines before: {live}")
            summary.resumed += 1
            states.update(live)
            admitted |= {seq: version for seq, _, version in line["live"]}
            continue
        for seq in line.get("seqs", [line.get("seq")]):
            state = states.get(seq)
            if event == "admit":
                if state is not None:
                    raise wrong(number, f"group {seq} is admitted twice")
                states[seq], admitted[seq] = GroupState.INFLIGHT, line["version"]
                continue
            before, after = _TRANSITIONS[event]
            if state not in before:
                raise wrong(number, f"{event} of group {seq}, which is {'not there' if state is None else state.value}")
            states[seq] = after
            if event == "void":
                summary.voided[line["reason"]] += 1
            if event == "take":
                summary.ages.append(line["version"] - admitted[seq])
    return summary


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of each line; of a process that was killed, the last one may be a part."""
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        yield number, json.loads(line)
