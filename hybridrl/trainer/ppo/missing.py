"""Samples without a score: which are generated again, and which leave their group.

An attempt at a sample fails where its session, its reward function or a limit gives no reward. `algorithm.missing` says
what becomes of the sample, by the reason. One that is refilled is generated again with the next `attempt`, which
changes its seed; all other samples stay as they are.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import RewardError, RolloutError, UserError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import MISSING_SAMPLES
from hybridrl.protocol.sample_names import SampleName, UnscoredSample, sample_names
from hybridrl.registry import ADV_ESTIMATORS
from hybridrl.scored import Reason, Unscored

REFILL, DROP, RAISE = "refill", "drop", "raise"
_FEWEST = 16  # samples that the share of missing ones is taken of


class MissingPolicy:
    """Decides what becomes of samples without a score, by the settings of a run.

    Args:
        config: the whole configuration.
        pad_token_id: pads rows that were generated to different widths.
    """

    def __init__(self, config: PPOTrainerConfig, pad_token_id: int) -> None:
        self.settings = config.algorithm.missing
        self.smallest_group = smallest_group(config)
        self.pad_token_id = pad_token_id
        self._reward_on_error = config.reward.on_error
        self._agent_on_error = config.actor_rollout_ref.rollout.agent.on_error
        self._samples = self._missing = 0  # since the share was last looked at
        self._lock = threading.Lock()  # several lots may be answered at once

    def of_rollout(self, answer: DataProto) -> tuple[list[UnscoredSample], list[UnscoredSample]]:
        """Return the samples that a rollout gave no answer to, and those that it has generated again itself."""
        samples: list[UnscoredSample] = answer.meta_info.pop(MISSING_SAMPLES, [])
        decided = []
        for sample in samples:
            dropped = sample.unscored.reason is Reason.DROPPED
            action = getattr(self.settings, sample.unscored.reason.value)
            if self._agent_on_error is not None and not dropped:
                action = self._agent_on_error
            decided.append(replace(sample, action=action, counts=not dropped))
        return [sample for sample in decided if not sample.again], [sample for sample in decided if sample.again]

    def of_rewards(self, batch: DataProto, result: Mapping[str, Any]) -> list[UnscoredSample]:
        """Return the samples that a reward manager gave no score; the reason is that of the first such row.

        Args:
            batch: the rows that were scored.
            result: what `RewardManager.__call__` returns.

        Raises:
            RewardError: it does not say which rows failed, and `reward.on_error` needs that.
        """
        if self._reward_on_error in (DROP, REFILL) and not result.get("failed"):
            raise RewardError(
                f"reward.on_error={self._reward_on_error}: the reward manager does not return which rows failed "
                "('failed', one bool per row); return what RewardManager.__call__ returns, or set on_error=zero"
            )
        failed = result.get("failed") or [False] * len(batch)
        lengths = batch.batch["response_mask"].sum(dim=-1).tolist()
        names = sample_names(batch)
        tokens: Counter[SampleName] = Counter()
        samples: dict[SampleName, UnscoredSample] = {}
        for row, (unscored, has_failed) in enumerate(zip(result["missing"], failed, strict=True)):
            name = names[row]
            tokens[name] += lengths[row]
            if unscored is None and has_failed and self._reward_on_error != "zero":
                unscored = Unscored(Reason.GRADING, "the reward manager lists it as failed")
            if unscored is None or name in samples:
                continue
            governed = bool(has_failed) and self._reward_on_error in (REFILL, DROP)
            action = self._reward_on_error if governed else getattr(self.settings, unscored.reason.value)
            if action == REFILL and "sample" not in batch.non_tensor_batch:
                action = DROP  # the rollout does not tell which sample a row is
                message = "samples without a reward are left out: the rollout returns no column 'sample'"
                notify(message, "warning", once=True)
            samples[name] = UnscoredSample(
                name.uid,
                name.sample,
                unscored,
                action=str(action),
                by_reward=True,
                counts=not governed and unscored.reason is not Reason.DROPPED,
            )
        return [replace(sample, tokens=tokens[name]) for name, sample in samples.items()]

    def check(self, missing: Sequence[UnscoredSample], samples: int, first: bool) -> None:
        """Report samples without a score, or end the run.

        Args:
            missing: those of one attempt.
            samples: number of samples of the attempt.
            first: it was the first attempt at them.

        Raises:
            RewardError, RolloutError: a sample is missing whose setting is `raise`, or too many are.
        """
        with self._lock:
            self._check(missing, samples, first)

    def _check(self, missing: Sequence[UnscoredSample], samples: int, first: bool) -> None:
        counting = [sample for sample in missing if sample.counts]
        if first:
            self._samples, self._missing = self._samples + samples, self._missing + len(counting)
        if not missing:
            self._start_share()
            return
        ending = [sample for sample in missing if sample.action == RAISE]
        if ending:
            reason = ending[0].unscored.reason.value
            raise _error(ending, f"{len(ending)} samples have no reward (algorithm.missing.{reason}=raise)")
        message = f"{len(missing)} of {samples} samples have no reward ({_reasons(missing)})"
        if counting and self._samples >= _FEWEST and self._missing > self.settings.max_share * self._samples:
            of = "" if self._samples == samples else f" ({self._missing} of the last {self._samples})"
            raise _error(counting, f"{message}, more than algorithm.missing.max_share={self.settings.max_share:g}{of}")
        self._start_share()
        again = sum(sample.action == REFILL for sample in missing)
        then = [f"{again} are generated again"] * bool(again) + [f"{len(missing) - again} are left out"] * (
            again < len(missing)
        )
        notify(f"{message}: {', '.join(then)}. The first: {_described(missing[0])}", "warning")

    def _start_share(self) -> None:
        if self._samples >= _FEWEST:
            self._samples = self._missing = 0


def smallest_group(config: PPOTrainerConfig) -> int:
    """Return the fewest samples of a prompt that the run's estimator can use; of a single sample per prompt, one."""
    metadata = ADV_ESTIMATORS.metadata(config.algorithm.adv_estimator)
    return min(metadata.fewest_samples, config.actor_rollout_ref.rollout.n)


def _reasons(missing: Sequence[UnscoredSample]) -> str:
    counts = Counter(sample.unscored.reason.value for sample in missing)
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())


def _described(sample: UnscoredSample) -> str:
    return f"uid {sample.uid!r}, sample {sample.sample}: {sample.unscored}"


def _error(missing: Sequence[UnscoredSample], message: str) -> UserError:
    error = RewardError if any(sample.by_reward for sample in missing) else RolloutError
    return error(f"{message}. The first is {_described(missing[0])}")
