"""From prompts to scored batches. `Sampler.next` draws prompts, generates responses and scores them.

Shapes: B rows, T response width.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.algorithms.groups import Groups
from hybridrl.config import PPOTrainerConfig
from hybridrl.data import StatefulLoader
from hybridrl.errors import RewardError, RolloutError
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.missing import MissingSample
from hybridrl.protocol.names import MISSING_SAMPLES, ROUTED_EXPERTS
from hybridrl.reward import RewardManager
from hybridrl.reward.columns import part_means
from hybridrl.rollout import Rollout
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import repeat_for_sampling, trim
from hybridrl.trainer.ppo.correction import UNTRUNCATED, is_untruncated, probe_prompts
from hybridrl.trainer.ppo.early_scores import EarlyScores
from hybridrl.trainer.ppo.memory import memory_advice
from hybridrl.trainer.ppo.needs import Needs
from hybridrl.trainer.ppo.prompt_pool import PromptPool
from hybridrl.trainer.ppo.role_scores import Scorer

_COUNTS = ("reward/timeouts", "reward/errors")


@dataclass(frozen=True)
class Sampled:
    """A scored batch and how it was made.

    Attributes:
        batch: `train_batch_size` prompts with all of their samples: prompts, responses, masks, the sampler's
            log-probabilities, `token_level_scores` [B, T], and the columns of the prompts, the rollout and the reward
            function.
        metrics: metrics of generation, scoring and the prompt pool.
        timing: seconds per phase: `data`, `gen`, `reward`, `gen_max`, and those of roles that score.
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
        scorer: adds the scores of roles; None: there are none.

    Attributes:
        step: number of batches that `next` returned. The sampling noise is keyed by it.
        reward_columns: names of the columns that the reward function last returned.
        unscored: the batch that the reward function is scoring, or failed for.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        rollout: Rollout,
        reward_fn: RewardManager,
        loader: StatefulLoader,
        pool: PromptPool,
        scorer: Scorer | None = None,
    ) -> None:
        self.config = config
        self.rollout = rollout
        self.reward_fn = reward_fn
        self.loader = loader
        self.pool = pool
        self.scorer = scorer or Scorer({})
        self.needs = Needs.of(config)
        self.step = 0
        self.reward_columns: tuple[str, ...] = ()
        self.unscored: DataProto | None = None
        self._early: EarlyScores | None = None
        self._failed: list[bool] = []
        self._prompts = _endless(loader)

    def next(self) -> Sampled:
        """Return the next scored batch: prompts are drawn, answered and scored until the pool has enough of them."""
        self.step += 1
        timer = PhaseTimer(memory_advice())
        metrics: dict[str, float] = {}
        while self.pool.wanted:
            with timer.phase("data"):
                prompts = next(self._prompts)
            batch = self.generate(prompts, timer)
            if not len(batch):
                continue
            metrics = _merged(metrics, self.score(batch, timer))
            if self.needs.reward_baselines:
                metrics = _merged(metrics, self.add_baselines(batch, prompts, timer))
            if any(self._failed):
                batch = without_failed(batch, self._failed)
            if len(batch):
                self.pool.add(batch)
        batch, of_pool = self.pool.take()
        parts = part_means({name: batch.non_tensor_batch[name].tolist() for name in self.reward_columns})
        probe = self.probe(batch) if self.step == 1 else None
        return Sampled(batch, metrics | parts | of_pool, dict(timer.seconds), self.reward_columns, probe)

    def generate(self, prompts: DataProto, timer: PhaseTimer) -> DataProto:
        """Generate `rollout.n` samples of each prompt, with the sampler's log-probabilities."""
        with timer.phase("gen"):
            asked = repeat_for_sampling(prompts, self.config.actor_rollout_ref.rollout.n)
            return without_dropped(self.respond(asked, **self._recorded), self.config.actor_rollout_ref.rollout.n)

    def score(self, batch: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """Add `token_level_scores` [B, T], each response's reward on its last token, and the function's columns.

        Returns:
            The metrics of the reward manager.
        """
        result = self._ask(batch, timer)
        self._failed = self._without_verdict(result)
        batch.batch["token_level_scores"] = result["reward_tensor"]
        for name, values in result["reward_extra_info"].items():
            batch.non_tensor_batch[name] = object_array(values)
        self.reward_columns = tuple(result["reward_extra_info"])
        metrics: dict[str, float] = result["metrics"]
        return metrics

    def add_baselines(self, batch: DataProto, prompts: DataProto, timer: PhaseTimer) -> dict[str, float]:
        """Add `reward_baselines` [B]: the score of the greedy response to the row's prompt (ReMax).

        With `reward.on_error=drop`, a prompt whose greedy response could not be scored counts as failed.

        Returns:
            The mean, and the manager's counts of time-outs and errors.
        """
        with timer.phase("gen_max"):
            greedy = self.respond(repeat_for_sampling(prompts, 1), do_sample=False)
        if lost := missing_of(greedy):
            raise RolloutError(
                f"{len(lost)} prompts have no greedy response, because their agent "
                f"sessions failed, and algorithm.adv_estimator={self.config.algorithm.adv_estimator} compares with it; "
                "raise actor_rollout_ref.rollout.agent.retries, or take an estimator that compares samples"
            )
        result = self._ask(greedy, timer)
        scores = result["reward_tensor"].sum(dim=-1)
        uids = greedy.non_tensor_batch["uid"]
        without = {uid for uid, failed in zip(uids, self._without_verdict(result), strict=True) if failed}
        if without:
            rows = zip(self._failed, batch.non_tensor_batch["uid"], strict=True)
            self._failed = [failed or uid in without for failed, uid in rows]
        sums = Groups(uids, scores.device).sum(scores)
        group_of = {uid: number for number, uid in enumerate(dict.fromkeys(uids.tolist()))}
        baselines = [group_of[uid] for uid in batch.non_tensor_batch["uid"].tolist()]
        batch.batch["reward_baselines"] = sums[torch.tensor(baselines)]
        counts = {name: result["metrics"].get(name, 0.0) for name in _COUNTS}
        return {"critic/reward_baselines/mean": sums.mean().item()} | counts

    def _without_verdict(self, result: Mapping[str, Any]) -> list[bool]:
        """Tell which rows have no verdict."""
        missing = [one is not None for one in result["missing"]]
        if self.config.reward.on_error == "zero":
            return missing
        return [one or bool(failed) for one, failed in zip(missing, result.get("failed") or missing, strict=True)]

    def _ask(self, batch: DataProto, timer: PhaseTimer) -> dict[str, Any]:
        """Return what the reward manager and the roles that score make of a batch.

        Raises:
            RewardError: it does not return which rows failed, and `reward.on_error=drop` needs that.
        """
        self.unscored = batch
        early, self._early = self._early, None
        result = self.scorer(early or self.reward_fn, batch, timer)
        self.unscored = None
        if self.config.reward.on_error == "drop" and len(result.get("failed", ())) != len(batch):
            raise RewardError(
                f"reward.on_error=drop: the reward manager {type(self.reward_fn).__name__} does not return which rows "
                "failed ('failed', one bool per row); return what RewardManager.__call__ returns, or set on_error=zero"
            )
        return result

    def probe(self, batch: DataProto) -> DataProto | None:
        """Generate a few responses without top-p and top-k, to compare sampler and trainer on them.

        Returns None if no probe is wanted, or if the batch itself was sampled this way. With top-p or top-k, sampler
        and trainer are expected to differ by the probability mass that was kept.
        """
        wanted = self.config.algorithm.rollout_correction.probe_threshold is not None
        if not wanted or is_untruncated(self.config.actor_rollout_ref.rollout):
            return None
        return self.respond(probe_prompts(batch), scored=False, **self._recorded, **UNTRUNCATED)

    @property
    def _recorded(self) -> dict[str, bool]:
        """What asks the rollout for the experts of the tokens that the trainer computes."""
        return {ROUTED_EXPERTS: True} if self.needs.sampled_experts else {}

    def respond(self, prompts: DataProto, scored: bool = True, **sampling: Any) -> DataProto:
        """Generate responses to the rows of `prompts` for training; see `respond`.

        Args:
            prompts: what to answer.
            scored: they are scored next, each as soon as it is complete.
            sampling: settings of this call.
        """
        temperature = self.config.actor_rollout_ref.rollout.temperature
        self._early = EarlyScores(self.reward_fn, self.rollout) if scored else None
        with self._early.listening(prompts) if self._early is not None else contextlib.nullcontext():
            return respond(self.rollout, prompts, temperature, global_steps=self.step, validate=False, **sampling)

    def position(self) -> dict[str, Any]:
        """Return where the next batch begins, for `rewind`."""
        return {"loader": self.loader.state_dict(), "pool": self.pool.position(), "step": self.step}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Forget what was drawn and generated since `position`, so that `save` saves the state of that moment."""
        self.loader.load_state_dict(position["loader"])
        self._prompts = _endless(self.loader)
        self.pool.rewind(position["pool"])
        self.step = position["step"]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the prompts that wait for the next step, and return the rest of the state."""
        self.pool.save(folder)
        return {"train_loader": self.loader.state_dict(), "reward_columns": list(self.reward_columns)}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from what `save` wrote and returned."""
        self.loader.load_state_dict(state["train_loader"])
        self.reward_columns = tuple(state["reward_columns"])
        self.pool.load(folder)


def _merged(metrics: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with those of a further call of the reward manager; counts are added."""
    counts = {name: metrics.get(name, 0.0) + more.get(name, 0.0) for name in _COUNTS if name in {**metrics, **more}}
    return {**metrics, **more, **counts}


def without_failed(batch: DataProto, failed: Sequence[bool]) -> DataProto:
    """Return a batch without the samples that could not be scored (`reward.on_error=drop`).

    All rows of such a sample are left out, and a prompt with a single sample left, which has nothing to compare with.
    """
    objects = batch.non_tensor_batch
    numbers = objects.get("sample", np.arange(len(batch))).tolist()
    uids = [str(uid) for uid in objects["uid"]]
    samples = list(zip(uids, numbers, strict=True))
    bad = {sample for sample, is_bad in zip(samples, failed, strict=True) if is_bad}
    left: dict[str, set[Any]] = {uid: set() for uid in uids}
    for uid, number in samples:
        if (uid, number) not in bad:
            left[uid].add(number)
    hit = {uid for uid, _ in bad}
    kept = [
        row
        for row, (uid, number) in enumerate(samples)
        if (uid, number) not in bad and not (uid in hit and len(left[uid]) < 2)
    ]
    return batch.select_idxs(torch.tensor(kept, dtype=torch.int64))


def missing_of(batch: DataProto) -> list[MissingSample]:
    """Return the samples that a generated batch lacks."""
    return [one for one in batch.meta_info.get(MISSING_SAMPLES, ()) if not one.again]


def without_dropped(batch: DataProto, samples: int) -> DataProto:
    """Return a batch without the rest of a group that the rollout left only one sample of, of several.

    The rollout may leave out samples (`rollout.agent.on_error=drop`), which it lists in the meta.
    """
    hit = {one.uid for one in missing_of(batch)}
    batch.meta_info.pop(MISSING_SAMPLES, None)
    if not hit or samples == 1:
        return batch
    uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
    numbers = [str(number) for number in batch.non_tensor_batch["sample"]]
    left: dict[str, set[str]] = {}
    for uid, number in zip(uids, numbers, strict=True):
        left.setdefault(uid, set()).add(number)
    kept = [row for row, uid in enumerate(uids) if uid not in hit or len(left[uid]) > 1]
    return batch if len(kept) == len(batch) else batch.select_idxs(torch.tensor(kept, dtype=torch.int64))


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
    kept = {name: answer.meta_info[name] for name in (MISSING_SAMPLES,) if name in answer.meta_info}
    answer.meta_info = {"temperature": temperature, **kept}
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
    dropped = {one.name[: len(names)] for one in missing_of(answer)}
    strange, lost = set(answered) - set(asked), set(asked) - set(answered) - dropped
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
