"""What of ours runs inside each worker process of vLLM: mixed into its worker class by `worker_extension_cls`.

Methods are called by name through `collective_rpc`. The names start with `hybridrl_` to stay clear of vLLM's own.
"""

import os
import pickle
import select
import signal
import threading
from typing import Any

import torch

from hybridrl.hybrid_engine.receive import WeightReceiver
from hybridrl.rollout.vllm import compat

#: the replica's process, which everything it started shall not outlive
OWNER_VARIABLE = "HYBRIDRL_REPLICA_PID"


class WeightReceiverExtension:
    """Takes new weights in."""

    device: torch.device
    rank: int
    model_runner: Any
    _hybridrl_receiver: WeightReceiver

    def hybridrl_begin_update(self) -> None:
        """Make the model ready to be loaded anew."""
        if not hasattr(self, "_hybridrl_receiver"):
            self._hybridrl_receiver = WeightReceiver(self.device, self.rank, copies=not compat.can_detach_pending())
        with torch.device(self.device):
            compat.begin_loading(self.model_runner.get_model())

    def hybridrl_load_bucket(self, pickled: bytes) -> int:
        """Load a pickled `Bucket`; how many parameters it had."""
        bucket = pickle.loads(pickled)
        model = self.model_runner.get_model()
        with torch.device(self.device), torch.no_grad():
            model.load_weights(self._hybridrl_receiver.tensors(bucket))
            if not self._hybridrl_receiver.copies:
                compat.detach_pending(model, self._hybridrl_receiver.last)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return len(bucket.entries)

    def hybridrl_end_update(self) -> None:
        """Make what was loaded the weights that generate."""
        with torch.device(self.device):
            compat.end_loading(self.model_runner.get_model(), self.model_runner.model_config)
        self._hybridrl_receiver.close()

    def hybridrl_pid(self) -> int:
        return os.getpid()


def _end_with_owner() -> None:
    """End this process, and the engine's core that started it, as soon as the replica is gone.

    vLLM's processes notice the end of their parent when they next talk to it; a replica that was killed would leave
    its memory taken.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        descriptor = os.pidfd_open(owner)
    except OSError:
        os._exit(1)

    def watch() -> None:
        select.select([descriptor], [], [])
        parent = os.getppid()
        if parent not in (1, owner):
            os.kill(parent, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="hybridrl-end-with-owner", daemon=True).start()


_end_with_owner()
