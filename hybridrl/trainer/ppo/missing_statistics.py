"""What the metrics say of missing samples, and a warning if they are not missing at random."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridrl.algorithms.missingness import Dependence, bias_bound, ranks
from hybridrl.notify import notify
from hybridrl.scored import Reason
from hybridrl.trainer.ppo.attempts import Judged
from hybridrl.trainer.ppo.missing import names_of_samples


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
        """Count the samples of a generation batch.

        Args:
            judged: what attempts at them gave.
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
