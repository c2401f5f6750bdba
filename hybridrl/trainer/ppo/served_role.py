"""Roles whose fixed models inference engines serve in replicas, called like worker groups.

Shapes: B rows, P prompt width, T response width, K tokens of the vocabulary that a teacher finds most likely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hybridrl.config.served import ServedModel, divide
from hybridrl.config.teachers import LOG_PROBS, TEACHER_INDEX, TOP_IDS, TOP_LOG_PROBS
from hybridrl.errors import RolloutError
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.models.value import HEAD_NAME, head_shapes
from hybridrl.protocol import DataProto
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.rollout.inference_engine import EngineSpec, inference_engine_class, missing_packages
from hybridrl.rollout.replicas.replica_handle import PoolSettings
from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.rollout.request import (
    GREEDY_TOKEN,
    CompletionArrays,
    PrefillRequest,
    PromptLogprobs,
    Request,
    request_number,
)
from hybridrl.rollout.start_replicas import replica_placements
from hybridrl.single_controller.ray import RayResourcePool
from hybridrl.utils.cores import available_cores
from hybridrl.utils.spans import TimedSpan, new_buffer

_KEY = "actor_rollout_ref.rollout"
#: by the task of a model: the field of an engine's metadata that says whether it can do it, and what it serves then
_ABILITIES = {
    "score": ("scores", "classifiers"),
    "read": ("reads", "log-probabilities of prompts"),
    "generate": ("has_replicas", "language models in replicas"),
}


class ServedRole:
    """The models of a role in replicas of inference engines, with the methods of a worker group that a run calls.

    On devices of another role the models take turns with it: a call takes memory, waits for the answers, and gives the
    memory back before it returns. In a pool of their own they compute while other roles do.

    Args:
        role: its name.
        models: what is served, in the role's order.
        pool: the devices.
        shared: whether another role has them too.
        threads: compute threads of each engine process on a CPU; None divides a node's cores.
        log_folder: where the replicas' output goes; None leaves it to Ray.

    Attributes:
        blocking: whether a call ends before it returns.
        method_seconds: seconds of each method so far.
    """

    def __init__(
        self,
        role: str,
        models: Sequence[ServedModel],
        pool: RayResourcePool,
        shared: bool,
        threads: int | None = None,
        log_folder: Path | None = None,
    ) -> None:
        self.role, self.models = role, tuple(models)
        self.resource_pool, self.blocking = pool, shared
        self.method_seconds: dict[str, float] = {}
        self.supervisors: list[Supervisor] = []
        self._threads, self._log_folder = threads, log_folder
        self._spans = new_buffer()

    @property
    def world_size(self) -> int:
        """Devices of the pool."""
        return len(self.resource_pool.slots())

    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        """Start the replicas, which load the models; on shared devices they give their memory back at once.

        Raises:
            RolloutError: one does not start; the message holds the end of its log.
        """
        shares, faults = divide(self.models, [self.world_size], self.blocking)
        if faults:
            raise RolloutError("; ".join(faults))
        processes = sum(model.devices * count for model, (_, count) in zip(self.models, shares, strict=True))
        threads = self._threads or max(1, available_cores() // processes)
        for model, (first, count) in zip(self.models, shares, strict=True):
            every = replica_placements(self.resource_pool, model.devices, self.blocking)
            placements = every[first // model.devices :][:count]
            self.supervisors.append(Supervisor(self._settings(model, threads), placements))
        if self.blocking:  # one that starts needs the memory that the others give back
            for supervisor in self.supervisors:
                supervisor.start()
                self._give_back(supervisor)
            return
        with ThreadPoolExecutor(len(self.supervisors)) as starting:
            list(starting.map(Supervisor.start, self.supervisors))

    def _settings(self, model: ServedModel, threads: int) -> PoolSettings:
        tokenizer = tokenizer_of(model.model)
        hf_config = config_of(model.model)
        rollout = model.rollout
        if rollout.max_model_len is None:
            limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
            rollout = replace(rollout, max_model_len=min(model.needs, limit or model.needs))
        spec = EngineSpec(
            config=rollout,
            model=model.model,
            eos_token_ids=tuple(eos_token_ids(model.model.path, hf_config, tokenizer)),
            pad_token_id=tokenizer.pad_token_id or 0,
            threads=threads,
            load_weights=True,
            task=model.task,
            top=min(model.top, hf_config.get_text_config().vocab_size),
            logits_temperature=model.temperature,
        )
        return PoolSettings(
            engine_name=model.engine,
            spec=spec,
            processes=model.devices,
            start_timeout_s=rollout.start_timeout_s,
            stuck_timeout_s=rollout.stuck_timeout_s,
            max_restarts=rollout.max_restarts,
            log_folder=None if self._log_folder is None else self._log_folder / self.role,
        )

    def ask(
        self,
        method: str,
        requests: Sequence[Sequence[Request]],
        answer: Callable[[Sequence[Sequence[PromptLogprobs]]], DataProto],
    ) -> OnceComputed:
        """Have each model read its requests.

        Args:
            method: for the times.
            requests: of each model.
            answer: makes the result of the findings of each model.
        """
        started = time.time()
        futures: list[Sequence[Future[CompletionArrays]]] = []
        for supervisor, of_model in zip(self.supervisors, requests, strict=True):
            if self.blocking and of_model:
                supervisor.resume()
            futures.append(supervisor.scheduler.submit(of_model))
            if self.blocking and of_model:
                for future in futures[-1]:
                    future.result()
                self._give_back(supervisor)

        def collect() -> DataProto:
            logprobs = [
                [_prompt_logprobs(model, future.result()) for future in of_model]
                for model, of_model in zip(self.models, futures, strict=True)
            ]
            seconds = time.time() - started
            self.method_seconds[method] = self.method_seconds.get(method, 0.0) + seconds
            self._spans.append(TimedSpan(f"{self.role}/{method}", 0, started, seconds))
            return answer(logprobs)

        ready = OnceComputed(collect)
        if self.blocking:
            ready.get()
        return ready

    def _give_back(self, supervisor: Supervisor) -> None:
        if self.blocking and supervisor.settings.spec.config.free_cache_engine:
            supervisor.release()

    def take_spans(self) -> list[TimedSpan]:
        """Return when calls ran since the previous call of this method; the newest few thousand."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def close(self) -> None:
        """End the replicas."""
        for supervisor in self.supervisors:
            supervisor.close()


class OnceComputed:
    """A result that is computed once."""

    def __init__(self, collect: Callable[[], DataProto]) -> None:
        self._collect = collect
        self._found: DataProto | None = None

    def get(self) -> DataProto:
        """Wait for the result.

        Raises:
            RolloutError: an engine refused a text, or replicas cannot be kept alive.
        """
        if self._found is None:
            self._found = self._collect()
        return self._found


class ServedRewardModel(ServedRole):
    """A reward model; see `workers.reward_model.RewardModelWorker`."""

    def compute_rm_score(self, batch: DataProto) -> OnceComputed:
        """`rm_scores` [B, 1] of a batch of `Conversations`."""
        masks = batch.batch["attention_mask"].bool()
        rows = [ids[mask].tolist()[:-1] for ids, mask in zip(batch.batch["input_ids"], masks, strict=True)]
        requests = [_request(row, PrefillRequest()) for row in rows]

        def answer(logprobs: Sequence[Sequence[PromptLogprobs]]) -> DataProto:
            scores = torch.tensor([[text.score] for text in logprobs[0]], dtype=torch.float32)
            return DataProto.from_dict(tensors={"rm_scores": scores})

        return self.ask("compute_rm_score", [requests], answer)


class ServedTeachers(ServedRole):
    """Teachers; see `workers.teacher.TeacherWorker`."""

    def compute_teacher(self, batch: DataProto) -> OnceComputed:
        """Compute the log-probabilities that the loss reads of each row's teacher.

        The teacher is the one with the number `teacher_index` [B], and the first where there is no such field.

        Returns:
            `teacher_log_probs` [B, T] of the sampled tokens; for a loss over the teacher's most likely tokens also
            `teacher_topk_log_probs` [B, T, K] and `teacher_topk_ids` [B, T, K].
        """
        fields = batch.batch
        attention, width = fields["attention_mask"].bool(), fields["response_mask"].shape[1]
        numbers = fields.get(TEACHER_INDEX, torch.zeros(len(batch), dtype=torch.int64)).tolist()
        lengths = attention[:, -width:].sum(1).tolist()
        used = fields["response_mask"].any(1).tolist()
        rows: list[list[int]] = [[] for _ in self.models]
        for row, number in enumerate(numbers):
            if used[row]:
                rows[number].append(row)
        tops = [supervisor.settings.spec.top for supervisor in self.supervisors]

        def request(row: int, top: int) -> Request:
            ids = fields["input_ids"][row][attention[row]].tolist()
            return _request(ids, PrefillRequest(first=len(ids) - lengths[row], top=top))

        requests = [[request(row, top) for row in teacher_rows] for teacher_rows, top in zip(rows, tops, strict=True)]

        def answer(logprobs: Sequence[Sequence[PromptLogprobs]]) -> DataProto:
            trained = fields["response_mask"].bool()
            log_probs = np.zeros(trained.shape, dtype=np.float32)
            top_log_probs = np.zeros((*trained.shape, max(tops)), dtype=np.float32)
            top_ids = np.zeros(top_log_probs.shape, dtype=np.int64)
            for teacher_rows, answers in zip(rows, logprobs, strict=True):
                for row, text in zip(teacher_rows, answers, strict=True):
                    length = lengths[row]
                    log_probs[row, :length] = text.log_probs
                    if text.top_log_probs is not None and text.top_ids is not None:
                        top_log_probs[row, :length], top_ids[row, :length] = text.top_log_probs, text.top_ids
            tensors = {LOG_PROBS: torch.from_numpy(log_probs) * trained}
            if max(tops):
                tensors[TOP_LOG_PROBS] = torch.from_numpy(top_log_probs) * trained[..., None]
                tensors[TOP_IDS] = torch.from_numpy(top_ids) * trained[..., None]
            return DataProto.from_dict(tensors=tensors)

        return self.ask("compute_teacher", requests, answer)


def check_served(models: Sequence[ServedModel], on_gpu: bool) -> None:
    """Refuse engines that cannot serve these models.

    Args:
        on_gpu: whether the devices are GPUs.

    Raises:
        RolloutError: names the setting and what to change.
    """
    for model in models:
        metadata, setting = INFERENCE_ENGINES.metadata(model.engine), f"{model.where}.name={model.engine}"
        ability, service = _ABILITIES[model.task]
        otherwise = "" if model.task == "generate" else ", or leave it out, and a training engine computes the model"
        if not getattr(metadata, ability):
            able = [name for name in INFERENCE_ENGINES.names() if getattr(INFERENCE_ENGINES.metadata(name), ability)]
            raise RolloutError(f"{setting}: this engine serves no {service}; set it to {' or '.join(able)}{otherwise}")
        if missing := missing_packages(model.engine):
            raise RolloutError(
                f"{setting}: {', '.join(missing)} is not installed. "
                f"{metadata.install or 'pip install ' + ' '.join(missing)}{otherwise}"
            )
        if model.task == "score" and f"{HEAD_NAME}.bias" in head_shapes(model.model.path):
            raise RolloutError(
                f"{setting}: the head of {model.model.path} has a bias, as a saved critic's, and engines serve heads "
                "without; leave it out, and a training engine computes the model"
            )
        try:
            engine = inference_engine_class(model.engine)
            engine.check(model.rollout, model.model, on_gpu)
            if model.task == "score":
                engine.check_scoring(model.model)
        except RolloutError as error:
            instead = f"{model.where}.name=sglang" if model.task == "generate" else f"leave {model.where}.name out"
            text = str(error).replace(f"{_KEY}.name=hf", instead)
            if model.task == "generate":
                text = text.replace(f"{_KEY}.temperature", "reward.reward_model.judge.temperature")
            raise RolloutError(text.replace(f"{_KEY}.", f"{model.where}.")) from error


def _request(prompt_ids: list[int], prefill: PrefillRequest) -> Request:
    return Request(f"read-{request_number()}", prompt_ids, GREEDY_TOKEN, prefill=prefill)


def _prompt_logprobs(model: ServedModel, completion: CompletionArrays) -> PromptLogprobs:
    if completion.prompt_logprobs is None:
        why = completion.error or f"it ended with {completion.finish_reason}"
        raise RolloutError(
            f"{model.where}: {model.engine} did not read a text: {why}. The longest are to have {model.needs} tokens "
            f"({model.where}.max_model_len)"
        )
    return completion.prompt_logprobs
