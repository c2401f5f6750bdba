"""`verl.utils.dataset.rl_dataset`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridrl.data import RLHFDataset
from hybridrl.protocol import object_array

__all__ = ["RLHFDataset", "collate_fn"]


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows as one dict: tensors stacked, everything else as an array of objects."""
    keys = dict.fromkeys(key for row in data_list for key in row)
    columns = {key: [row[key] for row in data_list if key in row] for key in keys}
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
        for key, values in columns.items()
    }
