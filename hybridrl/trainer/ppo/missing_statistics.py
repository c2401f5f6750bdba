"""Metrics of missing samples, and a warning if they are not missing at random."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.algorithms.missingness import Dependence, bias_bound, ranks
from hybridrl.notify import notify
from hybridrl.protocol.sample_names import SampleName, sample_names
from hybridrl.scored import Reason
from hybridrl.trainer.ppo.episode import EpisodeBatch, SampleAttempt


@dataclass(frozen=True)
class MissingCounts:
    """The attempts at the samples of a generation batch.

    Attributes:
        samples: number of samples that were asked for.
        left_out: number of those without a score in the end.
        attempts: all attempts.
        scores: of the samples of each prompt; none of samples that are not trained on.
    """

    samples: int
    left_out: int
    attempts: Sequence[SampleAttempt]
    scores: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, episodes: EpisodeBatch, scores: bool = True) -> "MissingCounts":
        """Count the samples of episodes that have ended.

        Args:
            scores: count their scores too; False for samples that are not trained on.
        """
        score_of: dict[SampleName, float] = {}
        if scores and episodes.batch is not None:
            rows = episodes.batch.batch["token_level_scores"].sum(dim=-1).tolist()
            for name, score in zip(sample_names(episodes.batch), rows, strict=True):
                score_of[name] = score_of.get(name, 0.0) + score
        by_uid: dict[str, list[float]] = {}
        for name, score in score_of.items():
            by_uid.setdefault(name.uid, []).append(score)
        return cls(len(episodes.prompts), episodes.left_out, tuple(episodes.attempts), by_uid)

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values, for `from_state`."""
        attempts = [[uid, tokens, None if reason is None else reason.value] for uid, tokens, reason in self.attempts]
        scores = {uid: list(values) for uid, values in self.scores.items()}
        return {"samples": self.samples, "left_out": self.left_out, "attempts": attempts, "scores": scores}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "MissingCounts":
        """Return the counts that `state` describes."""
        attempts = [
            SampleAttempt(uid, tokens, None if reason is None else Reason(reason))
            for uid, tokens, reason in state["attempts"]
        ]
        return cls(state["samples"], state["left_out"], attempts, state["scores"])


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
        self._samples = self._left_out = 0
        self._attempts: list[SampleAttempt] = []
        self._scores: dict[str, list[float]] = {}

    def _start_window(self) -> None:
        self._steps = self._missing = self._attempted = 0
        self._lowest, self._largest = float("inf"), float("-inf")
        self._tests = {"length": Dependence(), "reward": Dependence()}

    def add(self, counts: MissingCounts) -> None:
        """Count the samples of a generation batch."""
        self._samples += counts.samples
        self._left_out += counts.left_out
        self._attempts += counts.attempts
        for uid, scores in counts.scores.items():
            self._scores.setdefault(uid, []).extend(scores)

    def end_step(self) -> dict[str, float]:
        """Return the metrics of the step; every `window` steps, the tests are made.

        Returns:
            `missing/REASON`, the share of attempts without a reward for that reason; `missing/refilled` and
            `missing/left_out`, the attempts that repeat a sample and the samples that are left out, per sample of the
            step; and `missing/bias_bound` of the window so far, see `bias_bound`.
        """
        total = max(len(self._attempts), 1)
        counts = Counter(attempt.reason for attempt in self._attempts if attempt.reason is not None)
        metrics = {f"missing/{reason.value}": counts[reason] / total for reason in Reason}
        metrics["missing/refilled"] = (len(self._attempts) - self._samples) / max(self._samples, 1)
        metrics["missing/left_out"] = self._left_out / max(self._samples, 1)
        # what a loop or filter leaves out on purpose is no fault to be warned of
        attempts = [attempt for attempt in self._attempts if attempt.reason is not Reason.DROPPED]
        scores = [score for of_prompt in self._scores.values() for score in of_prompt]
        self._steps += 1
        self._attempted += len(attempts)
        self._missing += sum(attempt.reason is not None for attempt in attempts)
        self._lowest, self._largest = min([self._lowest, *scores]), max([self._largest, *scores])
        self._test(attempts)
        metrics["missing/bias_bound"] = self._bound()
        if self._steps >= self.window:
            self._warn()
            self._start_window()
        self._start_step()
        return metrics

    def _test(self, attempts: Sequence[SampleAttempt]) -> None:
        complete = [attempt for attempt in attempts if attempt.tokens is not None]
        lengths = ranks([float(attempt.tokens or 0) for attempt in complete])
        self._tests["length"].add(
            [attempt.reason is not None for attempt in complete],
            lengths.tolist(),
            [attempt.uid for attempt in complete],
        )
        scored = [attempt for attempt in attempts if attempt.uid in self._scores]
        means = {uid: float(np.mean(values)) for uid, values in self._scores.items()}
        self._tests["reward"].add(
            [attempt.reason is not None for attempt in scored],
            [means[attempt.uid] for attempt in scored],
            [attempt.uid for attempt in scored],
        )

    def _bound(self) -> float:
        return bias_bound(self._missing, self._attempted, self._lowest, self._largest) if self._missing else 0.0

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
                    f"({self._missing} of {self._attempted} attempts) {how} than others (p = {test.p_value:.1g}). "
                    "Training does not see what they were worth: the mean reward of the samples that it sees may be "
                    f"off by up to {self._bound():.3g}. Look at the reasons (missing/*): a limit that long responses "
                    "exceed, or a tool or judge that fails for some of them",
                    "warning",
                )

    def state(self) -> dict[str, Any]:
        """Return everything that later warnings depend on, for a checkpoint."""
        return {
            "steps": self._steps,
            "missing": self._missing,
            "tried": self._attempted,
            "scores": [self._lowest, self._largest] if self._lowest <= self._largest else None,
            "tests": {name: test.state() for name, test in self._tests.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._start_step()
        self._start_window()
        self._steps, self._missing, self._attempted = (int(state[name]) for name in ("steps", "missing", "tried"))
        if state["scores"] is not None:
            self._lowest, self._largest = state["scores"]
        for name, values in state["tests"].items():
            test = Dependence(values["total"], values["squares"], int(values["missing"]), int(values["prompts"]))
            self._tests[name] = test
