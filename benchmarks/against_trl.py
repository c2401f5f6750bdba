"""Loss values of SFT, DPO, KTO and reward models compared with TRL's, for the same logits.

    pip install --target DIR 'trl==1.16.*'      # with --no-deps where this environment's packages are to be used
    PYTHONPATH=DIR python benchmarks/against_trl.py

A model with random weights computes the logits of random pairs once, in float32. TRL's own code computes its loss of
them: `DPOTrainer._compute_loss`, `CPOTrainer.cpo_loss` (SimPO), `ORPOTrainer.odds_ratio_loss`,
`KTOTrainer._compute_loss` (of the same rows with labels), `RewardTrainer.compute_loss`, and for SFT the loss that
`SFTTrainer` takes of transformers. Hybridrl computes its loss of the log-probabilities of the same logits
(`hybridrl.workers.objectives`). The table has both and the difference; the exit status is 1 if one is above 1e-5.
"""

from __future__ import annotations

import collections
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from hybridrl.config import DPOConfig, KTOConfig, RMConfig, SFTObjectiveConfig
from hybridrl.models.tiny import build_tiny_model
from hybridrl.protocol import DataProto
from hybridrl.workers.losses import LossCounts
from hybridrl.workers.objectives import DESIRABLE, KL_BASELINE, MARGINS, NLL_WEIGHTS, REF_LOG_PROBS, Objective

PAIRS, PROMPT, WIDTH = 6, 5, 14
LIMIT = 1e-5


def rows() -> dict[str, torch.Tensor]:
    """Random pairs as TRL's collator makes them: all chosen rows, then all rejected ones, right-padded."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(PROMPT + 1, WIDTH + 1, (2 * PAIRS,), generator=draw)
    ids = torch.randint(10, 200, (2 * PAIRS, WIDTH), generator=draw)
    attention = (torch.arange(WIDTH) < lengths[:, None]).long()
    completion = attention * (torch.arange(WIDTH) >= PROMPT).long()
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def log_probs_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probability of each token but the first, [2N, S - 1]."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]


def interleaved(of_trl: torch.Tensor) -> torch.Tensor:
    """Rows in the order of hybridrl: the chosen and the rejected row of each pair side by side."""
    return torch.stack(of_trl.chunk(2), dim=1).flatten(0, 1)


def ours(settings: Any, values: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor) -> float:
    """The loss of hybridrl, of rows in the order of TRL."""
    chosen = torch.tensor([1.0, 0.0]).repeat(PAIRS)
    mask = interleaved(mask)
    tensors = {"response_mask": mask, NLL_WEIGHTS: chosen / mask[::2].sum()}
    tensors |= {name: interleaved(tensor) for name, tensor in more.items()}
    objective = Objective(settings.loss_type, settings)
    counts = LossCounts(int(mask.sum()), 2 * PAIRS)
    batch = DataProto.from_dict(tensors=tensors)
    loss, _ = objective.share("train")({objective.output: interleaved(values)}, batch, counts)
    return float(loss)


class Outputs:
    """What the model of TRL's DPOTrainer returns: log-probabilities of the answers, and zeros for its metrics."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        self.log_probs = log_probs

    def __getattr__(self, name: str) -> torch.Tensor:
        return torch.zeros_like(self.log_probs, dtype=torch.bool if name == "is_top1" else None)


def trl_dpo(
    log_probs: torch.Tensor, reference: torch.Tensor, inputs: dict[str, torch.Tensor], losses: list[str]
) -> float:
    """The loss of TRL's `DPOTrainer`, which computes log-probabilities in a head of its own that is replaced here."""
    from trl import DPOTrainer

    mask = inputs["completion_mask"][:, 1:]
    alone = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda one: one,
        gather_for_metrics=lambda one: one,
        unwrap_model=lambda one: one,
    )
    trainer = type("Bare", (DPOTrainer,), {"__init__": lambda self: None})()
    trainer.__dict__.update(
        model=SimpleNamespace(training=True),
        accelerator=alone,
        beta=0.3,
        label_smoothing=0.0,
        loss_types=losses,
        loss_weights=[1.0] * len(losses),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        use_weighting=False,
        aux_loss_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    chosen, rejected = (reference * mask).sum(1).chunk(2)
    given = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return float(trainer._compute_loss(lambda **_: Outputs(log_probs * mask), given, return_outputs=False))


def trl_kto(log_probs: torch.Tensor, reference: torch.Tensor, inputs: dict[str, torch.Tensor], loss: str) -> float:
    """The loss of TRL's KTOTrainer; the log-probabilities of the KL are those of the rows themselves."""
    from trl import KTOTrainer

    mask = inputs["completion_mask"][:, 1:]
    settings = KTOConfig(beta=0.3, desirable_weight=1.5, undesirable_weight=0.8)
    answers, before = ((values * mask).sum(1) for values in (log_probs, reference))
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather_for_metrics=lambda one: one, gather=lambda one: one
        ),
        loss_type=loss,
        beta=settings.beta,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
        calculate_KL=loss == "kto",
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        _compute_kl_logps=lambda *_: answers,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    given = {**inputs, "label": labels_of_rows(), "ref_logps": before, "ref_KL_logps": before}
    return float(KTOTrainer._compute_loss(trainer, lambda **_: Outputs(log_probs * mask), given, return_outputs=False))


def labels_of_rows() -> torch.Tensor:
    """Labels of the rows: two desirable ones for each that is not."""
    return torch.arange(2 * PAIRS) % 3 > 0


def compare() -> dict[str, tuple[float, float]]:
    """Name of the loss to TRL's value and ours."""
    from trl import RewardTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    logging.set_verbosity_error()  # it would tell that the head of the classifier is new
    inputs = rows()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = build_tiny_model(folder, hidden=32, heads=2, kv_heads=1)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        torch.manual_seed(1)
        scorer = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
        scorer.config.pad_token_id = 0
    with torch.no_grad():
        found: dict[str, tuple[float, float]] = {}
        log_probs = log_probs_of(model, inputs)
        mask = inputs["completion_mask"][:, 1:]
        reference = log_probs + 0.3 * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(2))
        sums = {REF_LOG_PROBS: (reference * mask).sum(1)}
        for name, losses, of_pairs in (
            ("sigmoid", ["sigmoid"], DPOConfig(beta=0.3)),
            ("ipo", ["ipo"], DPOConfig(loss_type="ipo", beta=0.3)),
            ("hinge", ["hinge"], DPOConfig(loss_type="hinge", beta=0.3)),
            ("sigmoid, per token", ["sigmoid_norm"], DPOConfig(beta=0.3, length_normalise=True)),
            ("sigmoid + sft", ["sigmoid", "sft"], DPOConfig(beta=0.3, sft_coef=1.0)),
        ):
            theirs = trl_dpo(log_probs, reference, inputs, losses)
            found[name] = (theirs, ours(of_pairs, log_probs, mask, **sums))
        answers, tokens = (log_probs * mask).sum(1), mask.sum(1)
        means = (answers / tokens).chunk(2)
        cpu = SimpleNamespace(device=torch.device("cpu"))
        cpo = SimpleNamespace(
            beta=2.0, loss_type="simpo", simpo_gamma=0.7, label_smoothing=0.0, accelerator=cpu, alpha=0.0
        )
        losses, *_ = CPOTrainer.cpo_loss(cpo, *means)
        simpo = DPOConfig(loss_type="simpo", beta=2.0, simpo_gamma=0.7)
        found["simpo"] = (float(losses.mean()), ours(simpo, log_probs, mask))
        losses, *_ = ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=0.3, accelerator=cpu), *means)
        orpo = DPOConfig(loss_type="orpo", beta=0.3, sft_coef=0.0)
        found["orpo, odds ratio"] = (-float(losses.mean()), ours(orpo, log_probs, mask))

        ratios = answers - sums[REF_LOG_PROBS]
        baseline = ratios.mean().clamp(min=0).expand_as(ratios)
        for loss in ("kto", "apo_zero_unpaired"):
            labelled = KTOConfig(loss_type=loss, beta=0.3, desirable_weight=1.5, undesirable_weight=0.8)
            own = ours(labelled, log_probs, mask, **sums, **{DESIRABLE: labels_of_rows(), KL_BASELINE: baseline})
            found[loss] = (trl_kto(log_probs, reference, inputs, loss), own)

        margins = torch.rand(PAIRS, generator=torch.Generator().manual_seed(3))
        bare = SimpleNamespace(
            model=scorer.eval(),
            args=SimpleNamespace(center_rewards_coefficient=0.01),
            accelerator=SimpleNamespace(gather=lambda one: one, gather_for_metrics=lambda one: one),
            _metrics={"eval": collections.defaultdict(list)},
            _total_train_tokens=0,
        )
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        given["input_ids"] = (
            given["input_ids"] * given["attention_mask"]
        )  # transformers finds the last token by its pad
        logits = scorer(**given).logits

        def without_margin(margin: Any = None, use_cache: Any = None, **inner: torch.Tensor) -> Any:
            return scorer(**inner)

        theirs = float(RewardTrainer.compute_loss(bare, without_margin, {**given, "margin": margins}))
        one = torch.ones(2 * PAIRS, 1, dtype=torch.long)
        settings = RMConfig(centering_coef=0.01)
        found["bradley_terry"] = (theirs, ours(settings, logits, one, **{MARGINS: torch.cat([margins, margins])}))

        labels = torch.where(inputs["completion_mask"].bool(), inputs["input_ids"], -100)
        plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        found["sft"] = (float(model(**plain, labels=labels).loss), ours(SFTObjectiveConfig(), log_probs, mask))
    return found


def main() -> int:
    """Print the table."""
    import trl

    print(f"| loss | TRL {trl.__version__} | hybridrl | difference |\n|---|---|---|---|")
    worst = 0.0
    for name, (theirs, own) in compare().items():
        worst = max(worst, abs(theirs - own))
        print(f"| {name} | {theirs:.7f} | {own:.7f} | {abs(theirs - own):.1e} |")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
