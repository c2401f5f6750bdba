"""The objectives of supervised training: what a model learns from conversations, pairs of answers and labelled answers.

Each is a small function in the table `OBJECTIVES`, chosen by `sft.loss_type`, `dpo.loss_type`, `kto.loss_type` or
`rm.loss_type`. A module that `model.external_lib` names adds its own with `register_objective`:

```python
from hybridrl.workers.objectives import PairLoss, Pairs, register_objective


@register_objective("likelihood", kind="pairs")
def likelihood(pairs: Pairs, settings) -> PairLoss:
    return PairLoss(-pairs.chosen, pairs.chosen, pairs.rejected)
```

Shapes: B rows, T response columns, N pairs. Log-probabilities of an answer y to a prompt x are
log pi(y | x) = sum_t log pi(y_t | x, y_<t); |y| is the number of its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from hybridrl.errors import AlgorithmError
from hybridrl.protocol import DataProto
from hybridrl.registry import OBJECTIVES
from hybridrl.utils.entry_metadata import ObjectiveMetadata
from hybridrl.utils.metrics import Metric
from hybridrl.workers.losses import CountedLossFn, LossCounts

ANSWER_LOG_PROBS = "answer_log_probs"  # [B]: log-probability of the answer
REF_LOG_PROBS = "ref_answer_log_probs"  # [B] of the batch: log-probability of the answer under the reference
MARGINS = "margins"  # [B]: by how much the chosen answer is better, on both rows of a pair
NLL_WEIGHTS = "nll_weights"  # [B]: weight of a row's tokens in the loss of the chosen answers
DESIRABLE = "desirable"  # [B] bool: the label of the row's answer
KL_BASELINE = "kl_baseline"  # [B]: z0 of the step, the same number in each row
LOSS_WEIGHTS = "loss_weights"  # [B, T]: weights of tokens, whose sum over the batch is 1


@dataclass(frozen=True)
class Pairs:
    """A model's log-probabilities or rewards of the answers of N pairs.

    Attributes:
        chosen, rejected: [N] log-probability of each answer, or its reward.
        chosen_tokens, rejected_tokens: [N] number of tokens of each answer.
        ref_chosen, ref_rejected: [N] log-probability under the reference; None without one.
        margins: [N] by how much the chosen answer is better; None without `data.margin_key`.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    ref_chosen: torch.Tensor | None = None
    ref_rejected: torch.Tensor | None = None
    margins: torch.Tensor | None = None


class PairLoss(NamedTuple):
    """The result of an objective of pairs.

    Attributes:
        losses: [N] loss of each pair, whose mean is minimised.
        chosen_rewards, rejected_rewards: [N] rewards that the model implies, for the metrics.
    """

    losses: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


@dataclass(frozen=True)
class LabelledAnswers:
    """A model's log-probabilities of N answers with labels.

    Attributes:
        log_probs: [N] log-probability of each answer.
        tokens: [N] number of its tokens.
        desirable: [N] bool, its label.
        ref_log_probs: [N] log-probability under the reference; None without one.
        kl_baseline: [N] the estimate z0 of the KL to the reference, the same for all rows of a step; None for
            objectives that do not read it.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    desirable: torch.Tensor
    ref_log_probs: torch.Tensor | None = None
    kl_baseline: torch.Tensor | None = None


class LabelLoss(NamedTuple):
    """The result of an objective of labelled answers.

    Attributes:
        losses: [N] loss of each answer, whose mean is minimised.
        rewards: [N] rewards that the model implies, for the metrics.
    """

    losses: torch.Tensor
    rewards: torch.Tensor


def register_objective(
    name: str,
    *,
    kind: str = "pairs",
    reference: bool = False,
    reads: tuple[str, ...] = (),
    margins: bool = False,
    kl_baseline: bool = False,
    likelihood: bool = False,
    settings: type | str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds an objective; see `ObjectiveMetadata`.

    Args:
        name: the value of `loss_type` that chooses it.
        kind: `tokens`: called as `f(log_probs [B, T], settings) -> losses [B, T]`; `pairs` and `scores`: called as
            `f(pairs: Pairs, settings) -> PairLoss`; `labels`: as `f(answers: LabelledAnswers, settings) -> LabelLoss`.
        settings: dataclass of further settings, next to `loss_type`.

    Raises:
        AlgorithmError: the name is taken, the kind unknown, or `kl_baseline` cannot be computed for it.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        if kl_baseline and not (kind == "labels" and reference):
            raise AlgorithmError(
                f"objective {name!r} has kl_baseline=True, which compares labelled answers with the reference; "
                'register it with kind="labels" and reference=True'
            )
        metadata = ObjectiveMetadata(
            kind=kind,
            reference=reference,
            reads=reads,
            margins=margins,
            kl_baseline=kl_baseline,
            likelihood=likelihood,
            settings=settings,
        )
        OBJECTIVES.add(name, function, metadata)
        return function

    return add


# ---------------------------------------------------------------- conversations


@register_objective("nll", kind="tokens")
def nll(log_probs: torch.Tensor, settings: Any) -> torch.Tensor:
    """Negative log-likelihood: l_t = -log pi(y_t | y_<t)."""
    return -log_probs


@register_objective("dft", kind="tokens")
def dft(log_probs: torch.Tensor, settings: Any) -> torch.Tensor:
    """Dynamic fine-tuning (Wu et al. 2025, arXiv 2508.05629): l_t = -sg(pi(y_t | y_<t)) log pi(y_t | y_<t).

    The factor takes the weight 1 / pi out of the gradient of the likelihood, so that improbable tokens pull less.
    """
    return -log_probs.detach().exp() * log_probs


# ---------------------------------------------------------------- pairs of answers


def log_ratios(pairs: Pairs, per_token: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(y | x) - log pi_ref(y | x) of both answers, [N] each; with `per_token` divided by |y|."""
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None  # `ObjectiveMetadata.reference`
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return (chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens) if per_token else (chosen, rejected)


def _smoothed(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    """-(1 - e) log s(z) - e log s(-z): the label is wrong with probability e."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


@register_objective(
    "sigmoid",
    kind="pairs",
    reference=True,
    margins=True,
    reads=("beta", "label_smoothing", "length_normalise", "sft_coef", "reference"),
)
def sigmoid(pairs: Pairs, settings: Any) -> PairLoss:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290): l = -log s(r_w - r_l - m) with r = beta log(pi / pi_ref).

    With `label_smoothing` e the conservative form -(1 - e) log s(.) - e log s(-.). The margin m of a pair makes it DPO
    with an offset (Amini et al. 2024, arXiv 2402.10571); `length_normalise` divides log-ratios by |y|.
    """
    chosen, rejected = (settings.beta * ratio for ratio in log_ratios(pairs, settings.length_normalise))
    difference = chosen - rejected if pairs.margins is None else chosen - rejected - pairs.margins
    return PairLoss(_smoothed(difference, settings.label_smoothing), chosen, rejected)


@register_objective("ipo", kind="pairs", reference=True, reads=("beta", "sft_coef", "reference"))
def ipo(pairs: Pairs, settings: Any) -> PairLoss:
    """IPO (Azar et al. 2023, arXiv 2310.12036): l = (h_w - h_l - 1 / (2 beta))^2 with h = log(pi / pi_ref) / |y|."""
    chosen, rejected = log_ratios(pairs, per_token=True)
    losses = (chosen - rejected - 1 / (2 * settings.beta)).square()
    return PairLoss(losses, settings.beta * chosen, settings.beta * rejected)


@register_objective("hinge", kind="pairs", reference=True, reads=("beta", "length_normalise", "sft_coef", "reference"))
def hinge(pairs: Pairs, settings: Any) -> PairLoss:
    """SLiC's hinge on DPO's rewards (Zhao et al. 2023, arXiv 2305.10425): l = max(0, 1 - (r_w - r_l))."""
    chosen, rejected = (settings.beta * ratio for ratio in log_ratios(pairs, settings.length_normalise))
    return PairLoss(torch.relu(1 - (chosen - rejected)), chosen, rejected)


@register_objective("simpo", kind="pairs", reads=("beta", "simpo_gamma", "label_smoothing", "sft_coef"))
def simpo(pairs: Pairs, settings: Any) -> PairLoss:
    """SimPO (Meng et al. 2024, arXiv 2405.14734): l = -log s(r_w - r_l - gamma) with r = beta log pi / |y|."""
    chosen = settings.beta * pairs.chosen / pairs.chosen_tokens
    rejected = settings.beta * pairs.rejected / pairs.rejected_tokens
    return PairLoss(_smoothed(chosen - rejected - settings.simpo_gamma, settings.label_smoothing), chosen, rejected)


@register_objective("orpo", kind="pairs", likelihood=True, reads=("beta", "sft_coef"))
def orpo(pairs: Pairs, settings: Any) -> PairLoss:
    """The odds ratio of ORPO (Hong et al. 2024, arXiv 2403.07691); the likelihood is added by `sft_coef`, here 1.

    l = -beta log s(log odds_w - log odds_l) with odds = p / (1 - p) and log p = log pi(y | x) / |y|.
    """
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    log_odds = (chosen - rejected) - (_log_one_minus_exp(chosen) - _log_one_minus_exp(rejected))
    return PairLoss(-settings.beta * logsigmoid(log_odds), settings.beta * chosen, settings.beta * rejected)


def _log_one_minus_exp(value: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, also where exp(x) is near 1; at x = 0 that of the number next to it."""
    value = value.clamp(max=-torch.finfo(value.dtype).tiny)
    near = value > -0.6931471805599453
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, value, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, value))),
    )


# ---------------------------------------------------------------- answers with labels


def _unpaired(answers: LabelledAnswers, settings: Any, baseline: torch.Tensor | float) -> LabelLoss:
    """l = lambda_y s(-+ beta (h - b)): falls with h of desirable answers, and rises with that of the others."""
    assert answers.ref_log_probs is not None  # `ObjectiveMetadata.reference`
    ratios = answers.log_probs - answers.ref_log_probs
    signs = torch.where(answers.desirable, 1.0, -1.0)
    weights = torch.where(answers.desirable, settings.desirable_weight, settings.undesirable_weight)
    losses = weights * torch.sigmoid(-signs * settings.beta * (ratios - baseline))
    return LabelLoss(losses, settings.beta * ratios)


@register_objective(
    "kto",
    kind="labels",
    reference=True,
    kl_baseline=True,
    reads=("beta", "desirable_weight", "undesirable_weight", "reference"),
)
def kto(answers: LabelledAnswers, settings: Any) -> LabelLoss:
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306): l = lambda_y - v(x, y), with h = log(pi / pi_ref).

    v = lambda_D s(beta (h - z0)) of a desirable answer and lambda_U s(beta (z0 - h)) of another one. z0 is the mean of
    log pi(y' | x) - log pi_ref(y' | x) over prompts x with an answer y' to another prompt, at least 0, without a
    gradient (`SupervisedTrainer.kl_baseline`).
    """
    assert answers.kl_baseline is not None  # `ObjectiveMetadata.kl_baseline`
    return _unpaired(answers, settings, answers.kl_baseline)


@register_objective(
    "apo_zero_unpaired",
    kind="labels",
    reference=True,
    reads=("beta", "desirable_weight", "undesirable_weight", "reference"),
)
def apo_zero_unpaired(answers: LabelledAnswers, settings: Any) -> LabelLoss:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv 2408.06266) without pairs: KTO's loss with z0 = 0."""
    return _unpaired(answers, settings, 0.0)


# ---------------------------------------------------------------- rewards of answers


@register_objective("bradley_terry", kind="scores", margins=True, reads=("centering_coef",))
def bradley_terry(pairs: Pairs, settings: Any) -> PairLoss:
    """Bradley-Terry: l = -log s(r_w - r_l - m) + c (r_w + r_l)^2.

    The margin m is Llama 2's (Touvron et al. 2023, arXiv 2307.09288); `centering_coef` c keeps rewards near 0
    (Eisenstein et al. 2023, arXiv 2312.09244).
    """
    difference = pairs.chosen - pairs.rejected
    losses = -logsigmoid(difference if pairs.margins is None else difference - pairs.margins)
    if settings.centering_coef:
        losses = losses + settings.centering_coef * (pairs.chosen + pairs.rejected).square()
    return PairLoss(losses, pairs.chosen, pairs.rejected)


# ---------------------------------------------------------------- a micro-batch's share


Share = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Objective:
    """An objective as workers use it: the loss function of an engine's micro-batches.

    Each call returns the micro-batch's share of the loss of the whole mini-batch, over all ranks, so that shares add up
    to the same loss and gradient however the mini-batch was split.

    Attributes:
        name: `loss_type`.
        settings: the group that holds `loss_type`.
    """

    name: str
    settings: Any

    @property
    def metadata(self) -> ObjectiveMetadata:
        """Return the properties of the objective."""
        return OBJECTIVES.metadata(self.name)

    @property
    def model_type(self) -> str:
        """The kind of model that it trains."""
        return "reward_model" if self.metadata.kind == "scores" else "language_model"

    @property
    def output(self) -> str:
        """Name of the engine's output that the objective reads."""
        return "values" if self.metadata.kind == "scores" else "log_probs"

    @property
    def rows_together(self) -> int:
        """Rows of a batch that it compares with each other: 2 for pairs, the chosen answer first."""
        return 2 if self.metadata.kind in ("pairs", "scores") else 1

    @property
    def sft_coef(self) -> float:
        """Coefficient of the likelihood of chosen answers."""
        coefficient = self.settings.get("sft_coef")
        return float(self.metadata.likelihood) if coefficient is None else float(coefficient)

    def share(self, phase: str) -> CountedLossFn:
        """The loss function; metrics are called `<phase>/...`."""
        compute = {"tokens": self._of_tokens, "labels": self._of_labelled}.get(self.metadata.kind, self._of_pairs)

        def loss_fn(outputs: dict[str, torch.Tensor], batch: DataProto, counts: LossCounts) -> Share:
            loss, metrics = compute(outputs[self.output], batch, counts)
            loss_metric = Metric(loss.detach(), kind="sum")
            return loss, {f"{phase}/{name}": metric for name, metric in {"loss": loss_metric, **metrics}.items()}

        return loss_fn

    def _of_tokens(self, log_probs: torch.Tensor, batch: DataProto, counts: LossCounts) -> Share:
        """L = sum_t w_t l_t / sum_t w_t over the trained tokens of the mini-batch; without weights, w_t = 1."""
        mask = batch.batch["response_mask"].bool()
        losses = OBJECTIVES.get(self.name)(torch.where(mask, log_probs, 0.0), self.settings)
        losses = torch.where(mask, losses, 0.0)
        if LOSS_WEIGHTS in batch.batch.keys():
            return (losses * batch.batch[LOSS_WEIGHTS]).sum(), {}
        return losses.sum() / counts.tokens, {}

    def _of_pairs(self, outputs: torch.Tensor, batch: DataProto, counts: LossCounts) -> Share:
        """L = mean over pairs of l, and with `sft_coef` the mean of -log pi over the tokens of chosen answers."""
        tensors = batch.batch
        mask = tensors["response_mask"].bool()
        answers = torch.where(mask, outputs, 0.0).sum(1)
        (chosen, rejected), (chosen_tokens, rejected_tokens) = _both(answers), _both(mask.sum(1))
        before = _both(tensors[REF_LOG_PROBS]) if self.metadata.reference else (None, None)
        margins = _both(tensors[MARGINS])[0] if MARGINS in tensors.keys() else None
        pairs = Pairs(chosen, rejected, chosen_tokens, rejected_tokens, before[0], before[1], margins)
        losses, chosen_rewards, rejected_rewards = OBJECTIVES.get(self.name)(pairs, self.settings)
        loss = losses.sum() / (counts.sequences // 2)
        metrics: dict[str, Any] = self._measured(pairs, chosen_rewards.detach(), rejected_rewards.detach())
        if coefficient := self.sft_coef:
            share = -(answers * tensors[NLL_WEIGHTS]).sum()
            metrics["nll_loss"] = Metric(share.detach(), kind="sum")
            loss = loss + coefficient * share
        return loss, metrics

    def _of_labelled(self, log_probs: torch.Tensor, batch: DataProto, counts: LossCounts) -> Share:
        """L = mean over answers of l. The means of rewards count the answers of one label."""
        tensors = batch.batch
        mask, desirable = tensors["response_mask"].bool(), tensors[DESIRABLE].bool()
        answers = LabelledAnswers(
            torch.where(mask, log_probs, 0.0).sum(1),
            mask.sum(1),
            desirable,
            tensors[REF_LOG_PROBS] if self.metadata.reference else None,
            tensors[KL_BASELINE] if self.metadata.kl_baseline else None,
        )
        losses, rewards = OBJECTIVES.get(self.name)(answers, self.settings)
        metrics = {}
        for label, rows in (("desirable", desirable), ("undesirable", ~desirable)):
            values = {"reward": rewards, "log_prob": answers.log_probs}
            for name, value in values.items():
                total = torch.where(rows, value.detach().double(), 0.0).sum()
                metrics[f"{label}_{name}"] = Metric(total / rows.sum().clamp(min=1), rows.sum())
        if answers.kl_baseline is not None:
            metrics["kl_baseline"] = Metric(answers.kl_baseline.double().mean(), len(desirable))
        return losses.sum() / counts.sequences, metrics

    def _measured(self, pairs: Pairs, chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, Metric]:
        values = {
            "accuracy": (chosen > rejected).double(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        if self.output == "log_probs":
            values |= {"chosen_log_prob": pairs.chosen.detach(), "rejected_log_prob": pairs.rejected.detach()}
        return {name: Metric(value.double().mean(), len(chosen)) for name, value in values.items()}


def _both(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the chosen and of the rejected answers; rows are pairs, the chosen answer first."""
    chosen, rejected = rows.view(-1, 2).unbind(1)
    return chosen, rejected
