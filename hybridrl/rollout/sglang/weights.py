"""A weight loader that SGLang calls by name in each of its processes that hold weights.

SGLang gives a custom loader the model and a list of (name, tensor). Ours gets one entry whose name is the message
and whose tensor is empty, so that only the message goes through SGLang; the weights come from the bucket it names.
"""

import base64
import pickle
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from hybridrl.weight_sync.messages import Bucket
from hybridrl.weight_sync.receive import WeightReceiver

#: how SGLang finds the loader
LOADER = f"{__name__}.load"
#: projections that SGLang joins while loading, and loses where they do not come in one call
_JOINED = (".q_a_proj.", ".kv_a_proj_with_mqa.")

Weights = Iterable[tuple[str, torch.Tensor]]

_receiver: WeightReceiver | None = None
_waiting: dict[str, torch.Tensor] = {}


def message(bucket: Bucket | None) -> list[tuple[str, torch.Tensor]]:
    """The named tensors that tell `load` to load a bucket, or (None) that there are no more."""
    return [(base64.b64encode(pickle.dumps(bucket)).decode("ascii"), torch.empty(0))]


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's hook: load what `message` names."""
    global _receiver
    ((text, _),) = named_tensors
    bucket: Bucket | None = pickle.loads(base64.b64decode(text))
    device = next(model.parameters()).device
    if _receiver is None:
        # SGLang copies what it loads before it returns, so that no copy of the bucket is needed.
        _receiver = WeightReceiver(device, torch.distributed.get_rank(), copies=False)
    weights: Weights
    if bucket is None:
        weights = list(_waiting.items())
        _waiting.clear()
    else:
        weights = joined(_receiver.tensors(bucket), _waiting)
    with torch.no_grad():
        model.load_weights(weights)  # type: ignore[operator]  # every model of SGLang has it
    if device.type != "cpu":
        torch.accelerator.synchronize()
    if bucket is None:
        _receiver.close()


def joined(weights: Weights, waiting: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, those of a joined pair held back until both are there.

    Args:
        weights: some of a model's.
        waiting: tensors held back so far, kept between calls; copies, because buckets are overwritten.
    """
    for name, value in weights:
        mine = next((part for part in _JOINED if part in name), None)
        if mine is None:
            yield name, value
            continue
        other = name.replace(mine, _JOINED[1 - _JOINED.index(mine)])
        if other in waiting:
            yield other, waiting.pop(other)
            yield name, value
        else:
            waiting[name] = value.clone()
