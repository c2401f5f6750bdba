"""A weight loader that SGLang calls by name in each of its processes that hold weights.

SGLang gives a custom loader the model and a list of (name, tensor). Ours gets one entry whose name is the message
and whose tensor is empty, so that only the message goes through SGLang; the weights come from the bucket it names.
"""

import base64
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint, ShardBucket
from hybridrl.hybrid_engine.receive import ShardReceiver, WeightReceiver

#: how SGLang finds the loader
LOADER = f"{__name__}.load"
#: projections that SGLang joins while loading, and loses where they do not come in one call
_JOINED = (".q_a_proj.", ".kv_a_proj_with_mqa.")

Weights = Iterable[tuple[str, torch.Tensor]]

_receiver: WeightReceiver | None = None
_shards: ShardReceiver | None = None
_waiting: dict[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Question:
    """Asks every process what it needs of a checkpoint; each answers with a pickled `RequiredSlices` in a file.

    Attributes:
        folder: on this node. The file's name is the rank of the process.
    """

    checkpoint: Checkpoint
    folder: str


@dataclass(frozen=True)
class LogitsTemperature:
    """Has every process divide logits by a temperature, once."""

    value: float


@dataclass(frozen=True)
class NoHeadBias:
    """Has every process set the bias of a classifier's head to 0.

    SGLang gives the heads of some families a bias, which the weights of reward models do not have: it would keep the
    random numbers that it starts with.
    """


Content = Bucket | ShardBucket | Question | LogitsTemperature | NoHeadBias | None


def message(content: Content) -> list[tuple[str, torch.Tensor]]:
    """The named tensors that tell `load` what to load or to answer, or (None) that there are no more."""
    return [(base64.b64encode(pickle.dumps(content)).decode("ascii"), torch.empty(0))]


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's hook: load what `message` names."""
    global _receiver, _shards
    ((text, _),) = named_tensors
    content: Content = pickle.loads(base64.b64decode(text))
    device = next(model.parameters()).device
    if _receiver is None or _shards is None:
        # SGLang copies what it loads before it returns, so that no copy of the whole bucket is needed.
        _receiver = WeightReceiver(device, torch.distributed.get_rank(), copies=False)
        _shards = ShardReceiver(_receiver, lambda weights: _load(model, joined(weights, _waiting)))
    with torch.no_grad():
        if isinstance(content, Question):
            file = Path(content.folder) / str(_receiver.rank)
            file.write_bytes(pickle.dumps(_shards.require(content.checkpoint)))
        elif isinstance(content, LogitsTemperature):
            _divide_logits(model, content.value)
        elif isinstance(content, NoHeadBias):
            _drop_head_bias(model)
        elif isinstance(content, ShardBucket):
            _shards.load(content)
        elif content is not None:
            # Gemma's loader changes what it gets, and a bucket in shared memory is read by every process of the node.
            tensors = ((name, value.clone()) for name, value in _receiver.tensors(content))
            _load(model, joined(tensors, _waiting))
        else:
            _load(model, list(_waiting.items()))
            _waiting.clear()
            if faults := _shards.finish():
                raise RolloutError(f"weights of process {_receiver.rank} after an update: {'; '.join(faults)}")
    if device.type != "cpu":
        torch.accelerator.synchronize()
    if content is None:
        _receiver.close()


def _load(model: nn.Module, weights: Weights) -> None:
    model.load_weights(weights)  # type: ignore[operator]  # every model of SGLang has it


def _divide_logits(model: nn.Module, temperature: float) -> None:
    processor: Any = model.logits_processor
    if processor.final_logit_softcapping:  # which SGLang applies after the scale
        raise RolloutError(
            f"SGLang cannot divide the logits of {type(model).__name__} by temperature={temperature}, because they are "
            "capped; set the teacher's temperature to 1, or its inference.name to vllm"
        )
    processor.logit_scale = (1.0 if processor.logit_scale is None else processor.logit_scale) / temperature


def _drop_head_bias(model: nn.Module) -> None:
    head: Any = model.score
    if head.bias is not None:
        head.bias.zero_()


def joined(weights: Weights, waiting: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, those of a joined pair held back until both are there.

    Args:
        weights: some of a model's.
        waiting: tensors held back so far, kept between calls; copies, because buckets are overwritten.
    """
    for name, value in weights:
        projection = next((part for part in _JOINED if part in name), None)
        if projection is None or value.is_meta:  # one without memory is not joined, or it would not be without
            yield name, value
            continue
        other = name.replace(projection, _JOINED[1 - _JOINED.index(projection)])
        if other in waiting:
            yield other, waiting.pop(other)
            yield name, value
        else:
            waiting[name] = value.clone()
