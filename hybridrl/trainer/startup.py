"""Starts worker processes in parallel with everything else that has to be done before the first step."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from hybridrl.single_controller.ray import ResourcePoolManager, init_ray, shutdown_ray

Groups = TypeVar("Groups")


USES_GPU = {
    "auto": None,
    "cpu": False,
    "cuda": True,
}  # trainer.device -> use_gpu of the resource pools; None uses a GPU if there is one


@contextmanager
def workers_starting(
    ray_options: Mapping[str, Any], manager: ResourcePoolManager, device: str, spawn: Callable[[], Groups]
) -> Iterator[Callable[[], Groups]]:
    """Start Ray and the worker processes in a thread. The block gets a function that waits for them.

    Reading data and checking the user's settings takes as long as starting processes, and does not need them. The
    processes end with the block, whatever happens in it, and so does Ray if it was started here.

    Args:
        ray_options: `ray_kwargs.ray_init`.
        manager: the pools that the workers run in.
        device: `trainer.device`.
        spawn: starts the worker groups in the manager's pools, once Ray runs.
    """
    given_up = threading.Event()

    def start() -> Groups | None:
        init_ray(dict(ray_options), manager.resource_pool_spec, use_gpu=USES_GPU[device])
        return None if given_up.is_set() else spawn()

    # The thread must outlive Ray: the kernel ends Ray's processes when the thread that started them ends.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="start-workers") as background:
        starting = background.submit(start)
        try:
            yield starting.result  # type: ignore[misc]
        finally:
            given_up.set()
            wait([starting])  # Ray cannot be shut down in the middle of its start
            shutdown_ray()
            if ray.is_initialized():  # by the program that called: it gets its devices back
                for pool in manager.resource_pool_dict.values():
                    pool.release()
