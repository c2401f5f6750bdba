"""Reward managers: from responses to a reward for each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch

from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.protocol.bookkeeping import for_rewards
from hybridrl.protocol.names import ATTEMPT, DATA_COLUMNS, TURN_LEVEL_REWARDS
from hybridrl.registry import REWARD_MANAGERS
from hybridrl.reward.column_checks import check_columns, check_read_columns, check_rows, ground_truths
from hybridrl.reward.columns import ExtraColumns, check_keys, extra_of
from hybridrl.reward.pools import create_pool
from hybridrl.reward.positions import last_generated, tensors_of
from hybridrl.reward.processes.outcome import Outcome, without_score
from hybridrl.reward.response_rows import ResponseRow, batch_responses, own_rewards
from hybridrl.reward.results import BadScore, check_number
from hybridrl.reward.scorers import SampleScorer
from hybridrl.reward.signature import Form, Sample, ground_truth_of
from hybridrl.scored import Unscored
from hybridrl.utils.entry_metadata import ManagerMetadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PPOTrainerConfig
    from hybridrl.protocol import DataProto

#: what becomes of samples that the reward function failed for, by the setting that says so
_THEN = {
    "zero": "they score 0",
    "drop": "training and validation leave them out (of greedy baselines, all samples of the prompt)",
    "refill": "they are generated again",
    "raise": "the run ends",
}
#: the managers that were imported, by name
REGISTRY: dict[str, type[RewardManager]] = REWARD_MANAGERS.objects


def register_reward_manager(
    name: str, *, settings: type | str | None = None, runs_functions: bool = True
) -> Callable[[type[RewardManager]], type[RewardManager]]:
    """Class decorator: make a manager known as `reward.reward_manager.name=NAME`.

    Args:
        settings: dataclass of the keys of `reward.reward_kwargs`, or `module:Class`; the manager has an instance as
            `self.settings`. A method `check(config)` of it may yield sentences about what is wrong.
        runs_functions: see `hybridrl.utils.entry_metadata.ManagerMetadata`.

    Raises:
        RewardError: another class has that name.
    """

    def decorate(cls: type[RewardManager]) -> type[RewardManager]:
        REWARD_MANAGERS.add(name, cls, ManagerMetadata(settings=settings, runs_functions=runs_functions))
        cls.settings_class = REWARD_MANAGERS.settings(name)
        return cls

    return decorate


#: verl's name
register = register_reward_manager


def get_reward_manager_cls(name: str) -> type[RewardManager]:
    """The manager class registered under a name, or named as `module:Class`.

    Raises:
        RewardError: there is none; lists the known ones.
    """
    cls: type[RewardManager] = REWARD_MANAGERS.get(name)
    return cls


@dataclass(frozen=True)
class RowScore:
    """One row's score.

    Attributes:
        score: after `RewardManager.adjust`; NaN without a score.
        extra: the row's extra information.
        outcome: what the reward function returned; not `unscored` where `reward.on_error=zero` made it a 0.
    """

    score: float
    extra: dict[str, Any]
    outcome: Outcome


@register_reward_manager("naive")
class RewardManager:
    """Scores each response with the reward function; the score is placed on the last generated token.

    Derive custom managers from it: `adjust` changes one sample's score, `score_batch` all of them.

    Args:
        config: the run's configuration.
        tokenizer: turns responses into text.
        pool: runs the reward functions.

    Raises:
        RewardError: `reward.reward_kwargs` holds a key that this manager does not have.
    """

    form: ClassVar[Form] = "sample"
    settings_class: ClassVar[type | None] = None
    every_score_is_accuracy: ClassVar[bool] = (
        False  # a number that a function returns is `acc`, also if it is not 0 or 1
    )

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, pool: SampleScorer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.pool = pool
        self.metrics: dict[str, float] = {}
        self._scores_zero = config.reward.on_error == "zero"
        self._make_columns = ExtraColumns(0.0 if self._scores_zero else None, self.every_score_is_accuracy)
        self.settings = self.read_settings(config)

    @classmethod
    def read_settings(cls, config: PPOTrainerConfig) -> Any:
        """`reward.reward_kwargs` as this class's own dataclass; None where it has none.

        Raises:
            RewardError: a key or a value is wrong.
        """
        from hybridrl.config.entry_settings import read_reward_kwargs

        settings, faults = read_reward_kwargs(cls.settings_class, cls.__name__, config)
        if faults:
            raise RewardError("; ".join(faults))
        return settings

    @classmethod
    def create_pool(cls, config: PPOTrainerConfig, num_workers: int | None = None) -> SampleScorer:
        """Return the scorer of a manager of this class, not started yet: the functions that the configuration names.

        Args:
            num_workers: processes per function; None: as the settings say.

        Raises:
            RewardError: the settings contradict each other.
        """
        return create_pool(config.reward, cls.form, num_workers)

    def start(self) -> None:
        """Start the pool's processes without waiting for them."""
        self.pool.start()

    def check(self, *datasets: Any) -> None:
        """Wait until a process has loaded the reward function, and refuse data that it cannot score.

        Call it before a model is loaded.

        Args:
            datasets: see `hybridrl.reward.check_dataset`; None is skipped.

        Raises:
            RewardError: the function cannot be loaded, or a row has an unknown data source or no ground truth.
        """
        self.pool.start(wait_for_one=True)
        for dataset in datasets:
            if dataset is not None:
                if self.pool.built_in:
                    check_rows(self.config, dataset)
                if hasattr(dataset, "table"):
                    columns = list(getattr(dataset, "columns", dataset.table.columns))
                    has_truth = any(truth is not None for truth in ground_truths(dataset))
                    check_columns(self.pool, columns, has_truth, getattr(dataset, "left_out", ()))
                    check_read_columns(self.config, columns)

    @property
    def takes_ground_truth(self) -> bool:
        """Whether any reward function gets the ground truth; waits until all have been loaded."""
        return any(how.takes_ground_truth for _, how in self.pool.calls)

    def close(self) -> None:
        """End the pool's processes."""
        self.pool.close()

    @overload
    def __call__(self, batch: DataProto, return_dict: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def __call__(self, batch: DataProto, return_dict: Literal[True]) -> dict[str, Any]: ...

    @overload
    def __call__(self, batch: DataProto, return_dict: bool) -> torch.Tensor | dict[str, Any]: ...

    def __call__(self, batch: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Score a batch.

        Args:
            batch: `responses` `[B, T]`, `attention_mask` `[B, P + T]` (or `response_mask` `[B, T]`);
                non-tensors `reward_model`, `extra_info`, and the column `data.reward_fn_key`, each if there is
                one.
            return_dict: return more than the tensor.

        Returns:
            The reward tensor, float32 `[B, T]`: each score on its response's last generated token, NaN there without a
            score, and 0 elsewhere. With `return_dict` `{"reward_tensor", "reward_extra_info": {name: list of B},
            "metrics": {name: float}, "failed": list of B, "missing": list of B}`; `failed` tells the rows that the
            function failed for (`reward.on_error`), `missing` has an `Unscored` for each row without a score. The
            extra information comes from the function's dicts (None where a sample's dict lacks a name), or is the
            score itself, where it returned numbers: `acc`, or `score` if they are not all 0 or 1. Metrics:
            `reward/timeouts`, `reward/errors` and the seconds per sample, `timing_s/reward_sample/mean` and `/max`.

        Raises:
            RewardError: see `RewardPool.run`; the sample is named by data source, uid and prompt. With
                `reward.on_error` zero, drop or refill, only if more fail than `reward.max_error_rate` allows.
        """
        responses = batch_responses(batch)
        samples = self.samples(responses)
        open_rows = self._open_rows(responses, samples)
        outcomes = [_given(response.own_reward) for response in responses]
        scored_outcomes = self.score_batch([samples[row] for row in open_rows], _names(responses, samples, open_rows))
        for row, outcome in zip(open_rows, scored_outcomes, strict=True):
            outcomes[row] = outcome
        rows = zip(outcomes, samples, responses, strict=True)
        result = self.collect(batch, [self._row_score(*row) for row in rows])
        return result if return_dict else result["reward_tensor"]

    def submit(self, batch: DataProto) -> list[Future[RowScore]]:
        """Score rows as soon as processes are free; see `submit_responses`.

        Args:
            batch: as `__call__` takes it; any number of rows, but whole sessions.
        """
        return self.submit_responses(batch_responses(batch))

    def submit_responses(self, responses: Sequence[ResponseRow]) -> list[Future[RowScore]]:
        """Score responses as soon as processes are free, for example those of a session that has just ended.

        Args:
            responses: any number of them, but whole sessions.

        Returns:
            One future per response, for `collect`. It raises `RewardError` as `RewardPool.submit` says.

        Raises:
            RewardError: the manager scores whole batches, or a row cannot be scored by the built-in functions.
        """
        if type(self).score_batch is not RewardManager.score_batch:
            raise RewardError(
                f"the reward manager {type(self).__name__} defines score_batch, so it scores whole batches and cannot "
                "score single samples as they finish"
            )
        samples = self.samples(responses)
        open_rows = self._open_rows(responses, samples)
        submitted = self.pool.submit_all([samples[row] for row in open_rows], _names(responses, samples, open_rows))
        outcome_of = dict(zip(open_rows, submitted, strict=True))
        scores = []
        for row, (sample, response) in enumerate(zip(samples, responses, strict=True)):
            outcome = outcome_of.get(row) or _known(_given(response.own_reward))
            scores.append(_then(outcome, partial(self._row_score, sample=sample, response=response)))
        return scores

    def _open_rows(self, responses: Sequence[ResponseRow], samples: Sequence[Sample]) -> list[int]:
        """Return the rows that brought no reward along, which the reward function has to score."""
        rows = [row for row, response in enumerate(responses) if response.own_reward is None]
        self._check([samples[row] for row in rows])
        return rows

    def _row_score(self, outcome: Outcome, sample: Sample, response: ResponseRow) -> RowScore:
        if response.adds:
            return RowScore(outcome.score, extra_of(outcome), outcome)
        return self._scored(outcome, sample, len(response.token_ids))

    def collect(self, batch: DataProto, scored: Sequence[RowScore]) -> dict[str, Any]:
        """Make of scored rows what `__call__` returns with `return_dict`.

        Args:
            batch: the rows.
            scored: one per row.
        """
        outcomes = [score.outcome for score in scored]
        rewards = own_rewards(batch.non_tensor_batch, len(batch))
        by_function = [outcome for outcome, reward in zip(outcomes, rewards, strict=True) if reward is None]
        self.metrics = _metrics(by_function)
        failed = [outcome.error is not None for outcome in outcomes]
        self._report_failures([outcome.error for outcome in by_function], batch.meta_info.get(ATTEMPT, 0) == 0)
        tensor = torch.zeros(tensors_of(batch)["responses"].shape, dtype=torch.float32)
        scores = torch.tensor([outcome.score for outcome in scored], dtype=torch.float32)
        tensor[torch.arange(len(scored)), last_generated(batch)] = scores
        extras, whole = [dict(outcome.extra) for outcome in scored], outcomes
        if (of_turns := tensors_of(batch).get(TURN_LEVEL_REWARDS, None)) is not None:
            tensor += of_turns
            whole = _whole_scores(extras, outcomes, rewards, of_turns.sum(-1).tolist())
        info = _with_given(self._columns(extras, whole), batch)
        missing = [outcome.unscored for outcome in outcomes]
        metrics = self.metrics
        return {
            "reward_tensor": tensor,
            "reward_extra_info": info,
            "metrics": metrics,
            "failed": failed,
            "missing": missing,
        }

    def _report_failures(self, errors: list[str | None], first: bool) -> None:
        """Report samples that the reward function failed for (`reward.on_error`), or end the run.

        Args:
            errors: of each sample that was scored; None: it did not fail.
            first: they are asked for the first time. A share of a few samples that are missing says nothing.

        Raises:
            RewardError: they are a larger share than `reward.max_error_rate`.
        """
        failures, reward = [error for error in errors if error is not None], self.config.reward
        if not failures:
            return
        message = f"the reward function failed for {len(failures)} of {len(errors)} samples"
        if first and reward.on_error is not None and len(failures) > reward.max_error_rate * len(errors):
            raise RewardError(f"{message}, more than reward.max_error_rate={reward.max_error_rate:g}. {failures[0]}")
        key = "reward.on_error" if reward.on_error is not None else "algorithm.missing.infra"
        setting = reward.on_error or self.config.algorithm.missing.infra
        notify(f"{message}; {_THEN[setting]} ({key}={setting}). The first: {failures[0]}", "warning")

    def _scored(self, outcome: Outcome, sample: Sample, length: int) -> RowScore:
        if outcome.unscored is not None:
            if not (self._scores_zero and (outcome.timed_out or outcome.error is not None)):
                return RowScore(math.nan, extra_of(outcome), outcome)
            outcome = replace(outcome, score=0.0, unscored=None)
        score, extra = self.adjust(outcome.score, extra_of(outcome), sample, length)
        try:
            score = check_number(score)
        except BadScore as error:
            raise RewardError(f"{type(self).__name__}.adjust {error}. The score was {outcome.score}") from None
        return RowScore(score, extra, outcome)

    def _check(self, samples: list[Sample]) -> None:
        if self.pool.built_in:
            check_built_in(samples, self.config.data.reward_fn_key)

    def samples(self, responses: Sequence[ResponseRow]) -> list[Sample]:
        """Return the reward function's arguments, one `Sample` per response."""
        texts = self.tokenizer.batch_decode(
            [list(response.token_ids) for response in responses], skip_special_tokens=True
        )
        named = for_rewards(responses[0].columns) if responses else []
        samples = []
        for text, response in zip(texts, responses, strict=True):
            row = response.columns
            info = row.get("extra_info")
            samples.append(
                Sample(
                    data_source=row.get(self.config.data.reward_fn_key),
                    solution_str=text,
                    ground_truth=ground_truth_of(row),
                    extra_info=(dict(info) if isinstance(info, Mapping) else {}) | _of_rollout(row),
                    prompt=_prompt_of(row, isinstance(row.get(self.config.data.prompt_key), str)),
                    token_ids=list(response.token_ids),
                    columns={name: row[name] for name in named},
                )
            )
        return samples

    def score_batch(self, samples: list[Sample], name: Callable[[int], str]) -> list[Outcome]:
        """One outcome per sample; `name` describes the i-th for messages."""
        return self.pool.run(samples, name)

    def adjust(self, score: float, extra: dict[str, Any], sample: Sample, length: int) -> tuple[float, dict[str, Any]]:
        """A sample's final score and extra information; `length` is its response's in tokens.

        Of a session in several rows, the rows before the last that brought a reward along are not adjusted.
        """
        return score, extra

    def columns_of(
        self, responses: Sequence[ResponseRow], samples: Sequence[Sample], outcomes: Sequence[Outcome]
    ) -> dict[str, list[Any]]:
        """Return the columns that scored rows have in a batch.

        Args:
            responses: the rows.
            samples, outcomes: what the reward function got and returned for each.
        """
        scored = [self._row_score(*row) for row in zip(outcomes, samples, responses, strict=True)]
        return self._columns([dict(score.extra) for score in scored], [score.outcome for score in scored])

    def _columns(self, extras: list[dict[str, Any]], outcomes: list[Outcome]) -> dict[str, list[Any]]:
        columns = self._make_columns(extras, outcomes)
        read = [self.config.data.reward_fn_key, self.config.distillation.teacher_key]
        check_keys(columns, f"the reward function ({self.pool.label})", [name for name in read if name])
        return columns


@register_reward_manager("batch")
class BatchRewardManager(RewardManager):
    """Like `naive`, for a function that takes the whole batch.

    Any manager calls a function with parameters `(responses, ground_truths)` or `(data_sources, solution_strs,
    ground_truths, extra_infos)` once with lists. This one does so for other parameter names, too.
    """

    form = "batch"


@register_reward_manager("session", runs_functions=False)
class SessionRewardManager(RewardManager):
    """Takes the rewards that sessions bring along, of environments or of loops; no reward function runs."""

    def _check(self, samples: list[Sample]) -> None:
        if samples:
            raise RewardError(
                f"reward.reward_manager.name=session: {len(samples)} samples brought no reward along, so a reward "
                "function has to score them; choose another manager, or give every session a reward (an environment "
                "with gives_rewards, reward_score of an agent loop)"
            )


@register_reward_manager("dapo", settings="hybridrl.config.schema.reward:DapoConfig")
class DAPORewardManager(RewardManager):
    """DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13), added to the score.

    With L the response's length, `max_resp_len` M and `overlong_buffer_cfg.len` b:
    `penalty = min(0, -(L - (M - b)) / b * penalty_factor)`.

    Settings (`reward.reward_kwargs`): `max_resp_len` (default `data.max_response_length`),
    `overlong_buffer_cfg.{enable, len, penalty_factor, log}`; `log` adds `overlong_reward` and `overlong` to the
    extra information.
    """

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, pool: SampleScorer) -> None:
        super().__init__(config, tokenizer, pool)
        buffer = self.settings.overlong_buffer_cfg
        self.max_length = self.settings.max_resp_len or config.data.max_response_length
        self.enabled, self.log, self.factor = buffer.enable, buffer.log, buffer.penalty_factor
        self.buffer = buffer.len or 0

    def adjust(self, score: float, extra: dict[str, Any], sample: Sample, length: int) -> tuple[float, dict[str, Any]]:
        if not self.enabled:
            return score, extra
        excess = length - (self.max_length - self.buffer)
        penalty = min(-excess / self.buffer * self.factor, 0.0)
        if self.log:
            extra = {**extra, "overlong_reward": penalty, "overlong": penalty < 0}
        return score + penalty, extra


def _given(reward: float | Unscored | None) -> Outcome:
    """The outcome of a row that is not asked for."""
    if isinstance(reward, Unscored):
        return without_score(reward, 0.0)
    return Outcome(0.0 if reward is None else reward, None, 0.0, brought_along=True)


def _with_given(columns: dict[str, list[Any]], batch: DataProto) -> dict[str, list[Any]]:
    """Columns of extra information with the values that rows brought along with their rewards (`Scored.extra`)."""
    brought, of_data = own_rewards(batch.non_tensor_batch, len(batch)), batch.meta_info.get(DATA_COLUMNS, ())
    for name in (columns.keys() & batch.non_tensor_batch.keys()) - set(of_data):
        own = batch.non_tensor_batch[name]
        for row, reward in enumerate(brought):
            if reward is not None and columns[name][row] is None:
                columns[name][row] = own[row]
    return columns


def _whole_scores(
    extras: list[dict[str, Any]],
    outcomes: Sequence[Outcome],
    brought: Sequence[float | Unscored | None],
    of_turns: Sequence[float],
) -> list[Outcome]:
    """The outcomes of rows that brought a score along with the rewards of their turns in it, and `acc` likewise."""
    whole = []
    for extra, outcome, reward, more in zip(extras, outcomes, brought, of_turns, strict=True):
        if isinstance(reward, float):
            outcome = replace(outcome, score=outcome.score + more)
            if "acc" in extra:
                extra["acc"] += more
        whole.append(outcome)
    return whole


def check_built_in(samples: list[Sample], key: str) -> None:
    """Refuse samples that the built-in scorers cannot score.

    Raises:
        RewardError: an unknown data source, or a ground truth that no answer could equal.
    """
    from hybridrl.reward.score import check_data_source, check_ground_truth

    for source in {sample.data_source if isinstance(sample.data_source, str) else None for sample in samples}:
        check_data_source(source, key)
    for sample in samples:
        check_ground_truth(sample.ground_truth, sample.data_source)


def _names(responses: Sequence[ResponseRow], samples: Sequence[Sample], rows: Sequence[int]) -> Callable[[int], str]:
    """Return the function that names the i-th of some rows in messages."""
    return lambda number: describe(responses[rows[number]].columns, samples[rows[number]], rows[number])


def describe(columns: Mapping[str, Any], sample: Sample, number: int) -> str:
    """Name a sample in messages: its row, data source, uid and the beginning of its prompt."""
    parts = [f"data source {sample.data_source!r}"]
    if "uid" in columns:
        parts.append(f"uid {columns['uid']!r}")
    prompt = ""
    if "raw_prompt" in columns:
        prompt = str(columns["raw_prompt"][-1].get("content"))
    if prompt:
        parts.append(f"prompt {prompt[:80]!r}{'...' if len(prompt) > 80 else ''}")
    return f"sample {number} ({', '.join(parts)})"


def _prompt_of(row: Mapping[str, Any], is_text: bool) -> Any:
    """A prompt in the form that the data have it in: messages or text."""
    messages = row.get("raw_prompt")
    return messages[-1].get("content") if is_text and messages else messages


def _of_rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that verl adds to `extra_info`: the number of turns, and rewards that tools or users gave in them."""
    turns, scores = row.get("__num_turns__"), row.get("reward_scores")
    if turns is None and "session_id" not in row:
        turns = 2  # verl counts the prompt and the response
    if scores is None:
        scores = {"user_turn_rewards": list(row["turn_rewards"])} if row.get("turn_rewards") else {}
    return {"num_turns": turns, "rollout_reward_scores": scores}


def _known(outcome: Outcome) -> Future[Outcome]:
    """A future that is done."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def _then(outcome: Future[Outcome], function: Callable[[Outcome], RowScore]) -> Future[RowScore]:
    """A future of what `function` makes of another future's result."""
    result: Future[RowScore] = Future()
    result.set_running_or_notify_cancel()

    def done(finished: Future[Outcome]) -> None:
        try:
            value = function(finished.result())
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    outcome.add_done_callback(done)
    return result


def _metrics(outcomes: list[Outcome]) -> dict[str, float]:
    seconds = [outcome.seconds for outcome in outcomes] or [0.0]
    return {
        "reward/timeouts": float(sum(outcome.timed_out for outcome in outcomes)),
        "reward/errors": float(sum(outcome.error is not None for outcome in outcomes)),
        "timing_s/reward_sample/mean": sum(seconds) / len(seconds),
        "timing_s/reward_sample/max": max(seconds),
    }
