"""Asynchronous GRPO with the library's own sampler and learner: generation runs ahead by a bounded number of steps.

    python examples/async_grpo.py STALENESS actor_rollout_ref.model.path=MODEL data.train_files=train.parquet ...

`RayPPOTrainer.fit` alternates between `Sampler.next` and `Learner.learn`. Here a thread samples while the learner
learns. Batch i is requested when batch i - STALENESS - 1 has been learned from and the rollout has the resulting
weights, so no token is more than STALENESS updates old when it is learned from. A rollout engine (`rollout.name=vllm`)
on its own devices (`rollout.nnodes=1`) generates at the same time. `hf` generates with the training weights, so the two
take turns. An engine that shares devices with training would have to release its memory while it generates, so it needs
`rollout.free_cache_engine=False`.
"""

import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

from hybridrl.config import load_config
from hybridrl.errors import UserError
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.ppo.sampler import ScoredBatch
from hybridrl.trainer.ppo.trainer import RayPPOTrainer

SETTINGS = ["algorithm.adv_estimator=grpo", "algorithm.rollout_correction.rollout_is=token"]


def fit(trainer: RayPPOTrainer, staleness: int) -> list[dict[str, Any]]:
    """Train to the last step; returns the metrics of each step and the rows (`uid`, `sample`) that it learned from."""
    sampler, learner, steps = trainer.sampler, trainer.learner, []
    settings = trainer.config.actor_rollout_ref.rollout
    if trainer.rollout.gives_memory_back and not settings.nnodes:
        raise UserError(
            "actor_rollout_ref.rollout.free_cache_engine=True with nnodes=0: training would need the memory of the "
            "engines while they generate; set free_cache_engine=False, nnodes=1, or name=hf"
        )
    turns = threading.Lock() if trainer.rollout.in_place else nullcontext()

    def sample() -> ScoredBatch:
        with turns:
            return sampler.next()

    with trainer.run as run, ExitStack() as cleanup:
        thread = ThreadPoolExecutor(max_workers=1)
        cleanup.callback(thread.shutdown, cancel_futures=True)  # batches that will not be learned from
        trainer.reshard()
        batches = deque(thread.submit(sample) for _ in range(min(staleness + 1, run.total_steps)))
        while not run.is_last:
            with run.measured_step():
                sampled = batches.popleft().result()
                with turns:
                    result = learner.learn(sampled)
                    synced = trainer.reshard()
                if run.step + len(batches) < run.total_steps:
                    batches.append(thread.submit(sample))
            columns = result.batch.non_tensor_batch
            rows = list(zip(columns["uid"].tolist(), columns["sample"].tolist(), strict=True))
            steps.append({"rows": rows, **trainer.report(sampled, result, synced)})
        learner.save(run.folder / "final")
    return steps


def main(argv: list[str]) -> list[dict[str, Any]]:
    config = load_config("ppo_trainer", [*SETTINGS, *argv[1:]])
    with started_trainer(config) as trainer:
        return fit(trainer, staleness=int(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
