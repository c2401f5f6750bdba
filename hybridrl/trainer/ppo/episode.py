"""An episode: the samples of one prompt are generated and scored, and again where they have no score.

It ends with a scored group, or with the reason why there is none. It knows nothing of the batch that its group will
join: rows stay in the answers that they came with until `join_groups` forms the batch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hybridrl.notify import notify
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.names import ATTEMPT, DATA_COLUMNS
from hybridrl.protocol.sample_names import SampleName, UnscoredSample, sample_names
from hybridrl.reward.factory import complete
from hybridrl.scored import Reason, Unscored
from hybridrl.trainer.ppo.batching import join_generated
from hybridrl.trainer.ppo.missing import REFILL, MissingPolicy

COUNTS = ("reward/timeouts", "reward/errors")


@dataclass(frozen=True)
class AnsweredRows:
    """Scored rows of an answer of the rollout.

    Attributes:
        answer: has `token_level_scores` [B, T].
        rows: numbers of its rows.
        attempt: which attempt it answers.
    """

    answer: DataProto
    rows: tuple[int, ...]
    attempt: int


@dataclass(frozen=True)
class ScoredGroup:
    """The scored samples of a prompt.

    Attributes:
        uid: of the prompt.
        samples: those that were asked for, in order; some may have no rows.
        parts: the rows, by attempt.
    """

    uid: str
    samples: tuple[SampleName, ...]
    parts: tuple[AnsweredRows, ...]


class Episode:
    """The samples of a prompt, from the first attempt to the end.

    Args:
        samples: of one prompt.
        max_refills: how often a sample is generated again.
        smallest_group: fewest scored samples that make a group where some are left out.

    Attributes:
        waiting: what to generate and score now; nothing once the episode has ended.
        attempt: the number of this attempt, from 0.
        left_out: samples without a score in the end, with their reasons.
    """

    def __init__(self, samples: Sequence[SampleName], max_refills: int, smallest_group: int = 1) -> None:
        self.samples = tuple(samples)
        self.max_refills = max_refills
        self.smallest_group = smallest_group
        self.waiting = self.samples
        self.attempt = 0
        self.left_out: dict[SampleName, Unscored] = {}
        self._parts: list[AnsweredRows] = []

    def add(self, answer: DataProto, rows: Sequence[int], unscored: Iterable[UnscoredSample]) -> None:
        """Take the result of an attempt at the samples that wait, and decide which of them wait again.

        Args:
            answer: the scored answer of the rollout.
            rows: those of its rows that belong to scored samples of this prompt.
            unscored: the samples of this prompt without a score, with `action` decided.
        """
        assert self.waiting, "the episode has ended"
        if rows:
            self._parts.append(AnsweredRows(answer, tuple(rows), self.attempt))
        reasons = {sample.name: sample.unscored for sample in unscored}
        refilled = {sample.name for sample in unscored if sample.action == REFILL}
        again = tuple(name for name in self.waiting if name in refilled)
        self.waiting = again if self.attempt < self.max_refills else ()
        self.left_out |= {name: reason for name, reason in reasons.items() if name not in self.waiting}
        self.attempt += bool(self.waiting)

    @property
    def scored(self) -> ScoredGroup | None:
        """The samples with a score, however few there are; None if there is none."""
        return ScoredGroup(self.samples[0].uid, self.samples, tuple(self._parts)) if self._parts else None

    @property
    def outcome(self) -> ScoredGroup | Unscored:
        """The scored group; the reason of the first sample that is left out where too few have a score."""
        assert not self.waiting, "samples wait for a score"
        group, reasons = self.scored, list(self.left_out.values())
        names = {sample_names(part.answer)[row] for part in self._parts for row in part.rows}
        if group is None or (reasons and len(names) < self.smallest_group):
            return reasons[0] if reasons else Unscored(Reason.DROPPED, "the rollout returned no rows")
        return group


def join_groups(groups: Sequence[ScoredGroup], pad_token_id: int) -> DataProto:
    """Form a batch of groups. It holds no copy of rows that make up a whole answer.

    Rows of a single answer keep its order. Rows of several answers are in the order of the groups, and within a group
    in that of its samples; those of one sample keep the order of the answer.
    """
    parts = sorted((part for group in groups for part in group.parts), key=lambda part: part.attempt)
    rows_of: dict[int, list[int]] = {}
    for part in parts:
        rows_of.setdefault(id(part.answer), []).extend(part.rows)
    answers = {id(part.answer): part.answer for part in parts}
    chosen_rows = ((answers[key], sorted(rows)) for key, rows in rows_of.items())
    joined = join_generated(
        [answer if len(rows) == len(answer) else answer.select_idxs(rows) for answer, rows in chosen_rows], pad_token_id
    )
    if len(answers) == 1:
        return joined
    names = sample_names(joined)
    place = {name: number for number, name in enumerate(name for group in groups for name in group.samples)}
    return joined.select_idxs(sorted(range(len(joined)), key=lambda row: place[names[row]]))


class SampleAttempt(NamedTuple):
    """An attempt at a sample, for statistics.

    Attributes:
        uid: of the prompt.
        tokens: how many were generated; None: the attempt was cut off.
        reason: why there is no score; None: there is one.
    """

    uid: str
    tokens: int | None
    reason: Reason | None


class EpisodeBatch:
    """Episodes whose samples are generated and scored together.

        episodes = EpisodeBatch(policy, prompts)
        while (rows := episodes.rows) is not None:
            answer = generate(rows, episodes.attempt)
            episodes.add(answer, score(answer) if len(answer) else None)
        episodes.batch

    Args:
        policy: says what becomes of samples without a score.
        prompts: one row per sample, with `uid` and `sample`.

    Attributes:
        episodes: by uid.
        rows: what to generate and score now; None if no sample waits.
        attempt: the number of this attempt, from 0.
        attempts: all attempts so far.
        columns: names of the columns that the reward function returned.
        metrics: those of the reward manager for the first attempt; of further ones, which are at a few samples, its
            counts are added.
    """

    def __init__(self, policy: MissingPolicy, prompts: DataProto) -> None:
        self.policy = policy
        self.prompts = prompts
        self.rows: DataProto | None = prompts
        self.attempt = 0
        self.attempts: list[SampleAttempt] = []
        self.columns: tuple[str, ...] = ()
        self.metrics: dict[str, float] = {}
        samples_of: dict[str, list[SampleName]] = {}
        for name in sample_names(prompts):
            samples_of.setdefault(name.uid, []).append(name)
        refills, smallest = policy.settings.max_refills, policy.smallest_group
        self.episodes = {uid: Episode(names, refills, smallest) for uid, names in samples_of.items()}

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
        missing, repeated = self.policy.of_rollout(answer)
        if rewards is not None:
            rewards = complete(rewards, answer)
            missing += self.policy.of_rewards(answer, rewards)
            self._attach(answer, rewards)
        for name in (ATTEMPT, DATA_COLUMNS):
            answer.meta_info.pop(name, None)
        self.policy.check(missing, len(self.rows), first=self.attempt == 0)
        names = sample_names(answer) if len(answer) else []
        without_score = {sample.name for sample in missing}
        self.attempts += [
            SampleAttempt(sample.uid, sample.tokens, sample.unscored.reason) for sample in [*repeated, *missing]
        ]
        self.attempts += _scored_attempts(answer, names, without_score)
        rows_of: dict[str, list[int]] = {}
        for row, sample_name in enumerate(names):
            if sample_name not in without_score:
                rows_of.setdefault(sample_name.uid, []).append(row)
        missing_of: dict[str, list[UnscoredSample]] = {}
        for sample in missing:
            missing_of.setdefault(sample.uid, []).append(sample)
        for uid, episode in self.episodes.items():
            if episode.waiting:
                episode.add(answer, rows_of.get(uid, []), missing_of.get(uid, []))
        waiting = {name for episode in self.episodes.values() for name in episode.waiting}
        again = [row for row, name in enumerate(sample_names(self.rows)) if name in waiting]
        self.rows = self.rows.select_idxs(again) if again else None
        self.attempt += bool(again)

    def _attach(self, answer: DataProto, rewards: Mapping[str, Any]) -> None:
        """Add the scores and columns of the reward function to the answer."""
        answer.batch["token_level_scores"] = rewards["reward_tensor"]
        replaced = [name for name in rewards["reward_extra_info"] if name in self.prompts.non_tensor_batch]
        if replaced:
            notify(
                f"the reward function returned {', '.join(replaced)}, as columns of the data are called: samplers, "
                "data sets and dumps see what the function returned from then on",
                once=True,
            )
        for name, values in rewards["reward_extra_info"].items():
            answer.non_tensor_batch[name] = object_array(values)
        self.columns = tuple(dict.fromkeys([*self.columns, *rewards["reward_extra_info"]]))
        metrics = rewards["metrics"]
        if self.attempt:  # a few samples: their means say nothing
            metrics = counts_of(metrics)
        self.metrics = merged(self.metrics, metrics)

    @property
    def left_out(self) -> int:
        """The number of samples without a score in the end."""
        return sum(len(episode.left_out) for episode in self.episodes.values())

    @cached_property
    def batch(self) -> DataProto | None:
        """All samples with a score, in the order of the prompts; None if there is none. Read it once no sample waits.

        It has `token_level_scores` [B, T] and the columns of the reward function.
        """
        groups = [group for episode in self.episodes.values() if (group := episode.scored) is not None]
        return join_groups(groups, self.policy.pad_token_id) if groups else None

    def trainable(self) -> DataProto | None:
        """Return `batch` without the prompts whose episodes ended without a group; None if there is no other."""
        batch = self.batch
        if batch is None:
            return None
        groups = {uid for uid, episode in self.episodes.items() if isinstance(episode.outcome, ScoredGroup)}
        rows = [row for row, name in enumerate(sample_names(batch)) if name.uid in groups]
        if len(rows) == len(batch):
            return batch
        return batch.select_idxs(rows) if rows else None


def counts_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those metrics of a reward manager that count, and can be added."""
    return {name: metrics[name] for name in COUNTS if name in metrics}


def merged(metrics: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with those of a further call of the reward manager; counts are added."""
    counts = {name: metrics.get(name, 0.0) + value for name, value in counts_of(more).items()}
    return {**metrics, **more, **counts}


def _scored_attempts(
    answer: DataProto, names: Sequence[SampleName], without_score: set[SampleName]
) -> Iterable[SampleAttempt]:
    """Return the attempts with a score."""
    if not len(answer):
        return []
    tokens: Counter[SampleName] = Counter()
    for name, length in zip(names, answer.batch["response_mask"].sum(dim=-1).tolist(), strict=True):
        tokens[name] += length
    return [SampleAttempt(name.uid, length, None) for name, length in tokens.items() if name not in without_score]
