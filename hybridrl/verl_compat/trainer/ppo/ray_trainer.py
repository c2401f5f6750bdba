"""`verl.trainer.ppo.ray_trainer`."""

from typing import Any

import torch

from hybridrl.algorithms import AdvantageEstimator
from hybridrl.config import AlgorithmConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.ppo import advantage
from hybridrl.trainer.ppo.advantage import apply_kl_penalty
from hybridrl.trainer.ppo.role_groups import Role
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.verl_compat.trainer.ppo.utils import WorkerType

__all__ = [
    "AdvantageEstimator",
    "RayClassWithInitArgs",
    "RayPPOTrainer",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "Role",
    "WorkerType",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
]


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the columns of the attention mask that belong to the response. [B, T]"""
    return data.batch["attention_mask"][:, -data.batch["responses"].size(1) :]


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Add `advantages` and `returns` [B, T] with verl's arguments.

    Args:
        num_repeat: samples per prompt; it is not read, because `uid` tells which rows belong together.
        norm_adv_by_std_in_grpo: used if there is no `config`.
    """
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
    settings = AlgorithmConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo) if config is None else config
    return advantage.compute_advantage(data, adv_estimator, gamma, lam, settings)
