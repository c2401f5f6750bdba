"""Parquet to prompts: datasets, samplers, loaders; one preprocessing script a data set.

The names below are looked up on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.data.build import (
        create_rl_dataset,
        create_sampler,
        create_sft_dataset,
        create_sft_loader,
        create_train_loader,
        create_val_loader,
    )
    from hybridrl.data.errors import DataError
    from hybridrl.data.loader import PromptLoader, SFTLoader, StatefulLoader
    from hybridrl.data.rl_dataset import RLHFDataset
    from hybridrl.data.sampler import EpochSampler
    from hybridrl.data.sft_dataset import SFTDataset

_HOMES = {
    "DataError": "errors",
    "EpochSampler": "sampler",
    "PromptLoader": "loader",
    "RLHFDataset": "rl_dataset",
    "SFTDataset": "sft_dataset",
    "SFTLoader": "loader",
    "StatefulLoader": "loader",
    "create_rl_dataset": "build",
    "create_sampler": "build",
    "create_sft_dataset": "build",
    "create_sft_loader": "build",
    "create_train_loader": "build",
    "create_val_loader": "build",
}

__all__ = [
    "DataError",
    "EpochSampler",
    "PromptLoader",
    "RLHFDataset",
    "SFTDataset",
    "SFTLoader",
    "StatefulLoader",
    "create_rl_dataset",
    "create_sampler",
    "create_sft_dataset",
    "create_sft_loader",
    "create_train_loader",
    "create_val_loader",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
