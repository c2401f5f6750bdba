"""Samples without a verdict: which are generated again, and which leave their group.

An attempt at a sample fails where its session, its reward function or a limit gives no reward. `algorithm.missing` says
what becomes of the sample, by the reason. One that is refilled is asked for again with the next `attempt`, which
changes its seed; all other samples stay as they are.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import RewardError, RolloutError, UserError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.missing import MissingSample
from hybridrl.protocol.names import MISSING_SAMPLES
from hybridrl.registry import ADV_ESTIMATORS
from hybridrl.verdict import NoVerdict, Reason

REFILL, DROP, RAISE = "refill", "drop", "raise"
_FEWEST = 16  # samples that the share of missing ones is taken of


@dataclass(frozen=True)
class Lost:
    """A sample without a verdict, after one attempt.

    Attributes:
        sample: which one, and why.
        action: what becomes of it: `refill`, `drop` or `raise`.
        by_reward: the reward function has no verdict; False: the rollout.
        counted: it counts for `algorithm.missing.max_share`.
    """

    sample: MissingSample
    action: str
    by_reward: bool
    counted: bool = True


class MissingSamples:
    """Decides what becomes of samples without a verdict, by the settings of a run.

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
        self._asked = self._counted = 0  # since the share was last looked at

    def of_rollout(self, answer: DataProto) -> tuple[list[Lost], list[MissingSample]]:
        """The samples that a rollout gave no answer to, and those that it has generated again itself."""
        found: list[MissingSample] = answer.meta_info.pop(MISSING_SAMPLES, [])
        lost = []
        for one in found:
            action = getattr(self.settings, one.verdict.reason.value)
            if self._agent_on_error is not None and one.verdict.reason is not Reason.DROPPED:
                action = self._agent_on_error
            lost.append(Lost(one, action, by_reward=False, counted=one.verdict.reason is not Reason.DROPPED))
        return [one for one in lost if not one.sample.again], [one for one in found if one.again]

    def of_rewards(self, batch: DataProto, result: Mapping[str, Any]) -> list[Lost]:
        """The samples that a reward manager has no verdict of; of each, the first of its rows without one.

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
        names, found = names_of_samples(batch), {}
        tokens: Counter[tuple[str, str]] = Counter()
        for row, (verdict, bad) in enumerate(zip(result["missing"], failed, strict=True)):
            tokens[names[row]] += lengths[row]
            if verdict is None and bad and self._reward_on_error != "zero":
                verdict = NoVerdict(Reason.GRADING, "the reward manager lists it as failed")
            if verdict is None or names[row] in found:
                continue
            governed = bool(bad) and self._reward_on_error in (REFILL, DROP)
            action = self._reward_on_error if governed else getattr(self.settings, verdict.reason.value)
            counted = not governed and verdict.reason is not Reason.DROPPED
            if action == REFILL and "sample" not in batch.non_tensor_batch:
                action = DROP  # the rollout does not tell which sample a row is
                what = "samples without a reward are left out: the rollout returns no column 'sample'"
                notify(what, "warning", once=True)
            uid, sample = names[row]
            found[names[row]] = Lost(MissingSample(uid, int(sample), verdict), str(action), True, counted)
        return [replace(one, sample=replace(one.sample, tokens=tokens[name])) for name, one in found.items()]

    def check(self, lost: Sequence[Lost], asked: int, first: bool) -> None:
        """Report samples without a verdict, or end the run.

        Args:
            lost: those of one attempt.
            asked: number of samples that were asked for.
            first: it was the first attempt at them.

        Raises:
            RewardError, RolloutError: a sample is missing whose setting is `raise`, or too many are.
        """
        counted = [one for one in lost if one.counted]
        if first:
            self._asked, self._counted = self._asked + asked, self._counted + len(counted)
        if not lost:
            self._start_share()
            return
        ending = [one for one in lost if one.action == RAISE]
        if ending:
            reason = ending[0].sample.verdict.reason.value
            raise _error(ending, f"{len(ending)} samples have no reward (algorithm.missing.{reason}=raise)")
        what = f"{len(lost)} of {asked} samples have no reward ({_reasons(lost)})"
        if counted and self._asked >= _FEWEST and self._counted > self.settings.max_share * self._asked:
            of = "" if self._asked == asked else f" ({self._counted} of the last {self._asked})"
            raise _error(counted, f"{what}, more than algorithm.missing.max_share={self.settings.max_share:g}{of}")
        self._start_share()
        again = sum(one.action == REFILL for one in lost)
        then = [f"{again} are generated again"] * bool(again) + [f"{len(lost) - again} are left out"] * (
            again < len(lost)
        )
        notify(f"{what}: {', '.join(then)}. The first: {_told(lost[0])}", "warning")

    def _start_share(self) -> None:
        if self._asked >= _FEWEST:
            self._asked = self._counted = 0

    def without_small_groups(self, batch: DataProto, left_out: Collection[tuple[str, str]]) -> DataProto | None:
        """The batch without prompts that lost samples and have fewer left than the estimator needs.

        Args:
            batch: the samples with a verdict.
            left_out: (uid, sample) of those without one.
        """
        hit = {uid for uid, _ in left_out}
        left: dict[str, set[str]] = {}
        names = names_of_samples(batch)
        for uid, sample in names:
            left.setdefault(uid, set()).add(sample)
        kept = [row for row, (uid, _) in enumerate(names) if uid not in hit or len(left[uid]) >= self.smallest_group]
        if len(kept) == len(batch):
            return batch
        return batch.select_idxs(torch.tensor(kept, dtype=torch.int64)) if kept else None


def smallest_group(config: PPOTrainerConfig) -> int:
    """Fewest samples of a prompt that the run's estimator can use; with a single sample per prompt, that is enough."""
    facts = ADV_ESTIMATORS.metadata(config.algorithm.adv_estimator)
    return min(facts.fewest_samples, config.actor_rollout_ref.rollout.n)


def names_of_samples(batch: DataProto) -> list[tuple[str, str]]:
    """(uid, sample) of each row, as text. Without a column `sample`, every row is one."""
    objects = batch.non_tensor_batch
    numbers = objects.get("sample", np.arange(len(batch)))
    return list(zip(map(str, objects["uid"]), map(str, numbers.tolist()), strict=True))


def in_order_of(batch: DataProto, asked: DataProto) -> DataProto:
    """The rows of a batch in the order in which their samples stand in `asked`; rows of a sample keep theirs."""
    place = {name: number for number, name in enumerate(names_of_samples(asked))}
    order = sorted(range(len(batch)), key=lambda row: place[names[row]]) if (names := names_of_samples(batch)) else []
    return batch.select_idxs(order)


def _reasons(lost: Sequence[Lost]) -> str:
    counts = Counter(one.sample.verdict.reason.value for one in lost)
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())


def _told(lost: Lost) -> str:
    one = lost.sample
    return f"uid {one.uid!r}, sample {one.sample}: {one.verdict}"


def _error(lost: Sequence[Lost], what: str) -> UserError:
    error = RewardError if any(one.by_reward for one in lost) else RolloutError
    return error(f"{what}. The first is {_told(lost[0])}")
