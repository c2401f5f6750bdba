"""The worker of the training server: one base with many adapters, which compute, learn and generate in turn.

Shapes: B datums of N <= T tokens, T = S - 1 with S the width of the batch, K targets of a position, I inputs of a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from hybridrl.config import ModelConfig, OptimConfig, RolloutConfig
from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.engine.fsdp.adapter_bank import ALPHA, AdamStep, AdapterBank, AdapterShape, layers_by_kind
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.engine.logits_functions import LogProbsAt
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.errors import UserError
from hybridrl.models.info import eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.protocol import DataProto
from hybridrl.registry import DATUM_LOSSES, import_external_lib
from hybridrl.rollout.hf.rollout import HFRollout
from hybridrl.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.utils.metrics import Metric
from hybridrl.workers.model_worker import COLLECTIVE_TIMEOUT_S, ModelWorker

_MESH = "adapters"
_OUTPUT = "log_probs_at"


@dataclass
class BankModelConfig(ModelConfig):
    """A model whose output layer may have an adapter, too: the same module generates."""

    adapts_head: ClassVar[bool] = True


@dataclass(frozen=True)
class BankSettings:
    """Settings of an `AdapterWorker`.

    Attributes:
        model: with `lora_rank`, the largest rank.
        engine: of the base.
        max_tokens: per micro-batch and rank.
        max_sequences: that are generated at a time, per rank.
    """

    model: BankModelConfig
    engine: FSDPConfig
    max_tokens: int
    max_sequences: int

    def check(self, ranks: int) -> None:
        """Refuse a model that cannot be served; see `Engine.check`.

        Raises:
            UserError: the message names the model, or the setting.
        """
        import_external_lib(self.model.external_lib)
        FSDPEngine.check_first_weights(self.model, self.engine)
        FSDPEngine.check(self.model, self.engine, ranks, OptimConfig())


def settings_of_base(
    path: str, largest_rank: int, dtype: str, max_tokens: int, max_sequences: int, external_lib: str | None = None
) -> BankSettings:
    """Return the settings of workers for a base.

    Args:
        path: folder or hub id of the model.
        largest_rank: of an adapter.
        dtype: of the computation.
        max_tokens, max_sequences: see `BankSettings`.
        external_lib: modules or files that register losses.
    """
    model = BankModelConfig(path=path, lora_rank=largest_rank, lora_alpha=ALPHA, external_lib=external_lib)
    return BankSettings(model, FSDPConfig(dtype=dtype), max_tokens, max_sequences)


@dataclass(frozen=True)
class DatumLoss:
    """The loss of a request: its registered name, its numbers, and the names of the I inputs in their order."""

    name: str
    config: Mapping[str, float]
    inputs: tuple[str, ...]


class AdapterWorker(ModelWorker):
    """One rank of the base.

    Args:
        settings: of the base.
        timeout_s: how long a collective may wait for other ranks.
    """

    metric_prefix = "adapters"

    def __init__(self, settings: BankSettings, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self._settings = settings
        self._refusal = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> dict[str, int]:
        """Build and shard the base; return how many layers of each kind may have an adapter."""
        settings = self._settings
        import_external_lib(settings.model.external_lib)
        self.build_engine("language_model", "fsdp2", settings.model, settings.engine, OptimConfig(), None, 1)
        assert isinstance(self.engine, FSDPEngine)
        self._fsdp = self.engine
        self._bank = AdapterBank(self._fsdp)
        tokenizer = tokenizer_of(settings.model)
        self._rollout = HFRollout(
            RolloutConfig(name="hf", max_num_seqs=settings.max_sequences),
            engine=self._fsdp,
            eos_token_ids=eos_token_ids(settings.model.path, config_of(settings.model), tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            tokenizer=tokenizer,
        )
        self.place_in_mesh(_MESH)
        return layers_by_kind(self._fsdp)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def create_adapter(self, name: str, shape: AdapterShape, seed: int) -> None:
        """See `AdapterBank.create`."""
        self._bank.create(name, shape, seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def remove_adapter(self, name: str) -> None:
        """See `AdapterBank.remove`."""
        self._bank.remove(name)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_MESH))
    def evaluate_datums(self, batch: DataProto) -> DataProto:
        """Compute log-probabilities and losses, and with `backward` add the gradients of the summed loss.

        Args:
            batch: `input_ids`, `attention_mask` `[B, S]`, `response_mask` `[B, T]`, `datum_targets` `[B, T, K]` and
                `datum_inputs` `[B, T, K, I]`; its meta has the name of the `adapter`, a `DatumLoss` as `loss`, and
                `backward`.

        Returns:
            `datum_log_probs` `[B, T, K]`, `datum_losses` `[B]` summed over tokens, and `refused` `[B]`: nothing was
            added, and `last_refusal` says why.
        """
        meta, rows = batch.meta_info, len(batch)
        adapter, loss, backward = str(meta["adapter"]), meta["loss"], bool(meta["backward"])
        batch.batch["row"] = torch.arange(rows)
        log_probs = torch.zeros(batch.batch["datum_targets"].shape)
        losses = torch.zeros(rows)

        def share(outputs: dict[str, torch.Tensor], part: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
            own, fields = outputs[_OUTPUT], part.batch
            by_row = _losses(loss, own, fields["datum_inputs"], fields["response_mask"])
            index = fields["row"].cpu()
            log_probs[index, : own.shape[1]] = own.detach().float().cpu()
            losses[index] = by_row.detach().float().cpu()
            return by_row.sum(), {}

        def compute() -> str:
            self._bank.use(adapter)
            function = LogProbsAt("datum_targets")
            with self._fsdp.computing(function):
                if backward:
                    problem = self._fsdp.compute_gradients(batch, self._micro(), share, (_OUTPUT,))
                    if problem is None:
                        self._bank.collect_gradients(adapter)
                    return "" if problem is None else str(problem)
                computed = self._fsdp.infer(batch, self._micro(), outputs=(_OUTPUT,))
                share({_OUTPUT: computed[_OUTPUT].cpu()}, batch)
                return ""

        with self.loaded("evaluate_datums", optimizer=backward):
            self._refusal = self._attempted(compute)
        refused = torch.full((rows,), bool(self._refusal))
        return DataProto.from_dict(tensors={"datum_log_probs": log_probs, "datum_losses": losses, "refused": refused})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_MESH))
    def score_prompts(self, batch: DataProto) -> DataProto:
        """`datum_log_probs` `[B, T, K]` of a saved adapter; see `generate_from` and `evaluate_datums`."""
        with self.loaded("score_prompts"), self._saved(batch), self._fsdp.computing(LogProbsAt("datum_targets")):
            computed = self._fsdp.infer(batch, self._micro(), outputs=(_OUTPUT,))
        return DataProto.from_dict(tensors={"datum_log_probs": computed[_OUTPUT].float().cpu()})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_MESH))
    def generate_from(self, prompts: DataProto) -> DataProto:
        """Responses of a saved adapter, or of the base; see `HFRollout.generate`.

        Args:
            prompts: their meta has the `folder` of the adapter in PEFT's format, and the `key` of its content, which
                is None for the base.
        """
        with self.loaded("generate_from"), self._saved(prompts):
            return self._rollout.generate(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step_adapter(self, name: str, numbers: AdamStep) -> float | None:
        """See `AdapterBank.step`."""
        with self.loaded("step_adapter", optimizer=True):
            return self._bank.step(name, numbers)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_adapter(self, name: str, folder: str, optimizer: bool) -> None:
        """See `AdapterBank.save`."""
        self._bank.save(name, Path(folder), str(self._settings.model.path), optimizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_adapter(self, name: str, folder: str, optimizer: bool) -> None:
        """See `AdapterBank.load`."""
        self._bank.load(name, Path(folder), optimizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_refusal(self) -> str:
        """Return why the last `evaluate_datums` added nothing; empty if it did."""
        return self._refusal

    def _micro(self) -> MicroBatching:
        return MicroBatching(max_tokens=self._settings.max_tokens, key="--max-tokens")

    def _attempted(self, compute: Callable[[], str]) -> str:
        """Return what `compute` returns, or an error's message where one rank alone fails by what a client sent."""
        try:
            return compute()
        except UserError as error:
            if self.world_size > 1:  # the others wait in a collective
                raise
            return str(error)

    @contextlib.contextmanager
    def _saved(self, batch: DataProto) -> Iterator[None]:
        """Within the context, the module has the adapter that the batch names, or none."""
        key, folder = batch.meta_info["key"], batch.meta_info["folder"]
        if key is None:
            with self._fsdp.without_adapter():
                yield
            return
        self._bank.use_saved(key, Path(folder))
        yield


def _losses(loss: DatumLoss, log_probs: torch.Tensor, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss of each datum `[B]`, summed over its targets."""
    named = dict(zip(loss.inputs, inputs.unbind(-1), strict=True))
    by_target = DATUM_LOSSES.get(loss.name)(log_probs, named, loss.config)
    return torch.where(mask.bool()[..., None], by_target, 0.0).flatten(1).sum(1)
