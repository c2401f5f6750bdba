"""`verl.utils.distributed`."""

from __future__ import annotations

import os

from hybridrl.utils.device import set_device
from hybridrl.utils.distributed import destroy_process_group as destroy_global_process_group
from hybridrl.utils.distributed import get_rank, get_world_size, init_process_group

__all__ = ["destroy_global_process_group", "initialize_global_process_group"]


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Join the process group of this worker, and return its local rank, its rank and the number of processes."""
    environment = os.environ
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    set_device(local_rank)
    init_process_group(
        int(environment.get("RANK", "0")),
        int(environment.get("WORLD_SIZE", "1")),
        environment.get("MASTER_ADDR", "127.0.0.1"),
        int(environment.get("MASTER_PORT", "0")),
        timeout_second,
    )
    return local_rank, get_rank(), get_world_size()
