"""`verl.utils.dataset.sft_dataset`."""

from hybridrl.data import SFTDataset

__all__ = ["SFTDataset"]
