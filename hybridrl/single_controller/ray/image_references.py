"""Images of a batch's rows travel once: later calls carry references to what is in the object store already.

A step passes the same rows to generation, to log-probabilities and to updates, and the samples of a prompt have the
same images, which take more memory than all other fields together. The controller's batch keeps the images themselves,
so it can be saved and joined as usual; only the arguments of a call have references. Workers read the store's memory
without a copy. An entry leaves the store when the controller's images do.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
import torch
from torch.utils.weak import WeakIdKeyDictionary

from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.names import MULTI_MODAL_INPUTS
from hybridrl.protocol.transport import tensor_from_numpy, tensor_to_numpy

#: smaller images stay in the arguments of a call
SMALLEST = 16 * 1024

_LOCK = threading.Lock()
stored_images: Any = (
    WeakIdKeyDictionary()
)  # largest tensor of a row's images -> (job, node) that put them, and the reference


def with_references(value: Any) -> Any:
    """Return an argument of a call with references in place of images; anything but such a batch as it is."""
    column = value.non_tensor_batch.get(MULTI_MODAL_INPUTS) if isinstance(value, DataProto) else None
    if column is None:
        return value
    return _replaced(value, [reference_of(entry) for entry in column.tolist()])


def with_images(value: Any) -> Any:
    """Return an argument of a call with the images that `with_references` replaced; rows with the same share them."""
    column = value.non_tensor_batch.get(MULTI_MODAL_INPUTS) if isinstance(value, DataProto) else None
    if column is None:
        return value
    entries = column.tolist()
    references = list({entry: None for entry in entries if isinstance(entry, ray.ObjectRef)})
    tensors = {reference: tensors_of(arrays) for reference, arrays in zip(references, ray.get(references), strict=True)}
    return _replaced(value, [tensors[entry] if isinstance(entry, ray.ObjectRef) else entry for entry in entries])


def reference_of(entry: Any) -> Any:
    """The reference to a row's images, which are put into the store at most once; small ones as they are."""
    if not isinstance(entry, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in entry.values()):
        return entry
    largest = max(entry.values(), key=lambda tensor: tensor.nbytes, default=None)
    if largest is None or largest.nbytes < SMALLEST:
        return entry
    context = ray.get_runtime_context()
    owner = (context.get_job_id(), context.get_node_id())  # each new cluster numbers its jobs from 1 again
    with _LOCK:
        stored = stored_images.get(largest)
        if stored is None or stored[0] != owner:  # an earlier cluster of this process
            arrays: dict[str, np.ndarray] = {name: tensor_to_numpy(tensor) for name, tensor in entry.items()}
            stored = stored_images[largest] = (owner, ray.put(arrays))
        return stored[1]


def tensors_of(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """A row's images out of what the store has, without a copy."""
    return {name: tensor_from_numpy(array) for name, array in arrays.items()}


def _replaced(batch: DataProto, entries: list[Any]) -> DataProto:
    replaced = copy.copy(batch)
    replaced.non_tensor_batch[MULTI_MODAL_INPUTS] = object_array(entries)
    return replaced
