"""What takes long to import. `spawn` imports it once, and the processes of a test are forks of that one."""

import importlib
import warnings

import engine_helpers  # noqa: F401

from hybridrl.engine.megatron import engine  # noqa: F401
from hybridrl.engine.megatron.parallel import import_parallel_state

import_parallel_state()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about packages that are not installed
    for name in (
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.dist_checkpointing",
        "torch._dynamo.repro.after_dynamo",  # of the first function that is compiled
    ):
        importlib.import_module(name)
