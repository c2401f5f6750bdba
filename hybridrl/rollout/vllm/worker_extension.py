"""Our extension of vLLM's worker class (`worker_extension_cls`), which runs in each of its worker processes.

Methods are called by name through `collective_rpc`. Their names start with `hybridrl_` to avoid vLLM's own.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridrl.hybrid_engine.buckets import ShardBucket
from hybridrl.hybrid_engine.receive import ShardReceiver, WeightReceiver
from hybridrl.rollout.vllm import compat, leftovers
from hybridrl.rollout.vllm.parent_watch import end_with_owner


class WeightReceiverExtension:
    """Loads new weights."""

    device: torch.device
    rank: int
    model_runner: Any
    vllm_config: Any
    _hybridrl_receiver: WeightReceiver
    _hybridrl_shards: ShardReceiver

    def hybridrl_begin_update(self) -> None:
        """Prepare the model for loading weights."""
        if not hasattr(self, "_hybridrl_receiver"):
            self._hybridrl_receiver = WeightReceiver(self.device, self.rank, copies=not compat.can_detach_pending())
            model = self.model_runner.get_model()
            self._hybridrl_shards = ShardReceiver(
                self._hybridrl_receiver, model.load_weights, self._hybridrl_settle, lambda: compat.forget_loaded(model)
            )
        with self._hybridrl_loading():
            compat.begin_loading(self.model_runner.get_model())

    def hybridrl_require(self, pickled: bytes) -> bytes:
        """Return, pickled, the `RequiredSlices` of this process for a pickled `Checkpoint`."""
        with self._hybridrl_loading():
            required = self._hybridrl_shards.require(pickle.loads(pickled))
            compat.begin_loading(self.model_runner.get_model())
        return pickle.dumps(required)

    def hybridrl_load_bucket(self, pickled: bytes) -> None:
        """Load a pickled `Bucket` or `ShardBucket`."""
        bucket = pickle.loads(pickled)
        model = self.model_runner.get_model()
        with self._hybridrl_loading():
            if isinstance(bucket, ShardBucket):
                self._hybridrl_shards.load(bucket)
            else:
                model.load_weights(self._hybridrl_receiver.tensors(bucket))
                if not self._hybridrl_receiver.copies:
                    compat.detach_pending(model, self._hybridrl_receiver.last)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def hybridrl_end_update(self) -> list[str]:
        """Generate with the loaded weights. Returns what went wrong with them."""
        faults: list[str] = []
        with self._hybridrl_loading():
            if self._hybridrl_shards.began:
                faults = self._hybridrl_shards.finish()
            else:
                self._hybridrl_settle()
        self._hybridrl_receiver.close()
        return faults

    def _hybridrl_settle(self) -> None:
        compat.end_loading(self.model_runner.get_model(), self.model_runner.model_config)

    def hybridrl_note_process(self) -> None:
        """Tell the replica which process this is, so that it learns of its end."""
        leftovers.note_process()

    def hybridrl_divide_logits(self, temperature: float) -> None:
        """Divide all logits by a temperature, in float32, so that log-probabilities of prompts are those at it."""
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(*args, **kwargs)
            return None if logits is None else logits.float() / temperature

        model.compute_logits = divided

    @contextmanager
    def _hybridrl_loading(self) -> Iterator[None]:
        """The context in which vLLM's loaders work."""
        with compat.engine_config(self), torch.device(self.device), torch.no_grad():
            yield


end_with_owner()
