"""Metrics of one training step, from the batch on the controller and the timers around its phases.

Names are HybridFlow's (verl's `metric_utils`), so that dashboards made for one work with the other.

Legend: B sequences, P prompt width, T response width. Every function here returns plain Python floats and ints.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.sessions import sessions_of
from hybridrl.config.roles import phases_per_token
from hybridrl.observe.validation_metrics import (
    bootstrap_metric,
    calc_maj_val,
    process_validation_metrics,
    validation_metrics,
)
from hybridrl.utils.metrics import Metric, merge_metrics, reduce_to_floats

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hybridrl.protocol import DataProto

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
    "validation_metrics",
]

_EXPLAINED_VARIANCE_EPS = 1e-5

# Phases that process only generated tokens. Those that also process prompts are in the table of roles.
_RESPONSE_PHASES = ("gen",)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduce each metric to one number, from the list of numbers that micro-batches or ranks reported.

    A metric whose name has the word `max` (`.../max`, `max_memory_allocated_gb`) is reduced by the maximum, one
    with the word `min` by the minimum, and every other by the mean. Words are the parts between `/`, `_`, `@` and `.`,
    so `actor/terminated` is a mean. The mean weights every entry equally. Entries that are
    `hybridrl.utils.metrics.Metric` are merged by their own kind and weights instead.

    Args:
        metrics: name -> list of numbers or of `Metric` (or a single one).

    Raises:
        ValueError: a metric has an empty list, or an entry that is not a single number; the error names it.
    """
    return {name: _reduce_one(name, values) for name, values in metrics.items()}


def _reduce_one(name: str, values: Any) -> float:
    if isinstance(values, Metric):
        values = [values]
    if _is_listlike(values) and len(values) and all(isinstance(value, Metric) for value in values):
        return reduce_to_floats(merge_metrics({name: value} for value in values))[name]
    try:
        numbers = np.asarray([float(value) for value in values] if _is_listlike(values) else [float(values)])
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ValueError(f"metric {name!r}: expected numbers, found {values!r}") from exc
    if numbers.size == 0:
        raise ValueError(f"metric {name!r} has an empty list: log it only in the steps that have a value for it")
    words = set(name.replace("/", "_").replace("@", "_").replace(".", "_").split("_"))
    if "max" in words:
        return float(numbers.max())
    if "min" in words:
        return float(numbers.min())
    return float(numbers.mean())


def _is_listlike(values: Any) -> bool:
    if isinstance(values, (Tensor, np.ndarray)):
        return values.ndim > 0
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes))


def _summary(prefix: str, values: Tensor) -> dict[str, float]:
    """Return mean, maximum and minimum of a 1-D tensor; NaN if it is empty."""
    if values.numel() == 0:
        return {f"{prefix}/{kind}": float("nan") for kind in ("mean", "max", "min")}
    low, high = torch.aminmax(values)
    return {f"{prefix}/mean": values.mean().item(), f"{prefix}/max": high.item(), f"{prefix}/min": low.item()}


def _length_summary(prefix: str, lengths: Tensor, limit: int) -> dict[str, float]:
    """Return `_summary` with the fraction of sequences that reach the maximum length."""
    clipped = (lengths >= limit).float().mean().item() if lengths.numel() else float("nan")
    return {**_summary(prefix, lengths), f"{prefix}/clip_ratio": clipped}


def _fields(batch: "DataProto") -> "TensorDict":
    if batch.batch is None:
        raise ValueError("the batch has no tensors; metrics need attention_mask and responses at least")
    return batch.batch


def _lengths(batch: "DataProto") -> tuple[Tensor, Tensor]:
    """Return prompt and response lengths `[B]` in tokens (float32), from the attention mask."""
    fields = _fields(batch)
    mask = fields["attention_mask"]
    width = fields["responses"].shape[-1]
    response = mask[:, mask.shape[1] - width :].sum(-1).float()
    return mask.sum(-1).float() - response, response


def compute_data_metrics(
    batch: "DataProto",
    use_critic: bool = True,
    *,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> dict[str, float]:
    """Summarise scores, rewards, advantages, returns, values and lengths of a training batch.

    A sequence's score is `token_level_scores.sum(-1)` over all rows of its session, and its reward is
    `token_level_rewards.sum(-1)` (the score minus the KL penalty, if one is set). A sequence without a generated token
    is aborted: it counts in `response/aborted_ratio` and `response_length/*`, and is left out of scores and rewards.
    Advantages, returns and values are summarised over the tokens of `response_mask`. With values,

        critic/vf_explained_var = 1 - Var(returns - values) / (Var(returns) + 1e-5)     (over tokens, unbiased)

    Args:
        batch: needs `attention_mask [B,P+T]`, `responses [B,T]`, `response_mask [B,T]`. If present,
            `token_level_scores`, `token_level_rewards`, `advantages`, `returns`, `values` (all `[B,T]`) and the
            non-tensors `__num_turns__` and `tool_call_counts` (one number per sequence) are summarised.
        use_critic: whether `values` come from a critic; otherwise they are ignored.
        max_prompt_length, max_response_length: the limits that `clip_ratio` counts. None is the width of the batch,
            which is the limit only if batches are padded to it (as in verl).

    Returns:
        `critic/{score,rewards,advantages,returns,values}/{mean,max,min}`, `critic/vf_explained_var`,
        `response_length/*`, `response_length_non_aborted/*`, `response/aborted_ratio`, `prompt_length/*`
        (`mean, max, min, clip_ratio`), `num_turns/*`, `tool_call_counts/*`. NaN if no sequence or token is left.
    """
    fields = _fields(batch)
    prompt_length, response_length = _lengths(batch)
    answered = response_length > 0
    all_answered = bool(answered.all())
    sessions = sessions_of(batch)
    metrics: dict[str, float] = {}

    for name, field in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if field in fields.keys():
            sums, has_response = fields[field].sum(-1), answered
            if sessions is not None:
                sums, has_response = sessions.sum(sums), sessions.sum(answered.long()) > 0
            metrics |= _summary(f"critic/{name}", sums if all_answered else sums[has_response])

    mask = fields["response_mask"].bool()
    token_fields = ["advantages", "returns", "values"] if use_critic else ["advantages", "returns"]
    places = mask.flatten().nonzero().squeeze(1)
    tokens = {name: fields[name].flatten().index_select(0, places) for name in token_fields if name in fields.keys()}
    for name, values in tokens.items():
        metrics |= _summary(f"critic/{name}", values)
    if "values" in tokens and "returns" in tokens:
        metrics["critic/vf_explained_var"] = _explained_variance(tokens["values"], tokens["returns"])

    width = fields["responses"].shape[-1]
    limit = max_response_length or width
    metrics |= _length_summary("response_length", response_length, limit)
    non_aborted = response_length if all_answered else response_length[answered]
    metrics |= _length_summary("response_length_non_aborted", non_aborted, limit)
    metrics["response/aborted_ratio"] = 0.0 if all_answered else 1.0 - answered.float().mean().item()
    limit = max_prompt_length or fields["attention_mask"].shape[1] - width
    metrics |= _length_summary("prompt_length", prompt_length, limit)

    for name, key in (("num_turns", "__num_turns__"), ("tool_call_counts", "tool_call_counts")):
        if key in batch.non_tensor_batch:
            counts = torch.as_tensor(np.asarray(batch.non_tensor_batch[key], dtype=np.float32))
            metrics |= _summary(name, counts)
    return metrics


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    if values.numel() < 2:
        return float("nan")
    values, returns = values.double(), returns.double()
    return 1.0 - (torch.var(returns - values) / (torch.var(returns) + _EXPLAINED_VARIANCE_EPS)).item()


def staleness_metrics(batch: "DataProto", version: int) -> dict[str, float]:
    """Return by how many updates the weights that generated each token are older than `version`.

    Args:
        batch: a batch with `weight_versions` and `response_mask` [B, T].
        version: the current version of the weights.

    Returns:
        `rollout/staleness/{mean,max}`.
    """
    fields = _fields(batch)
    if "weight_versions" not in fields.keys() or not bool(fields["response_mask"].any()):
        return {}
    behind = version - fields["weight_versions"][fields["response_mask"].bool()].double()
    return {"rollout/staleness/mean": behind.mean().item(), "rollout/staleness/max": behind.max().item()}


def compute_timing_metrics(batch: "DataProto", timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase, and the milliseconds per token of the phases that process tokens.

    Args:
        batch: `attention_mask` and `responses`, for the number of tokens.
        timing_raw: phase -> seconds. `gen` is divided by the number of generated tokens, the phases of
            `phases_per_token` by the number of prompt and response tokens together.

    Returns:
        `timing_s/<phase>` for every phase, and `timing_per_token_ms/<phase>` for `gen` and those.
    """
    metrics = {f"timing_s/{name}": float(seconds) for name, seconds in timing_raw.items()}
    whole = int(_fields(batch)["attention_mask"].sum())
    generated = int(_lengths(batch)[1].sum())
    for names, count in ((_RESPONSE_PHASES, generated), (phases_per_token(), whole)):
        for name in names:
            if name in timing_raw and count > 0:
                metrics[f"timing_per_token_ms/{name}"] = float(timing_raw[name]) * 1000.0 / count
    return metrics


def compute_throughout_metrics(batch: "DataProto", timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Return tokens of the step, seconds of the step, and tokens per second and device.

    Args:
        batch: `meta_info["global_token_num"]` (tokens of each sequence), or else `attention_mask`.
        timing_raw: needs `step`, in seconds.
        n_gpus: number of devices (worker processes on a machine without GPUs).

    Returns:
        `perf/total_num_tokens`, `perf/time_per_step`, `perf/throughput`.

    Raises:
        ValueError: there is no time for `step`, or there are no devices.
    """
    if "step" not in timing_raw:
        raise ValueError(f"timing_raw has no 'step': time the whole step; it has {sorted(timing_raw)}")
    if n_gpus < 1:
        raise ValueError(f"n_gpus is {n_gpus}; the number of devices is at least 1")
    counts = batch.meta_info.get("global_token_num")
    total = int(np.sum(counts)) if counts is not None else int(_fields(batch)["attention_mask"].sum())
    seconds = float(timing_raw["step"])
    throughput = total / (seconds * n_gpus) if seconds > 0 else float("nan")
    return {"perf/total_num_tokens": total, "perf/time_per_step": seconds, "perf/throughput": throughput}
