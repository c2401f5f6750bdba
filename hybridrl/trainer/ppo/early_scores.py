"""Scores of samples that have finished, while others are still being generated."""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.algorithms.sessions import split_sessions
from hybridrl.errors import RewardError
from hybridrl.protocol import DataProto, object_array
from hybridrl.reward import RewardManager
from hybridrl.reward.manager import Scored
from hybridrl.reward.positions import response_lengths
from hybridrl.rollout import Rollout
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.trajectory import Trajectory

_Key = tuple[str, str, int]


@dataclass(frozen=True)
class _Early:
    """A trajectory that is being scored."""

    token_ids: list[int]
    future: Future[Scored]


class EarlyScores:
    """A reward manager that begins with each sample as soon as the rollout has finished it.

    It is called in place of the manager, and returns the same. Where the manager or its function takes whole batches,
    or the rollout returns all responses at once, the manager scores the batch as it is.

    Args:
        manager: scores the samples.
        rollout: generates them.
    """

    def __init__(self, manager: Any, rollout: Rollout) -> None:
        self.manager = manager
        self._rollout = rollout
        self._finished: queue.SimpleQueue[Sequence[Trajectory] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._rows: dict[tuple[str, str], int] = {}
        self._asked: DataProto | None = None
        self._found: dict[_Key, _Early] = {}
        self._error: BaseException | None = None
        self.__name__ = type(manager).__name__

    @contextlib.contextmanager
    def listening(self, asked: DataProto) -> Iterator[None]:
        """Score what the rollout finishes within this context; the batch of it is scored by the next call.

        Args:
            asked: what the rollout is asked for: a row per sample, with all columns.
        """
        if not self._possible(asked):
            yield
            return
        columns = asked.non_tensor_batch
        names = zip(map(str, columns["uid"].tolist()), map(str, columns["sample"].tolist()), strict=True)
        self._rows = {name: row for row, name in enumerate(names)}
        self._asked, self._found, self._error = asked, {}, None
        self._finished = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._score, name="early-scores", daemon=True)
        self._thread.start()
        self._rollout.on_finished = self._finished.put
        try:
            yield
        finally:
            self._rollout.on_finished = None
            self._finished.put(None)

    def __call__(self, batch: DataProto, return_dict: bool = True) -> Any:
        """What the manager returns for a batch; see `RewardManager.__call__`.

        The metric `perf/reward_scored_early` is the share of rows whose score was there when the batch was complete.
        """
        if self._thread is None:
            return self.manager(batch, return_dict=return_dict)
        thread, self._thread = self._thread, None
        thread.join()
        if self._error is not None:
            raise self._error
        futures = self._futures(batch)
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
        self._found = {}
        result["metrics"] = {**result["metrics"], "perf/reward_scored_early": done / max(len(futures), 1)}
        return result if return_dict else result["reward_tensor"]

    def _possible(self, asked: DataProto) -> bool:
        kind = type(self.manager)
        if not isinstance(self.manager, RewardManager) or not {"uid", "sample"} <= asked.non_tensor_batch.keys():
            return False
        if any(getattr(kind, name) is not getattr(RewardManager, name) for name in ("__call__", "score_batch")):
            return False
        try:
            calls = self.manager.pool.calls
        except RewardError:  # scoring the batch raises it
            return False
        return bool(calls) and all(how.form == "sample" for _, how in calls)

    def _score(self) -> None:
        """Hand over trajectories as they finish; those that finish together make one batch."""
        try:
            while (first := self._finished.get()) is not None:
                several, ended = list(first), False
                with contextlib.suppress(queue.Empty):
                    while not ended:
                        more = self._finished.get_nowait()
                        ended = more is None
                        several += more or ()
                self._submit(several)
                if ended:
                    return
        except BaseException as error:
            self._error = error

    def _submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Begin with the trajectories of samples that were asked for; a phase of one's own may generate others."""
        assert self._asked is not None
        trajectories = [one for one in trajectories if (one.uid, str(one.sample)) in self._rows]
        if not trajectories:
            return
        pad = self.manager.tokenizer.pad_token_id
        batch = batch_of([replace(one, routed_experts=None) for one in trajectories], 0 if pad is None else pad)
        rows = [self._rows[one.uid, str(one.sample)] for one in trajectories]
        for name, column in self._asked.non_tensor_batch.items():
            if name not in batch.non_tensor_batch:
                batch.non_tensor_batch[name] = object_array([column[row] for row in rows])
        for one, future in zip(trajectories, self.manager.submit(batch), strict=True):
            self._found[one.uid, str(one.sample), one.turn] = _Early(list(one.token_ids), future)

    def _futures(self, batch: DataProto) -> list[Future[Scored] | None]:
        """The futures of a batch's rows; None for a row that was not scored with these tokens."""
        columns, lengths = batch.non_tensor_batch, response_lengths(batch).tolist()
        responses = batch.batch["responses"].tolist()
        turns = columns.get("trajectory_index")
        futures: list[Future[Scored] | None] = []
        for row, (uid, sample) in enumerate(zip(columns["uid"].tolist(), columns["sample"].tolist(), strict=True)):
            early = self._found.get((str(uid), str(sample), 0 if turns is None else int(turns[row])))
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
