"""Our extension of vLLM's worker class (`worker_extension_cls`), which runs in each of its worker processes.

Methods are called by name through `collective_rpc`. Their names start with `hybridrl_` to avoid vLLM's own.
"""

import os
import pickle
from typing import Any

import torch

from hybridrl.rollout.vllm import compat
from hybridrl.rollout.vllm.parent_watch import end_with_owner
from hybridrl.weight_sync.receive import WeightReceiver


class WeightReceiverExtension:
    """Loads new weights."""

    device: torch.device
    rank: int
    model_runner: Any
    _hybridrl_receiver: WeightReceiver

    def hybridrl_begin_update(self) -> None:
        """Prepare the model for loading weights."""
        if not hasattr(self, "_hybridrl_receiver"):
            self._hybridrl_receiver = WeightReceiver(self.device, self.rank, copies=not compat.can_detach_pending())
        with torch.device(self.device):
            compat.begin_loading(self.model_runner.get_model())

    def hybridrl_load_bucket(self, pickled: bytes) -> int:
        """Load a pickled `Bucket`; returns the number of its parameters."""
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
        """Generate with the loaded weights."""
        with torch.device(self.device):
            compat.end_loading(self.model_runner.get_model(), self.model_runner.model_config)
        self._hybridrl_receiver.close()

    def hybridrl_pid(self) -> int:
        return os.getpid()


end_with_owner()
