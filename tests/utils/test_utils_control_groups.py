"""Control groups of both versions, read from folders that look like the kernel's."""

from pathlib import Path

import psutil
import pytest

from hybridrl.utils import control_groups, cores, machine_memory
from hybridrl.utils.control_groups import cpu_quota, groups_of, memory_limits

GIB = 2**30
V1_NO_LIMIT = "9223372036854771712"


class Tree:
    """A folder of a process in /proc, and mounts of control groups.

    Args:
        root: an empty folder.
        own: `/proc/self/cgroup`.
        mounts: (group that the mount begins at, folder below `root`, controllers; "": version 2).
    """

    def __init__(self, root: Path, own: str, *mounts: tuple[str, str, str]) -> None:
        self.proc, self.root = root / "proc", root
        self.proc.mkdir()
        (self.proc / "cgroup").write_text(own)
        lines = ["21 1 8:1 / / rw - ext4 /dev/sda rw", "no mount at all"]
        for number, (begin, folder, kinds) in enumerate(mounts):
            (root / folder).mkdir(parents=True)
            where = str(root / folder).replace(" ", "\\040")
            kind, options = ("cgroup", f"rw,{kinds}") if kinds else ("cgroup2", "rw,nsdelegate")
            lines.append(f"{30 + number} 21 0:{number} {begin} {where} rw,nosuid shared:9 - {kind} {kind} {options}")
        (self.proc / "mountinfo").write_text("\n".join(lines) + "\n")

    def group(self, folder: str, **files: object) -> Path:
        """Write files of a group; `__` in their names is a dot."""
        path = self.root / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name.replace("__", ".")).write_text(f"{content}\n")
        return path


def memory_1(limit: object, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"cache {cached}\ninactive_file 1\ntotal_inactive_file {cached}\ntotal_active_file 0"
    return {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": used, "memory__stat": stat}


def memory_2(limit: object, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"anon 1\ninactive_file {cached}\nactive_file 0\nslab_reclaimable 0"
    return {"memory__max": limit, "memory__current": used, "memory__stat": stat}


def test_version_2_with_nested_limits(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/pod/container/job\n", ("/", "fs", ""))
    tree.group("fs/pod", **memory_2(4 * GIB, 3 * GIB, GIB), cpu__max="150000 100000")
    tree.group("fs/pod/container", **memory_2(2 * GIB, 3 * GIB // 2, GIB // 2), cpu__max="max 100000")
    own = tree.group("fs/pod/container/job", **memory_2("max", GIB))
    assert memory_limits(tree.proc) == [(2 * GIB, GIB), (4 * GIB, 2 * GIB)]
    assert cpu_quota(tree.proc) == 1.5
    groups = groups_of("memory", tree.proc)
    assert groups is not None and groups.version == 2
    assert groups.folders == (own, own.parent, own.parent.parent, tmp_path / "fs")


def test_version_1_with_nested_limits(tmp_path: Path) -> None:
    own = "9:name=systemd:/x\n5:cpu,cpuacct:/lxc/box\n4:memory:/lxc/box\n0::/\n"
    mounts = ("/", "my fs/memory", "memory"), ("/", "my fs/cpu,cpuacct", "cpu,cpuacct"), ("/", "my fs/unified", "")
    tree = Tree(tmp_path, own, *mounts)
    tree.group("my fs/memory", **memory_1(V1_NO_LIMIT, 9 * GIB))
    tree.group("my fs/memory/lxc", **memory_1(GIB, GIB, GIB // 4))
    tree.group("my fs/memory/lxc/box", **memory_1(2 * GIB, GIB // 2))
    tree.group("my fs/cpu,cpuacct/lxc", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    tree.group("my fs/cpu,cpuacct/lxc/box", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    found = memory_limits(tree.proc)
    assert found == [(2 * GIB, GIB // 2), (GIB, 3 * GIB // 4), (int(V1_NO_LIMIT), 9 * GIB)]
    assert cpu_quota(tree.proc) == 2.5


def test_a_hybrid_machine_has_each_controller_in_one_version(tmp_path: Path) -> None:
    """`memory` in version 1, `cpu` in version 2, whose path is another."""
    own = "4:memory:/a\n0::/b\n"
    tree = Tree(tmp_path, own, ("/", "fs/memory", "memory"), ("/", "fs/unified", ""))
    tree.group("fs/memory/a", **memory_1(GIB, 1))
    tree.group("fs/unified/b", **memory_2(GIB // 2, 1), cpu__max="100000 100000")
    assert memory_limits(tree.proc) == [(GIB, 1)]
    assert cpu_quota(tree.proc) == 1.0
    assert [groups.version for name in ("memory", "pids") if (groups := groups_of(name, tree.proc))] == [1, 2]


@pytest.mark.parametrize(
    ("own", "begin"),
    [
        ("4:memory:/docker/abc\n", "/docker/abc"),  # the path on the host, and a mount of the container's group
        ("4:memory:/docker/abc/in\n", "/docker/abc"),
        ("4:memory:/\n", "/"),  # a namespace of control groups
        ("4:memory:/kubepods/pod/x\n", "/docker/other"),  # nothing fits: the mount is all that is seen
    ],
)
def test_version_1_in_a_container(tmp_path: Path, own: str, begin: str) -> None:
    tree = Tree(tmp_path, own, (begin, "fs/memory", "memory"))
    tree.group("fs/memory", **memory_1(GIB, 7))
    if own.strip().endswith("/in"):
        tree.group("fs/memory/in", **memory_1(V1_NO_LIMIT, 3))
    assert memory_limits(tree.proc)[-1] == (GIB, 7)


def test_version_2_in_a_container(tmp_path: Path) -> None:
    """The namespace shows its own group as the root; processes from outside have a path above it."""
    for number, (path, expected) in enumerate((("/", [(GIB, 5)]), ("/../other", []))):
        root = tmp_path / str(number)
        root.mkdir()
        tree = Tree(root, f"0::{path}\n", ("/", "fs", ""))
        tree.group("fs", **memory_2(GIB, 5))
        tree.group("other", **memory_2(1, 1))
        assert memory_limits(tree.proc) == expected


@pytest.mark.parametrize("own", ["", "nonsense\n", "4:cpu:/x\n", "0::/gone\n", "4:memory:/\n"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, own: str) -> None:
    tree = Tree(tmp_path, own)
    assert memory_limits(tree.proc) == [] and cpu_quota(tree.proc) is None
    assert groups_of("memory", tmp_path / "none") is None


def test_memory_and_cores_of_this_process_are_those_of_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of version 1 was not read, and neither was one of processor time in a group below the root."""
    tree = Tree(tmp_path, "4:memory:/box\n3:cpu:/box\n", ("/", "m", "memory"), ("/", "c", "cpu"))
    limit = psutil.virtual_memory().total // 4
    tree.group("m/box", **memory_1(limit, limit // 2, limit // 4))
    tree.group("c/box", cpu__cfs_quota_us=100000, cpu__cfs_period_us=100000)
    for function in (control_groups.memory_limits, control_groups.cpu_quota):
        monkeypatch.setattr(function, "__defaults__", (tree.proc,))
    available, total = machine_memory.machine_memory()
    assert total == limit and available <= 3 * limit // 4
    assert cores.available_cores() == 1
    tree.group("m/box", **memory_1(V1_NO_LIMIT, limit))
    assert machine_memory.machine_memory()[1] == psutil.virtual_memory().total
