"""What of ours runs inside each worker process of vLLM: mixed into its worker class by `worker_extension_cls`.

Methods are called by name through `collective_rpc`. The names start with `hybridrl_` to stay clear of vLLM's own.
"""

import os
import pickle
from typing import Any

import torch

from hybridrl.rollout.vllm import compat
from hybridrl.rollout.vllm.parent_watch import end_with_owner
from hybridrl.weight_sync.receive import WeightReceiver


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


end_with_owner()
