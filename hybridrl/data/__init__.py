"""Parquet to prompts: datasets, samplers and loaders, and one preprocessing script per dataset.

The names below are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybridrl.errors import DataError

if TYPE_CHECKING:
    from hybridrl.data.curricula import SourceRecord, register_curriculum
    from hybridrl.data.dataset_factory import (
        create_labelled_dataset,
        create_labelled_loader,
        create_pair_loader,
        create_preference_dataset,
        create_rl_dataset,
        create_sampler,
        create_sft_dataset,
        create_sft_loader,
        create_train_loader,
        create_val_loader,
    )
    from hybridrl.data.labelled_dataset import LabelledDataset
    from hybridrl.data.loader import LabelledLoader, PairLoader, PromptLoader, SFTLoader, StatefulLoader
    from hybridrl.data.memory_files import save_rows
    from hybridrl.data.preference_dataset import PreferenceDataset
    from hybridrl.data.rl_dataset import RLHFDataset
    from hybridrl.data.samplers import EpochSampler
    from hybridrl.data.sft_dataset import SFTDataset

_HOMES = {
    "EpochSampler": "samplers",
    "LabelledDataset": "labelled_dataset",
    "LabelledLoader": "loader",
    "PairLoader": "loader",
    "PreferenceDataset": "preference_dataset",
    "PromptLoader": "loader",
    "RLHFDataset": "rl_dataset",
    "SFTDataset": "sft_dataset",
    "SFTLoader": "loader",
    "SourceRecord": "curricula",
    "StatefulLoader": "loader",
    "create_labelled_dataset": "dataset_factory",
    "create_labelled_loader": "dataset_factory",
    "create_pair_loader": "dataset_factory",
    "create_preference_dataset": "dataset_factory",
    "create_rl_dataset": "dataset_factory",
    "create_sampler": "dataset_factory",
    "create_sft_dataset": "dataset_factory",
    "create_sft_loader": "dataset_factory",
    "create_train_loader": "dataset_factory",
    "create_val_loader": "dataset_factory",
    "register_curriculum": "curricula",
    "save_rows": "memory_files",
}

__all__ = [
    "DataError",
    "EpochSampler",
    "LabelledDataset",
    "LabelledLoader",
    "PairLoader",
    "PreferenceDataset",
    "PromptLoader",
    "RLHFDataset",
    "SFTDataset",
    "SFTLoader",
    "SourceRecord",
    "StatefulLoader",
    "create_labelled_dataset",
    "create_labelled_loader",
    "create_pair_loader",
    "create_preference_dataset",
    "create_rl_dataset",
    "create_sampler",
    "create_sft_dataset",
    "create_sft_loader",
    "create_train_loader",
    "create_val_loader",
    "register_curriculum",
    "save_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
