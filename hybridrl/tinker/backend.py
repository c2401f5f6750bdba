"""`AdapterBackend`: what the training server asks of its workers, one call after the other."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.engine.fsdp.adapter_bank import AdamStep, AdapterShape
from hybridrl.protocol import DataProto, object_array
from hybridrl.registry import DATUM_LOSSES
from hybridrl.tinker.datum_batch import as_datum, batch_of_datums, check_datums, log_probs_of
from hybridrl.tinker.wire import Array, Datum, RequestError, SampledTokens
from hybridrl.workers.adapter_worker import DatumLoss


@dataclass(frozen=True)
class BaseFacts:
    """Facts of the base model.

    Attributes:
        name: as clients call it.
        path: where it is.
        architecture: its `model_type`.
        vocabulary: number of token ids.
        context: most tokens of a sequence.
        pad_token_id: of its tokenizer.
    """

    name: str
    path: str
    architecture: str
    vocabulary: int
    context: int
    pad_token_id: int


@dataclass(frozen=True)
class SavedWeights:
    """An adapter on disk; `key` is another one for other content."""

    key: str
    folder: Path


@dataclass(frozen=True)
class Decoding:
    """Settings of samples that are generated together.

    Attributes:
        weights: None: the base.
        max_tokens: of a response.
        temperature: 0 takes the most likely token.
        top_p, top_k: 1 and -1 keep every token.
        stop: texts that end a response, besides the model's own end tokens.
        stop_ids: likewise, tokens.
        endless: nothing ends a response but its length.
    """

    weights: SavedWeights | None
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    endless: bool = False


@dataclass(frozen=True)
class SampleJob:
    """A request for samples of one prompt; without a seed, the noise is new."""

    prompt: tuple[int, ...]
    count: int
    decoding: Decoding
    seed: int | None = None
    prompt_log_probs: bool = False


@dataclass(frozen=True)
class SampleOutcome:
    """The samples of a job, and the log-probabilities `[P]` of its prompt if they were asked for."""

    samples: Sequence[SampledTokens]
    prompt_log_probs: Array | None


class AdapterBackend:
    """The workers.

    Args:
        group: of `AdapterWorker`, with the model loaded.
        facts: of the model.
        layers: how many layers of each kind may have an adapter.
        largest_rank: of an adapter.
        eos_token_ids: end a response.
    """

    def __init__(
        self,
        group: Any,
        facts: BaseFacts,
        layers: Mapping[str, int],
        largest_rank: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._group, self.facts, self.layers, self.largest_rank = group, facts, layers, largest_rank
        self._eos = tuple(eos_token_ids)

    def check_shape(self, shape: AdapterShape) -> None:
        """Refuse an adapter that the workers cannot hold.

        Raises:
            RequestError: its rank is too large, or no layer has it.
        """
        if not 1 <= shape.rank <= self.largest_rank:
            raise RequestError(
                f"lora_config.rank={shape.rank}: this server serves ranks from 1 to {self.largest_rank} (--max-rank)"
            )
        if not any(shape.covers(kind) and count for kind, count in self.layers.items()):
            raise RequestError("lora_config: no layer of this model would get an adapter")

    def create(self, adapter: str, shape: AdapterShape, seed: int | None) -> None:
        """Add a new adapter."""
        self._group.create_adapter(adapter, shape, secrets.randbits(31) if seed is None else seed)

    def remove(self, adapter: str) -> None:
        """Forget an adapter."""
        self._group.remove_adapter(adapter)

    def evaluate(
        self, adapter: str, datums: Sequence[Datum], loss: str, numbers: Mapping[str, float], backward: bool
    ) -> tuple[list[Array], float]:
        """Return the log-probabilities of each datum's targets, and the loss summed over all of them.

        Args:
            backward: add the gradients of the loss to those of the adapter.

        Raises:
            RequestError: the datums do not fit the loss, or the loss or a gradient is not finite.
        """
        check_datums(datums, loss, self.facts.vocabulary, self.facts.context)
        inputs = DATUM_LOSSES.metadata(loss).inputs
        batch = batch_of_datums(datums, inputs)
        batch.meta_info |= {"adapter": adapter, "loss": DatumLoss(loss, dict(numbers), inputs), "backward": backward}
        output = self._group.evaluate_datums(batch).batch
        if bool(output["refused"].any()):
            reason = next((text for text in self._group.last_refusal() if text), "an unknown reason")
            raise RequestError(f"{loss}: nothing was added to the gradients: {reason}")
        total = float(output["datum_losses"].double().sum())
        return log_probs_of(datums, output["datum_log_probs"]), total

    def step(self, adapter: str, numbers: AdamStep) -> float:
        """Take an optimizer step; return the norm of the gradients before clipping.

        Raises:
            RequestError: there are no gradients, or they are not finite; they are forgotten.
        """
        norm = self._group.step_adapter(adapter, numbers)[0]
        if norm is None:
            raise RequestError("optim_step: there are no gradients; no forward_backward since the last step succeeded")
        if not np.isfinite(norm):
            raise RequestError(
                f"optim_step: the norm of the gradients is {norm}; they are forgotten, the weights unchanged"
            )
        return float(norm)

    def save(self, adapter: str, folder: Path, optimizer: bool) -> None:
        """Write an adapter into a folder that does not exist."""
        self._group.save_adapter(adapter, str(folder), optimizer)

    def load(self, adapter: str, folder: Path, optimizer: bool) -> None:
        """Replace or add an adapter by what `save` wrote."""
        self._group.load_adapter(adapter, str(folder), optimizer)

    def sample(self, jobs: Sequence[SampleJob]) -> list[SampleOutcome]:
        """Generate the samples of jobs with the same `Decoding`."""
        decoding = jobs[0].decoding
        weights = decoding.weights
        source = {"key": None, "folder": ""} if weights is None else {"key": weights.key, "folder": str(weights.folder)}
        prompts = _prompt_batch(jobs, decoding, self.facts.pad_token_id, self._eos)
        prompts.meta_info |= source
        output = self._group.generate_from(prompts)
        lengths = output.batch["response_mask"].sum(dim=1).tolist()
        samples = [
            SampledTokens(tokens[:length], log_probs[:length], reason == "stop")
            for tokens, log_probs, length, reason in zip(
                output.batch["responses"].tolist(),
                output.batch["rollout_log_probs"].tolist(),
                lengths,
                output.non_tensor_batch["finish_reason"].tolist(),
                strict=True,
            )
        ]
        scored = iter(self._prompt_log_probs([job.prompt for job in jobs if job.prompt_log_probs], source))
        outcomes, start = [], 0
        for job in jobs:
            own = samples[start : start + job.count]
            outcomes.append(SampleOutcome(own, next(scored) if job.prompt_log_probs else None))
            start += job.count
        return outcomes

    def _prompt_log_probs(self, prompts: Sequence[Sequence[int]], source: Mapping[str, Any]) -> list[Array]:
        """log p of each token of each prompt; NaN for the first."""
        datums = [as_datum(prompt) for prompt in prompts if len(prompt) > 1]
        rows: list[Array] = []
        if datums:
            batch = batch_of_datums(datums, ())
            batch.meta_info |= source
            output = self._group.score_prompts(batch)
            rows = log_probs_of(datums, output.batch["datum_log_probs"])
        scores = iter(rows)
        first = np.full(1, np.nan, dtype=np.float32)
        return [np.concatenate([first, next(scores)]) if len(prompt) > 1 else first for prompt in prompts]


def _prompt_batch(jobs: Sequence[SampleJob], decoding: Decoding, pad: int, eos: Sequence[int]) -> DataProto:
    """One row for each sample. The noise of a row is keyed by its seed and its number within the job."""
    rows = [(job, number) for job in jobs for number in range(job.count)]
    width = max(len(job.prompt) for job in jobs)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    attention = torch.zeros((len(rows), width), dtype=torch.int64)
    for row, (job, _) in enumerate(rows):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        attention[row, width - len(job.prompt) :] = 1
    uid_of = {id(job): f"new-{secrets.token_hex(8)}" if job.seed is None else f"seed-{job.seed}" for job in jobs}
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        },
        non_tensors={
            "uid": object_array([uid_of[id(job)] for job, _ in rows]),
            "sample": object_array([number for _, number in rows]),
        },
        meta_info={
            "do_sample": decoding.temperature > 0,
            "temperature": decoding.temperature or 1.0,
            "top_p": decoding.top_p,
            "top_k": decoding.top_k,
            "max_new_tokens": decoding.max_tokens,
            "ignore_eos": decoding.endless,
            "stop": decoding.stop,
            "eos_token_id": sorted({*eos, *decoding.stop_ids}),
            "finish_reasons": True,
        },
    )
