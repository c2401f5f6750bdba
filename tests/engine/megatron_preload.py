"""What takes long to import. `spawn` imports it once, and the processes of a test are forks of that one."""

import engine_helpers  # noqa: F401

from hybridrl.engine.megatron import engine  # noqa: F401
from hybridrl.engine.megatron.parallel import import_parallel_state

import_parallel_state()
