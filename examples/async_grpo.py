"""Asynchronous GRPO with the library's own sampler and learner: generation runs ahead by a bounded number of steps.

    python examples/async_grpo.py STALENESS actor_rollout_ref.model.path=MODEL data.train_files=train.parquet ...

`RayPPOTrainer.fit` alternates between `Sampler.next` and `Learner.learn`. Here a thread samples while the learner
learns. Batch i is asked for once batch i - STALENESS - 1 was learned from and the rollout has the weights that came of
it, so no token is more than STALENESS updates old when it is learned from. With `rollout.nnodes=1` and a rollout engine
(`rollout.name=vllm`) on devices of its own both run at the same time; `hf` generates with the training weights, so
there the two take turns.
"""

import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from typing import Any

from hybridrl.config import load_config, validate
from hybridrl.trainer.ppo.build import prepare
from hybridrl.trainer.ppo.roles import resource_pools, spawn_worker_groups
from hybridrl.trainer.ppo.sampler import Sampled
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.startup import workers_starting

SETTINGS = ["algorithm.adv_estimator=grpo", "algorithm.rollout_correction.rollout_is=token"]


def fit(trainer: RayPPOTrainer, staleness: int) -> list[dict[str, Any]]:
    """Train to the last step; returns the metrics of each step and the rows (`uid`, `sample`) that it learned from."""
    sampler, learner, steps = trainer.sampler, trainer.learner, []
    turns = threading.Lock() if trainer.rollout.in_place else nullcontext()

    def sample() -> Sampled:
        with turns:
            return sampler.next()

    with trainer.run as run, ExitStack() as cleanup:
        thread = ThreadPoolExecutor(max_workers=1)
        cleanup.callback(thread.shutdown, cancel_futures=True)  # what was asked for and is not learned from
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
    validate(config)
    manager = resource_pools(config)

    def spawn() -> dict:
        return spawn_worker_groups(config, None, manager)

    with workers_starting(config.ray_kwargs.ray_init, manager, config.trainer.device, spawn) as started:
        trainer = prepare(config, resource_pool_manager=manager)
        with closing(trainer.reward_fn):
            trainer.init_workers(started())
            with closing(trainer.rollout):
                return fit(trainer, staleness=int(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
