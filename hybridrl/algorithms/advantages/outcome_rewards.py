"""The decorator for estimators that compute one advantage per sample from its summed reward.

Legend: B samples, T response tokens; R_i = sum of the rewards on sample i's response tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.algorithm_registry import AdvantageFn, register_adv_est
from hybridrl.algorithms.functional import masked_whiten
from hybridrl.algorithms.groups import group_samples, levelled_scores, spread


def outcome_estimator(
    name: str,
    *,
    needs: Iterable[str] = (),
    compares_samples: bool = False,
    alone: bool = False,
    smallest_group: int | None = None,
    unbiased: bool = False,
    reads_components: bool = False,
    settings: type | None = None,
    whitened: bool = False,
) -> Callable[[Callable[..., Tensor]], AdvantageFn]:
    """Return a decorator that turns a function of the samples' scores into an estimator with verl's signature.

        @outcome_estimator("mine", compares_samples=True)
        def mine(scores: Tensor, groups: Groups) -> Tensor:
            return scores - groups.mean(scores)

    The decorated function receives R [B] and the groups of samples of one prompt, and returns one advantage per sample,
    [B]. Scores of a group that differ by rounding alone (`functional.rounding_of`) are equal in R. The resulting
    estimator is called as in verl, `(token_level_rewards, response_mask, index, ...)`, with the function's further
    parameters. It returns (advantages, returns), which are equal: the sample's advantage on each of its response
    tokens, [B, T] and zero outside the mask. A function with the parameter `response_mask` receives the mask.

    Args:
        name, needs, compares_samples, alone, smallest_group, unbiased, reads_components, settings: see
            `register_adv_est`.
        whitened: whether advantages are whitened over all response tokens of the batch.
    """

    def decorate(body: Callable[..., Tensor]) -> AdvantageFn:
        empty = inspect.Parameter.empty
        own = list(inspect.signature(body).parameters.values())[2:]
        takes_mask = any(p.name == "response_mask" for p in own)
        own = [p for p in own if p.name != "response_mask"]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        common = [inspect.Parameter(parameter, kind) for parameter in ("token_level_rewards", "response_mask", "index")]
        spare = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        if all(p.name != "config" for p in own):
            own.append(inspect.Parameter("config", kind, default=None))
        reads = {p.name for p in own if p.name in inspect.signature(body).parameters}
        signature = inspect.Signature([*common, *(p.replace(kind=kind, annotation=empty) for p in own), spare])

        @torch.no_grad()
        def estimate(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            arguments = signature.bind(*args, **kwargs).arguments
            rewards: Tensor = arguments.pop("token_level_rewards")
            mask: Tensor = arguments.pop("response_mask")
            index: np.ndarray = arguments.pop("index")
            groups = group_samples(index, rewards)
            scores = levelled_scores(rewards, mask, groups)
            more = {key: value for key, value in arguments.items() if key in reads}
            if takes_mask:
                more["response_mask"] = mask
            advantages = spread(body(scores, groups, **more), rewards, mask)
            if whitened:
                advantages = masked_whiten(advantages, mask)
            return advantages, advantages

        estimate.__signature__ = signature  # type: ignore[attr-defined]
        estimate.__doc__, estimate.__name__, estimate.__module__ = body.__doc__, body.__name__, body.__module__
        estimate.__qualname__ = body.__qualname__
        return register_adv_est(
            name,
            needs=needs,
            compares_samples=compares_samples,
            alone=alone,
            smallest_group=smallest_group,
            unbiased=unbiased,
            reads_components=reads_components,
            settings=settings,
        )(estimate)

    return decorate
