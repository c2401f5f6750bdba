"""Attempts at samples: they are generated and scored, and again where they have no score."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridrl.notify import notify
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.names import ATTEMPT, DATA_COLUMNS
from hybridrl.reward.factory import complete
from hybridrl.scored import Reason
from hybridrl.trainer.ppo.batching import join_generated
from hybridrl.trainer.ppo.missing import REFILL, MissingSamples, in_order_of, names_of_samples

COUNTS = ("reward/timeouts", "reward/errors")


class Judged:
    """What attempts at some samples gave.

    Attributes:
        batch: the rows of samples with a score, in the order of what was asked for, with `token_level_scores` [B, T]
            and the columns of the reward function; None if no sample has one.
        left_out: (uid, sample) of those without one.
        attempts: (uid, tokens or None, reason or None) of every attempt that was made.
        asked: number of samples.
        columns: names of the columns that the reward function returned.
        metrics: those of the reward manager for the first attempt; of further ones, which are at a few samples, its
            counts are added.
    """

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.batch: DataProto | None = None
        self.left_out: set[tuple[str, str]] = set()
        self.attempts: list[tuple[str, int | None, Reason | None]] = []
        self.columns: tuple[str, ...] = ()
        self.metrics: dict[str, float] = {}


class Attempts:
    """Samples that wait for a score. Each answer that is added gives some of them one, until none waits.

        attempts = Attempts(missing, asked)
        while (rows := attempts.rows) is not None:
            answer = generate(rows, attempts.number)
            attempts.add(answer, score(answer) if len(answer) else None)
        attempts.judged.batch

    Args:
        missing: says what becomes of samples without a score.
        asked: one row per sample, with `uid` and `sample`.

    Attributes:
        rows: what to generate and score now; None if no sample waits.
        number: the number of this attempt, from 0.
        judged: the result, once no sample waits.
    """

    def __init__(self, missing: MissingSamples, asked: DataProto) -> None:
        self.rows: DataProto | None = asked
        self.number = 0
        self.judged = Judged(len(asked))
        self._missing = missing
        self._asked = asked
        self._parts: list[DataProto] = []

    def add(self, answer: DataProto, rewards: Mapping[str, Any] | None) -> None:
        """Take the answer to `rows`, and decide which of its samples wait again.

        Args:
            answer: the rows that the rollout returned; any number per sample, none for those in the meta
                `missing_samples`. It gets its scores and the columns of the reward function.
            rewards: what `RewardManager.__call__` returns for the answer; None if it has no rows.

        Raises:
            RewardError, RolloutError: a sample is missing whose setting is `raise`, or too many are.
        """
        assert self.rows is not None, "no sample waits"
        judged = self.judged
        lost, repeated = self._missing.of_rollout(answer)
        if rewards is not None:
            rewards = complete(rewards, answer)
            lost += self._missing.of_rewards(answer, rewards)
            self._attach(answer, rewards)
        for name in (ATTEMPT, DATA_COLUMNS):
            answer.meta_info.pop(name, None)
        self._missing.check(lost, len(self.rows), first=self.number == 0)
        names = names_of_samples(answer) if len(answer) else []
        missing = {one.sample.name for one in lost}
        judged.attempts += [(one.uid, one.tokens, one.unscored.reason) for one in repeated]
        judged.attempts += [(one.sample.uid, one.sample.tokens, one.sample.unscored.reason) for one in lost]
        judged.attempts += _with_verdict(answer, names, missing)
        kept = [row for row, name in enumerate(names) if name not in missing]
        if kept:
            self._parts.append(answer if len(kept) == len(answer) else answer.select_idxs(kept))
        again = {one.sample.name for one in lost if one.action == REFILL}
        judged.left_out |= missing - again
        waiting = [row for row, name in enumerate(names_of_samples(self.rows)) if name in again]
        if not waiting or self.number == self._missing.settings.max_refills:
            judged.left_out |= again
            self._end()
        else:
            self.rows, self.number = self.rows.select_idxs(waiting), self.number + 1

    def _attach(self, answer: DataProto, rewards: Mapping[str, Any]) -> None:
        answer.batch["token_level_scores"] = rewards["reward_tensor"]
        replaced = [name for name in rewards["reward_extra_info"] if name in self._asked.non_tensor_batch]
        if replaced:
            notify(
                f"the reward function returned {', '.join(replaced)}, as columns of the data are called: samplers, "
                "data sets and dumps see what the function returned from then on",
                once=True,
            )
        for name, values in rewards["reward_extra_info"].items():
            answer.non_tensor_batch[name] = object_array(values)
        judged, found = self.judged, rewards["metrics"]
        judged.columns = tuple(dict.fromkeys([*judged.columns, *rewards["reward_extra_info"]]))
        if self.number:  # a few samples: their means say nothing
            found = counts_of(found)
        judged.metrics = merged(judged.metrics, found)

    def _end(self) -> None:
        self.rows = None
        if self._parts:
            joined = join_generated(self._parts, self._missing.pad_token_id)
            self.judged.batch = joined if len(self._parts) == 1 else in_order_of(joined, self._asked)


def counts_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those metrics of a reward manager that count, and can be added."""
    return {name: metrics[name] for name in COUNTS if name in metrics}


def merged(metrics: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with those of a further call of the reward manager; counts are added."""
    counts = {name: metrics.get(name, 0.0) + value for name, value in counts_of(more).items()}
    return {**metrics, **more, **counts}


def _with_verdict(
    batch: DataProto, names: Sequence[tuple[str, str]], missing: set[tuple[str, str]]
) -> Iterable[tuple[str, int | None, Reason | None]]:
    """The attempts with a score."""
    if not len(batch):
        return []
    tokens: Counter[tuple[str, str]] = Counter()
    for name, length in zip(names, batch.batch["response_mask"].sum(dim=-1).tolist(), strict=True):
        tokens[name] += length
    return [(uid, length, None) for (uid, sample), length in tokens.items() if (uid, sample) not in missing]
