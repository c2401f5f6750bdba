"""`verl.utils.dataset.multiturn_sft_dataset`."""

from hybridrl.data import SFTDataset as MultiTurnSFTDataset

__all__ = ["MultiTurnSFTDataset"]
