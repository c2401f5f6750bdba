"""`verl.workers.fsdp_workers`."""

from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker as AsyncActorRolloutRefWorker
from hybridrl.workers.critic import CriticWorker

__all__ = ["ActorRolloutRefWorker", "AsyncActorRolloutRefWorker", "CriticWorker"]
