"""Scores of samples that have finished, while others are still being generated."""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridrl.algorithms.sessions import split_sessions
from hybridrl.errors import RewardError
from hybridrl.protocol import DataProto, object_array
from hybridrl.reward import RewardManager
from hybridrl.reward.manager import RowScore
from hybridrl.reward.positions import response_lengths
from hybridrl.rollout import Rollout
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.trajectory import Trajectory

_Key = tuple[str, str, int]


@dataclass(frozen=True)
class _Early:
    """A trajectory that is being scored."""

    token_ids: list[int]
    future: Future[RowScore]


_Finished = queue.SimpleQueue[Sequence[Trajectory] | None]
_Begun = Future[Mapping[_Key, _Early]]


@contextlib.contextmanager
def scored_early(manager: Any, rollout: Rollout, asked: DataProto) -> Iterator["EarlyScores"]:
    """Score what the rollout finishes within this context. It gives what then scores the whole batch.

    Where the manager or its function takes whole batches, or the rollout returns all responses at once, the manager
    scores the batch as it is.

    Args:
        manager: scores the samples.
        rollout: generates them.
        asked: what the rollout is asked for: a row per sample, with all columns.
    """
    if not _possible(manager, asked):
        yield EarlyScores(manager)
        return
    finished: _Finished = queue.SimpleQueue()
    begun: _Begun = Future()
    threading.Thread(target=_listen, args=(manager, asked, finished, begun), name="early-scores", daemon=True).start()
    rollout.on_finished = finished.put
    try:
        yield EarlyScores(manager, begun)
    finally:
        rollout.on_finished = None
        finished.put(None)


class EarlyScores:
    """A reward manager that has begun with samples that finished before others.

    It is called in place of the manager, and returns the same.

    Args:
        manager: scores the samples.
        begun: the samples that it has begun with; None if there are none.
    """

    def __init__(self, manager: Any, begun: _Begun | None = None) -> None:
        self.manager = manager
        self._begun = begun
        self.__name__ = type(manager).__name__

    def __call__(self, batch: DataProto, return_dict: bool = True) -> Any:
        """What the manager returns for a batch; see `RewardManager.__call__`.

        The metric `perf/reward_scored_early` is the share of rows whose score was there when the batch was complete.
        """
        if self._begun is None:
            return self.manager(batch, return_dict=return_dict)
        futures = _futures(batch, self._begun.result())
        late = _with_sessions(batch, [row for row, future in enumerate(futures) if future is None])
        done = sum(future is not None and future.done() for future in futures)
        if late:
            for row, future in zip(late, self.manager.submit(batch.select_idxs(late)), strict=True):
                futures[row] = future
        known = [future for future in futures if future is not None]
        concurrent.futures.wait(known, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in known:
            if future.done() and (error := future.exception()) is not None:
                raise error
        result = self.manager.collect(batch, [future.result() for future in known])
        result["metrics"] = {**result["metrics"], "perf/reward_scored_early": done / max(len(futures), 1)}
        return result if return_dict else result["reward_tensor"]


def _listen(manager: RewardManager, asked: DataProto, finished: _Finished, begun: _Begun) -> None:
    """Hand over trajectories as they finish, until None; those that finish together make one batch."""
    found: dict[_Key, _Early] = {}
    ended = False
    try:
        columns = asked.non_tensor_batch
        names = zip(map(str, columns["uid"].tolist()), map(str, columns["sample"].tolist()), strict=True)
        row_of = {name: row for row, name in enumerate(names)}
        while not ended and (first := finished.get()) is not None:
            several = list(first)
            with contextlib.suppress(queue.Empty):
                while not ended:
                    more = finished.get_nowait()
                    ended = more is None
                    several += more or ()
            found |= _submitted(manager, columns, row_of, several)
        begun.set_result(found)
    except BaseException as error:
        begun.set_exception(error)


def _submitted(
    manager: RewardManager,
    columns: Mapping[str, np.ndarray],
    row_of: Mapping[tuple[str, str], int],
    several: Sequence[Trajectory],
) -> dict[_Key, _Early]:
    """Begin with the trajectories of samples that were asked for; a phase of one's own may generate others."""
    several = [one for one in several if (one.uid, str(one.sample)) in row_of]
    if not several:
        return {}
    pad = manager.tokenizer.pad_token_id
    batch = batch_of([replace(one, routed_experts=None) for one in several], 0 if pad is None else pad)
    rows = [row_of[one.uid, str(one.sample)] for one in several]
    for name, column in columns.items():
        if name not in batch.non_tensor_batch:
            batch.non_tensor_batch[name] = object_array([column[row] for row in rows])
    return {
        (one.uid, str(one.sample), one.turn): _Early(list(one.token_ids), future)
        for one, future in zip(several, manager.submit(batch), strict=True)
    }


def _possible(manager: Any, asked: DataProto) -> bool:
    kind = type(manager)
    if not isinstance(manager, RewardManager) or not {"uid", "sample"} <= asked.non_tensor_batch.keys():
        return False
    if any(getattr(kind, name) is not getattr(RewardManager, name) for name in ("__call__", "score_batch")):
        return False
    try:
        calls = manager.pool.calls
    except RewardError:  # scoring the batch raises it
        return False
    return bool(calls) and all(how.form == "sample" for _, how in calls)


def _futures(batch: DataProto, found: Mapping[_Key, _Early]) -> list[Future[RowScore] | None]:
    """The futures of a batch's rows; None for a row that was not scored with these tokens."""
    columns, lengths = batch.non_tensor_batch, response_lengths(batch).tolist()
    responses = batch.batch["responses"].tolist()
    turns = columns.get("trajectory_index")
    futures: list[Future[RowScore] | None] = []
    for row, (uid, sample) in enumerate(zip(columns["uid"].tolist(), columns["sample"].tolist(), strict=True)):
        early = found.get((str(uid), str(sample), 0 if turns is None else int(turns[row])))
        same = early is not None and early.token_ids == responses[row][: lengths[row]]
        futures.append(early.future if early is not None and same else None)
    return futures


def _with_sessions(batch: DataProto, rows: list[int]) -> list[int]:
    """Rows of a batch with the other rows of their sessions: a manager scores whole sessions."""
    sessions = split_sessions(batch.non_tensor_batch, len(batch)) if rows else None
    if sessions is None:
        return rows
    ids = sessions.groups.ids.tolist()
    found = {ids[row] for row in rows}
    return [row for row, number in enumerate(ids) if number in found]
