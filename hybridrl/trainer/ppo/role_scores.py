"""The reward of responses: that of the reward function, and of models that take part in the run as roles.

Shapes: B rows, T response width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridrl.algorithms.sessions import sessions_of
from hybridrl.config import PPOTrainerConfig
from hybridrl.config.roles import Scoring
from hybridrl.protocol import DataProto
from hybridrl.reward import RewardManager
from hybridrl.reward.factory import ask
from hybridrl.reward.positions import last_generated
from hybridrl.rollout import Rollout
from hybridrl.single_controller import RayWorkerGroup
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.early_scores import EarlyScores
from hybridrl.trainer.ppo.role_groups import POLICY, active_roles
from hybridrl.trainer.ppo.served_judge import ServedJudge


class Scorer:
    """Scores batches of responses, in training before groups are chosen, and in validation.

    With s the reward of the reward function and s_r the score of a role r with weight w_r, the reward of a response is
    s + sum over r of w_r * s_r, at its last generated token. Of a session in several rows, the last row gets the
    scores of the roles.

    Args:
        readers: what turns a batch into what a role's worker group gets, by role.
        config: the run's configuration; None for a scorer without roles.
    """

    def __init__(
        self, readers: Mapping[str, Callable[[DataProto], DataProto]], config: PPOTrainerConfig | None = None
    ) -> None:
        self._readers = readers
        self._config = config
        self._roles: list[tuple[Scoring, Callable[[DataProto], DataProto], Any]] = []
        self._lend_cache: Callable[[], None] | None = None
        self._judges: list[ServedJudge] = []

    @classmethod
    def of(cls, config: PPOTrainerConfig, tokenizer: Any) -> Scorer:
        """Return the scorer of a run, which `connect` completes.

        Raises:
            UserError: the model of a role cannot score these conversations.
        """
        specs = [spec for spec in active_roles(config) if spec.scoring is not None]
        return cls({spec.name: spec.scoring.reader()(config, tokenizer) for spec in specs if spec.scoring}, config)

    def connect(self, groups: Mapping[str, RayWorkerGroup], rollout: Rollout) -> None:
        """Have the models of the roles score, once they are loaded.

        Args:
            groups: the worker groups, by role.
            rollout: its cache is released while a model on the policy's devices scores.
        """
        assert self._config is not None
        specs = [spec for spec in active_roles(self._config) if spec.name in self._readers and spec.name in groups]
        self._roles = [(spec.scoring, self._readers[spec.name], groups[spec.name]) for spec in specs if spec.scoring]
        judges: list[Any] = [groups.get(spec.name) for spec in active_roles(self._config) if spec.asked_in]
        self._judges = [judge for judge in judges if isinstance(judge, ServedJudge)]
        pool = groups[POLICY].resource_pool
        sharing: list[Any] = [*(groups[spec.name] for spec in specs), *self._judges]
        shared = any(group.resource_pool is pool for group in sharing)
        if shared and rollout.gives_memory_back and not self._config.actor_rollout_ref.rollout.nnodes:
            self._lend_cache = rollout.lend_cache

    def __call__(self, reward_fn: RewardManager | EarlyScores, batch: DataProto, timer: PhaseTimer) -> dict[str, Any]:
        """Return what `RewardManager.__call__` describes, with the scores of the roles.

        `reward_extra_info` has a column for each role. The models compute while the reward function runs.

        Args:
            reward_fn: the reward manager, or what has begun to score for it.
            batch: responses.
            timer: measures `reward` and the phases of the roles.
        """
        if self._lend_cache is not None:
            self._lend_cache()
        pending = []
        for scoring, read, group in self._roles:
            with timer.phase(scoring.phase):
                inputs = read(batch)
                pending.append((scoring, read, inputs, getattr(group, scoring.method)(inputs)))
        with timer.phase("reward"), contextlib.ExitStack() as turns:
            for judge in self._judges:
                turns.enter_context(judge.turn())
            result = ask(reward_fn, batch)
        for scoring, read, inputs, future in pending:
            with timer.phase(scoring.phase):
                scores = future.get().batch[scoring.column]
                rewards, columns = getattr(read, "rewards", _at_the_end(scoring.column))(scores, inputs, batch)
            result["reward_tensor"] = self.add_scores(result["reward_tensor"], scoring, rewards, batch)
            result["reward_extra_info"] |= columns
        return result

    def add_scores(self, rewards: torch.Tensor, scoring: Scoring, more: torch.Tensor, batch: DataProto) -> torch.Tensor:
        assert self._config is not None
        sessions = sessions_of(batch)
        rows = torch.arange(len(more)) if sessions is None else sessions.last
        rewards = rewards.clone()
        rewards[rows] += scoring.weight(self._config) * more[rows]
        return rewards


def _at_the_end(column: str) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    """Return the function that puts scores [B, 1] of whole responses at their last generated tokens."""

    def rewards(scores: torch.Tensor, inputs: DataProto, batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        placed = torch.zeros(batch.batch["responses"].shape, dtype=scores.dtype)
        placed[torch.arange(len(placed)), last_generated(batch)] = scores[:, -1]
        return placed, {column: scores[:, -1].tolist()}

    return rewards
