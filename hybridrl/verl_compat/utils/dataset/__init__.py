"""`verl.utils.dataset`."""

from hybridrl.verl_compat.utils.dataset.rl_dataset import RLHFDataset
from hybridrl.verl_compat.utils.dataset.sft_dataset import SFTDataset

__all__ = ["RLHFDataset", "SFTDataset"]
