"""From prompts to scored batches. `Sampler.next` draws prompts, generates responses and scores them.

Shapes: B rows, T response width.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.algorithms.groups import Groups
from hybridrl.config import PPOTrainerConfig
from hybridrl.data import StatefulLoader
from hybridrl.errors import RewardError, RolloutError
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import (
    ATTEMPT,
    DATA_COLUMNS,
    MISSING_SAMPLES,
    MULTI_MODAL_INPUTS,
    PROMPT_IMAGES,
    ROUTED_EXPERTS,
    TRAJECTORY_REWARD,
)
from hybridrl.protocol.sample_names import SampleName, sample_names
from hybridrl.reward import RewardManager
from hybridrl.reward.columns import part_means
from hybridrl.rollout import Rollout
from hybridrl.rollout.rollout import OnFinished
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import repeat_for_sampling, trim
from hybridrl.trainer.ppo.correction import UNTRUNCATED, is_untruncated, probe_prompts
from hybridrl.trainer.ppo.early_scores import EarlyScores, scored_early
from hybridrl.trainer.ppo.episode import EpisodeBatch, counts_of, merged
from hybridrl.trainer.ppo.memory import memory_advice
from hybridrl.trainer.ppo.missing import MissingPolicy
from hybridrl.trainer.ppo.missing_statistics import MissingStatistics
from hybridrl.trainer.ppo.prompt_pool import PromptPool
from hybridrl.trainer.ppo.role_scores import Scorer
from hybridrl.trainer.ppo.run_requirements import RunRequirements


@dataclass(frozen=True)
class ScoredBatch:
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
        failed_batches: keeps a batch that could not be scored; None: it is not kept.

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
        scorer: Scorer | None = None,
        failed_batches: FailedBatches | None = None,
    ) -> None:
        self.config = config
        self.rollout = rollout
        self.reward_fn = reward_fn
        self.loader = loader
        self.pool = pool
        self.scorer = scorer or Scorer({})
        self.failed_batches = failed_batches
        self.needs = RunRequirements.of(config)
        self.step = 0
        self.reward_columns: tuple[str, ...] = ()
        self.missing = MissingPolicy(config, pool.pad_token_id)
        settings = config.algorithm.missing
        self.missing_statistics = MissingStatistics(settings.window, settings.significance)
        self._fruitless = 0
        self._prompts = _endless(loader)

    def next(self) -> ScoredBatch:
        """Return the next scored batch: prompts are drawn, answered and scored until the pool has enough of them."""
        self.step += 1
        timer = PhaseTimer(memory_advice())
        metrics: dict[str, float] = {}
        columns: frozenset[str] = frozenset()
        while self.pool.needed:
            with timer.phase("data"):
                prompts = next(self._prompts)
            samples = repeat_for_sampling(prompts, self.config.actor_rollout_ref.rollout.n)
            columns = frozenset(samples.non_tensor_batch)
            episodes = self.run_episodes(samples, timer, self.generate)
            self.missing_statistics.add(episodes)
            metrics = merged(metrics, episodes.metrics)
            if episodes.batch is not None:
                self.reward_columns = episodes.columns
            batch = episodes.trainable()
            if batch is not None and self.needs.reward_baselines:
                batch, baseline_metrics = self.add_baselines(batch, prompts, timer)
                metrics = merged(metrics, baseline_metrics)
            if batch is not None:
                self.pool.add(batch)
            self._check_progress(len(prompts), batch)
        batch, pool_metrics = self.pool.take()
        metrics |= self.missing_statistics.end_step()
        parts = part_means({name: batch.non_tensor_batch[name].tolist() for name in self.reward_columns})
        probe = self.probe(batch, columns) if self.step == 1 else None
        return ScoredBatch(batch, metrics | parts | pool_metrics, dict(timer.seconds), self.reward_columns, probe)

    def run_episodes(self, samples: DataProto, timer: PhaseTimer, generate: Callable[..., DataProto]) -> EpisodeBatch:
        """Generate and score samples, and those without a score again, as `algorithm.missing` says.

        Args:
            samples: a row per sample.
            timer: measures the phases.
            generate: answers rows: `generate` or `generate_greedy`.
        """
        episodes = EpisodeBatch(self.missing, samples)
        while (rows := episodes.rows) is not None:
            with scored_early(self.reward_fn, rows) as reward_fn:
                answer = generate(rows, timer, episodes.attempt, on_finished=reward_fn.on_finished)
            with self._keeping(answer):
                episodes.add(answer, self.score(answer, timer, reward_fn) if len(answer) else None)
        return episodes

    def _keeping(self, answer: DataProto) -> AbstractContextManager[None]:
        """Keep the answer if it cannot be scored inside the block."""
        if self.failed_batches is None:
            return nullcontext()
        return self.failed_batches.keeping(answer, self.step, RewardError)

    def _check_progress(self, prompts: int, batch: DataProto | None) -> None:
        """End a run that would draw prompts for ever, because all samples are left out."""
        self._fruitless = 0 if batch is not None else self._fruitless + prompts
        if self._fruitless >= max(self.pool.prompts_in_data, 1):
            raise RolloutError(
                f"none of the last {self._fruitless} prompts, a whole pass over the data, has samples with a reward "
                "(enough of them for algorithm.adv_estimator): all were left out. The warnings and missing/* say why"
            )

    def generate(
        self, samples: DataProto, timer: PhaseTimer, attempt: int = 0, on_finished: OnFinished | None = None
    ) -> DataProto:
        """Generate a response to each row, with the sampler's log-probabilities.

        Args:
            samples: a row per sample.
            timer: measures `gen`.
            attempt: how often these samples were generated before; it changes the seeds.
            on_finished: begins to score samples that finish before others; see `Rollout.generate`.
        """
        with timer.phase("gen"):
            return self.respond(samples, on_finished, **self._recorded, **_attempt_meta(attempt))

    def generate_greedy(
        self, samples: DataProto, timer: PhaseTimer, attempt: int = 0, on_finished: OnFinished | None = None
    ) -> DataProto:
        """Generate the most likely response to each row, for the baselines of ReMax; `gen_max` is measured."""
        with timer.phase("gen_max"):
            return self.respond(samples, on_finished, do_sample=False, **_attempt_meta(attempt))

    def score(self, batch: DataProto, timer: PhaseTimer, reward_fn: RewardManager | EarlyScores) -> dict[str, Any]:
        """Score responses: by the reward function, and by the models of roles that score.

        Args:
            batch: the responses.
            timer: measures `reward`, and the phases of the roles.
            reward_fn: the reward manager of the run. It has begun with responses that finished before others.

        Returns:
            What `RewardManager.__call__` returns: `reward_tensor` [B, T], each response's reward on its last token;
            and, if there are any, `reward_extra_info` (columns of the batch), `metrics`, `failed` and `missing`.
        """
        return self.scorer(reward_fn, batch, timer)

    def add_baselines(
        self, batch: DataProto, prompts: DataProto, timer: PhaseTimer
    ) -> tuple[DataProto | None, dict[str, float]]:
        """Add `reward_baselines` [B]: the score of the greedy response to the row's prompt (ReMax).

        A greedy response without a score is asked for again, as other samples are. A prompt that has none in the end
        is left out, because its advantages would be whole scores.

        Returns:
            The batch, None where nothing of it is left; and the mean of the baselines, with the counts of time-outs and
            errors.
        """
        uids = set(batch.non_tensor_batch["uid"].tolist())
        rows = [row for row, uid in enumerate(prompts.non_tensor_batch["uid"].tolist()) if uid in uids]
        samples = repeat_for_sampling(prompts.select_idxs(rows), 1)
        episodes = self.run_episodes(samples, timer, self.generate_greedy)
        self.missing_statistics.add(episodes, scores=False)  # greedy samples are not those that training sees
        metrics = counts_of(episodes.metrics)
        if episodes.batch is None:
            return None, metrics
        greedy_uids = episodes.batch.non_tensor_batch["uid"]
        sums = Groups(greedy_uids, torch.device("cpu")).sum(episodes.batch.batch["token_level_scores"].sum(dim=-1))
        baseline_of = dict(zip(dict.fromkeys(greedy_uids.tolist()), sums.tolist(), strict=True))
        rows = [row for row, uid in enumerate(batch.non_tensor_batch["uid"].tolist()) if uid in baseline_of]
        batch = batch if len(rows) == len(batch) else batch.select_idxs(rows)
        baselines = [baseline_of[uid] for uid in batch.non_tensor_batch["uid"].tolist()]
        batch.batch["reward_baselines"] = torch.tensor(baselines, dtype=sums.dtype)
        return batch, metrics | {"critic/reward_baselines/mean": sums.mean().item()}

    def probe(self, batch: DataProto, columns: Collection[str]) -> DataProto | None:
        """Generate a few responses without top-p and top-k, to compare sampler and trainer on them.

        Args:
            batch: the responses of the step.
            columns: names of the columns of prompts.

        Returns None if no probe is wanted, or if the batch itself was sampled this way. With top-p or top-k, sampler
        and trainer are expected to differ by the probability mass that was kept.
        """
        no_probe = self.config.algorithm.rollout_correction.probe_threshold is None
        if no_probe or is_untruncated(self.config.actor_rollout_ref.rollout):
            return None
        return self.respond(probe_prompts(batch, columns), None, **self._recorded, **UNTRUNCATED)

    @property
    def _recorded(self) -> dict[str, bool]:
        """The setting that has the rollout return the experts of the tokens that the trainer computes."""
        return {ROUTED_EXPERTS: True} if self.needs.sampled_experts else {}

    def respond(self, prompts: DataProto, on_finished: OnFinished | None = None, **sampling: Any) -> DataProto:
        """Generate responses to the rows of `prompts` for training, with settings of this call; see `respond`."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        meta = {"global_steps": self.step, "validate": False, **sampling}
        return respond(self.rollout, prompts, temperature, on_finished, **meta)

    def position(self) -> dict[str, Any]:
        """Return where the next batch begins, for `rewind`."""
        return {
            "loader": self.loader.state_dict(),
            "pool": self.pool.position(),
            "step": self.step,
            "missing": self.missing_statistics.state(),
        }

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Forget what was drawn and generated since `position`, so that `save` saves the state of that moment."""
        self.loader.load_state_dict(position["loader"])
        self._prompts = _endless(self.loader)
        self.pool.rewind(position["pool"])
        self.step = position["step"]
        self.missing_statistics.load(position["missing"])

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the prompts that wait for the next step, and return the rest of the state."""
        self.pool.save(folder)
        return {
            "train_loader": self.loader.state_dict(),
            "reward_columns": list(self.reward_columns),
            "missing": self.missing_statistics.state(),
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from what `save` wrote and returned."""
        self.loader.load_state_dict(state["train_loader"])
        self.reward_columns = tuple(state["reward_columns"])
        self.pool.load(folder)
        if "missing" in state:  # checkpoints of earlier versions have none
            self.missing_statistics.load(state["missing"])


def _attempt_meta(attempt: int) -> dict[str, Any]:
    return {ATTEMPT: attempt} if attempt else {}


def respond(
    rollout: Rollout, prompts: DataProto, temperature: float, on_finished: OnFinished | None = None, **meta: Any
) -> DataProto:
    """Have a rollout answer prompts. The answer also has the columns of the prompts.

    A rollout that returns no `uid` answers row by row. A rollout that returns `uid` may return any number of rows per
    prompt, in any order; each row gets the columns of its prompt. A column that the rollout returns is kept as it is.

    Args:
        prompts: rows with all of their columns (`raw_prompt`, `extra_info`, ...); the rollout gets all of them.
        temperature: the temperature that responses are trained at.
        on_finished: see `Rollout.generate`.
        meta: settings of this call: `global_steps`, `validate`, and fields of `SamplingParams` to override.

    Raises:
        RolloutError: a prompt has no answer, or an answer has no prompt.
    """
    request = DataProto(batch=prompts.batch, non_tensor_batch=dict(prompts.non_tensor_batch), meta_info=meta)
    answer = trim(rollout.generate(request) if on_finished is None else rollout.generate(request, on_finished))
    columns = _columns_of(prompts, answer)
    if MULTI_MODAL_INPUTS in answer.non_tensor_batch and MULTI_MODAL_INPUTS in columns:
        columns[PROMPT_IMAGES] = columns[MULTI_MODAL_INPUTS]
    of_data = [name for name in columns if name not in answer.non_tensor_batch]
    brought = {DATA_COLUMNS: of_data} if TRAJECTORY_REWARD in answer.non_tensor_batch else {}
    answer.non_tensor_batch = columns | answer.non_tensor_batch
    missing = {name: answer.meta_info[name] for name in (MISSING_SAMPLES,) if name in answer.meta_info}
    answer.meta_info = {"temperature": temperature, **missing, **brought, **_attempt_meta(meta.get(ATTEMPT, 0))}
    return answer


def _columns_of(prompts: DataProto, answer: DataProto) -> dict[str, np.ndarray]:
    """Return the prompts' columns for the rows of the answer, found by `uid` and `sample`, or by row without `uid`."""
    columns, returned = prompts.non_tensor_batch, answer.non_tensor_batch
    if "uid" not in returned:
        if len(answer) != len(prompts):
            raise RolloutError(
                f"the rollout returned {len(answer)} rows for {len(prompts)}, and no column 'uid' to tell which prompt "
                "each row answers; a rollout that returns another number of rows must return 'uid' and 'sample'"
            )
        return dict(columns)
    numbered = "sample" in returned and "sample" in columns

    def keys(names: Iterable[SampleName]) -> list[tuple[Any, ...]]:
        return [name if numbered else name[:1] for name in names]

    requested, answered = keys(sample_names(prompts)), keys(sample_names(answer))
    row_of = {key: row for row, key in reversed(list(enumerate(requested)))}
    dropped = keys(sample.name for sample in answer.meta_info.get(MISSING_SAMPLES, ()) if not sample.again)
    strange, unanswered = set(answered) - set(requested), set(requested) - set(answered) - set(dropped)
    if strange or unanswered:
        what = "answered rows that were not asked for" if strange else "left rows without an answer"
        raise RolloutError(
            f"the rollout {what}: {'uid, sample' if numbered else 'uid'} = "
            f"{[tuple(map(str, key)) for key in sorted(strange or unanswered)[:3]]} "
            f"({len(strange or unanswered)} in all, of {len(set(requested))})"
        )
    rows = np.array([row_of[key] for key in answered], dtype=np.int64)
    # If the rollout does not say which sample a row belongs to, every row counts as its own sample.
    return {name: column[rows] for name, column in columns.items() if name != "sample" or "sample" in returned}


def _endless(loader: StatefulLoader) -> Iterator[DataProto]:
    """Yield the loader's batches, epoch after epoch, from its current position."""
    while True:
        yield from loader
