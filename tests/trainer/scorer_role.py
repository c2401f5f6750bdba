"""A role of a user's own: a second frozen model that scores each response token, with its worker, settings and row."""

from dataclasses import dataclass

import torch
from torch import nn

from hybridrl.protocol import DataProto
from hybridrl.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.trainer.ppo.role_groups import Pass, RoleSpec, register_role


@dataclass(frozen=True)
class ScorerSettings:
    """`roles.scorer`."""

    seed: int
    vocabulary: int = 512


def frozen_model(settings: ScorerSettings) -> nn.Module:
    """A score per token id."""
    generator = torch.Generator().manual_seed(settings.seed)
    weights = torch.randn(settings.vocabulary, 1, generator=generator)
    return nn.Embedding.from_pretrained(weights, freeze=True)


class ScorerWorker(Worker):
    """One rank of the scorer; every rank holds the whole model."""

    def __init__(self, config: ScorerSettings, timeout_s: float) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        self.model = frozen_model(self.config)
        self._register_dispatch_collect_info("scorer", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="scorer"), blocking=False)
    def compute_scores(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"scorer_values": self.model(batch.batch["responses"])[..., 0]})


def weighted(batch: DataProto) -> torch.Tensor:
    return 0.5 * batch.batch["scorer_values"]


SCORER = register_role(
    RoleSpec(
        name="scorer",
        worker=lambda: ScorerWorker,
        settings=ScorerSettings,
        needed=lambda config: "scorer" in config.roles,
        placement=("scorer", "actor_rollout_ref"),
        mesh="scorer",
        passes=(Pass("scorer", "compute_scores", advice="lower data.train_batch_size"),),
        scores=weighted,
    )
)
