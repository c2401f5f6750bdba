"""Reward managers: from responses to a reward for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch

from hybridrl.errors import RewardError
from hybridrl.protocol.names import TRAJECTORY_REWARD
from hybridrl.reward.columns import extra_columns, extra_of
from hybridrl.reward.function import Form, Sample
from hybridrl.reward.processes.pool import Outcome, RewardPool

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PPOTrainerConfig
    from hybridrl.protocol import DataProto

RESERVED = (
    "uid",
    "index",
    "raw_prompt",
    "reward_model",
    "extra_info",
)  # columns that a function's dict must not replace
REGISTRY: dict[str, type[RewardManager]] = {}


def register(name: str) -> Callable[[type[RewardManager]], type[RewardManager]]:
    """Class decorator: make a manager known as `reward.reward_manager.name=NAME`.

    Raises:
        RewardError: another class has that name.
    """

    def decorate(cls: type[RewardManager]) -> type[RewardManager]:
        known = REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RewardError(f"the reward manager name {name!r} is taken by {known.__module__}.{known.__qualname__}.")
        REGISTRY[name] = cls
        return cls

    return decorate


def get_reward_manager_cls(name: str) -> type[RewardManager]:
    """The manager class registered under a name.

    Raises:
        RewardError: there is none; lists the known ones.
    """
    if name not in REGISTRY:
        raise RewardError(
            f"reward.reward_manager.name={name}: no such manager. Known: {', '.join(sorted(REGISTRY))}. For a custom "
            "one set reward.reward_manager.source=importlib, .module.path=FILE.py and .module.name=CLASS."
        )
    return REGISTRY[name]


@dataclass(frozen=True)
class Scored:
    """One row's score.

    Attributes:
        score: after `RewardManager.adjust`.
        extra: the row's extra information.
        outcome: what the reward function returned.
    """

    score: float
    extra: dict[str, Any]
    outcome: Outcome


@register("naive")
class RewardManager:
    """Scores each response with the reward function; the score is placed on the last generated token.

    Derive custom managers from it: `adjust` changes one sample's score, `score_batch` all of them.

    Args:
        config: the run's configuration.
        tokenizer: turns responses into text.
        pool: runs the reward function.

    Raises:
        RewardError: `reward.reward_kwargs` holds a key that this manager does not have.
    """

    form: ClassVar[Form] = "sample"
    kwargs_allowed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, pool: RewardPool) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.pool = pool
        self.metrics: dict[str, float] = {}
        self._reported: set[str] = set()
        for name in config.reward.reward_kwargs or {}:
            if name not in self.kwargs_allowed:
                raise RewardError(
                    f"reward.reward_kwargs.{name}: the manager {config.reward.reward_manager.name!r} has no such "
                    f"setting (it has: {', '.join(self.kwargs_allowed) or 'none'}). Arguments of the reward function "
                    "belong in reward.custom_reward_function.reward_kwargs."
                )

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
        from hybridrl.reward.factory import check_dataset

        self.pool.start(wait_for_one=True)
        for dataset in datasets:
            if dataset is not None:
                check_dataset(self.config, dataset)

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
            The reward tensor, float32 `[B, T]`: each score on its response's last generated token, 0 elsewhere. With
            `return_dict` `{"reward_tensor", "reward_extra_info": {name: list of B}, "metrics": {name: float}}`. The
            extra information comes from the function's dicts (None where a sample's dict lacks a name), or is `acc`,
            the score itself, where it returned numbers. Metrics: `reward/timeouts` and the seconds per sample,
            `timing_s/reward_sample/mean` and `/max`.

        Raises:
            RewardError: see `RewardPool.run`; the sample is named by data source, uid and prompt.
        """
        lengths = response_lengths(batch)
        samples = self.samples(batch, lengths)
        given = given_rewards(batch)
        asked = [number for number, reward in enumerate(given) if reward is None]
        self._check([samples[number] for number in asked])
        found = self.score_batch(
            [samples[number] for number in asked], lambda number: describe(batch, samples[asked[number]], asked[number])
        )
        outcomes = [Outcome(0.0 if reward is None else reward, None, 0.0) for reward in given]
        for number, outcome in zip(asked, found, strict=True):
            outcomes[number] = outcome
        rows = zip(outcomes, samples, lengths.tolist(), strict=True)
        result = self.collect(batch, [self._scored(*row) for row in rows])
        return result if return_dict else result["reward_tensor"]

    def submit(self, batch: DataProto) -> list[Future[Scored]]:
        """Score rows as soon as processes are free, for example the trajectories of a session that has just ended.

        Args:
            batch: as `__call__` takes it; any number of rows.

        Returns:
            One future per row, for `collect`. It raises `RewardError` as `RewardPool.submit` says.

        Raises:
            RewardError: the manager scores whole batches, or a row cannot be scored by the built-in functions.
        """
        if type(self).score_batch is not RewardManager.score_batch:
            raise RewardError(
                f"the reward manager {type(self).__name__} defines score_batch, so it scores whole batches and cannot "
                "score single samples as they finish"
            )
        lengths = response_lengths(batch)
        samples = self.samples(batch, lengths)
        given = given_rewards(batch)
        self._check([sample for sample, reward in zip(samples, given, strict=True) if reward is None])
        futures = []
        for number, (sample, reward, length) in enumerate(zip(samples, given, lengths.tolist(), strict=True)):
            if reward is None:
                outcome = self.pool.submit(sample, describe(batch, sample, number))
            else:
                outcome = Future()
                outcome.set_result(Outcome(reward, None, 0.0))
            futures.append(_then(outcome, partial(self._scored, sample=sample, length=length)))
        return futures

    def collect(self, batch: DataProto, scored: Sequence[Scored]) -> dict[str, Any]:
        """What `__call__` returns with `return_dict`, of rows that are scored.

        Args:
            batch: the rows.
            scored: one per row.
        """
        outcomes = [one.outcome for one in scored]
        asked = [one for one, reward in zip(outcomes, given_rewards(batch), strict=True) if reward is None]
        self.metrics = _metrics(asked)
        tensor = torch.zeros(tensors_of(batch)["responses"].shape, dtype=torch.float32)
        scores = torch.tensor([one.score for one in scored], dtype=torch.float32)
        tensor[torch.arange(len(scored)), last_generated(batch)] = scores
        info = self._columns([dict(one.extra) for one in scored], outcomes)
        return {"reward_tensor": tensor, "reward_extra_info": info, "metrics": self.metrics}

    def _scored(self, outcome: Outcome, sample: Sample, length: int) -> Scored:
        score, extra = self.adjust(outcome.score, extra_of(outcome), sample, length)
        return Scored(score, extra, outcome)

    def _check(self, samples: list[Sample]) -> None:
        if self.pool.function.path is None:
            check_built_in(samples, self.config.data.reward_fn_key)

    def samples(self, batch: DataProto, lengths: torch.Tensor) -> list[Sample]:
        """The reward function's arguments, one `Sample` per response."""
        responses = tensors_of(batch)["responses"]
        texts = self.tokenizer.batch_decode(
            [row[:length] for row, length in zip(responses.tolist(), lengths.tolist(), strict=True)],
            skip_special_tokens=True,
        )
        columns = batch.non_tensor_batch
        key = self.config.data.reward_fn_key
        nothing = [None] * len(texts)
        sources, references = columns.get(key, nothing), columns.get("reward_model", nothing)
        infos = columns.get("extra_info", nothing)
        samples = []
        for text, source, reference, info in zip(texts, sources, references, infos, strict=True):
            truth = reference.get("ground_truth") if isinstance(reference, Mapping) else None
            samples.append(Sample(source, text, truth, dict(info) if info else {}))
        return samples

    def score_batch(self, samples: list[Sample], name: Callable[[int], str]) -> list[Outcome]:
        """One outcome per sample; `name` describes the i-th for messages."""
        return self.pool.run(samples, name)

    def adjust(self, score: float, extra: dict[str, Any], sample: Sample, length: int) -> tuple[float, dict[str, Any]]:
        """A sample's final score and extra information; `length` is its response's in tokens."""
        return score, extra

    def _columns(self, extras: list[dict[str, Any]], outcomes: list[Outcome]) -> dict[str, list[Any]]:
        found = extra_columns(extras, outcomes, self._reported)
        for name in {*RESERVED, self.config.data.reward_fn_key} & found.keys():
            raise RewardError(
                f"the reward function ({self.pool.function.label}) returned a dict with the key {name!r}, which is "
                "already a column of the batch. Rename the key."
            )
        return found


@register("batch")
class BatchRewardManager(RewardManager):
    """Like `naive`, for a function that takes the whole batch.

    Any manager calls a function with parameters `(responses, ground_truths)` or `(data_sources, solution_strs,
    ground_truths, extra_infos)` once with lists. This one does so for other parameter names, too.
    """

    form = "batch"


@register("dapo")
class DAPORewardManager(RewardManager):
    """DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13), added to the score.

    With L the response's length, `max_resp_len` M and `overlong_buffer_cfg.len` b:
    `penalty = min(0, -(L - (M - b)) / b * penalty_factor)`.

    Settings (`reward.reward_kwargs`): `max_resp_len` (default `data.max_response_length`),
    `overlong_buffer_cfg.{enable, len, penalty_factor, log}`; `log` adds `overlong_reward` and `overlong` to the
    extra information.
    """

    kwargs_allowed = ("max_resp_len", "overlong_buffer_cfg")

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, pool: RewardPool) -> None:
        super().__init__(config, tokenizer, pool)
        settings = dict(config.reward.reward_kwargs or {})
        buffer = dict(settings.get("overlong_buffer_cfg") or {})
        key = "reward.reward_kwargs.overlong_buffer_cfg"
        for name in buffer:
            if name not in ("enable", "len", "penalty_factor", "log"):
                raise RewardError(f"{key}.{name}: no such setting; known are enable, len, penalty_factor and log.")
        self.max_length = int(settings.get("max_resp_len") or config.data.max_response_length)
        self.enabled = bool(buffer.get("enable", False))
        self.log = bool(buffer.get("log", False))
        self.factor = float(buffer.get("penalty_factor", 1.0))
        self.buffer = 0
        if self.enabled:
            length = buffer.get("len")
            if not isinstance(length, int) or not 0 < length <= self.max_length:
                raise RewardError(
                    f"{key}.len={length}: with enable=True it must be a whole number of tokens from 1 to the longest "
                    f"response ({self.max_length}, from reward.reward_kwargs.max_resp_len or "
                    "data.max_response_length)."
                )
            self.buffer = length

    def adjust(self, score: float, extra: dict[str, Any], sample: Sample, length: int) -> tuple[float, dict[str, Any]]:
        if not self.enabled:
            return score, extra
        excess = length - (self.max_length - self.buffer)
        penalty = min(-excess / self.buffer * self.factor, 0.0)
        if self.log:
            extra = {**extra, "overlong_reward": penalty, "overlong": penalty < 0}
        return score + penalty, extra


def tensors_of(batch: DataProto) -> TensorDict:
    """The batch's tensors.

    Raises:
        RewardError: there are no responses among them.
    """
    if batch.batch is None or batch.batch.get("responses", None) is None:
        raise RewardError("the batch to score has no tensor 'responses': score generated batches.")
    return batch.batch


def response_lengths(batch: DataProto) -> torch.Tensor:
    """Tokens of each response up to its end, int64 `[B]`."""
    tensors = tensors_of(batch)
    width = tensors["responses"].shape[-1]
    mask = tensors.get("attention_mask", None)
    if mask is None:
        return _last_of(tensors["response_mask"]) + 1  # it may have holes, so that its sum is not the length
    return mask[:, mask.shape[-1] - width :].sum(dim=-1)


def last_generated(batch: DataProto) -> torch.Tensor:
    """The position of each response's last generated token, int64 `[B]`; 0 for an empty response.

    Tokens of tools are masked in training, so that a reward there would be lost.
    """
    mask = tensors_of(batch).get("response_mask", None)
    last = response_lengths(batch) - 1 if mask is None else _last_of(mask)
    return last.clamp(min=0)


def _last_of(mask: torch.Tensor) -> torch.Tensor:
    """The last position `[B]` where a mask `[B, T]` is set; -1 where it is nowhere."""
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask.bool(), positions, -1).amax(dim=-1)


def given_rewards(batch: DataProto) -> list[float | None]:
    """The reward that each row brought along (column `trajectory_reward`); None leaves it to the reward function."""
    column = batch.non_tensor_batch.get(TRAJECTORY_REWARD)
    return [None] * len(batch) if column is None else [None if one is None else float(one) for one in column]


def check_built_in(samples: list[Sample], key: str) -> None:
    """Refuse samples that the built-in scorers cannot score.

    Raises:
        RewardError: an unknown data source or no ground truth.
    """
    from hybridrl.reward.score import check_data_source

    for source in {sample.data_source if isinstance(sample.data_source, str) else None for sample in samples}:
        check_data_source(source, key)
    for sample in samples:
        if sample.ground_truth is None:
            raise RewardError(missing_ground_truth(sample.data_source))


def missing_ground_truth(data_source: Any) -> str:
    """The message for a row that has no reference answer."""
    return (
        f"no ground truth for data source {data_source!r}: the column 'reward_model' must hold "
        '{"style": "rule", "ground_truth": ANSWER}. Add it, or score with a custom function that needs none '
        "(reward.custom_reward_function.path)."
    )


def describe(batch: DataProto, sample: Sample, number: int) -> str:
    """A sample's name in messages: its row, data source, uid and the beginning of its prompt."""
    columns = batch.non_tensor_batch
    parts = [f"data source {sample.data_source!r}"]
    if "uid" in columns:
        parts.append(f"uid {columns['uid'][number]!r}")
    prompt = ""
    if "raw_prompt" in columns:
        prompt = str(columns["raw_prompt"][number][-1].get("content"))
    if prompt:
        parts.append(f"prompt {prompt[:80]!r}{'...' if len(prompt) > 80 else ''}")
    return f"sample {number} ({', '.join(parts)})"


def _then(outcome: Future[Outcome], function: Callable[[Outcome], Scored]) -> Future[Scored]:
    """A future of what `function` makes of another future's result."""
    result: Future[Scored] = Future()
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
        "timing_s/reward_sample/mean": sum(seconds) / len(seconds),
        "timing_s/reward_sample/max": max(seconds),
    }
