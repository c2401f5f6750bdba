"""Responses to score: of the rows of a batch, or of trajectories that have no rows yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.algorithms.sessions import split_sessions
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import TRAJECTORY_REWARD
from hybridrl.reward.positions import response_lengths, tensors_of
from hybridrl.scored import Unscored


@dataclass(frozen=True)
class ResponseRow:
    """A response to score.

    Attributes:
        token_ids: up to its end.
        columns: the columns of its row, by name.
        own_reward: the reward that it brought along; None leaves it to the reward function.
        adds: it is a part of a session before its last that brought a reward along: it adds that and no more.
    """

    token_ids: Sequence[int]
    columns: Mapping[str, Any]
    own_reward: float | Unscored | None = None
    adds: bool = False


def responses_of(token_ids: Sequence[Sequence[int]], columns: Mapping[str, np.ndarray]) -> list[ResponseRow]:
    """Return the responses of rows with these tokens and columns; the rows of a session have to be complete."""
    rows = len(token_ids)
    sessions = split_sessions(columns, rows)
    last = set(range(rows) if sessions is None else sessions.last.tolist())
    rewards = own_rewards(columns, rows)
    return [
        ResponseRow(
            ids,
            {name: column[row] for name, column in columns.items()},
            rewards[row],
            adds=row not in last and rewards[row] is not None,
        )
        for row, ids in enumerate(token_ids)
    ]


def batch_responses(batch: DataProto) -> list[ResponseRow]:
    """Return the responses of a batch.

    Raises:
        RewardError: it has none.
    """
    rows = tensors_of(batch)["responses"].tolist()
    lengths = response_lengths(batch).tolist()
    ids = [tokens[:length] for tokens, length in zip(rows, lengths, strict=True)]
    return responses_of(ids, batch.non_tensor_batch)


def own_rewards(columns: Mapping[str, np.ndarray], rows: int) -> list[float | Unscored | None]:
    """Return what each row brought along (column `trajectory_reward`); None leaves it to the reward function."""
    column = columns.get(TRAJECTORY_REWARD)
    if column is None:
        return [None] * rows
    return [reward if reward is None or isinstance(reward, Unscored) else float(reward) for reward in column]
