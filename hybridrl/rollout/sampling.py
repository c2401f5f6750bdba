"""Sampling of responses: the settings of one call, and one draw from a batch of logits.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from hybridrl.config import RolloutConfig
from hybridrl.errors import UserError

_WHOLE = 2.0**52  # the precision of a float64
_BLOCK = 1024  # tokens


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one generation call.

    Attributes:
        do_sample: False takes the most likely token.
        temperature: divides the logits; > 0 when sampling.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep the k most likely tokens; -1 keeps all.
        max_new_tokens: length limit of a response, the EOS included.
        ignore_eos: continue to the limit whatever is sampled.
        stop: end after the token that completes one of these strings; the token stays in the response.
        seed: of this request's noise; None draws from the engine's stream. Batches of the hf rollout ignore it, because
            their noise is keyed by the sample.
        json_schema: the response is JSON of this schema, a JSON text; only engines with `constrains` take it.
    """

    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        if self.do_sample and not self.temperature > 0:
            raise UserError(
                f"rollout temperature is {self.temperature}, but sampling divides by it: set it above 0, "
                "or set do_sample=False for greedy decoding"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"rollout top_p is {self.top_p}: it must lie in (0, 1]; 1 keeps every token")
        if self.top_k == 0 or self.top_k < -1:
            raise UserError(f"rollout top_k is {self.top_k}: it must be at least 1, or -1 to keep every token")

    @classmethod
    def for_training(cls, rollout: RolloutConfig) -> "SamplingParams":
        return cls(
            do_sample=rollout.do_sample,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.response_length,
            ignore_eos=rollout.ignore_eos,
            stop=tuple(rollout.stop),
        )

    @classmethod
    def for_validation(cls, rollout: RolloutConfig) -> "SamplingParams":
        """`rollout.val_kwargs`; as in verl, temperature 0 means greedy, whatever `do_sample` says."""
        val = rollout.val_kwargs
        do_sample = val.do_sample and val.temperature > 0
        return cls(
            do_sample=do_sample,
            temperature=val.temperature if do_sample else 1.0,
            top_p=val.top_p,
            top_k=val.top_k,
            max_new_tokens=rollout.response_length,
            ignore_eos=rollout.ignore_eos,
            stop=tuple(rollout.stop),
        )

    @classmethod
    def from_meta(cls, rollout: RolloutConfig, meta: Mapping[str, Any]) -> "SamplingParams":
        """The settings of a batch: `meta["validate"]` chooses the base, single keys of `meta` override it."""
        base = cls.for_validation(rollout) if meta.get("validate", False) else cls.for_training(rollout)
        names = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos", "stop")
        return replace(base, **{name: meta[name] for name in names if name in meta})


def draw(logits: torch.Tensor, params: SamplingParams, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-probability under the distribution that it was drawn from.

    The draw inverts the cumulative distribution at `uniform`, so that one number per token decides it. A greedy token's
    log-probability is that of the untruncated distribution at temperature 1.

    Args:
        logits: [B, V], any float type.
        params: temperature, top_k and top_p are applied in this order.
        uniform: [B] float64 in [0, 1).

    Returns:
        tokens [B] int64 and log-probabilities [B] float32.
    """
    logits = logits.float()
    if not params.do_sample:
        log_probs = torch.log_softmax(logits, dim=-1)
        best, tokens = log_probs.max(dim=-1)
        return tokens, best
    scores = truncate(logits / params.temperature, params.top_k, params.top_p)
    log_probs = torch.log_softmax(scores, dim=-1)
    tokens = _inverted(log_probs.exp(), uniform)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def _inverted(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token [B, 1] at which the cumulative probability exceeds `uniform` [B].

    Cumulative sums run over blocks of the vocabulary, and then over the tokens of one block. They are of integers, so
    they are those over all tokens.
    """
    rows, width = probs.shape
    size = min(_BLOCK, width)
    masses = _as_integers(pad(probs, [0, -width % size])).view(rows, -1, size)
    blocks = masses.sum(dim=-1).cumsum(dim=-1)
    # `right=True` finds the first whose cumulative mass exceeds the target: never one of zero probability.
    target = (uniform.to(blocks.device) * blocks[:, -1]).long().unsqueeze(-1)
    block = torch.searchsorted(blocks, target, right=True).clamp_(max=blocks.shape[-1] - 1)
    within = masses[torch.arange(rows, device=block.device), block.squeeze(-1)]
    before = blocks.gather(-1, block) - within.sum(dim=-1, keepdim=True)
    token = block * size + torch.searchsorted(within.cumsum(dim=-1), target - before, right=True)
    return token.clamp_(max=width - 1)


def _as_integers(probs: torch.Tensor) -> torch.Tensor:
    """Probabilities as multiples of 1 / `_WHOLE`, which a float32 holds exactly.

    Sums of integers are exact in any order. With deterministic algorithms, PyTorch refuses others on a GPU.
    """
    return (probs * _WHOLE).round_().long()


def truncate(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Scores [B, V] with the tokens that top-k and then top-p (nucleus) drop set to -inf."""
    if 0 < top_k < scores.shape[-1]:
        threshold = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, float("-inf"))
    if top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        before = _as_integers(probs).cumsum(dim=-1).double() / _WHOLE - probs
        dropped = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        scores = scores.masked_fill(dropped, float("-inf"))
    return scores
