"""`TrainingService`: what each request of Tinker's API does. `hybridrl.tinker.training_app` has the paths.

A request that cannot be served fails as its client's error: where it has a number among the requests of its training
run, its future fails, so that those after it go on; else the answer is HTTP 400.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.engine.fsdp.adapter_bank import AdamStep, AdapterShape
from hybridrl.models.lora import base_digest
from hybridrl.tinker.backend import AdapterBackend, Decoding, SampleJob, SavedWeights
from hybridrl.tinker.client_sessions import AdapterRun, ClientSessionTable, SamplingSource, Session
from hybridrl.tinker.datum_batch import loss_numbers
from hybridrl.tinker.pending_requests import Answer, PendingRequest, RequestQueue
from hybridrl.tinker.saved_adapters import SAMPLER, WEIGHTS, SavedAdapters, SavedState
from hybridrl.tinker.wire import RequestError, datums_of, pass_answer, read_pass_request, sample_answer

if TYPE_CHECKING:
    from tinker import types

_SWEEP_S = 5.0
_UNNAMED = "unnamed-"


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the service.

    Attributes:
        requests: that are accepted and whose answer was not fetched.
        sessions: that are open.
        adapters: of all sessions.
        idle_s: see `ClientSessionTable`.
        unnamed: adapters saved for sampling without a name that are kept of a training run.
        samples: of one request.
    """

    requests: int = 4096
    sessions: int = 256
    adapters: int = 16
    idle_s: float = 600.0
    unnamed: int = 32
    samples: int = 1024


class TrainingService:
    """The service behind the server's requests.

    Args:
        backend: computes.
        folder: of checkpoints.
        limits: what it accepts.
    """

    def __init__(self, backend: AdapterBackend, folder: Path, limits: ServiceLimits) -> None:
        self.backend, self.limits = backend, limits
        self.queue = RequestQueue(limits.requests, limits.samples)
        self._sessions = ClientSessionTable(limits.sessions, limits.adapters, limits.idle_s)
        self._saved = SavedAdapters(folder)
        self._base = base_digest(backend.facts.path)

    async def run(self) -> None:
        """Compute requests and end silent sessions, until the task is cancelled."""
        working = asyncio.ensure_future(self.queue.work())
        try:
            while True:
                done, _ = await asyncio.wait({working}, timeout=_SWEEP_S)
                if done:
                    working.result()
                for id in self._sessions.silent():
                    self.finish_session(id)
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
            self.queue.close()

    # ------------------------------------------------------------------ sessions

    def open_session(self, request: types.CreateSessionRequest) -> Session:
        """Open a session."""
        return self._sessions.open(request.user_metadata, request.display_name)

    def heartbeat(self, session_id: str) -> None:
        """Note that a session's client is there."""
        self._sessions.get(session_id)

    def finish_session(self, session_id: str) -> None:
        """End a session: its adapters and unnamed snapshots go, its named checkpoints stay."""
        session = self._sessions.close(session_id)
        if session is None:
            return
        self.queue.forget(session_id)
        for run in session.runs.values():

            def remove(run: AdapterRun = run) -> Answer:
                self.backend.remove(run.id)
                for folder in self._saved.root.glob(f"{run.id}/{SAMPLER}/{_UNNAMED}*"):
                    self._saved.remove(folder)
                return {}

            self.queue.submit(PendingRequest("", session_id, compute=remove))

    def session(self, session_id: str) -> Session:
        """Return an open session."""
        return self._sessions.get(session_id)

    # ------------------------------------------------------------------ training runs

    def create_run(self, request: types.CreateModelRequest) -> PendingRequest:
        """Create a training run with a new adapter."""
        config = request.lora_config
        self._check_base(request.base_model)
        self._check_optimizer(request.optimizer_config)
        if config is None:
            raise RequestError("lora_config is missing: adapters are trained here, and no whole models")
        shape = AdapterShape(config.rank, config.train_attn, config.train_mlp, config.train_unembed)
        self.backend.check_shape(shape)
        session = self._sessions.get(request.session_id)
        run = self._new_run(session, request.model_seq_id, request.user_metadata)
        if isinstance(run, PendingRequest):
            return run
        run.shape = shape

        def create() -> Answer:
            self.backend.create(run.id, shape, config.seed)
            return {"model_id": run.id, "type": "create_model"}

        return self._first_request(run, create)

    def load_run(self, request: types.LoadWeightsRequest) -> PendingRequest:
        """Load a checkpoint, into a new training run or one that exists."""
        if request.weights_access_token is not None:
            raise RequestError("weights_access_token is not served: all checkpoints of this server belong to its users")
        if request.optimizer_config is not None:
            self._check_optimizer(request.optimizer_config)

        def loading(run: AdapterRun) -> Callable[[], Answer]:
            def load() -> Answer:
                folder, state = self._checked_state(request.path)
                self.backend.load(run.id, folder, request.optimizer)
                run.shape = _shape_of(state)
                return {"path": request.path, "model_id": run.id, "type": "load_weights"}

            return load

        if request.session_id is None:
            run = self._sessions.run(request.model_id or "")
            return self._in_order(run, request.seq_id, loading(run))
        self._checked_state(request.path)
        if request.base_model is not None:
            self._check_base(request.base_model)
        session = self._sessions.get(request.session_id)
        new = self._new_run(session, request.model_seq_id or 0, request.user_metadata)
        return new if isinstance(new, PendingRequest) else self._first_request(new, loading(new))

    def info(self, model_id: str) -> dict[str, Any]:
        """Return what a client knows of its model."""
        run, facts = self._sessions.run(model_id), self.backend.facts
        return {
            "type": "get_info",
            "model_data": {"arch": facts.architecture, "model_name": facts.name, "tokenizer_id": facts.path},
            "model_id": model_id,
            "is_lora": True,
            "lora_rank": None if run.shape is None else run.shape.rank,
            "model_name": facts.name,
        }

    def forward_backward(self, body: bytes) -> PendingRequest:
        """Compute a forward pass, and a backward pass."""
        request = read_pass_request(body)
        run = self._sessions.run(request.model_id)

        def compute() -> Answer:
            numbers = loss_numbers(request.loss, request.config)
            datums = datums_of(request)
            log_probs, total = self.backend.evaluate(run.id, datums, request.loss, numbers, not request.forward_only)
            return pass_answer(log_probs, total)

        return self._in_order(run, request.seq_id, compute)

    def optim_step(self, request: types.OptimStepRequest) -> PendingRequest:
        """Take an optimizer step."""
        run = self._sessions.run(request.model_id)
        return self._in_order(
            run,
            request.seq_id,
            lambda: {"metrics": {"grad_norm": self.backend.step(run.id, _adam(request.optim_params))}},
        )

    def save(self, request: types.SaveWeightsRequest) -> PendingRequest:
        """Save the weights and the optimizer's state of a training run."""
        run = self._sessions.run(request.model_id)

        def save() -> Answer:
            if request.path is None:
                raise RequestError("path is missing: name the checkpoint")
            self._write(run, WEIGHTS, request.path, request, overwrite=request.overwrite)
            return {"path": self._saved.path(run.id, WEIGHTS, request.path), "type": "save_weights"}

        return self._in_order(run, request.seq_id, save)

    def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> PendingRequest:
        """Save the weights of a training run for sampling: under a name, or for a sampler of their own."""
        run = self._sessions.run(request.model_id)

        def save() -> Answer:
            if request.kind != "snapshot":
                raise RequestError(f"kind={request.kind}: weights that change while they generate are not served")
            if request.path is not None:
                if request.path.startswith(_UNNAMED):
                    raise RequestError(f"path={request.path}: names that begin with {_UNNAMED} are the server's own")
                self._write(run, SAMPLER, request.path, request, overwrite=False)
                path = self._saved.path(run.id, SAMPLER, request.path)
                return {"path": path, "type": "save_weights_for_sampler"}
            session = self._sessions.get(run.session)
            name = f"{_UNNAMED}{run.saves}"
            run.saves += 1
            weights = self._write(run, SAMPLER, name, request, overwrite=True)
            shutil.rmtree(weights.folder.with_name(f"{_UNNAMED}{run.saves - 1 - self.limits.unnamed}"), True)
            sampler = self._sessions.add_sampler(session, request.sampling_session_seq_id or 0, weights, None)
            return {"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}

        return self._in_order(run, request.seq_id, save)

    def weights_info(self, path: str) -> dict[str, Any]:
        """Return what a client needs to know of a checkpoint."""
        _, state = self._saved.find(path)
        return {
            "base_model": state.base_model,
            "is_lora": True,
            "lora_rank": state.rank,
            "train_unembed": state.head,
            "train_mlp": state.mlp,
            "train_attn": state.attention,
        }

    # ------------------------------------------------------------------ sampling

    def open_sampler(self, request: types.CreateSamplingSessionRequest) -> SamplingSource:
        """Make what a client samples from: the base, or a checkpoint."""
        session = self._sessions.get(request.session_id)
        weights = None
        if request.model_path is not None:
            folder, state = self._checked_state(request.model_path)
            weights = SavedWeights(f"{request.model_path} {state.saved_at!r}", folder)
        elif request.base_model is None:
            raise RequestError("base_model and model_path are missing; give one of them")
        if request.base_model is not None:
            self._check_base(request.base_model)
        return self._sessions.add_sampler(session, request.sampling_session_seq_id, weights, request.model_path)

    def sampler(self, id: str) -> SamplingSource:
        """Return a sampler."""
        return self._sessions.sampler(id)

    def sample(self, request: types.SampleRequest) -> PendingRequest:
        """Generate samples of a prompt; requests that wait for the same weights are computed together."""
        if request.sampling_session_id is None:
            raise RequestError("sampling_session_id is missing; create a sampling client first")
        sampler = self._sessions.sampler(request.sampling_session_id)
        seq = request.seq_id or 0
        if seq in sampler.by_seq:
            return sampler.by_seq[seq]
        job = self._job(request, sampler)
        accepted = self.queue.accept(sampler.session, batch=self._sampled, batch_key=("sample", job.decoding), job=job)
        sampler.remember(seq, accepted)
        self.queue.submit(accepted)
        return accepted

    def _sampled(self, jobs: Sequence[SampleJob]) -> list[Answer]:
        weights = jobs[0].decoding.weights
        if weights is not None and not weights.folder.is_dir():
            raise RequestError(
                f"the weights of this sampler are gone: of a training run the last {self.limits.unnamed} snapshots "
                "without a name are kept (--max-snapshots); save them under a name"
            )
        return [sample_answer(done.samples, done.prompt_log_probs) for done in self.backend.sample(jobs)]

    def _job(self, request: types.SampleRequest, sampler: SamplingSource) -> SampleJob:
        """The samples that a request asks for.

        Raises:
            RequestError: something is not served, or out of range.
        """
        facts, params = self.backend.facts, request.sampling_params
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if getattr(request, name):
                raise RequestError(f"{name}={getattr(request, name)} is not served; leave it out")
        for name in ("target_prompt_logprobs", "prompt_logprobs_last_n", "record_stability_info"):
            if getattr(request, name):
                raise RequestError(f"{name} is not served; leave it out")
        if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
            raise RequestError("prompt: only chunks of encoded_text (tokens) are served")
        prompt = tuple(request.prompt.to_ints())
        room = facts.context - len(prompt)
        if not prompt or room < 1 or min(prompt) < 0 or max(prompt) >= facts.vocabulary:
            raise RequestError(
                f"prompt has {len(prompt)} tokens; from 1 to {facts.context - 1} are served, from 0 to "
                f"{facts.vocabulary - 1}"
            )
        limit = room if params.max_tokens is None else params.max_tokens
        if not 1 <= limit <= room:
            raise RequestError(f"max_tokens={limit}: after this prompt, the model has room for 1 to {room} tokens")
        if not 1 <= request.num_samples <= self.limits.samples:
            raise RequestError(f"num_samples={request.num_samples}: from 1 to {self.limits.samples} are served")
        if not params.temperature >= 0 or not 0 < params.top_p <= 1 or params.top_k == 0 or params.top_k < -1:
            raise RequestError(
                f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k}: temperature is at "
                "least 0, top_p above 0 and at most 1, top_k at least 1, or -1"
            )
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        texts = tuple(stop for stop in stops if isinstance(stop, str))
        ids = tuple(stop for stop in stops if isinstance(stop, int))
        endless = params.stop is not None and not stops
        decoding = Decoding(sampler.weights, limit, params.temperature, params.top_p, params.top_k, texts, ids, endless)
        return SampleJob(prompt, request.num_samples, decoding, params.seed, bool(request.prompt_logprobs))

    # ------------------------------------------------------------------ helpers

    def _new_run(
        self, session: Session, number: int, user_metadata: dict[str, Any] | None
    ) -> AdapterRun | PendingRequest:
        """Return a new training run, or the request that made it, which its client sends again."""
        existing = session.runs.get(f"{session.id}:train:{number}")
        if existing is not None:
            creation = existing.sent_before(0)
            assert creation is not None
            return creation
        return self._sessions.add_run(session, number, user_metadata)

    def _first_request(self, run: AdapterRun, compute: Callable[[], Answer]) -> PendingRequest:
        run.next_seq = 0
        return self._in_order(run, 0, compute)

    def _in_order(self, run: AdapterRun, seq: int | None, compute: Callable[[], Answer]) -> PendingRequest:
        """Submit a request of a training run, after those with smaller numbers."""
        number = run.next_seq if seq is None else seq
        before = run.sent_before(number)
        if before is not None:
            return before
        if number < run.next_seq:
            raise RequestError(f"seq_id={number}: this training run has gone on to {run.next_seq}")
        request = self.queue.accept(run.session, compute=compute)
        run.submit(number, request, self.queue)
        return request

    def _check_base(self, name: str) -> None:
        if name != self.backend.facts.name:
            raise RequestError(f"base_model={name!r} is not served; this server has {self.backend.facts.name}")

    def _check_optimizer(self, config: Any) -> None:
        if config.type != "adamw":
            raise RequestError(f"optimizer_config.type={config.type!r} is not served; only adamw is")

    def _checked_state(self, path: str) -> tuple[Path, SavedState]:
        """Find a checkpoint of this server's base.

        Raises:
            RequestError: there is none, or it belongs to other weights.
        """
        folder, state = self._saved.find(path)
        if state.base != self._base:
            raise RequestError(f"{path} belongs to other weights of the base ({state.base_model}, {state.base})")
        return folder, state

    def _write(self, run: AdapterRun, kind: str, name: str, request: Any, overwrite: bool) -> SavedWeights:
        assert run.shape is not None  # it was created before
        now, shape = time.time(), run.shape
        state = SavedState(
            self._base,
            self.backend.facts.name,
            shape.rank,
            shape.attention,
            shape.mlp,
            shape.head,
            saved_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        optimizer = kind == WEIGHTS
        folder = self._saved.write(
            run.id, kind, name, state, lambda folder: self.backend.save(run.id, folder, optimizer), overwrite
        )
        return SavedWeights(f"{run.id}/{kind}/{name} {now!r}", folder)


def _shape_of(state: SavedState) -> AdapterShape:
    return AdapterShape(state.rank, state.attention, state.mlp, state.head)


def _adam(params: Any) -> AdamStep:
    """The numbers of a step.

    Raises:
        RequestError: another optimizer, or a number out of range.
    """
    if hasattr(params, "type"):
        raise RequestError(f"optim_params.type={params.type!r} is not served; only AdamParams are")
    ranges = {
        "learning_rate": params.learning_rate >= 0,
        "beta1": 0 <= params.beta1 < 1,
        "beta2": 0 <= params.beta2 < 1,
        "eps": params.eps > 0,
        "weight_decay": params.weight_decay >= 0,
        "grad_clip_norm": params.grad_clip_norm >= 0,
    }
    if wrong := [name for name, fits in ranges.items() if not fits]:
        raise RequestError(
            f"optim_step: {wrong[0]}={getattr(params, wrong[0])}; rates, decay and clipping are at least 0, beta1 and "
            "beta2 below 1, and eps above 0"
        )
    return AdamStep(
        params.learning_rate,
        (params.beta1, params.beta2),
        params.eps,
        params.weight_decay,
        params.grad_clip_norm,
    )
