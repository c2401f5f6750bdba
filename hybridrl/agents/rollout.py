"""A rollout whose prompts are answered by agent loops, side by side, over any other rollout."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hybridrl.agents.agents import Agents, kwargs_of
from hybridrl.agents.loop import AgentLoopMetrics, AgentLoopOutput, GenerationFailedError, SessionClient
from hybridrl.agents.record import trajectory_of
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.protocol.missing import MissingSample
from hybridrl.protocol.names import MISSING_SAMPLES, SESSION_LOG
from hybridrl.rollout.batch import batch_of, names_of, prompt_ids_of
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.noise import purpose_of, stream_keys
from hybridrl.rollout.request import MEMORY_TAGS
from hybridrl.rollout.rollout import Rollout
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.verdict import NoVerdict, Reason, no_verdict_of

T = TypeVar("T")


class AgentRollout(Rollout):
    """Runs a session per row. Weights, memory and pauses are those of the rollout that generates.

    A session that fails is run again (`agent.retries`), unless it ran out of time, and then ends the run
    (`agent.on_error=raise`) or is listed as missing; no other session notices.

    Args:
        inner: generates.
        agents: what the sessions share.
    """

    def __init__(self, inner: Rollout, agents: Agents) -> None:
        self.inner = inner
        self._agents = agents
        self._config = agents.config.actor_rollout_ref.rollout
        self.in_place = inner.in_place
        self.gives_memory_back = inner.gives_memory_back
        self._counts = _Counts()
        self.server = inner.server
        if agents.gateway is not None:
            agents.gateway.connect(inner.server)

    @property
    def version(self) -> int:  # type: ignore[override]
        """Of the weights; see `Rollout`."""
        return self.inner.version

    def generate(self, prompts: DataProto) -> DataProto:
        """One or more rows per row of `prompts`, in their order; see `Rollout.generate` and `batch_of`.

        The meta `missing_samples` has a `MissingSample` for each session that gave no verdict.

        Raises:
            RolloutError: generation failed, or a session failed and `agent.on_error` is `raise`.
        """
        self.inner.resume()
        trajectories, missing = _run(self._sessions(prompts))
        batch = batch_of(
            trajectories,
            self._agents.tokenizer.pad_token_id,
            prompt_width=max([prompts.batch["input_ids"].shape[1], *(len(one.prompt_ids) for one in trajectories)]),
            response_width=self._config.response_length,
        )
        if missing:
            batch.meta_info[MISSING_SAMPLES] = missing
        return batch

    async def _sessions(self, prompts: DataProto) -> tuple[list[Trajectory], list[MissingSample]]:
        rows = rows_of(prompts)
        names = list(zip(*names_of(prompts), strict=True))
        client = self.inner.client()
        sampling = SamplingParams.from_meta(self._config, prompts.meta_info)
        tasks = [
            asyncio.ensure_future(self._told(self._session(client, sampling, prompts.meta_info, row, uid, sample)))
            for row, (uid, sample) in zip(rows, names, strict=True)
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [one for answered, _ in found for one in answered], [one for _, lost in found for one in lost]

    async def _told(
        self, session: Coroutine[Any, Any, tuple[list[Trajectory], list[MissingSample]]]
    ) -> tuple[list[Trajectory], list[MissingSample]]:
        """What a session gave, told to `on_finished` at once."""
        found = await session
        if self.on_finished is not None and found[0]:
            self.on_finished(found[0])
        return found

    async def _session(
        self,
        client: GenerationClient,
        sampling: SamplingParams,
        meta: Mapping[str, Any],
        row: Mapping[str, Any],
        uid: str,
        sample: int,
    ) -> tuple[list[Trajectory], list[MissingSample]]:
        """The trajectories of one session, and the attempts at it without a verdict."""
        settings, longest = self._config.agent, self._config.max_model_len
        missing: list[MissingSample] = []
        failure: Exception | None = None
        while not missing or missing[-1].again:
            session = SessionClient(
                client,
                sampling,
                longest or self._config.prompt_length + self._config.response_length,
                f"{uid}/{sample}",
                self._seeds(meta, uid, sample, len(missing), sampling.do_sample),
                trains=not meta.get("validate", False),
                images=self._agents.seen(),
            )
            try:
                name = row.get("agent_name")
                loop = self._agents.loop(name, session)
                given = {key: getattr(sampling, key) for key in ("do_sample", "temperature", "top_p", "top_k")}
                outputs = await loop.run(given, **row)
                found = self._trajectories(outputs, session, uid, sample, row)
                if not isinstance(found, NoVerdict):
                    return found, missing
                verdict, failure = found, None
                tokens: int | None = _trained_tokens(outputs)
            except GenerationFailedError as error:
                assert error.__cause__ is not None
                raise error.__cause__ from None
            except Exception as error:
                verdict, failure = no_verdict_of(error), error
                tokens = None  # it was cut off
            again = len(missing) < settings.retries and verdict.reason not in (Reason.DROPPED, Reason.TIMEOUT)
            missing.append(MissingSample(uid, sample, verdict, tokens, again))
            if verdict.reason is not Reason.DROPPED:
                self._counts.failed(again)
        what = f"agent session of uid {uid!r}, sample {sample} has no verdict: {verdict}"
        if settings.on_error == "raise" and verdict.reason is not Reason.DROPPED:
            raise RolloutError(f"{what}. rollout.agent.on_error=drop leaves such samples out") from failure
        notify(what, "warning")
        return [], missing

    def _trajectories(
        self, outputs: Any, session: SessionClient, uid: str, sample: int, row: Mapping[str, Any]
    ) -> list[Trajectory] | NoVerdict:
        """The trajectories of what a loop returned, or why it has no verdict."""
        several = outputs if isinstance(outputs, Sequence) else [outputs]
        if not several or not all(isinstance(one, AgentLoopOutput) for one in several):
            raise RolloutError(f"an agent loop returned {outputs!r}, and must return AgentLoopOutput or a list of them")
        lost = [one.reward_score for one in several if isinstance(one.reward_score, NoVerdict)]
        if lost:
            return lost[0]
        several[0].extra_fields[SESSION_LOG] = session.log.record()
        found = []
        for number, output in enumerate(several):
            name = f"sample {sample}" if len(several) > 1 else ""
            one = trajectory_of(output, session.generated, uid, sample, name, number, session.images)
            _check_extra(one.extra, row)
            # The reward function scores a session once, where it ended; what its other parts bring is added.
            unscored = number < len(several) - 1 and one.reward is None
            found.append(replace(one, reward=0.0) if unscored else one)
            if len(output.response_ids) > self._config.response_length:
                raise RolloutError(
                    f"an agent loop returned {len(output.response_ids)} response_ids, more than "
                    f"response_length={self._config.response_length}; end the session, or cut it"
                )
            self._counts.add(output)
        return found

    def _seeds(
        self, meta: Mapping[str, Any], uid: str, sample: int, attempt: int, do_sample: bool
    ) -> Callable[[int], int | None]:
        """The seed of each turn, where seeds decide what is drawn: then a resumed run draws the same again."""
        if not do_sample or not (self.in_place or self._config.full_determinism or meta.get("seeded", False)):
            return lambda _: None
        step, purpose = int(meta.get("global_steps", 0)), purpose_of(meta)

        def seed_of(turn: int) -> int:
            name = f"{uid} turn {turn} attempt {attempt}"
            return int(stream_keys(self._config.seed, step, purpose, [name], [sample])[0]) % 2**63

        return seed_of

    # ------------------------------------------------------------------ the rollout that generates

    def update_weights(self, version: int) -> dict[str, float]:
        return self.inner.update_weights(version)

    def weights_will_change(self) -> None:
        self.inner.weights_will_change()

    def release(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self.inner.release(tags)

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

    def metrics(self) -> dict[str, float]:
        """Those of the rollout, and of the sessions since the previous call.

        `agent_loop/{generate_sequences,tool_calls}/{mean,max}` are seconds per session, `agent_loop/tool_faults/KIND`
        the share of sessions with such a fault, `agent_loop/sessions_{retried,failed}` counts.
        """
        return self.inner.metrics() | self._counts.take()

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            self._agents.close()


class _Counts:
    """What sessions did since the previous metrics."""

    def __init__(self) -> None:
        self._outputs: list[AgentLoopOutput] = []
        self._retried = self._failed = 0

    def add(self, output: AgentLoopOutput) -> None:
        self._outputs.append(output)

    def failed(self, again: bool) -> None:
        self._retried += again
        self._failed += not again

    def take(self) -> dict[str, float]:
        found = {"agent_loop/sessions_retried": float(self._retried), "agent_loop/sessions_failed": float(self._failed)}
        for name in ("generate_sequences", "tool_calls"):
            values = [_seconds(output.metrics, name) for output in self._outputs]
            if values:
                found[f"agent_loop/{name}/mean"], found[f"agent_loop/{name}/max"] = float(np.mean(values)), max(values)
        faults = [output.extra_fields.get("tool_faults") or {} for output in self._outputs]
        for kind in sorted({kind for one in faults for kind in one}):
            found[f"agent_loop/tool_faults/{kind}"] = float(np.mean([kind in one for one in faults]))
        self._outputs, self._retried, self._failed = [], 0, 0
        return found


def _check_extra(extra: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """Refuse extra fields that would replace what the data say, such as the ground truth, in the whole batch."""
    replaced = sorted(name for name, value in extra.items() if name in row and value is not row[name])
    if replaced:
        raise RolloutError(
            f"an agent loop returned the extra field {replaced[0]!r} (extra_fields, or extra of a Verdict), which is a "
            "column of the data; give the field another name"
        )


def _trained_tokens(outputs: Any) -> int:
    several = outputs if isinstance(outputs, Sequence) else [outputs]
    return sum(sum(map(int, output.response_mask)) for output in several)


def _seconds(metrics: AgentLoopMetrics | Mapping[str, float], name: str) -> float:
    return float(metrics.get(name, 0.0) if isinstance(metrics, Mapping) else getattr(metrics, name))


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


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a thread of its own: the caller may be inside of an event loop.

    Where the caller is interrupted meanwhile, the coroutine is cancelled.
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

    thread = threading.Thread(target=run, name="agents", daemon=True)
    thread.start()
    try:
        return result.result()
    except BaseException:
        if not result.done():  # else the error is the coroutine's own, and its loop is about to be closed
            with contextlib.suppress(RuntimeError):  # it has come to its end meanwhile
                loop.call_soon_threadsafe(task.cancel)
        raise
