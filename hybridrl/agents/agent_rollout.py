"""A rollout whose prompts are answered by agent loops, side by side, over any other rollout."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hybridrl.agents.agents import Agents, kwargs_of
from hybridrl.agents.session import META, OutputCost, SessionResult, Task, run_attempt
from hybridrl.agents.workers.agent_pool import SessionPool
from hybridrl.agents.workers.setup import setup_of
from hybridrl.config.checks.check_agents import MAX_AGENTS, MAX_SESSIONS
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import MISSING_SAMPLES
from hybridrl.protocol.sample_names import UnscoredSample, request_names
from hybridrl.rollout.batch import batch_of, prompt_ids_of
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.request import MEMORY_TAGS
from hybridrl.rollout.rollout import OnFinished, Rollout
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.scored import Reason
from hybridrl.utils.background import ended_by

T = TypeVar("T")


class AgentRollout(Rollout):
    """Runs a session per row, in worker processes (`agent.num_workers`) or here. Weights, memory and pauses are those
    of the rollout that generates.

    A session that fails is run again (`agent.retries`), unless it ran out of time, and then ends the run
    (`agent.on_error=raise`) or is listed as missing; no other session notices.

    Args:
        inner: generates.
        agents: what the sessions share.
    """

    def __init__(self, inner: Rollout, agents: Agents) -> None:
        self.inner = inner
        self.agents = agents
        self._config = agents.config.actor_rollout_ref.rollout
        self.in_place = inner.in_place
        self.gives_memory_back = inner.gives_memory_back
        self._counts = _Counts()
        self.server = inner.server
        for gateway in agents.gateways.values():
            gateway.connect(inner.server)
        self._pool = SessionPool(setup_of(agents), agents.workers) if agents.workers else None

    @property
    def version(self) -> int:  # type: ignore[override]
        """The version of the weights; see `Rollout`."""
        return self.inner.version

    def generate(self, prompts: DataProto, on_finished: OnFinished | None = None) -> DataProto:
        """One or more rows per row of `prompts`, in their order; see `Rollout.generate` and `batch_of`.

        The meta `missing_samples` has an `UnscoredSample` for each session that gave no score.

        Raises:
            RolloutError: generation failed, or a session failed and `agent.on_error` is `raise`.
        """
        self.inner.resume_for_requests()
        trajectories, missing = run_coroutine(self._sessions(prompts, on_finished))
        batch = batch_of(
            trajectories,
            self.agents.tokenizer.pad_token_id,
            prompt_width=max(
                [prompts.batch["input_ids"].shape[1], *(len(trajectory.prompt_ids) for trajectory in trajectories)]
            ),
            response_width=self._config.response_length,
        )
        if missing:
            batch.meta_info[MISSING_SAMPLES] = missing
        return batch

    async def _sessions(
        self, prompts: DataProto, on_finished: OnFinished | None
    ) -> tuple[list[Trajectory], list[UnscoredSample]]:
        sampling = SamplingParams.from_meta(self._config, prompts.meta_info)
        meta = {name: prompts.meta_info[name] for name in META if name in prompts.meta_info}
        drawn = self.in_place or self._config.full_determinism or bool(prompts.meta_info.get("seeded", False))
        batch = _Batch(self.inner.client(), self._config.agent.max_running, on_finished)
        sessions = [
            asyncio.ensure_future(
                self._session(batch, Task(row, uid, sample, sampling, meta, sampling.do_sample and drawn))
            )
            for row, (uid, sample) in zip(rows_of(prompts), request_names(prompts), strict=True)
        ]
        try:
            results = await asyncio.gather(*sessions)
        finally:
            for session in sessions:
                session.cancel()
            await asyncio.gather(*sessions, return_exceptions=True)
        return (
            [trajectory for trajectories, _ in results for trajectory in trajectories],
            [sample for _, missing in results for sample in missing],
        )

    async def _session(self, batch: "_Batch", task: Task) -> tuple[list[Trajectory], list[UnscoredSample]]:
        """The trajectories of a session, passed to `on_finished` at once, and the attempts at it without a score."""
        name = task.row.get("agent_name")
        async with batch.places(self.agents.uses_gateway(name)):
            attempt, missing = await self._attempts(batch, task, self.agents.runs_on_controller(name))
        if attempt.unscored is None:
            for cost in attempt.costs:
                self._counts.add(cost)
            if batch.on_finished is not None:
                batch.on_finished(attempt.trajectories)
            return attempt.trajectories, missing
        message = f"agent session of uid {task.uid!r}, sample {task.sample} has no score: {attempt.unscored}"
        if self._config.agent.on_error == "raise" and attempt.unscored.reason is not Reason.DROPPED:
            raise RolloutError(f"{message}. rollout.agent.on_error=drop leaves such samples out") from attempt.failure
        notify(message, "warning")
        return [], missing

    async def _attempts(
        self, batch: "_Batch", task: Task, on_controller: bool
    ) -> tuple[SessionResult, list[UnscoredSample]]:
        """The last attempt at a session, and those without a score."""
        missing: list[UnscoredSample] = []
        while True:
            task = replace(task, attempt=len(missing))
            if self._pool is None or on_controller:
                attempt = await run_attempt(self.agents, batch.client, task)
            else:
                attempt = await asyncio.wrap_future(self._pool.submit(task, batch.client))
            if attempt.unscored is None:
                return attempt, missing
            self.inner.check_running()  # no session can have an answer any more
            reason = attempt.unscored.reason
            again = len(missing) < self._config.agent.retries and reason not in (Reason.DROPPED, Reason.TIMEOUT)
            missing.append(UnscoredSample(task.uid, task.sample, attempt.unscored, attempt.tokens, again))
            if reason is not Reason.DROPPED:
                self._counts.failed(again)
            if not again:
                return attempt, missing

    # ------------------------------------------------------------------ the rollout that generates

    def update_weights(self, version: int) -> dict[str, float]:
        return self.inner.update_weights(version)

    def weights_will_change(self) -> None:
        self.inner.weights_will_change()

    def release(self, tags: Sequence[str] = MEMORY_TAGS, training: bool = False) -> None:
        self.inner.release(tags, training)

    def resume_for_requests(self) -> None:
        self.inner.resume_for_requests()

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self.inner.resume(tags)

    def lend_cache(self) -> None:
        self.inner.lend_cache()

    def pause(self) -> None:
        self.inner.pause()

    def unpause(self) -> None:
        self.inner.unpause()

    def abort(self) -> None:
        self.inner.abort()

    def client(self) -> GenerationClient:
        return self.inner.client()

    def health(self) -> list[str]:
        return self.inner.health()

    def check_running(self) -> None:
        self.inner.check_running()

    def metrics(self) -> dict[str, float]:
        """Metrics of the rollout, and of the sessions since the previous call.

        `agent_loop/{generate_sequences,tool_calls}/{mean,max}` are seconds per session, `agent_loop/tool_faults/KIND`
        the share of sessions with such a fault, `agent_loop/sessions_{retried,failed}` counts, and
        `agent_loop/workers_restarted` the number of processes of sessions that died.
        """
        restarts = {} if self._pool is None else {"agent_loop/workers_restarted": float(self._pool.take_restarts())}
        return self.inner.metrics() | self._counts.take() | restarts

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self.agents.close)
            ends.callback(self.inner.close)
            if self._pool is not None:
                ends.callback(self._pool.close)


class _Batch:
    """The client and the places that the sessions of a batch share.

    Args:
        client: generates.
        most: `agent.max_running`.
        on_finished: see `Rollout.generate`.
    """

    def __init__(self, client: GenerationClient, most: int | None, on_finished: OnFinished | None) -> None:
        self.client = client
        self.on_finished = on_finished
        others = asyncio.Semaphore(most or MAX_SESSIONS)
        self._places = {False: others, True: others if most is not None else asyncio.Semaphore(MAX_AGENTS)}

    def places(self, uses_gateway: bool) -> asyncio.Semaphore:
        """The places of sessions that run at once."""
        return self._places[uses_gateway]


class _Counts:
    """Counts and costs of the sessions since the previous metrics."""

    def __init__(self) -> None:
        self._costs: list[OutputCost] = []
        self._retried = self._failed = 0

    def add(self, cost: OutputCost) -> None:
        self._costs.append(cost)

    def failed(self, again: bool) -> None:
        self._retried += again
        self._failed += not again

    def take(self) -> dict[str, float]:
        metrics = {
            "agent_loop/sessions_retried": float(self._retried),
            "agent_loop/sessions_failed": float(self._failed),
        }
        for name in ("generate_sequences", "tool_calls"):
            values = [float(getattr(cost, name)) for cost in self._costs]
            if values:
                metrics[f"agent_loop/{name}/mean"] = float(np.mean(values))
                metrics[f"agent_loop/{name}/max"] = max(values)
        for kind in sorted({kind for cost in self._costs for kind in cost.faults}):
            metrics[f"agent_loop/tool_faults/{kind}"] = float(np.mean([kind in cost.faults for cost in self._costs]))
        self._costs, self._retried, self._failed = [], 0, 0
        return metrics


def rows_of(prompts: DataProto) -> list[dict[str, Any]]:
    """The keyword arguments of `AgentLoopBase.run` for each row: its columns, and `prompt_ids`.

    `tools_kwargs`, `env_kwargs` and `interaction_kwargs` are these columns, or the entries of `extra_info`, as verl's
    data sets have them. `validate` says whether the rows are of a validation.
    """
    columns = {str(name): column.tolist() for name, column in prompts.non_tensor_batch.items()}
    rows = []
    for number, ids in enumerate(prompt_ids_of(prompts)):
        row = {name: column[number] for name, column in columns.items()}
        row |= {name: kwargs_of(row, name) for name in ("tools_kwargs", "env_kwargs", "interaction_kwargs")}
        row["validate"] = bool(prompts.meta_info.get("validate", False))
        rows.append(row | {"prompt_ids": ids, "raw_prompt": list(row.get("raw_prompt") or [])})
    return rows


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a thread of its own: the caller may be inside of an event loop.

    The coroutine is cancelled where the caller is interrupted meanwhile, or nobody waits for its thread any more.
    """
    result: Future[T] = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            result.set_result(loop.run_until_complete(task))
        except BaseException as error:
            result.set_exception(error)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def cancel() -> None:
        if not result.done():  # else the error is the coroutine's own, and its loop is about to be closed
            with contextlib.suppress(RuntimeError):  # it has come to its end meanwhile
                loop.call_soon_threadsafe(task.cancel)

    thread = threading.Thread(target=run, name="agents", daemon=True)
    thread.start()
    try:
        with ended_by(cancel):
            return result.result()
    except BaseException:
        cancel()
        raise
