"""The common beginning and end of every policy loss, and the decorator that adds them.

Legend: B sequences of a micro-batch, T response tokens; rho = pi / pi_old of a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hybridrl.algorithms.aggregation import agg_loss, total_tokens_match
from hybridrl.algorithms.algorithm_registry import PolicyLossFn, PrepareFn, register_policy_loss
from hybridrl.algorithms.config_access import counts_of, read_settings
from hybridrl.algorithms.functional import keep, masked_mean
from hybridrl.algorithms.sequences import Sequences, sequences_of
from hybridrl.errors import AlgorithmError
from hybridrl.settings import key

Metrics = dict[str, Any]
ACTOR = "actor_rollout_ref.actor"
GROUP = "policy_loss."  # the group of the losses' settings, below the actor's


@dataclass(frozen=True)
class Tokens:
    """A micro-batch with everything outside the mask set to zero before any arithmetic, so that NaN cannot spread.

    Attributes:
        log_prob: [B, T], with gradient.
        log_ratio: [B, T] log rho = log_prob - old_log_prob, with gradient.
        advantages: [B, T], without gradient.
        mask: [B, T] bool.
        weights: [B, T] importance weights of the sampler's mismatch, or None.
        prepared: [B, T] the micro-batch's rows of the preliminary pass over the whole mini-batch, or None.
        more: further fields that the loss declares in `needs`, [B, T].
        sequences: sums over whole sequences; see `total`.
    """

    log_prob: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None
    prepared: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)

    def mean(self, values: Tensor) -> Tensor:
        """Token mean over the mask, detached, as metrics are reported."""
        return masked_mean(values.detach().to(self.log_prob.dtype), self.mask)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the response tokens of each row's whole sequence, [B, T] -> [B, 1].

        A sequence may have further rows in other micro-batches and on other ranks (`algorithms.sequences`). Their
        part is a constant, which was computed before the update. A loss that calls this is registered with
        `whole_sequences=True`, and `values` must not depend on another total.
        """
        return self.sequences.sum(keep(values.to(self.log_prob.dtype), self.mask))

    def carry(self, loss: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss of each token, where all tokens of a sequence carry the sequence's loss: [B, 1] -> [B, T].

            l_t = w_t sg[l] + (sum of w over the sequence / n of the row) (l - sg[l])

        The gradient of l with respect to a token comes from the row of the token alone, because the other rows hold
        it as a constant. That row therefore has the gradient of the whole sequence, for all of its n tokens. Of a
        sequence in one row, and without weights, l_t = l.

        Args:
            loss: l, computed from totals.
            weights: w of each token, [B, T]; None: 1.
        """
        own = self.mask.sum(-1, keepdim=True).clamp(min=1)
        each = self.mask.to(loss.dtype) if weights is None else weights
        return each * loss.detach() + self.total(each) / own * (loss - loss.detach())

    def ratio(self) -> Tensor:
        """rho, with the log-ratio clamped to [-20, 20] so that it stays finite."""
        return self.log_ratio.clamp(-20.0, 20.0).exp()

    def kl(self) -> Tensor:
        """Token mean of -log rho, an estimate of KL(pi_old || pi)."""
        return self.mean(-self.log_ratio.clamp(-20.0, 20.0))


def read_tokens(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, rollout_is_weights: Tensor | None
) -> Tokens:
    """Check the shapes of a loss's inputs and set everything outside the mask to zero."""
    named = {
        "old_log_prob": old_log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
        "rollout_is_weights": rollout_is_weights,
    }
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != log_prob.shape:
            raise AlgorithmError(
                f"{name} has shape {tuple(tensor.shape)}, log_prob {tuple(log_prob.shape)}; both must be [B, T]."
            )
    mask = response_mask.bool()
    weights = None if rollout_is_weights is None else keep(rollout_is_weights.detach(), mask)
    return Tokens(
        keep(log_prob, mask), keep(log_prob - old_log_prob, mask), keep(advantages.detach(), mask), mask, weights
    )


def _check_signature(body: Callable[..., Any], who: str, arguments: Sequence[str]) -> None:
    """Raise an AlgorithmError unless the function can be called with these arguments by position."""
    try:
        inspect.signature(body).bind(*arguments)
    except TypeError as error:
        without = "" if "settings" in arguments else " Declare settings=..., a dataclass, to get settings as well."
        raise AlgorithmError(
            f"{who}: {body.__qualname__} cannot be called with ({', '.join(arguments)}): {error}.{without}"
        ) from error


def _checked(result: Any, mask: Tensor, who: str) -> tuple[Tensor, Metrics]:
    """The losses [B, T] and the metrics that a decorated function returned."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        losses = result[0]
        if isinstance(losses, Tensor) and losses.shape == mask.shape:
            return losses, dict(result[1])
        returned = f"losses of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    else:
        returned = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
    raise AlgorithmError(
        f"{who} returned {returned}; it returns a loss per token, of shape {tuple(mask.shape)}, and a dict of metrics."
    )


def policy_loss(
    name: str,
    *,
    settings: type | None = None,
    needs: tuple[str, ...] = (),
    requires: tuple[str, ...] = (),
    prepare: PrepareFn | None = None,
    loss_agg_mode: str = "token-mean",
    weighs_itself: bool = False,
    whole_sequences: bool = False,
    compares_samples: bool = False,
) -> Callable[[Callable[..., tuple[Tensor, Metrics]]], PolicyLossFn]:
    """Return a decorator that registers a per-token loss as a policy loss with verl's signature.

        @policy_loss("mine", settings=MySettings)
        def mine(tokens: Tokens, settings: MySettings) -> tuple[Tensor, dict[str, Tensor]]:
            return -settings.my_beta * tokens.advantages * tokens.log_prob, {"actor/mine": tokens.ratio()}

    The decorated function returns one loss per token [B, T] and metrics, of which those of shape [B, T] are averaged
    over the response tokens. The resulting policy loss is called as in verl, see `hybridrl.algorithms.policy_losses`.
    It adds the importance weights, `actor/ppo_kl` and the aggregation.

    Args:
        name: value of `actor.policy_loss.loss_mode`.
        settings: dataclass of the settings that it reads, from `actor.policy_loss` unless a field's `path` names
            another place; without it the function takes only the tokens.
        needs, requires, compares_samples: see `hybridrl.utils.entry_metadata.LossMetadata`. Fields of `needs` are in
            `tokens.more`.
        prepare: see `register_policy_loss`; its result is `tokens.prepared`.
        loss_agg_mode: the default for a call without one. A run always sets it.
        weighs_itself: whether the function multiplies by `tokens.weights` itself.
        whole_sequences: whether the function calls `tokens.total` or `tokens.carry`, or `prepare` sums over sequences.
    """
    who = f"policy loss {name}"
    facts: dict[str, Any] = {"needs": needs, "requires": requires, "compares_samples": compares_samples}
    register = register_policy_loss(name, settings=settings, prepare=prepare, whole_sequences=whole_sequences, **facts)

    def decorate(body: Callable[..., tuple[Tensor, Metrics]]) -> PolicyLossFn:
        default_mode = loss_agg_mode
        _check_signature(body, who, ("tokens",) if settings is None else ("tokens", "settings"))

        def loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_mode,
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
            prepared: Tensor | None = None,
            counts: Mapping[str, Any] | None = None,
            sequences: Sequences | None = None,
            **more: Tensor,
        ) -> tuple[Tensor, Metrics]:
            own = () if settings is None else (read_settings(settings, config, who=who, root=ACTOR, group=GROUP),)
            global_counts = counts_of(counts, config)
            tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
            if prepare is not None and prepared is None:
                _check_whole(tokens.mask, global_counts, who)
                further = _further_inputs(more, needs, compares_samples, who)
                prepared = prepare(old_log_prob, log_prob, advantages, response_mask, config, 0, **further)
            extra_tensors = {field: keep(more[field], tokens.mask) for field in needs if field in more}
            whole = sequences_of(sequences, "sequence_lengths" in global_counts, who)
            tokens = replace(tokens, prepared=prepared, more=extra_tensors, sequences=whole)
            loss_mat, loss_metrics = _checked(body(tokens, *own), tokens.mask, who)
            if tokens.weights is not None and not weighs_itself:
                loss_mat = loss_mat * tokens.weights
            metrics = {"actor/ppo_kl": tokens.kl()}
            for metric, x in loss_metrics.items():
                metrics[metric] = tokens.mean(x) if x.shape == tokens.mask.shape else x.detach()
            return agg_loss(loss_mat, tokens.mask, loss_agg_mode, **global_counts), metrics

        loss.__doc__, loss.__name__, loss.__module__ = body.__doc__, body.__name__, body.__module__
        loss.__qualname__ = body.__qualname__
        return register(loss)

    return decorate


def _check_whole(mask: Tensor, counts: Mapping[str, Any], who: str) -> None:
    """Refuse a part of a mini-batch where the loss has a preliminary pass over the whole."""
    if not total_tokens_match(mask, counts.get("batch_num_tokens")):
        raise AlgorithmError(
            f"{who} reads the whole mini-batch before its update, but this call holds a part of it and nothing was "
            "prepared. Run get_policy_loss_prepare_fn(name) on the mini-batch and pass each part its rows as prepared=."
        )


def _further_inputs(
    fields: Mapping[str, Tensor], needs: Sequence[str], compares_samples: bool, who: str
) -> dict[str, Tensor]:
    """The inputs of a preliminary pass in addition to those of every one."""
    names = [*(name for name in needs if name != "old_log_probs"), *(["group_ids"] if compares_samples else [])]
    if missing := [name for name in names if name not in fields]:
        raise AlgorithmError(
            f"{who} was called without {', '.join(missing)}, which its pass over the whole mini-batch reads. Pass them "
            "by name (group_ids: the prompt of each row), or the result of that pass as prepared=."
        )
    return {name: fields[name] for name in names}


@dataclass(frozen=True)
class ClipRange:
    """The clip range of a ratio: `clip_ratio_low` and `clip_ratio_high`, each falling back to `clip_ratio` if null."""

    clip_ratio: float | None = key(None, "both sides", path="", ge=0)
    clip_ratio_low: float | None = key(None, "below 1", path="", ge=0, le=1)
    clip_ratio_high: float | None = key(None, "above 1", path="", ge=0)

    @property
    def low(self) -> float:
        return self._side(self.clip_ratio_low, "clip_ratio_low")

    @property
    def high(self) -> float:
        return self._side(self.clip_ratio_high, "clip_ratio_high")

    def _side(self, own: float | None, name: str) -> float:
        bound = self.clip_ratio if own is None else own
        if bound is None:
            raise AlgorithmError(
                f"the policy loss needs {ACTOR}.clip_ratio or .{name}, but both are missing or null. Set one of them."
            )
        limits = type(self).__dataclass_fields__[name].metadata["limits"]
        if limits.le is not None and bound > limits.le:
            raise AlgorithmError(
                f"{ACTOR}.clip_ratio is {bound}; the policy loss needs a number in [0, {limits.le:g}]."
            )
        return bound


@dataclass(frozen=True)
class WideClipRange(ClipRange):
    """A clip range whose lower side does not bound 1 - low: it may exceed 1."""

    clip_ratio_low: float | None = key(None, "below", path="", ge=0)


@dataclass(frozen=True)
class DualClipRange(ClipRange):
    """A clip range with the bound of the dual clip."""

    clip_ratio_c: float = key(3.0, "bound for negative advantages", path="", gt=1)
