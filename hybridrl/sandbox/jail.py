"""Runs one program with limits; a program of its own, of the standard library alone (see `local`).

The program's process tree is cut off by namespaces: no network, no other processes, and a file system that has the
system's libraries and Python's folders, read only, and an empty `/tmp` in memory. Where the kernel refuses namespaces,
the limits hold, and what the program started is ended with it.

Started as `python -I -S jail.py JSON`, with JSON on the standard input: `files`, base64 by relative path, and `stdin`,
base64, of the program. The descriptor `report` gets a line "namespaces", or the reason why there are none, before the
program starts, and lines of JSON: `failed`, where it could not be started, and at its end `time` (it was ended for
that) and `seconds`. Files that are asked for are copied to the folder `out`, numbered, of at most `files_mb` in all.
"""

import base64
import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

_KILLED = 128 + signal.SIGKILL
_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mount, pid, net, ipc, uts
_NEW_USER = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_MOUNT_SETATTR, _AT_RECURSIVE, _RDONLY = 442, 0x8000, 1
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_USERS, _COUNT = 1_000_000_000, 500_000_000
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the program, and exit as it does."""
    limits: dict[str, Any] = json.loads(sys.argv[1])
    program = json.loads(sys.stdin.buffer.read())
    started = time.monotonic()
    deadline = started + limits["wall_s"]
    way, reason = _unshare(limits["ways"])
    uid = None
    if os.geteuid() == 0 and way != "user":  # a user of its own, who owns no file and no other process
        uid = _own_user(*(Path(f"/proc/self/{name}").read_text() for name in ("uid_map", "gid_map")))
    os.set_inheritable(limits["report"], False)
    os.write(limits["report"], f"{reason or 'namespaces'}\n".encode())
    _prctl(_SUBREAPER, 1)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    _prctl(_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os._exit(_run(program, limits, uid) if reason else _init(program, limits, uid))
        except BaseException as error:
            _tell_failure(limits, error)
    status = None
    while status is None and not ended and time.monotonic() < deadline:
        pid, found = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            status = found
        elif pid == 0:
            time.sleep(0.005)
    if reason and uid is not None:
        _end_user(uid)
    _end_descendants()
    report = {"time": status is None, "seconds": time.monotonic() - started}
    _fetch(limits, limits["folder"] if reason else f"{limits['folder']}/tmp")
    os.write(limits["report"], (json.dumps(report) + "\n").encode())
    os._exit(_KILLED if status is None else _code(status))


def _tell_failure(limits: dict[str, Any], error: BaseException) -> None:
    """Say that the program did not start, and exit."""
    os.write(limits["report"], (json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n").encode())
    os._exit(126)


def _own_user(*maps: str) -> int:
    """The number of a user and group that nothing else has, among those that this user namespace knows.

    Args:
        maps: `/proc/self/uid_map` and `gid_map`: lines of (first number here, first number outside, count).

    Raises:
        OSError: it knows no others than its first.
    """
    known = [[tuple(map(int, line.split())) for line in text.splitlines()] for text in maps]
    if all(any(first <= _USERS and first + count >= _USERS + _COUNT for first, _, count in one) for one in known):
        return _USERS + random.SystemRandom().randrange(_COUNT)
    # A container's namespace often knows 65536. Processes that live at the same time differ in their number.
    first, count = max(((first, count) for first, _, count in known[0]), key=lambda found: found[1])
    uid = first + count // 2 + os.getpid() % max(count // 4, 1)
    if count < 4 or not all(any(start <= uid < start + size for start, _, size in one) for one in known):
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


def _init(program: dict[str, Any], limits: dict[str, Any], uid: int | None) -> int:
    """The first process of the namespaces, which ends with the program and takes all others with it."""
    _change_root(limits)
    child = os.fork()
    if child == 0:
        try:
            os._exit(_run(program, limits, uid))
        except BaseException as error:
            _tell_failure(limits, error)
    while True:
        pid, status = os.wait()
        if pid == child:
            return _code(status)


def _change_root(limits: dict[str, Any]) -> None:
    """A root that has nothing but system and Python, read only, and an empty /tmp."""
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
    _set_mount(root, _AT_RECURSIVE, _RDONLY, 0)
    _set_mount(f"{root}/tmp", 0, 0, _RDONLY)
    _mount("proc", f"{root}/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV)  # root could set /proc/sys
    os.chroot(root)
    os.chdir("/tmp")


def _run(program: dict[str, Any], limits: dict[str, Any], uid: int | None) -> int:
    """Become the program."""
    if os.path.isdir(limits["folder"]):  # it is not seen from a root of its own, whose folder is /tmp
        os.chdir(limits["folder"])
    _write(program["files"], uid if os.geteuid() == 0 else None)
    stdin = os.memfd_create("stdin")
    with open(os.dup(stdin), "wb") as file:
        file.write(base64.b64decode(program["stdin"]))
    os.lseek(stdin, 0, os.SEEK_SET)
    megabyte = 2**20
    for kind, limit in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
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
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_NO_NEW_PRIVS, 1)
    os.dup2(stdin, 0)
    if limits["one_stream"]:
        os.dup2(1, 2)
    os.closerange(3, limits["report"])  # which closes itself where the program starts
    os.closerange(limits["report"] + 1, 256)
    # libraries that start a thread per core would reach the limits of memory and processes
    environment = {"HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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
    """Copy files that the program wrote. No link is followed: it would lead out of the program's folder."""
    left = limits["files_mb"] * 2**20
    for number, path in enumerate(limits["fetch"]):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            for part in path.split("/"):
                inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            found = os.fstat(descriptor)
            with open(descriptor, "rb") as file:
                if stat.S_ISREG(found.st_mode) and found.st_size <= left:
                    data = file.read(left + 1)
                    left -= len(data)
                    with open(f"{limits['out']}/{number}", "wb") as copy:
                        copy.write(data)
        except OSError:
            continue


def _end_user(uid: int) -> None:
    """Kill all processes of a user at once: those that keep on forking are faster than a search for them."""
    helper = os.fork()
    if helper == 0:
        os.setresuid(uid, uid, uid)
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


def _end_descendants() -> None:
    """Kill every process below this one, also those that left their group, until none is left."""
    while True:
        for name in os.listdir("/proc"):
            if name.isdigit() and _parent(name) == os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(int(name), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), target)


def _set_mount(path: str, flags: int, put: int, cleared: int) -> None:
    """Change attributes of a mount; with `_AT_RECURSIVE` of all below it."""
    attributes = (ctypes.c_uint64 * 4)(put, cleared, 0, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, ctypes.byref(attributes), 32), path)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    main()
