"""What the processes of `test_engine_lora` import, for the process that forks them."""

import engine_helpers  # noqa: F401
import peft  # noqa: F401
import transformers  # noqa: F401

import hybridrl.engine.fsdp.engine  # noqa: F401
