"""Scores of samples that have finished, while others are still being generated."""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np

from hybridrl.algorithms.sessions import sessions_of
from hybridrl.errors import RewardError
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.sample_names import SampleName, sample_names
from hybridrl.reward import RewardManager
from hybridrl.reward.manager import RowScore
from hybridrl.reward.positions import response_lengths
from hybridrl.reward.response_rows import responses_of
from hybridrl.rollout.batch import columns_of
from hybridrl.rollout.rollout import OnFinished
from hybridrl.rollout.trajectory import Trajectory

_FinishedQueue: TypeAlias = queue.SimpleQueue[Sequence[Trajectory] | None]
#: the tokens and the score of each trajectory, by its sample and its place in the session
_Submitted: TypeAlias = Mapping[tuple[SampleName, int], tuple[list[int], Future[RowScore]]]


@contextlib.contextmanager
def scored_early(manager: Any, prompts: DataProto) -> Iterator["EarlyScores"]:
    """Score samples as they finish within this context. Yield the scorer of the whole batch.

    Where the manager or its function takes whole batches, or the rollout returns all responses at once, the manager
    scores the batch as it is.

    Args:
        manager: scores the samples.
        prompts: a row per sample, with all columns.
    """
    if not _scores_samples(manager, prompts):
        yield EarlyScores(manager)
        return
    finished: _FinishedQueue = queue.SimpleQueue()
    submitted: Future[_Submitted] = Future()
    arguments = (manager, prompts, finished, submitted)
    threading.Thread(target=_submit_finished, args=arguments, name="early-scores", daemon=True).start()
    try:
        yield EarlyScores(manager, finished.put, submitted)
    finally:
        finished.put(None)


class EarlyScores:
    """A reward manager that has begun with samples that finished before others.

    It is called in place of the manager, and returns the same.

    Args:
        manager: scores the samples.
        on_finished: begins with the trajectories of a sample, for `Rollout.generate`; None: the manager scores whole
            batches.
        submitted: the trajectories that it has begun with; None if there are none.
    """

    def __init__(
        self, manager: Any, on_finished: OnFinished | None = None, submitted: Future[_Submitted] | None = None
    ) -> None:
        self.manager = manager
        self.on_finished = on_finished
        self._submitted = submitted
        self.__name__ = type(manager).__name__

    def __call__(self, batch: DataProto, return_dict: bool = True) -> Any:
        """Return the manager's result for a batch; see `RewardManager.__call__`.

        The metric `perf/reward_scored_early` is the share of rows whose score was there when the batch was complete.
        """
        if self._submitted is None:
            return self.manager(batch, return_dict=return_dict)
        futures = _futures(batch, self._submitted.result())
        late = _with_sessions(batch, [row for row, future in enumerate(futures) if future is None])
        done = sum(future is not None and future.done() for future in futures)
        if late:
            for row, future in zip(late, self.manager.submit(batch.select_idxs(late)), strict=True):
                futures[row] = future
        of_rows = [future for future in futures if future is not None]
        concurrent.futures.wait(of_rows, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in of_rows:
            if future.done() and (error := future.exception()) is not None:
                raise error
        result = self.manager.collect(batch, [future.result() for future in of_rows])
        result["metrics"] = {**result["metrics"], "perf/reward_scored_early": done / max(len(futures), 1)}
        return result if return_dict else result["reward_tensor"]


def _submit_finished(
    manager: RewardManager, prompts: DataProto, finished: _FinishedQueue, submitted: Future[_Submitted]
) -> None:
    """Hand over trajectories as they finish, until None; those that finish together are handed over at once."""
    scores: dict[tuple[SampleName, int], tuple[list[int], Future[RowScore]]] = {}
    ended = False
    try:
        row_of = {name: row for row, name in enumerate(sample_names(prompts))}
        while not ended and (first := finished.get()) is not None:
            trajectories = list(first)
            with contextlib.suppress(queue.Empty):
                while not ended:
                    more = finished.get_nowait()
                    ended = more is None
                    trajectories += more or ()
            # A phase of a subclass may generate samples that this batch does not have.
            trajectories = [trajectory for trajectory in trajectories if _name_of(trajectory) in row_of]
            rows = [row_of[_name_of(trajectory)] for trajectory in trajectories]
            for trajectory, future in zip(
                trajectories, _submitted(manager, prompts.non_tensor_batch, rows, trajectories), strict=True
            ):
                scores[_name_of(trajectory), trajectory.turn] = np.asarray(trajectory.token_ids).tolist(), future
        submitted.set_result(scores)
    except BaseException as error:
        submitted.set_exception(error)


def _submitted(
    manager: RewardManager, columns: Mapping[str, np.ndarray], rows: list[int], trajectories: Sequence[Trajectory]
) -> list[Future[RowScore]]:
    """Submit trajectories with the columns of their prompts; `rows` has the row of each."""
    if not trajectories:
        return []
    own = columns_of(trajectories)
    of_prompts = {
        name: object_array([column[row] for row in rows]) for name, column in columns.items() if name not in own
    }
    return manager.submit_responses(
        responses_of([np.asarray(trajectory.token_ids).tolist() for trajectory in trajectories], own | of_prompts)
    )


def _name_of(trajectory: Trajectory) -> SampleName:
    return SampleName(trajectory.uid, trajectory.sample)


def _scores_samples(manager: Any, prompts: DataProto) -> bool:
    """Return whether a manager scores single samples, and nothing of it is replaced that sees whole batches."""
    kind = type(manager)
    if not isinstance(manager, RewardManager) or not {"uid", "sample"} <= prompts.non_tensor_batch.keys():
        return False
    if any(getattr(kind, name) is not getattr(RewardManager, name) for name in ("__call__", "score_batch")):
        return False
    try:
        calls = manager.pool.calls
    except RewardError:  # scoring the batch raises it
        return False
    return bool(calls) and all(how.form == "sample" for _, how in calls)


def _futures(batch: DataProto, submitted: _Submitted) -> list[Future[RowScore] | None]:
    """Return the futures of a batch's rows; None for a row that was not scored with these tokens."""
    turns, lengths = batch.non_tensor_batch.get("trajectory_index"), response_lengths(batch).tolist()
    responses = batch.batch["responses"].tolist()
    futures: list[Future[RowScore] | None] = []
    for row, name in enumerate(sample_names(batch)):
        token_ids, future = submitted.get((name, 0 if turns is None else int(turns[row])), (None, None))
        same = token_ids is not None and token_ids == responses[row][: lengths[row]]
        futures.append(future if same else None)
    return futures


def _with_sessions(batch: DataProto, rows: list[int]) -> list[int]:
    """Return rows of a batch with the other rows of their sessions: a manager scores whole sessions."""
    sessions = sessions_of(batch) if rows else None
    if sessions is None:
        return rows
    ids = sessions.groups.ids.tolist()
    late = {ids[row] for row in rows}
    return [row for row, number in enumerate(ids) if number in late]
