"""Settings of what supervised training minimises: `sft`, `dpo`, `kto` and `rm`."""

from dataclasses import dataclass

from hybridrl.config.schema.conditions import MetadataNeed, entry_has
from hybridrl.config.schema.node import ConfigNode, key
from hybridrl.registry import OBJECTIVES

REFERENCES = ("model", "cache", "adapter")


def _read(name: str) -> MetadataNeed:
    """The objective reads this setting."""
    return entry_has(".loss_type", OBJECTIVES, "reads", name)


@dataclass
class ObjectiveConfig(ConfigNode):
    """Settings that these groups share: the name of an objective of `hybridrl.workers.objectives`."""

    loss_type: str = key("nll", "objective")


@dataclass
class SFTObjectiveConfig(ObjectiveConfig):
    """`sft`: what is learned from conversations."""

    loss_type: str = key(
        "nll", "nll: likelihood; dft: likelihood without the weight of improbable tokens; or a registered objective"
    )


@dataclass
class DPOConfig(ObjectiveConfig):
    """`dpo`: what is learned from pairs of answers."""

    loss_type: str = key("sigmoid", "sigmoid (DPO), ipo, hinge, simpo, orpo, or a registered objective")
    beta: float = key(
        0.1, "scale of the implied rewards: larger values keep nearer to the reference", gt=0, needs=_read("beta")
    )
    label_smoothing: float = key(
        0.0, "sigmoid, simpo: probability that a pair is labelled wrongly", ge=0, lt=0.5, needs=_read("label_smoothing")
    )
    length_normalise: bool = key(
        False,
        "sigmoid, hinge: divide the log-ratio of an answer by its number of tokens",
        needs=_read("length_normalise"),
    )
    simpo_gamma: float = key(
        0.5, "simpo: margin that the rewards of a pair are to differ by", ge=0, needs=_read("simpo_gamma")
    )
    sft_coef: float | None = key(
        None,
        "coefficient of the likelihood of chosen answers, added to the loss; null: 1 for orpo, else 0",
        ge=0,
        needs=_read("sft_coef"),
    )
    reference: str | None = key(
        None,
        "log-probabilities of the reference, the model before training, are from model: a second copy of it; cache: "
        "itself before the first step, kept in the run's folder; adapter: itself with its LoRA adapter off; null: "
        "adapter with model.lora_rank, else model",
        choices=REFERENCES,
        needs=_read("reference"),
    )


@dataclass
class KTOConfig(ObjectiveConfig):
    """`kto`: what is learned from answers with a label."""

    loss_type: str = key("kto", "kto, apo_zero_unpaired, or a registered objective")
    beta: float = key(
        0.1, "scale of the implied rewards: larger values keep nearer to the reference", gt=0, needs=_read("beta")
    )
    desirable_weight: float = key(
        1.0, "weight of the losses of desirable answers", ge=0, needs=_read("desirable_weight")
    )
    undesirable_weight: float = key(
        1.0, "weight of the losses of undesirable answers", ge=0, needs=_read("undesirable_weight")
    )
    reference: str | None = key(
        None,
        "log-probabilities of the reference, the model before training, are from model: a second copy of it; cache: "
        "itself before the first step, kept in the run's folder (apo_zero_unpaired); adapter: itself with its LoRA "
        "adapter off; null: adapter with model.lora_rank, else model",
        choices=REFERENCES,
        needs=_read("reference"),
    )


@dataclass
class RMConfig(ObjectiveConfig):
    """`rm`: how a reward model learns from pairs of answers."""

    loss_type: str = key("bradley_terry", "bradley_terry, or a registered objective")
    centering_coef: float = key(
        0.0,
        "coefficient of the squared sum of a pair's rewards: keeps them near 0",
        ge=0,
        needs=_read("centering_coef"),
    )
