"""Checks of training engines against transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.config import FSDPConfig, ModelConfig, OptimConfig
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.engine import Engine, MicroBatching, create_train_engine
from hybridrl.engine.fsdp.routing import check_routing
from hybridrl.errors import ModelError
from hybridrl.model_check.check_rows import ModelCheckRow, checked
from hybridrl.models import loading, lora
from hybridrl.models.attention import VARLEN, packing_unsupported_reason
from hybridrl.models.model_config import config_of
from hybridrl.models.routers import why_no_router_loss
from hybridrl.models.tree_attention import sharing_unsupported_reason
from hybridrl.protocol import DataProto
from hybridrl.registry import MEGATRON_FAMILIES
from hybridrl.utils import device, distributed
from hybridrl.utils.metrics import Metric

#: largest difference of a log-probability that float32 arithmetic in another order may make
TOLERANCE = 5e-4
ROWS, PROMPT, RESPONSE = 6, 8, 12
_SPECIAL = 16


@dataclass(frozen=True)
class ReferenceRun:
    """Rows of random tokens, and what transformers computes for each row by itself.

    Attributes:
        batch: left-padded prompts and right-padded responses, as training has them.
        log_probs: `[B, T]`, 0 on padding.
    """

    batch: DataProto
    log_probs: torch.Tensor

    def compare(self, log_probs: torch.Tensor) -> str:
        """Return the largest difference.

        Raises:
            ModelError: it is larger than `TOLERANCE`.
        """
        difference = float((log_probs - self.log_probs).abs().max())
        text = f"log-probabilities of {int(self.batch.batch['response_mask'].sum())} tokens differ by {difference:.1e}"
        if not difference <= TOLERANCE:
            raise ModelError(f"{text}, more than {TOLERANCE:.0e}")
        return text


def reference_run(model: ModelConfig, seed: int = 0) -> ReferenceRun:
    """Compute random rows with transformers, in float32 and eager attention where the model has it."""
    config = config_of(model)
    batch = random_rows(int(config.get_text_config().vocab_size), seed)
    module = loading.load_language_model(model.path, config, torch.float32, model.trust_remote_code).eval()
    tensors = batch.batch
    log_probs = torch.zeros(tensors["response_mask"].shape)
    with torch.no_grad():
        for row in range(ROWS):
            real = tensors["attention_mask"][row].bool()
            ids = tensors["input_ids"][row][real]
            logits = module(input_ids=ids[None]).logits[0].float()
            start = int(real[:PROMPT].sum())
            length = len(ids) - start
            of_tokens = logits[start - 1 : -1].log_softmax(-1).gather(1, ids[start:, None])[:, 0]
            log_probs[row, :length] = of_tokens
    if not bool(log_probs.isfinite().all()):
        raise ModelError("transformers computes log-probabilities that are NaN or infinite")
    return ReferenceRun(batch, log_probs)


def random_rows(vocabulary: int, seed: int) -> DataProto:
    """Return rows of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    first = min(3, vocabulary - 1)
    ids = torch.randint(first, max(first + 1, vocabulary - _SPECIAL), (ROWS, PROMPT + RESPONSE), generator=generator)
    prompts = torch.randint(1, PROMPT + 1, (ROWS,), generator=generator)
    responses = torch.randint(2, RESPONSE + 1, (ROWS,), generator=generator)
    attention = torch.zeros_like(ids)
    for row in range(ROWS):
        attention[row, PROMPT - prompts[row] : PROMPT + responses[row]] = 1
    mask = attention[:, PROMPT:].clone()
    fields = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT].clone(),
        "responses": ids[:, PROMPT:].clone(),
        "response_mask": mask,
        "advantages": torch.randn(ROWS, RESPONSE, generator=generator),
    }
    return DataProto.from_dict(fields, meta_info={"batch_num_tokens": int(mask.sum())})


def check_training(model: ModelConfig, reference: ReferenceRun) -> Iterator[ModelCheckRow]:
    """Yield the rows of `strategy=fsdp2`."""
    yield checked("fsdp2: padded rows", lambda: _padded(model, reference))
    yield checked("fsdp2: packed rows (model.use_remove_padding)", lambda: _packed(model, reference), refused="no")
    yield checked("fsdp2: shared prefixes (model.share_prefixes)", lambda: _shared(model, reference), refused="no")
    yield checked("fsdp2: a step of training", lambda: _step(model, reference.batch))
    yield checked("critic and reward model", lambda: _values(model, reference.batch))
    yield checked("LoRA", lambda: _lora(model), refused="no")
    if getattr(config_of(model).get_text_config(), "num_experts_per_tok", None):
        yield checked("router replay", lambda: _replay(model), refused="no")
        yield checked("loss of routers", lambda: _router_loss(model), refused="no")


def _engine(model: ModelConfig, kind: str = "language_model", trains: bool = False) -> Engine:
    engine = create_train_engine(
        kind,
        "fsdp2",
        model=model,
        engine=FSDPConfig(dtype="float32", model_dtype="float32"),
        optim=OptimConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=4) if trains else None,
    )
    engine.initialize()
    return engine


def _log_probs(engine: Engine, batch: DataProto) -> torch.Tensor:
    return engine.infer(batch, MicroBatching(size=ROWS // 2))["log_probs"]


def _padded(model: ModelConfig, reference: ReferenceRun) -> str:
    engine = _engine(replace(model, use_remove_padding=False, share_prefixes=False))
    return reference.compare(_log_probs(engine, reference.batch))


def _packed(model: ModelConfig, reference: ReferenceRun) -> str:
    overrides = dict(model.override_config)
    if not device.is_gpu():  # where rows are packed on request only
        overrides.setdefault("attn_implementation", VARLEN)
    engine = _engine(replace(model, use_remove_padding=True, share_prefixes=False, override_config=overrides))
    if not engine.packed:  # type: ignore[attr-defined]
        reason = packing_unsupported_reason(config_of(model)) or "a row's results depend on the rows before it"
        raise ModelError(f"rows are padded: {reason}")
    return _or_failed(reference, _log_probs(engine, reference.batch))


def _shared(model: ModelConfig, reference: ReferenceRun) -> str:
    if reason := sharing_unsupported_reason(config_of(model)):
        raise ModelError(reason)
    engine = _engine(replace(model, use_remove_padding=True, share_prefixes=True))
    return _or_failed(reference, _log_probs(engine, reference.batch))


def _or_failed(reference: ReferenceRun, log_probs: torch.Tensor) -> str:
    """Compare, where a `ModelError` would say that the model lacks the feature."""
    try:
        return reference.compare(log_probs)
    except ModelError as error:
        raise RuntimeError(str(error)) from error


def _policy_loss(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    tensors = micro.batch
    weighted = outputs["log_probs"] * tensors["advantages"] * tensors["response_mask"]
    loss = -weighted.sum() / micro.meta_info["batch_num_tokens"]
    return loss, {"loss": Metric(loss.detach(), kind="sum")}


def _value_loss(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    tensors = micro.batch
    errors = ((outputs["values"] - tensors["advantages"]) ** 2) * tensors["response_mask"]
    loss = errors.sum() / micro.meta_info["batch_num_tokens"]
    return loss, {"loss": Metric(loss.detach(), kind="sum")}


def _step(model: ModelConfig, batch: DataProto) -> str:
    engine = _engine(model, trains=True)
    before = {name: tensor.clone() for name, tensor in engine.export_weights()}
    losses = [_loss(engine.train_batch(batch, MicroBatching(size=ROWS // 2), _policy_loss)) for _ in range(3)]
    if not losses[-1] < losses[0]:
        raise ModelError(f"the loss did not fall in three steps: {losses}")
    same = [name for name, tensor in engine.export_weights() if torch.equal(tensor, before[name])]
    moved = len(before) - len(same)
    still = f"; not moved: {', '.join(same[:3])}{', ...' * (len(same) > 3)}" if same else ""
    return f"the loss falls, {moved} of {len(before)} tensors move{still}"


def _values(model: ModelConfig, batch: DataProto) -> str:
    engine = _engine(model, "value_model", trains=True)
    losses = [_loss(engine.train_batch(batch, MicroBatching(size=ROWS // 2), _value_loss)) for _ in range(3)]
    if not losses[-1] < losses[0]:
        raise ModelError(f"the loss did not fall in three steps: {losses}")
    return "the loss falls"


def _loss(metrics: dict[str, Metric]) -> float:
    return float(metrics["loss"].value)


def _lora(model: ModelConfig) -> str:
    lora.check(replace(model, lora_rank=4))
    module = loading.build_language_model(config_of(model), torch.float32, model.trust_remote_code)
    names = sorted({name.rpartition(".")[2] for name in lora.linear_layers(module)})
    experts = "; experts are one tensor and take none" if lora.has_fused_experts(module) else ""
    return f"{', '.join(names)}{experts}"


def _replay(model: ModelConfig) -> str:
    check_routing(model, FSDPConfig())
    return "recorded and replayed"


def _router_loss(model: ModelConfig) -> str:
    if reason := why_no_router_loss(config_of(model)):
        raise ModelError(reason)
    return "fsdp_config.router_aux_loss_coef acts"


def check_megatron(model: ModelConfig, reference: ReferenceRun) -> Iterator[ModelCheckRow]:
    """Yield the row of `strategy=megatron`."""
    yield checked("megatron: log-probabilities", lambda: _megatron(model, reference), refused="no")


def _megatron(model: ModelConfig, reference: ReferenceRun) -> str:
    config = config_of(model)
    if not MEGATRON_FAMILIES.knows(config.model_type):
        raise ModelError(f"there is no table for model_type={config.model_type} (docs/megatron_models.md)")
    settings = MegatronConfig(dtype="float32")
    with _process_group():
        engine = create_train_engine("language_model", "megatron", model=model, engine=settings)
        engine.initialize()
        return _or_failed(reference, _log_probs(engine, reference.batch))


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Have a process group of this process alone, unless there is one."""
    if distributed.is_distributed():
        yield
        return
    dist.init_process_group(device.backend_name(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
