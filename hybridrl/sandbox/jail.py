"""Runs one program with limits; a program of its own, of the standard library alone (see `local`).

The program's process tree is cut off by namespaces: no network, no other processes, and a file system that has the
system's libraries and Python's folders, read only, and an empty `/tmp` in memory. Where the kernel refuses namespaces,
the limits hold, and what the program started is ended with it.

Started as `python -I -S jail.py JSON`, with JSON on the standard input: `files`, base64 by relative path, `stdin`,
base64, of the program, and `seal`, a secret. The descriptor `report` gets lines of JSON, each with the seal, which the
program never learns: `isolated` ("namespaces", or the reason why there are none), `started`, and at last `end` or
`failed`; `more`, seconds, where the program gets so much more time, because it waited for a core. Only `end` says how
the program ended: `code`, `time` (it was ended for that), `seconds`, `cpu`, seconds of processor time, and `doubt`:
a signal ended or stopped it that may have come from outside. Where a process of the jail dies, is stopped or lacks what
it needs, `end` never comes.

The first process of the namespaces tells the jail over a pipe of their own that the program started and how it ended,
and, when the time is over, that the program still runs, how long it had to wait for a core, and the processor time of
all its processes. Files that are asked for are copied to the folder `out`, numbered, of at most `files_mb` in all.
"""

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import random
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ != "__main__" or TYPE_CHECKING:
    from hybridrl.sandbox.jail_watch import KILLED, JailedChild, Watch, end_descendants, send
else:  # started by its path, where the package cannot be imported
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from jail_watch import KILLED, JailedChild, Watch, end_descendants, send

_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mount, pid, net, ipc, uts
_NEW_USER = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38
_MOUNT_SETATTR, _AT_RECURSIVE, _RDONLY = 442, 0x8000, 1
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}  # in /dev, to what is in /proc/self
_PATH = "/usr/local/bin:/usr/bin:/bin"
_USERS, _COUNT = 1_000_000_000, 500_000_000
_POLL_S = 0.005
_MESSAGE = 4000  # bytes of a message, which one write puts into a pipe as a whole
_SET_FLAGS, _UP = 0x8914, 1  # of a network interface
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the program, report how it ended, and exit as it does."""
    limits: dict[str, Any] = json.loads(sys.argv[1])
    program = json.loads(sys.stdin.buffer.read())
    os.set_inheritable(limits["report"], False)
    os.umask(0o022)
    report = {"seal": program.pop("seal")}
    _join(limits["group"], lambda fault: send(limits["report"], report | {"isolated": "", "failed": fault}))
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the caller ignores it, no end of a process is told
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_PDEATHSIG, signal.SIGTERM)
    _prctl(_SUBREAPER, 1)
    way, reason = _unshare(limits["ways"])
    _prctl(_DUMPABLE, 0)  # a program of the same user must not reach this process's descriptors and memory
    send(limits["report"], report | {"isolated": reason or "namespaces", "unisolated": limits["unisolated"]})
    if reason and not limits["unisolated"]:
        os._exit(126)
    before = shortages(limits["counters"])
    limits["send_message"] = lambda message: send(limits["report"], report | message)
    end = _supervised(program, limits, way, reason, ended)
    if "failed" not in end:
        _fetch(limits, limits["folder"] if reason else f"{limits['folder']}/tmp")
        end = without_shortage(end, before, shortages(limits["counters"]), limits, reason)
    send(limits["report"], report | ({"end": end} if "failed" not in end else end))
    os._exit(end.get("code", 126))


def _supervised(
    program: dict[str, Any], limits: dict[str, Any], way: str, reason: str, ended: list[int]
) -> dict[str, Any]:
    """Run the program; how it ended, or `failed`. Nothing that it started is left."""
    uid = None
    if os.geteuid() == 0 and way != "user":  # a user of its own, who owns no file and no other process
        uid = own_user(*(Path(f"/proc/self/{name}").read_text() for name in ("uid_map", "gid_map")))
    inner, write = os.pipe()
    question, ask = os.pipe()
    os.set_blocking(inner, False)
    limits["inner"], limits["direct"] = write, bool(reason)
    limits["processes"] = _process_limit(limits["processes"], uid, way)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        for descriptor in (limits["report"], inner, ask):
            os.close(descriptor)
        _prctl(_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        limits["proc"] = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os._exit(_run(program, limits, uid) if reason else _init(program, limits, uid, question))
        except BaseException as error:
            _report_failure(limits, error)
    os.close(write)
    watch = Watch(child, inner, ask, limits["wall_s"], bool(reason))
    end = watch.wait(ended, limits["send_message"])
    if reason and uid is not None:
        _end_user(uid)
    end_descendants()
    seconds = time.monotonic() - (watch.started or started) - end.pop("waited", 0.0)
    return {"seconds": max(seconds, 0.0), **end}


def _go_first(proc: int) -> None:
    """Where memory runs out, the kernel ends this process before those that watch it.

    Args:
        proc: the folder /proc in which files can be written.
    """
    _prctl(_DUMPABLE, 1)  # otherwise the file is root's
    with contextlib.suppress(OSError):
        file = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc)
        os.write(file, b"1000")
        os.close(file)
    _prctl(_DUMPABLE, 0)


def _report_failure(limits: dict[str, Any], error: BaseException) -> None:
    """Say that the program did not start, and exit."""
    send(limits["inner"], {"failed": f"{type(error).__name__}: {error}"[: _MESSAGE // 6]})
    os._exit(126)


def _join(group: str | None, report: Callable[[str], None]) -> None:
    """Enter the control group of the program, which what is started from here on inherits; exit where that fails."""
    if group is not None:
        try:
            with open(f"{group}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
        except OSError as error:
            report(f"the control group {group} cannot be joined: {error}")
            os._exit(126)


def shortages(counters: list[list[str]]) -> dict[str, int]:
    """Count the shortages of memory or processes, of the machine and of the program's control groups, by file."""
    return {file: _counter(file, line) for file, line in counters}


def _reached_own_limit(group: str | None) -> bool:
    """Whether the kernel killed something because the program's own control group was full."""
    if group is None:
        return False
    with contextlib.suppress(OSError, ValueError):
        limit = f"{group}/memory.limit_in_bytes"
        if os.path.exists(limit):  # version 1, which has no counter of this
            kills = _counter(f"{group}/memory.oom_control", "oom_kill")
            most = int(Path(f"{group}/memory.max_usage_in_bytes").read_text())
            return kills > 0 and most >= int(Path(limit).read_text()) - 2**20
    return _counter(f"{group}/memory.events", "oom") > 0


def _counter(path: str, name: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return next((int(line.split()[1]) for line in file if line.split()[0] == name), 0)
    return 0


def without_shortage(
    end: dict[str, Any], before: dict[str, int], after: dict[str, int], limits: dict[str, Any], reason: str
) -> dict[str, Any]:
    """The end of a program; `failed` where it may have failed because the machine lacked something."""
    if end["code"] == 0 or _reached_own_limit(limits["group"]):
        return end | {"doubt": False}
    for path, count in after.items():
        # The counter of the whole machine also has kills that have nothing to do with this program.
        concerns = path != "/proc/vmstat" or end["code"] == KILLED
        if count > before[path] and concerns and not end.get("time"):
            return {"failed": f"the machine ran out of memory or processes while the program ran ({path})"}
    if reason:
        with contextlib.suppress(OSError):
            disk = os.statvfs(limits["folder"])
            if disk.f_bavail * disk.f_frsize < limits["files_mb"] * 2**20 or (disk.f_files and not disk.f_favail):
                return {"failed": f"the disk of {limits['folder']} is full"}
    return end


def _process_limit(count: int, uid: int | None, way: str) -> int:
    """RLIMIT_NPROC for so many processes of the program: the kernel counts all that the same user runs.

    A user of its own runs nothing else. A user namespace has a count of its own since Linux 5.14.
    """
    version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if uid is None and not (way == "user" and version >= (5, 14)):
        count += _tasks(os.getuid())
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    return count if most == resource.RLIM_INFINITY else min(count, most)


def _tasks(uid: int) -> int:
    """Processes and threads of a user that run now."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            with open(f"/proc/{name}/status") as file:
                lines = dict(line.split(":", 1) for line in file if ":" in line)
            if int(lines["Uid"].split()[0]) == uid:
                count += int(lines["Threads"])
    return count


def own_user(*maps: str) -> int:
    """The number of a user and group that nothing else has, among those that this user namespace knows.

    Args:
        maps: `/proc/self/uid_map` and `gid_map`: lines of (first number here, first number outside, count).

    Raises:
        OSError: it knows no others than its first.
    """
    ids = [[tuple(map(int, line.split())) for line in text.splitlines()] for text in maps]
    if all(any(first <= _USERS and first + count >= _USERS + _COUNT for first, _, count in ranges) for ranges in ids):
        return _USERS + random.SystemRandom().randrange(_COUNT)
    # A container's namespace often knows 65536. Processes that live at the same time differ in their number.
    first, count = max(((first, count) for first, _, count in ids[0]), key=lambda item: item[1])
    uid = first + count // 2 + os.getpid() % max(count // 4, 1)
    if count < 4 or not all(any(start <= uid < start + size for start, _, size in ranges) for ranges in ids):
        raise OSError(f"the user namespace of this process knows no users besides its own: {maps}")
    return uid


def _unshare(ways: list[str]) -> tuple[str, str]:
    """Enter namespaces of its own, as root or as a user who becomes root in them; which way, and why none."""
    ids, reason = (os.geteuid(), os.getegid()), "they are switched off"
    for way, flags in (("root", _NAMESPACES), ("user", _NAMESPACES | _NEW_USER)):
        if way not in ways or (way == "root" and ids[0] != 0):
            continue
        if _libc.unshare(flags) == 0:
            if way == "user":
                maps = {"setgroups": "deny", "uid_map": f"65534 {ids[0]} 1", "gid_map": f"65534 {ids[1]} 1"}
                for name, text in maps.items():
                    with open(f"/proc/self/{name}", "w") as file:
                        file.write(text)
            return way, ""
        reason = os.strerror(ctypes.get_errno())
    return "", reason


def _init(program: dict[str, Any], limits: dict[str, Any], uid: int | None, question: int) -> int:
    """The first process of the namespaces, which ends with the program and takes all others with it."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/shmall", "w") as file:
        file.write(str(limits["memory_mb"] * 2**20 // resource.getpagesize()))  # System V memory of these namespaces
    _change_root(limits, uid)
    child = os.fork()
    if child == 0:
        try:
            os._exit(_run(program, limits, uid))
        except BaseException as error:
            _report_failure(limits, error)
    program_process = JailedChild(child)
    while (end := program_process.end()) is None:
        if select.select([question], [], [], _POLL_S)[0]:
            os.read(question, 1)
            below = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
            send(limits["inner"], {"running": program_process.state(below)})
    send(limits["inner"], {"ended": end})
    return 0


def _change_root(limits: dict[str, Any], uid: int | None) -> None:
    """A root that has nothing but system and Python, read only, an empty /tmp and shared memory."""
    root = limits["folder"]
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID, "mode=755,size=1m")
    for name in ("/proc", "/tmp"):
        os.makedirs(root + name)
    # Before what is below it: Python may be in a folder of /tmp.
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={limits['files_mb']}m")
    for path in dict.fromkeys((*_SYSTEM, *limits["python"], *_DEVICES)):
        if os.path.islink(path) and path not in limits["python"]:
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path) and not os.path.exists(root + path):
            os.makedirs(root + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True)
            if not os.path.isdir(path):
                with open(root + path, "w"):
                    pass
            _mount(path, root + path, None, _MS_BIND | _MS_REC)
    for name, place in _LINKS.items():
        os.symlink(f"/proc/self/{place}", f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm")  # semaphores and shared memory of multiprocessing
    _mount("tmpfs", f"{root}/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={limits['files_mb']}m")
    own = os.getuid() if uid is None else uid
    for name, text in (
        ("passwd", f"root:x:0:0::/:/bin/sh\nprogram:x:{own}:{own}::/tmp:/bin/sh\n"),
        ("group", f"root:x:0:\nprogram:x:{own}:\n"),
        ("hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ):
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)
    _set_mount(root, _AT_RECURSIVE, _RDONLY, 0)
    for name in ("tmp", "dev/shm"):
        _set_mount(f"{root}/{name}", 0, 0, _RDONLY)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))  # reaches this program's servers alone
    _mount("proc", f"{root}/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV)  # root could set /proc/sys
    os.chroot(root)
    os.chdir("/tmp")


def _run(program: dict[str, Any], limits: dict[str, Any], uid: int | None) -> int:
    """Become the program."""
    _go_first(limits["proc"])
    if os.path.isdir(limits["folder"]):  # it is not seen from a root of its own, whose folder is /tmp
        os.chdir(limits["folder"])
    _write(program["files"], uid if os.geteuid() == 0 else None)
    stdin = os.memfd_create("stdin")
    with open(os.dup(stdin), "wb") as file:
        file.write(base64.b64decode(program["stdin"]))
    os.lseek(stdin, 0, os.SEEK_SET)
    megabyte = 2**20
    # The signal at the first limit of processor time can be told from a kill; the second is for those that catch it.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    for kind, limit in (
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, limits["files_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    if uid is not None and os.geteuid() == 0:
        if os.getcwd() == limits["folder"]:
            os.chown(".", uid, uid)
        for stream in (1, 2):  # it may open them again by their names, /dev/stdout and /dev/stderr
            os.fchown(stream, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if limits["direct"]:
            _prctl(_PDEATHSIG, signal.SIGKILL)  # a change of the user clears it
    _prctl(_NO_NEW_PRIVS, 1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # Python ignores SIGPIPE, callers others
        signal.signal(number, signal.SIG_DFL)
    os.dup2(stdin, 0)
    if limits["one_stream"]:
        os.dup2(1, 2)
    os.closerange(3, limits["inner"])  # which closes itself where the program starts
    os.closerange(limits["inner"] + 1, 65536)
    # libraries that start a thread per core would reach the limits of memory and processes
    environment = {"HOME": "/tmp", "USER": "program", "LOGNAME": "program", "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    send(limits["inner"], {"started": True})
    os.execve(limits["command"][0], limits["command"], environment | {"PATH": _PATH})


def _write(files: dict[str, str], uid: int | None) -> None:
    """Write the program's files into this folder; they belong to the program's user."""
    for path, text in files.items():
        parts = path.split("/")
        for number in range(1, len(parts)):
            folder = "/".join(parts[:number])
            if not os.path.isdir(folder):
                os.mkdir(folder, 0o755)
                if uid is not None:
                    os.chown(folder, uid, uid)
        with open(path, "wb") as file:
            file.write(base64.b64decode(text))
        os.chmod(path, 0o755)
        if uid is not None:
            os.chown(path, uid, uid)


def _fetch(limits: dict[str, Any], folder: str) -> None:
    """Copy files that the program wrote. No link is followed: it would lead out of the program's folder.

    Raises:
        OSError: a copy cannot be written. A file that cannot be read is left out.
    """
    budget = limits["files_mb"] * 2**20
    for number, path in enumerate(limits["fetch"]):
        data = _read(folder, path, budget)
        if data is not None:
            budget -= len(data)
            with open(f"{limits['out']}/{number}", "wb") as copy:
                copy.write(data)


def _read(folder: str, path: str, most: int) -> bytes | None:
    """The content of a file of at most so many bytes; None where there is none."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        for part in path.split("/"):
            try:
                inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = inner
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            return file.read(most + 1) if stat.S_ISREG(status.st_mode) and status.st_size <= most else None
    except OSError:
        return None


def _end_user(uid: int) -> None:
    """Kill all processes of a user at once: those that keep on forking are faster than a search for them."""
    helper = os.fork()
    if helper == 0:
        os.setresuid(uid, uid, uid)
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), target)


def _set_mount(path: str, flags: int, put: int, cleared: int) -> None:
    """Change attributes of a mount; with `_AT_RECURSIVE` of all below it."""
    attributes = (ctypes.c_uint64 * 4)(put, cleared, 0, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, ctypes.byref(attributes), 32), path)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    main()
