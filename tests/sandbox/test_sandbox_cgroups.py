"""Control groups of programs: where they are made, and which counters tell of the machine's want."""

import os
from pathlib import Path

import pytest

from hybridrl.sandbox import cgroups, jail
from hybridrl.sandbox.cgroups import memory_group, shortage_counters

MACHINE = ("/proc/vmstat", "oom_kill")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version 2 in which this process is in /user/session, and groups of /user can limit memory.

    A group that the kernel shows is removed though it has files; folders of a disk are left, which takes a moment.
    """
    monkeypatch.setattr(cgroups, "_END_S", 0.02)
    for path, given in (("fs", "cpu pids"), ("fs/user", "memory pids"), ("fs/user/session", "")):
        (tmp_path / path).mkdir()
        (tmp_path / path / "cgroup.subtree_control").write_text(given + "\n")
    (tmp_path / "cgroup").write_text("0::/user/session\n")
    (tmp_path / "mountinfo").write_text(f"9 1 0:1 / {tmp_path}/fs rw - cgroup2 cgroup2 rw\n")
    return tmp_path


def test_a_group_of_version_2_is_made_where_memory_is_given(proc: Path) -> None:
    with memory_group(64, proc) as group:
        assert group is not None and group.parent == proc / "fs" / "user"
        assert (group / "memory.max").read_text() == str(64 * 2**20)
        assert (group / "memory.swap.max").read_text() == "0"
        assert not (group / "memory.limit_in_bytes").exists()
    probe = next(one for one in (proc / "fs" / "user").glob("hybridrl-sandbox-*") if one != group)
    assert (probe / "cgroup.procs").read_text() == "0\n"  # a process has tried to enter
    with memory_group(64, proc) as other:
        assert other not in (None, group)


def test_a_group_that_cannot_be_joined_is_not_used(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a group needs fewer rights than entering it: programs would run without the limit, and nobody knew."""
    made = cgroups.make_group

    def without_entry(parent: Path, version: int, size: int) -> Path | None:
        group = made(parent, version, size)
        assert group is not None
        (group / "cgroup.procs").mkdir()  # nothing can be written there, not even by root
        return group

    monkeypatch.setattr(cgroups, "make_group", without_entry)
    with memory_group(64, proc) as group:
        assert group is None


def test_a_process_that_cannot_be_seen_is_not_killed(proc: Path) -> None:
    """The kernel shows 0 for it, and a signal to process 0 is one to this process group."""
    with memory_group(64, proc) as group:
        assert group is not None
        (group / "cgroup.procs").write_text("0\n")
    assert os.getpid()


def test_the_counters_of_version_2(proc: Path) -> None:
    """Files of groups around count kills of other programs, too: those would have taken verdicts away."""
    own, user = proc / "fs" / "user" / "session", proc / "fs" / "user"
    pids = [(str(folder / "pids.events"), "max") for folder in (own, user, proc / "fs")]
    assert shortage_counters(None, proc) == [(str(own / "memory.events"), "oom_kill"), MACHINE, *pids]
    (own / "memory.events.local").write_text("")
    assert shortage_counters(None, proc)[0] == (str(own / "memory.events.local"), "oom_kill")
    group = user / "group"
    assert shortage_counters(group, proc) == [
        (str(group / "memory.events"), "oom_kill"), (str(group / "pids.events"), "max"), *pids
    ]  # fmt: skip


def test_the_counters_of_version_1(proc: Path) -> None:
    (proc / "cgroup").write_text("4:memory:/a\n3:pids:/b\n")
    lines = [f"9 1 0:1 / {proc}/{name} rw - cgroup cgroup rw,{name}\n" for name in ("memory", "pids")]
    (proc / "mountinfo").write_text("".join(lines))
    for name in ("memory/a", "pids/b"):
        (proc / name).mkdir(parents=True)
    pids = [(f"{proc}/pids/b/pids.events", "max"), (f"{proc}/pids/pids.events", "max")]
    assert shortage_counters(None, proc) == [(f"{proc}/memory/a/memory.oom_control", "oom_kill"), MACHINE, *pids]
    assert shortage_counters(Path("/g"), proc) == [("/g/memory.oom_control", "oom_kill"), *pids]


@pytest.mark.parametrize(
    ("events", "own"), [("oom 1\noom_kill 1\n", True), ("oom 0\noom_kill 1\n", False), ("oom 0\noom_kill 0\n", False)]
)
def test_whose_limit_of_version_2_was_reached(tmp_path: Path, events: str, own: bool) -> None:
    """A kill without an `oom` of the own group is one by a limit around it, or by the machine."""
    file = tmp_path / "memory.events"
    file.write_text("oom 0\noom_kill 0\n")
    counters = [[str(file), "oom_kill"]]
    before = jail.shortages(counters)
    file.write_text(f"low 0\nhigh 0\nmax 3\n{events}")
    limits = {"group": str(tmp_path), "folder": "/", "files_mb": 1}
    found = jail.without_shortage({"code": 137}, before, jail.shortages(counters), limits, "")
    assert ("failed" in found) == (not own and "oom_kill 1" in events)
