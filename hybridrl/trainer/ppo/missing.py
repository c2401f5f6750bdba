"""Samples without a verdict: which are generated again, which leave their group, and what the metrics say of them.

An attempt at a sample fails where its session, its reward function or a limit gives no reward. `algorithm.missing` says
what becomes of the sample, by the reason. One that is refilled is asked for again with the next `attempt`, which
changes its seed; all other samples stay as they are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hybridrl.algorithms.missingness import Dependence, bias_bound, ranks
from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import RewardError, RolloutError, UserError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.missing import MissingSample
from hybridrl.protocol.names import MISSING_SAMPLES
from hybridrl.registry import ADV_ESTIMATORS
from hybridrl.trainer.ppo.batching import join_generated
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


class Judged:
    """What attempts at some samples gave.

    Attributes:
        batch: the rows of samples with a verdict, in the order of what was asked for.
        left_out: (uid, sample) of those without one.
        attempts: (uid, tokens or None, reason or None) of every attempt that was made.
        asked: number of samples.
    """

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.batch: DataProto | None = None
        self.left_out: set[tuple[str, str]] = set()
        self.attempts: list[tuple[str, int | None, Reason | None]] = []

    @property
    def refilled(self) -> int:
        """How often a sample was generated again."""
        return len(self.attempts) - self.asked


class MissingSamples:
    """Decides what becomes of samples without a verdict, by the settings of a run.

    Args:
        config: the whole configuration.
        pad_token_id: pads rows that were generated to different widths.
    """

    def __init__(self, config: PPOTrainerConfig, pad_token_id: int) -> None:
        self.settings = config.algorithm.missing
        self.smallest_group = smallest_group(config)
        self._pad = pad_token_id
        self._reward_on_error = config.reward.on_error
        self._agent_on_error = config.actor_rollout_ref.rollout.agent.on_error
        self._asked = self._counted = 0  # since the share was last looked at

    # ------------------------------------------------------------------ what becomes of a sample

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
        """
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

    # ------------------------------------------------------------------ attempts

    def judge(
        self, asked: DataProto, attempt: Callable[[DataProto, int], tuple[DataProto, list[Lost], list[MissingSample]]]
    ) -> Judged:
        """Have samples generated and scored, and those without a verdict again, as the settings say.

        Args:
            asked: one row per sample, with `uid` and `sample`.
            attempt: has rows answered and scored, with the number of the attempt, from 0. Returns the scored rows of
                the answer, the samples without a verdict, and attempts that the rollout has repeated itself.

        Raises:
            RewardError, RolloutError: a sample is missing whose setting is `raise`, or too many are.
        """
        judged, waiting, parts = Judged(len(asked)), asked, []
        for number in range(self.settings.max_refills + 1):
            batch, lost, repeated = attempt(waiting, number)
            missing = {one.sample.name for one in lost}
            self._check(lost, len(waiting), first=number == 0)
            names = names_of_samples(batch) if len(batch) else []
            judged.attempts += [(one.uid, one.tokens, one.verdict.reason) for one in repeated]
            judged.attempts += [(one.sample.uid, one.sample.tokens, one.sample.verdict.reason) for one in lost]
            judged.attempts += _attempts(batch, names, missing)
            kept = [row for row, name in enumerate(names) if name not in missing]
            if kept:
                parts.append(batch if len(kept) == len(batch) else batch.select_idxs(kept))
            again = {one.sample.name for one in lost if one.action == REFILL}
            judged.left_out |= missing - again
            rows = [row for row, name in enumerate(names_of_samples(waiting)) if name in again]
            if not rows:
                break
            waiting = waiting.select_idxs(rows)
            if number == self.settings.max_refills:
                judged.left_out |= again
        if parts:
            judged.batch = join_generated(parts, self._pad)
            if len(parts) > 1:
                judged.batch = in_order_of(judged.batch, asked)
        return judged

    def _check(self, lost: Sequence[Lost], asked: int, first: bool) -> None:
        """Report samples without a verdict, or end the run."""
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

    def without_small_groups(self, judged: Judged) -> DataProto | None:
        """The batch without prompts that lost samples and have fewer left than the estimator needs."""
        batch = judged.batch
        if batch is None or not judged.left_out:
            return batch
        hit = {uid for uid, _ in judged.left_out}
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
    facts = ADV_ESTIMATORS.facts(config.algorithm.adv_estimator)
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


def _attempts(
    batch: DataProto, names: Sequence[tuple[str, str]], missing: set[tuple[str, str]]
) -> Iterable[tuple[str, int | None, Reason | None]]:
    """The attempts with a verdict."""
    if not len(batch):
        return []
    tokens: Counter[tuple[str, str]] = Counter()
    for name, length in zip(names, batch.batch["response_mask"].sum(dim=-1).tolist(), strict=True):
        tokens[name] += length
    return [(uid, length, None) for (uid, sample), length in tokens.items() if (uid, sample) not in missing]


def _reasons(lost: Sequence[Lost]) -> str:
    counts = Counter(one.sample.verdict.reason.value for one in lost)
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())


def _told(lost: Lost) -> str:
    one = lost.sample
    return f"uid {one.uid!r}, sample {one.sample}: {one.verdict}"


def _error(lost: Sequence[Lost], what: str) -> UserError:
    error = RewardError if any(one.by_reward for one in lost) else RolloutError
    return error(f"{what}. The first is {_told(lost[0])}")


class MissingStatistics:
    """Counts the missing samples of steps, and warns if they are not missing at random.

    Args:
        window, significance: of `algorithm.missing`.
    """

    def __init__(self, window: int, significance: float) -> None:
        self.window, self.significance = window, significance
        self._start_step()
        self._start_window()

    def _start_step(self) -> None:
        self._asked = self._left_out = 0
        self._attempts: list[tuple[str, int | None, Reason | None]] = []
        self._scores: dict[str, list[float]] = {}

    def _start_window(self) -> None:
        self._steps = self._missing = self._tried = 0
        self._lowest, self._largest = float("inf"), float("-inf")
        self._tests = {"length": Dependence(), "reward": Dependence()}

    def add(self, judged: Judged, scores: bool = True) -> None:
        """Count the samples of a generation batch, which is scored (`token_level_scores`).

        Args:
            scores: count their scores too; False for samples that are not trained on.
        """
        self._asked += judged.asked
        self._left_out += len(judged.left_out)
        self._attempts += judged.attempts
        if scores and judged.batch is not None:
            score_of: dict[tuple[str, str], float] = {}
            rows = judged.batch.batch["token_level_scores"].sum(dim=-1).tolist()
            for name, score in zip(names_of_samples(judged.batch), rows, strict=True):
                score_of[name] = score_of.get(name, 0.0) + score
            for (uid, _), score in score_of.items():
                self._scores.setdefault(uid, []).append(score)

    def end_step(self) -> dict[str, float]:
        """The metrics of the step; every `window` steps, the tests are made.

        Returns:
            `missing/REASON`, the share of attempts without a reward for that reason; `missing/refilled` and
            `missing/left_out`, the attempts that repeat a sample and the samples that are left out, per sample asked
            for; and `missing/bias_bound` of the window so far, see `bias_bound`.
        """
        tried = max(len(self._attempts), 1)
        counts = Counter(reason for _, _, reason in self._attempts if reason is not None)
        metrics = {f"missing/{reason.value}": counts[reason] / tried for reason in Reason}
        metrics["missing/refilled"] = (len(self._attempts) - self._asked) / max(self._asked, 1)
        metrics["missing/left_out"] = self._left_out / max(self._asked, 1)
        # what a loop or filter leaves out on purpose is no fault to be warned of
        attempts = [one for one in self._attempts if one[2] is not Reason.DROPPED]
        scores = [score for of_prompt in self._scores.values() for score in of_prompt]
        self._steps += 1
        self._tried += len(attempts)
        self._missing += sum(reason is not None for _, _, reason in attempts)
        self._lowest, self._largest = min([self._lowest, *scores]), max([self._largest, *scores])
        self._test(attempts)
        metrics["missing/bias_bound"] = self._bound()
        if self._steps >= self.window:
            self._warn()
            self._start_window()
        self._start_step()
        return metrics

    def _test(self, attempts: Sequence[tuple[str, int | None, Reason | None]]) -> None:
        known = [one for one in attempts if one[1] is not None]
        lengths = ranks([float(tokens or 0) for _, tokens, _ in known])
        lost = [reason is not None for _, _, reason in known]
        self._tests["length"].add(lost, lengths.tolist(), [uid for uid, _, _ in known])
        scored = [one for one in attempts if one[0] in self._scores]
        means = {uid: float(np.mean(values)) for uid, values in self._scores.items()}
        self._tests["reward"].add(
            [reason is not None for _, _, reason in scored],
            [means[uid] for uid, _, _ in scored],
            [uid for uid, _, _ in scored],
        )

    def _bound(self) -> float:
        return bias_bound(self._missing, self._tried, self._lowest, self._largest) if self._missing else 0.0

    def _warn(self) -> None:
        words = {
            "length": ("are longer", "are shorter"),
            "reward": ("are of prompts that score more", "are of prompts that score less"),
        }
        for name, test in self._tests.items():
            if test.p_value < self.significance / len(self._tests):
                how = words[name][test.total < 0]
                notify(
                    f"samples are not missing at random: over {self._steps} steps, those without a reward "
                    f"({self._missing} of {self._tried} attempts) {how} than others (p = {test.p_value:.1g}). Training "
                    "does not see what they were worth: the mean reward of the samples that it sees may be off by up "
                    f"to {self._bound():.3g}. Look at the reasons (missing/*): a limit that long responses exceed, or "
                    "a tool or judge that fails for some of them",
                    "warning",
                )

    def state(self) -> dict[str, Any]:
        """Everything that later warnings depend on, for a checkpoint."""
        return {
            "steps": self._steps,
            "missing": self._missing,
            "tried": self._tried,
            "scores": [self._lowest, self._largest] if self._lowest <= self._largest else None,
            "tests": {name: test.state() for name, test in self._tests.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._start_step()
        self._start_window()
        self._steps, self._missing, self._tried = (int(state[name]) for name in ("steps", "missing", "tried"))
        if state["scores"] is not None:
            self._lowest, self._largest = state["scores"]
        for name, values in state["tests"].items():
            test = Dependence(values["total"], values["squares"], int(values["missing"]), int(values["prompts"]))
            self._tests[name] = test
