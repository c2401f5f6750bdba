"""`verl.workers.engine_workers`."""

from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker"]
