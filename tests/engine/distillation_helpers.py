"""What a teacher says about a batch, and an update of the policy with it, by the worker's own functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from engine_helpers import TEMPERATURE, make_batch

from hybridrl.config.schema.actor import ActorConfig
from hybridrl.config.schema.distillation import DistillationLossConfig
from hybridrl.engine import Engine, MicroBatching
from hybridrl.engine.logits_functions import TopTokens
from hybridrl.protocol import DataProto
from hybridrl.registry import DISTILLATION_LOSSES
from hybridrl.utils.metrics import Metric
from hybridrl.workers.distillation import Distillation, computing
from hybridrl.workers.losses import LossCounts, policy_loss_fn

TOP = 6
Fields = dict[str, torch.Tensor]


def taught(teacher: Engine, fields: Fields, temperature: float = TEMPERATURE) -> Fields:
    """The fields with what the teacher says."""
    function = TopTokens(TOP)
    with teacher.loaded(), computing(teacher, function):
        found = teacher.infer(make_batch(fields), MicroBatching(4), temperature, ("log_probs", *function.outputs))
    return fields | {
        "teacher_log_probs": found["log_probs"],
        "teacher_topk_log_probs": found["top_log_probs"],
        "teacher_topk_ids": found["top_ids"],
    }


def distilled(
    student: Engine,
    teacher: Engine,
    fields: Fields,
    micro: MicroBatching,
    actor: ActorConfig | None = None,
    own: slice = slice(None),
    **loss: Any,
) -> dict[str, float]:
    """Metrics of one update by the policy's worker's own loss.

    Args:
        fields: those of the whole mini-batch.
        own: this rank's rows of it; the metrics of losses are their shares.
    """
    settings, actor = DistillationLossConfig(topk=TOP, **loss), actor or ActorConfig()
    distillation = Distillation(settings, DISTILLATION_LOSSES.metadata(settings.loss_mode).reads)
    mask = fields["response_mask"]
    loss_fn = distillation.loss_fn(policy_loss_fn(actor), actor)
    counts = LossCounts(int(mask.sum()), int(mask.any(1).sum()))
    rows = DataProto.from_dict({name: tensor[own] for name, tensor in fields.items()})
    found: dict[str, Metric]
    with student.loaded(optimizer=True), teacher.loaded(), computing(student, distillation.function([teacher])):
        found = student.train_batch(rows, micro, partial(loss_fn, counts=counts), TEMPERATURE)
    return {name: float(metric.value) for name, metric in found.items()}
