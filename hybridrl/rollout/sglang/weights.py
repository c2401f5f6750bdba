"""What of ours runs inside each process of SGLang that holds weights: a weight loader that SGLang calls by its name.

SGLang gives a custom loader the model and a list of (name, tensor). Ours gets one entry whose name is the message and
whose tensor is empty, so that nothing but the message goes through SGLang; the weights come from the bucket it names.
"""

import base64
import pickle
from collections.abc import Sequence

import torch
from torch import nn

from hybridrl.hybrid_engine.messages import Bucket
from hybridrl.hybrid_engine.receive import WeightReceiver

#: how SGLang finds the loader
LOADER = f"{__name__}.load"

_receiver: WeightReceiver | None = None


def message(bucket: Bucket | None) -> list[tuple[str, torch.Tensor]]:
    """The named tensors that tell `load` to load a bucket, or (None) to let go of the sender's memory."""
    return [(base64.b64encode(pickle.dumps(bucket)).decode("ascii"), torch.empty(0))]


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's hook: take in what `message` says."""
    global _receiver
    ((text, _),) = named_tensors
    bucket: Bucket | None = pickle.loads(base64.b64decode(text))
    device = next(model.parameters()).device
    if _receiver is None:
        # SGLang copies what it loads before it returns, so the bucket itself will do.
        _receiver = WeightReceiver(device, torch.distributed.get_rank(), copies=False)
    if bucket is None:
        _receiver.close()
        return
    with torch.no_grad():
        model.load_weights(_receiver.tensors(bucket))  # type: ignore[operator]  # every model of SGLang has it
    if device.type != "cpu":
        torch.accelerator.synchronize()
