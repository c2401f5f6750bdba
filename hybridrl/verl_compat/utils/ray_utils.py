"""`verl.utils.ray_utils`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

__all__ = ["parallel_put"]

_MOST_WORKERS = 16


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[ray.ObjectRef]:
    """Put several objects into Ray's object store in threads, and return their references in order.

    Raises:
        AssertionError: there is nothing to put.
    """
    if not data_list:
        raise AssertionError("parallel_put: data_list is empty")
    with ThreadPoolExecutor(max_workers or min(len(data_list), _MOST_WORKERS)) as executor:
        return list(executor.map(ray.put, data_list))
