"""From prompts to scored batches. `Sampler.next` draws prompts, generates responses and scores them.

Shapes: B rows, T response width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.algorithms.groups import Groups
from hybridrl.config import PPOTrainerConfig
from hybridrl.data import StatefulLoader
from hybridrl.errors import RolloutError
from hybridrl.protocol import DataProto, object_array
from hybridrl.reward import RewardManager
from hybridrl.rollout import Rollout
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import repeat_for_sampling, trim
from hybridrl.trainer.ppo.correction import UNTRUNCATED, is_untruncated, probe_prompts
from hybridrl.trainer.ppo.memory import memory_advice
from hybridrl.trainer.ppo.needs import Needs
from hybridrl.trainer.ppo.prompt_pool import PromptPool


@dataclass(frozen=True)
class Sampled:
    """A scored batch and how it was made.

    Attributes:
        batch: `train_batch_size` prompts with all of their samples: prompts, responses, masks, the sampler's
            log-probabilities, `token_level_scores` [B, T], and the columns of the prompts, the rollout and the reward
            function.
        metrics: metrics of generation, scoring and the prompt pool.
        timing: seconds per phase: `gen`, `reward`, `gen_max`.
        reward_columns: names of the columns that the reward function returned, which dumps show.
        probe: responses sampled without top-p and top-k, on which the learner compares sampler and trainer. Set only
            with the first batch, and only if the batch itself was sampled otherwise.
    """

    batch: DataProto
    metrics: dict[str, float]
    timing: dict[str, float]
    reward_columns: tuple[str, ...] = ()
    probe: DataProto | None = None


class Sampler:
    """Produces the batches of a run, one at a time.

    Args:
        config: the whole configuration.
        rollout: generates responses. The caller updates its weights between batches.
        reward_fn: scores a batch of responses.
        loader: yields batches of prompts.
        pool: chooses the groups that are trained on.

    Attributes:
        step: number of batches that `next` returned. The sampling noise is keyed by it.
        reward_columns: names of the columns that the reward function last returned.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        rollout: Rollout,
        reward_fn: RewardManager,
        loader: StatefulLoader,
        pool: PromptPool,
    ) -> None:
        self.config = config
        self.rollout = rollout
        self.reward_fn = reward_fn
        self.loader = loader
        self.pool = pool
        self.needs = Needs.of(config)
        self.step = 0
        self.reward_columns: tuple[str, ...] = ()
        self._prompts = _endless(loader)

    def next(self) -> Sampled:
        """Return the next scored batch: prompts are drawn, answered and scored until the pool has enough of them."""
        self.step += 1
        timer = PhaseTimer(memory_advice())
        metrics: dict[str, float] = {}
        while self.pool.wanted:
            prompts = next(self._prompts)
            batch = self.generate(prompts, timer)
            scored = self.score(batch, timer)
            timeouts = metrics.get("reward/timeouts", 0.0) + scored.get("reward/timeouts", 0.0)
            metrics |= scored | {"reward/timeouts": timeouts}
            if self.needs.reward_baselines:
                metrics |= self.add_baselines(batch, prompts, timer)
            self.pool.add(batch)
        batch, of_pool = self.pool.take()
        probe = self.probe(batch) if self.step == 1 else None
        return Sampled(batch, metrics | of_pool, dict(timer.seconds), self.reward_columns, probe)

    def generate(self, prompts: DataProto, timer: PhaseTimer) -> DataProto:
        """Generate `rollout.n` samples of each prompt, with the sampler's log-probabilities."""
        with timer.phase("gen"):
            return self.respond(repeat_for_sampling(prompts, self.config.actor_rollout_ref.rollout.n))

    def score(self, batch: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """Add `token_level_scores` [B, T], each response's reward on its last token, and the function's columns.

        Returns:
            The metrics of the reward manager.
        """
        with timer.phase("reward"):
            result = self.reward_fn(batch, return_dict=True)
        batch.batch["token_level_scores"] = result["reward_tensor"]
        for name, values in result["reward_extra_info"].items():
            batch.non_tensor_batch[name] = object_array(values)
        self.reward_columns = tuple(result["reward_extra_info"])
        metrics: dict[str, float] = result["metrics"]
        return metrics

    def add_baselines(self, batch: DataProto, prompts: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """Add `reward_baselines` [B]: the score of the greedy response to the row's prompt (ReMax)."""
        with timer.phase("gen_max"):
            greedy = self.respond(repeat_for_sampling(prompts, 1), do_sample=False)
        with timer.phase("reward"):
            scores = self.reward_fn(greedy).sum(dim=-1)
        uids = greedy.non_tensor_batch["uid"]
        sums = Groups(uids, scores.device).sum(scores)
        group_of = {uid: number for number, uid in enumerate(dict.fromkeys(uids.tolist()))}
        rows = [group_of[uid] for uid in batch.non_tensor_batch["uid"].tolist()]
        batch.batch["reward_baselines"] = sums[torch.tensor(rows)]
        return {"critic/reward_baselines/mean": sums.mean().item()}

    def probe(self, batch: DataProto) -> DataProto | None:
        """Generate a few responses without top-p and top-k, to compare sampler and trainer on them.

        Returns None if no probe is wanted, or if the batch itself was sampled this way. With top-p or top-k, sampler
        and trainer are expected to differ by the probability mass that was kept.
        """
        wanted = self.config.algorithm.rollout_correction.probe_threshold is not None
        if not wanted or is_untruncated(self.config.actor_rollout_ref.rollout):
            return None
        return self.respond(probe_prompts(batch), **UNTRUNCATED)

    def respond(self, prompts: DataProto, **sampling: Any) -> DataProto:
        """Generate responses to the rows of `prompts` for training; see `respond`."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        return respond(self.rollout, prompts, temperature, global_steps=self.step, validate=False, **sampling)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the prompts that wait for the next step, and return the rest of the state."""
        self.pool.save(folder)
        return {"train_loader": self.loader.state_dict(), "reward_columns": list(self.reward_columns)}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from what `save` wrote and returned."""
        self.loader.load_state_dict(state["train_loader"])
        self.reward_columns = tuple(state["reward_columns"])
        self.pool.load(folder)


def respond(rollout: Rollout, prompts: DataProto, temperature: float, **meta: Any) -> DataProto:
    """Have a rollout answer prompts. The answer also has the columns of the prompts.

    A rollout that returns no `uid` answers row by row. A rollout that returns `uid` may return any number of rows per
    prompt, in any order; each row gets the columns of its prompt. A column that the rollout returns is kept as it is.

    Args:
        prompts: rows with all of their columns (`raw_prompt`, `extra_info`, ...); the rollout gets all of them.
        temperature: the temperature that responses are trained at.
        meta: settings of this call: `global_steps`, `validate`, and fields of `SamplingParams` to override.

    Raises:
        RolloutError: a prompt has no answer, or an answer has no prompt.
    """
    asked = DataProto(batch=prompts.batch, non_tensor_batch=dict(prompts.non_tensor_batch), meta_info=meta)
    answer = trim(rollout.generate(asked))
    answer.non_tensor_batch = _columns_of(prompts, answer) | answer.non_tensor_batch
    answer.meta_info = {"temperature": temperature}
    return answer


def _columns_of(prompts: DataProto, answer: DataProto) -> dict[str, np.ndarray]:
    """Return the prompts' columns for the rows of the answer, found by `uid` and `sample`, or by row without `uid`."""
    carried, returned = prompts.non_tensor_batch, answer.non_tensor_batch
    if "uid" not in returned:
        if len(answer) != len(prompts):
            raise RolloutError(
                f"the rollout returned {len(answer)} rows for {len(prompts)}, and no column 'uid' to tell which prompt "
                "each row answers; a rollout that returns another number of rows must return 'uid' and 'sample'"
            )
        return dict(carried)
    names = [name for name in ("uid", "sample") if name in returned and name in carried]
    asked = _keys(carried, names)
    row_of = {key: row for row, key in reversed(list(enumerate(asked)))}
    answered = _keys(returned, names)
    strange, lost = set(answered) - set(asked), set(asked) - set(answered)
    if strange or lost:
        what = "answered rows that were not asked for" if strange else "left rows without an answer"
        raise RolloutError(
            f"the rollout {what}: {', '.join(names)} = {sorted(strange or lost)[:3]} "
            f"({len(strange or lost)} in all, of {len(set(asked))})"
        )
    rows = np.array([row_of[key] for key in answered], dtype=np.int64)
    # If the rollout does not say which sample a row belongs to, every row counts as its own sample.
    kept = {name: column for name, column in carried.items() if name != "sample" or "sample" in returned}
    return {name: column[rows] for name, column in kept.items()}


def _keys(columns: Mapping[str, np.ndarray], names: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(*(map(str, columns[name]) for name in names), strict=True))


def _endless(loader: StatefulLoader) -> Iterator[DataProto]:
    """Yield the loader's batches, epoch after epoch, from its current position."""
    while True:
        yield from loader
