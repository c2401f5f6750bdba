"""Cost of the controller: a GRPO step over simulated ranks, in one process and without a model.

    python benchmarks/scale.py [--ranks 64 256 1024] [--samples 8192] [--length 8192] [--json FILE]

The controller's own code runs: completions become a batch, `Learner` orders it, sends it to the ranks of a worker group
for log-probabilities, reference log-probabilities and updates, collects the answers, estimates advantages, and computes
the metrics of the step. The ranks are simulated: what a call sends to each of them is pickled as Ray pickles it and
counted, and each answers with numbers of the right shapes. What the ranks do is not in the times.

Lengths are log-normal with a long tail, cut at `--length`. Times are seconds of processor time of one thread. The last
columns compare them with bare copies of the bytes that were sent and received, and with the bytes of the real tokens.

Ray's own work for a call is not part of it. The first step of a process also pays for memory that is new to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hybridrl.config import PPOTrainerConfig, load_config
from hybridrl.observe.step_metrics import compute_data_metrics, staleness_metrics
from hybridrl.protocol import DataProto
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.request import Completion, CompletionArrays
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.single_controller.base.decorator import finish_output
from hybridrl.single_controller.base.worker_group import GroupMethod, WorkerGroup
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import padded_batch, trim
from hybridrl.trainer.ppo.learner import Learner
from hybridrl.trainer.ppo.sampler import ScoredBatch
from hybridrl.utils.metrics import Metric
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

SAMPLES_PER_PROMPT = 8
PROMPT = 1024  # tokens at most
VOCABULARY = 150_000
SIGMA = 1.2  # of the logarithm of the lengths
MEAN_SHARE = 0.25  # of the lengths' median in the limit
REPLY = 4096  # completions that arrive at once


@dataclass
class Meter:
    """Seconds of processor time by part, without what is simulated, and bytes.

    Attributes:
        seconds: by part.
        sent, received: bytes that a call puts and gets.
        simulated: seconds of ranks and replicas.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    simulated: float = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of the controller's work."""
        began, simulated = time.process_time(), self.simulated
        yield
        spent = time.process_time() - began - (self.simulated - simulated)
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leave out what other processes would do."""
        began = time.process_time()
        yield
        self.simulated += time.process_time() - began


@dataclass
class Sent:
    """A pickled value, with its large buffers aside as in Ray's object store."""

    stream: bytes
    buffers: list[Any]

    @classmethod
    def of(cls, value: Any) -> Sent:
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return cls(stream, [bytearray(each.raw()) for each in buffers])  # the copy into the store

    @property
    def nbytes(self) -> int:
        return len(self.stream) + sum(map(len, self.buffers))

    def value(self) -> Any:
        return pickle.loads(self.stream, buffers=self.buffers)


class SimulatedGroup(WorkerGroup):
    """The ranks of a policy. A call is dispatched and collected by the worker class's own modes."""

    def __init__(self, ranks: int, meter: Meter) -> None:
        super().__init__(None)
        self._ranks, self._meter = ranks, meter
        self.bind_worker_methods(ActorRolloutRefWorker)

    @property
    def world_size(self) -> int:
        return self._ranks

    def mesh_info(self, mesh_name: str) -> tuple[list[int], list[int]]:
        return list(range(self._ranks)), list(range(self._ranks))

    def run_method(self, method: GroupMethod, args: tuple[Any, ...], kwargs: dict[str, Any], padding: Any) -> Any:
        """Send every rank its arguments, and keep the answers for `get`."""
        answers = []
        for rank in range(self._ranks):
            sent = Sent.of([column[rank] for column in args])
            self._meter.sent += sent.nbytes
            with self._meter.elsewhere():
                answers.append(Sent.of(ANSWERS[method.name](*sent.value())))

        def get() -> Any:
            self._meter.received += sum(answer.nbytes for answer in answers)
            return finish_output(method.collect_fn(self, [answer.value() for answer in answers]), padding)

        return get() if method.blocking else SimpleNamespace(get=get)


def log_probs(name: str) -> Callable[[DataProto], DataProto]:
    """Answer with a log-probability of each response token."""

    def answer(batch: DataProto) -> DataProto:
        mask = batch.batch["response_mask"]
        values = torch.where(mask.bool(), torch.empty(mask.shape).uniform_(-1, 0), 0.0)
        return DataProto.from_dict(tensors={name: values})

    return answer


def updated(batch: DataProto) -> DataProto:
    """Answer with the metrics of an update."""
    weight = float(batch.batch["response_mask"].sum())
    return DataProto(meta_info={"metrics": {f"actor/{name}": Metric(0.5, weight) for name in ("pg_loss", "grad_norm")}})


ANSWERS: dict[str, Callable[..., Any]] = {
    "compute_log_prob": log_probs("old_log_probs"),
    "compute_ref_log_prob": log_probs("ref_log_prob"),
    "update_actor": updated,
    "shares_prefixes": lambda: False,
}


def completions(samples: int, length: int) -> Iterator[Sent]:
    """Yield what replicas return, some thousand completions at a time."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(MEAN_SHARE * length), SIGMA, samples).astype(np.int64).clip(1, length)
    for first in range(0, samples, REPLY):
        yield Sent.of(
            [
                CompletionArrays.of(
                    Completion(
                        f"train-1-{first + number}",
                        generator.integers(0, VOCABULARY, count, dtype=np.int32),  # type: ignore[arg-type]
                        -generator.random(count, dtype=np.float32),  # type: ignore[arg-type]
                        "stop",
                        [(0, count)],
                    )
                )
                for number, count in enumerate(lengths[first : first + REPLY].tolist())
            ]
        )


def generated(samples: int, length: int, meter: Meter) -> DataProto:
    """Make the batch of a step out of completions, as a rollout does."""
    with meter.elsewhere():
        generator = np.random.default_rng(1)
        count = samples // SAMPLES_PER_PROMPT
        prompts = [
            generator.integers(0, VOCABULARY, generator.integers(PROMPT // 8, PROMPT)).tolist() for _ in range(count)
        ]
        arriving = list(completions(samples, length))
    trajectories: list[Trajectory] = []
    with meter.part("completions, batch"):
        while arriving:
            reply = arriving.pop(0)
            meter.received += reply.nbytes
            for completion in reply.value():
                prompt, sample = divmod(len(trajectories), SAMPLES_PER_PROMPT)
                trajectories.append(Trajectory.single_turn(prompts[prompt], completion, f"p{prompt}", sample))
        batch = trim(batch_of(trajectories, 0, PROMPT, length))
        ends = batch.batch["response_mask"].sum(dim=1) - 1
        scores = torch.zeros(batch.batch["response_mask"].shape)
        scores[torch.arange(samples), ends] = torch.rand(samples, generator=torch.Generator().manual_seed(0)).round()
        batch.batch["token_level_scores"] = scores
        batch.meta_info["temperature"] = 1.0
    return batch


def settings(samples: int, length: int) -> PPOTrainerConfig:
    """Two updates per step with a KL loss: log-probabilities of the policy and of the reference are needed."""
    prompts = samples // SAMPLES_PER_PROMPT
    return load_config(
        "ppo_trainer",
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_batch_size={prompts}",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={length}",
            f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}",
            "actor_rollout_ref.actor.use_kl_loss=True",
        ],
    )


def run_step(ranks: int, samples: int, length: int) -> dict[str, Any]:
    """Run one step over `ranks` simulated ranks, and return seconds by part, bytes and ratios."""
    meter = Meter()
    config = settings(samples, length)
    group = SimulatedGroup(ranks, meter)
    with tempfile.TemporaryDirectory() as folder:
        groups: Any = {"actor_rollout": group, "ref": group}
        learner = Learner(config, groups, FailedBatches(Path(folder)))
        sampled = ScoredBatch(generated(samples, length, meter), {}, {})
        fields = sampled.batch.batch
        tokens, generated_tokens = int(fields["attention_mask"].sum()), int(fields["response_mask"].sum())
        timer, learner.step = PhaseTimer(), 2  # the first step also compares sampler and trainer
        with meter.part("log-probabilities"):
            batch = padded_batch(sampled.batch)
            metrics = learner.evaluate(batch, timer)
        with meter.part("correction"):
            metrics |= learner.correct(batch, sampled.probe, timer)
        with meter.part("advantages"):
            metrics |= learner.estimate_advantages(batch, timer)
        with meter.part("update"):
            metrics |= learner.update(batch, timer)
        with meter.part("metrics"):
            metrics |= staleness_metrics(batch, 0) | compute_data_metrics(batch, False)
    bare = Meter()
    copy_bytes(meter.sent + meter.received, bare)
    total = sum(meter.seconds.values())
    return {
        "ranks": ranks,
        "samples": samples,
        "length": length,
        "tokens": tokens,
        "generated_tokens": generated_tokens,
        "seconds": meter.seconds,
        "total_s": total,
        "sent_gb": meter.sent / 1e9,
        "received_gb": meter.received / 1e9,
        "sent_of_real": meter.sent / bytes_of_real_tokens(tokens, generated_tokens),
        "of_bare_copies": total / bare.seconds["copies"],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def bytes_of_real_tokens(tokens: int, generated_tokens: int) -> int:
    """Return what three calls need: their token ids, and for the update three log-probabilities per generated token."""
    return 4 * (3 * tokens + 3 * generated_tokens)


def copy_bytes(count: int, meter: Meter) -> None:
    """Copy so many bytes, 256 MB at a time."""
    size = min(count, 256 * 2**20)
    source = np.zeros(size, dtype=np.uint8)
    target = np.empty_like(source)
    target[:] = 1
    with meter.part("copies"):
        for first in range(0, count, size):
            part = min(size, count - first)
            np.copyto(target[:part], source[:part])


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = []
    for ranks in options.ranks:
        result = run_step(ranks, options.samples, options.length)
        results.append(result)
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["seconds"].items())
        print(
            f"{ranks} ranks, {options.samples} samples of at most {options.length} tokens, "
            f"{result['tokens'] / 1e6:.1f} M tokens: {result['total_s']:.2f} s ({parts})\n"
            f"  sent {result['sent_gb']:.3f} GB ({result['sent_of_real']:.2f} of the real tokens'), received "
            f"{result['received_gb']:.3f} GB; {result['of_bare_copies']:.1f} times bare copies of these bytes; "
            f"peak {result['peak_gb']:.1f} GB"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
