"""Starts Ray for a placement, or joins a cluster that already runs."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import site
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]
from ray.job_config import JobConfig

from hybridrl.config.checks.check_run import visible_gpus
from hybridrl.errors import PlacementError
from hybridrl.notify import notify
from hybridrl.processes.inherited import keep_exit_codes
from hybridrl.single_controller.ray.capacity import check_placement, cluster_has_gpus
from hybridrl.single_controller.ray.reaper import Reaper
from hybridrl.single_controller.ray.resource_pool import RayResourcePool, check_mapping
from hybridrl.single_controller.ray.start_ray import keeping_stop_signals, start_ray
from hybridrl.single_controller.ray.watch import ClusterWatch
from hybridrl.utils.cores import available_cores

_ANSWER_LIMIT_S = 10.0
_FEW, _PER_CORE = 8, 4  # worker processes without a GPU that are accepted: on any machine, and for each core
_START_S, _MEMORY_GB = 6.0, 0.6  # what a worker process takes to start: seconds of a core, memory
_SETTINGS_FRAME = 4
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0])

_started_here = False
_reaper: Reaper | None = None
_watch: ClusterWatch | None = None


def init_ray(
    ray_init_kwargs: Mapping[str, Any] | None = None,
    pools: Mapping[str, Sequence[int]] | None = None,
    *,
    use_gpu: bool | None = None,
    extra_cpus: int = 1,
) -> bool:
    """Make Ray ready for a placement.

    An existing cluster is joined: the `address` in `ray_init_kwargs`, the one in `RAY_ADDRESS`, or one that
    `ray start` began on this machine. Otherwise Ray is started here with as many CPUs as the placement has slots,
    regardless of the number of cores, because a slot without a GPU is a process, not a core.

    Args:
        ray_init_kwargs: arguments of `ray.init`; None entries are ignored.
        pools: slots on each node, by pool name, as `ResourcePoolManager` takes them.
        use_gpu: whether slots are GPUs; None asks Ray whether there are any.
        extra_cpus: number of CPUs beyond the slots if Ray is started here, for the user's Ray tasks.

    Returns:
        Whether slots are GPUs.

    Raises:
        PlacementError: the placement does not fit on the nodes (checked before Ray would wait for it), or torchrun
            started this program.
    """
    global _started_here, _reaper, _watch
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the command lines of this package have removed it
        raise PlacementError(
            f"torchrun started this program, as rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}: every "
            "rank would be a controller with workers of its own. Start it with `python`; trainer.n_gpus_per_node and "
            "trainer.nnodes, or the pools, say how many workers there are"
        )
    pools = dict(pools or {})
    check_mapping(pools, {})
    if not ray.is_initialized():
        settings = {name: value for name, value in (ray_init_kwargs or {}).items() if value is not None}
        address = settings.pop("address", None) or os.environ.get("RAY_ADDRESS") or _running_cluster()
        slots = sum(map(sum, pools.values()))
        options = _options(settings, address, slots + extra_cpus)
        if options["address"] == "local":
            _check_cores(slots, use_gpu)
        logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(_is_a_risk)
        # When started in a thread, Ray cannot handle SIGTERM. It need not, because the program does.
        logging.getLogger("ray._private.worker").addFilter(_is_not_about_sigterm)
        try:
            _check_answers(options["address"])
            with keeping_stop_signals():
                start_ray(**options)
        except ConnectionError as error:
            raise PlacementError(
                f"no Ray cluster answers at {address!r}: {error}. Unset RAY_ADDRESS (or ray_kwargs.ray_init.address) "
                "to start Ray on this machine, or start the cluster with `ray start --head`"
            ) from error
        _check_token(options["address"])
        _started_here = True
        if options["address"] == "local":
            processes = _processes_of_ray()
            _reaper = Reaper([pid for name, pid in processes.items() if name == "raylet"])
            _watch = ClusterWatch(processes, os.path.join(_session_folder(), "logs"))
    keep_exit_codes(adopt_orphans=False)
    wants_gpu = cluster_has_gpus() if use_gpu is None else use_gpu
    check_placement(
        {name: RayResourcePool(list(counts), use_gpu=wants_gpu, name_prefix=name) for name, counts in pools.items()}
    )
    return wants_gpu


def _check_cores(slots: int, use_gpu: bool | None) -> None:
    """Refuse more worker processes than this machine's cores can start in reasonable time."""
    cores = available_cores()
    if use_gpu or (use_gpu is None and visible_gpus()) or slots <= max(_FEW, _PER_CORE * cores):
        return
    minutes = slots * _START_S / cores / 60
    raise PlacementError(
        f"{slots} worker processes on {cores} cores would take about {minutes:.0f} min to start, and "
        f"{slots * _MEMORY_GB:.0f} GB of memory. Without GPUs, ask for {cores}, and for {max(_FEW, _PER_CORE * cores)} "
        "at most (trainer.n_gpus_per_node x trainer.nnodes, or the pools of placement.pools)"
    )


def _is_a_risk(record: logging.LogRecord) -> bool:
    """Leave out that authentication is on; that it is off is for the user."""
    return "authentication is enabled" not in record.getMessage()


def _check_token(address: str) -> None:
    """Warn if anyone who reaches the cluster may use it, and keep the file with the token to its owner."""
    with contextlib.suppress(OSError):
        token = os.path.expanduser("~/.ray/auth_token")  # Ray leaves it readable to every user of the machine
        if os.stat(token).st_mode & 0o077:
            os.chmod(token, 0o600)
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        notify(
            f"the Ray cluster ({'started here' if address == 'local' else address}) has no token authentication: "
            "anyone who reaches its ports can run code on its nodes. Unset RAY_AUTH_MODE where Ray is started here; "
            "for a cluster, make a token with `ray get-auth-token --generate` and start it with RAY_AUTH_MODE=token "
            "(docs/network.md)",
            "warning",
        )


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def shutdown_ray() -> None:
    """End what `init_ray` started: the processes of this driver, and Ray if it was started here. Does nothing
    otherwise.

    Ray's folder with sockets and logs is removed where Ray was started here, unless an exception is being handled:
    its message may name the logs.
    """
    global _started_here, _reaper, _watch
    folder = None
    if _watch is not None:
        _watch.dismiss()
        folder = _session_folder()
    if _started_here and ray.is_initialized():
        if folder:
            _shut_down_own_ray()
        else:
            ray.shutdown()
    if _reaper is not None:
        _reaper.dismiss()
    if folder and sys.exc_info()[0] is None:
        _remove_session(folder)
    _started_here, _reaper, _watch = False, None, None


def _shut_down_own_ray() -> None:
    """End the Ray that was started here.

    Ray sends SIGTERM to each of its processes and waits for a second. Where a run has blocked this signal, that is in
    vain, so they are killed, and with them what the raylet would have ended.
    """
    raylet = _processes_of_ray().get("raylet")
    if raylet is None or signal.SIGTERM not in _blocked_in(raylet):
        ray.shutdown()
        return
    node: Any = ray._private.worker.global_worker.node
    kill, children = node.kill_all_processes, psutil.Process(raylet).children(recursive=True)
    node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})
    ray.shutdown()
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(children, timeout=_ANSWER_LIMIT_S)


def _blocked_in(pid: int) -> set[int]:
    """Return the signals that a process has blocked; none where the system does not report them."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigBlk:"):
                mask = int(line.split()[1], 16)
                return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return set()


def _session_folder() -> str:
    node = ray._private.worker.global_worker.node  # Ray has no public way to it
    return "" if node is None else str(node.get_session_dir_path())


def _remove_session(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    latest = os.path.join(os.path.dirname(folder), "session_latest")
    if os.path.islink(latest) and not os.path.exists(latest):
        with contextlib.suppress(OSError):  # another run has just replaced it
            os.unlink(latest)


def _options(settings: dict[str, Any], address: str | None, num_cpus: int) -> dict[str, Any]:
    options: dict[str, Any] = {"logging_level": logging.WARNING, "ignore_reinit_error": False, **settings}
    job_config = options.setdefault("job_config", JobConfig())
    # Workers must be able to import what this process can: the package run with -m, and the user's modules.
    job_config._py_driver_sys_path.extend(reversed(_own_import_path()))  # Ray prepends each entry
    if address is not None and address != "local":
        for name in ("num_cpus", "num_gpus"):
            if name in settings:
                raise PlacementError(
                    f"ray_kwargs.ray_init.{name}={settings[name]} cannot be set: the run joins the Ray cluster "
                    f"at {address!r}, whose nodes "
                    f"have their resources already. Give it to `ray start`, or unset the address to start Ray here"
                )
        return {**options, "address": address}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Failures are raised once, from the call that saw them. Ray would print each failed rank again.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    return {
        "include_dashboard": False,
        "num_cpus": max(1, num_cpus),
        **options,
        "address": "local",
    }


def _processes_of_ray() -> dict[str, int]:
    """Return the ids of the processes without which the cluster that was started here ends."""
    running: dict[str, int] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                running[child.name()] = child.pid
    return {name: running[name] for name in ("gcs_server", "raylet") if name in running}


def _check_answers(address: str) -> None:
    """Find out within seconds that no cluster is at an address `host:port`. Ray would try for a quarter of an hour.

    Ray's GCS is a gRPC server, which answers the preface of HTTP/2 with a SETTINGS frame.

    Raises:
        ConnectionError: nothing listens there, or something other than Ray does.
    """
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdigit():
        return  # a name such as "auto", or the address of a Ray client
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_LIMIT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(_HTTP2_PREFACE)
            frame = connection.recv(9, socket.MSG_WAITALL)
    except OSError as error:
        raise ConnectionError(f"{error} (waited up to {_ANSWER_LIMIT_S:g} s)") from error
    if len(frame) < 9 or frame[3] != _SETTINGS_FRAME:
        raise ConnectionError("another program uses that port")


def _running_cluster() -> str | None:
    """Return the address of a cluster that `ray start` began on this machine, if it still runs."""
    from ray._private import services, utils

    address = utils.read_ray_address()
    if not address:
        return None
    return address if address in services.find_gcs_addresses() else None


def _own_import_path() -> list[str]:
    """Return the entries of `sys.path` that a fresh interpreter would not have."""
    fixed = {
        os.path.realpath(path)
        for path in (*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages())
    }
    fixed.add(os.path.realpath(os.path.join(sysconfig.get_paths()["stdlib"], "lib-dynload")))
    own = [os.path.abspath(path or os.curdir) for path in sys.path]
    return [path for path in dict.fromkeys(own) if os.path.isdir(path) and os.path.realpath(path) not in fixed]
