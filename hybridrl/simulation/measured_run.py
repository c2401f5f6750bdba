"""Latencies of a run, from its folder: what a simulation of other schedules needs to know."""

import heapq
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hybridrl.config.roles import ROLES
from hybridrl.errors import DataError
from hybridrl.observe.run_history import load_history
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.recording import recording_of

_OTHER_LEARNING = ("rollout_corr", "adv")  # phases of the learner that belong to no role (docs/training.md)
_DRAWS = 20  # steps whose generation is laid out to find the seconds of a token


@dataclass(frozen=True)
class MeasuredRun:
    """Sizes and latencies of a run; seconds are medians over its steps without the first.

    Attributes:
        devices: of training and generation together.
        places: responses that a device generates at a time.
        prompts, samples: prompts of a step, and responses to each.
        learn_s, publish_s, reward_s: seconds of everything between generation and new weights, of sending the weights,
            and of scoring.
        generation_s: of a step.
        synchronous: whether generation and training took turns, so that `generation_s` is the time of generation.
        length: draws the tokens of a response.
        recorded: whether the lengths are those of recorded batches. Otherwise they are log-normal, with the mean and
            the maximum of the metrics, up to `data.max_response_length`.
    """

    devices: int
    places: int
    prompts: int
    samples: int
    learn_s: float
    publish_s: float
    reward_s: float
    generation_s: float
    synchronous: bool
    length: Callable[[Random], float]
    recorded: bool

    def seconds_per_token(self) -> float:
        """Return the seconds of a token with which the responses of a step take `generation_s` on all places."""
        random, places = Random(0), self.devices * self.places
        spans = []
        for _ in range(_DRAWS):
            ends = [0.0] * places
            for _ in range(self.prompts * self.samples):
                heapq.heapreplace(ends, ends[0] + self.length(random))
            spans.append(max(ends))
        return self.generation_s / statistics.mean(spans)


def read_run(folder: Path) -> MeasuredRun:
    """Read a run's folder: its settings, its metrics and, where there is one, its recording.

    Raises:
        UserError: the folder has no metrics, or they lack what is needed.
    """
    history = load_history(folder)
    settings: Mapping[str, Any] = history.config
    steps = [step for step in history.steps() if "timing_s/update_weights" in step][1:]
    if not steps or not settings:
        raise DataError(f"{folder}: a run with two steps and its config.yaml is needed")

    def seconds(*phases: str) -> float:
        return statistics.median(sum(step.get(f"timing_s/{phase}", 0.0) for phase in phases) for step in steps)

    def metric(name: str) -> float:
        values = [step[name] for step in steps if name in step]
        if not values:
            raise DataError(f"{folder}: its metrics have no {name}")
        return statistics.median(values)

    policy, trainer = settings["actor_rollout_ref"], settings["trainer"]
    rollout, prompts = policy["rollout"], int(settings["data"]["train_batch_size"])
    own = int(rollout["nnodes"] or 0) * int(rollout["n_gpus_per_node"] or 0)
    responses, limit = prompts * int(rollout["n"]), float(settings["data"]["max_response_length"])
    lengths = _recorded_lengths(folder)
    drawn = long_tailed(metric("response_length/mean"), metric("response_length/max"), responses, limit)
    return MeasuredRun(
        devices=int(trainer["nnodes"]) * int(trainer["n_gpus_per_node"]) + own,
        places=int(rollout["max_num_seqs"]),
        prompts=prompts,
        samples=int(rollout["n"]),
        learn_s=seconds(*_learning_phases()),
        publish_s=seconds("update_weights"),
        reward_s=seconds("reward"),
        generation_s=seconds("gen"),
        synchronous=trainer["v1"]["trainer_mode"] == "sync",
        length=chosen_from(lengths) if lengths else drawn,
        recorded=bool(lengths),
    )


def _learning_phases() -> set[str]:
    """Return the phases between generation and new weights; some roles share one."""
    passes = {step.phase for spec in ROLES.values() for step in spec.passes}
    updates = {spec.update.phase for spec in ROLES.values() if spec.update is not None}
    return passes | updates | set(_OTHER_LEARNING)


def chosen_from(values: Sequence[float]) -> Callable[[Random], float]:
    """Return a function that draws one of the values."""
    return lambda random: random.choice(values)


def long_tailed(mean: float, longest: float, count: int, limit: float) -> Callable[[Random], float]:
    """Return a function that draws log-normal lengths.

    Args:
        mean: of all lengths.
        longest: median of the longest of `count` lengths.
        limit: no length is longer.
    """
    quantile = statistics.NormalDist().inv_cdf(0.5 ** (1 / count))
    # ln(longest / mean) = s z - s^2 / 2; a maximum that is further away than any spread explains gets the largest one.
    spread = quantile - math.sqrt(max(quantile**2 - 2 * math.log(max(longest / mean, 1.0)), 0.0))
    center = math.log(mean) - spread**2 / 2
    return lambda random: min(random.lognormvariate(center, spread), limit)


def _recorded_lengths(folder: Path) -> list[float]:
    lengths: list[float] = []
    for path in sorted(recording_of(str(folder)).glob("step_?????.safetensors")):
        fields = DataProto.load_from_disk(path).batch
        width = fields["responses"].shape[-1]
        lengths += fields["attention_mask"][:, -width:].sum(-1).clamp(min=1).tolist()
    return lengths
