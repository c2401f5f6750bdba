"""Names of advantage estimators and policy losses, and how to add one's own.

An estimator is called with keywords and returns (advantages, returns), both [B, T]:

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, index, config=None, **kwargs): ...

It is handed what its parameters name, see `estimate_advantages`. A policy loss is called with positions or keywords and
returns (loss, metrics), see `hybridrl.algorithms.policy_losses`:

    @register_policy_loss("mine")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, StrEnum
from typing import Any

from torch import Tensor

from hybridrl.algorithms.config_access import setting
from hybridrl.algorithms.sessions import SESSION_KEY, Sessions
from hybridrl.errors import AlgorithmError

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
PrepareFn = Callable[..., Tensor]

ADV_ESTIMATOR_REGISTRY: dict[str, AdvantageFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
_PREPARE_REGISTRY: dict[str, tuple[PrepareFn, Callable[[Any], bool] | None]] = {}


class AdvantageEstimator(StrEnum):
    """The estimators that come with the library (``algorithm.adv_estimator``)."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


def _name(name_or_enum: Any) -> str:
    return name_or_enum.value if isinstance(name_or_enum, Enum) else str(name_or_enum)


def _add(registry: dict[str, Any], name: str, fn: Any, kind: str) -> None:
    if registry.get(name, fn) is not fn:
        raise AlgorithmError(
            f"{kind} {name!r} is registered already, as {registry[name].__module__}."
            f"{registry[name].__qualname__}; choose another name."
        )
    registry[name] = fn


def _find(registry: dict[str, Any], name: str, key: str, decorator: str) -> Any:
    if name not in registry:
        raise AlgorithmError(
            f"{key} is {name!r}; known are {', '.join(sorted(registry))}. One's own is added with {decorator}(name) of "
            "hybridrl.algorithms, in a module that the run imports."
        )
    return registry[name]


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator that makes an advantage estimator known under a name. A name taken by another function is refused."""

    def decorate(fn: AdvantageFn) -> AdvantageFn:
        _add(ADV_ESTIMATOR_REGISTRY, _name(name_or_enum), fn, "advantage estimator")
        return fn

    return decorate


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator of a name; AlgorithmError with the known names otherwise."""
    return _find(ADV_ESTIMATOR_REGISTRY, _name(name_or_enum), "algorithm.adv_estimator", "register_adv_est")


def register_policy_loss(
    name: str, prepare: PrepareFn | None = None, prepare_needed: Callable[[Any], bool] | None = None
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that makes a policy loss known under a name. A name taken by another function is refused.

    Args:
        name: value of ``actor.policy_loss.loss_mode``.
        prepare: for a loss that needs to see the whole mini-batch, to choose tokens or to normalise:
            ``prepare(old_log_prob, log_prob, advantages, response_mask, config, seed, row_ids=None) -> Tensor [B, T]``.
            The caller of the update runs it once a mini-batch, without gradients, on the log-probabilities of the
            policy as it stands before that update, and hands each micro-batch its rows as the keyword ``prepared``.
        prepare_needed: whether ``prepare`` is needed under a config; always when None.
    """

    def decorate(fn: PolicyLossFn) -> PolicyLossFn:
        _add(POLICY_LOSS_REGISTRY, name, fn, "policy loss")
        if prepare is not None:
            _PREPARE_REGISTRY[name] = (prepare, prepare_needed)
        return fn

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss of a name; AlgorithmError with the known names otherwise."""
    return _find(POLICY_LOSS_REGISTRY, name, "actor_rollout_ref.actor.policy_loss.loss_mode", "register_policy_loss")


def get_policy_loss_prepare_fn(name: str, config: Any = None) -> PrepareFn | None:
    """The preliminary pass that a loss needs over the whole mini-batch, or None for the many that need none.

    With ``config``, the actor's settings, also None where these settings do not need it.
    """
    get_policy_loss_fn(name)
    prepare, needed = _PREPARE_REGISTRY.get(name, (None, None))
    if config is not None and needed is not None and not needed(config):
        return None
    return prepare


# What provides an input that an estimator needs, for messages.
_PROVIDERS = {
    "values": "a critic (critic.enable=True, or leave it to adv_estimator=gae)",
    "index": "the prompts' uid (non_tensor_batch['uid'])",
    "reward_baselines": "the greedy baseline pass, which the trainer runs for adv_estimator=remax",
    "old_log_probs": "the old-log-prob pass of the actor, actor_rollout_ref.actor.recompute_old_log_prob=always",
    "sum_pi_squared": "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
}
# Estimator parameters that are read from elsewhere than a field of the same name.
_SETTINGS = ("gamma", "lam", "norm_adv_by_std_in_grpo")


def required_inputs(name_or_enum: str | AdvantageEstimator) -> tuple[str, ...]:
    """Parameters that an estimator cannot do without, besides rewards, mask, settings and the whole batch (``index`` is
    the uid)."""
    parameters = inspect.signature(get_adv_estimator_fn(name_or_enum)).parameters.values()
    given = {"token_level_rewards", "response_mask", "config", "batch", "non_tensor_batch", *_SETTINGS}
    return tuple(
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in given
    )


def named_inputs(name_or_enum: str | AdvantageEstimator) -> frozenset[str]:
    """Everything that an estimator names as a parameter, with or without a default."""
    return frozenset(inspect.signature(get_adv_estimator_fn(name_or_enum)).parameters)


def check_adv_inputs(name_or_enum: str | AdvantageEstimator, available: Iterable[str], config: Any = None) -> None:
    """Refuse, before training starts, an estimator whose inputs nothing will provide.

    Args:
        name_or_enum: ``algorithm.adv_estimator``.
        available: names of the fields that the run will have (``values``, ``reward_baselines``, ``sum_pi_squared``,
            ...); ``index`` or ``uid`` for the prompts' ids.
        config: ``algorithm`` settings.

    Raises:
        AlgorithmError: names every missing input and the setting that provides it.
    """
    name, have = _name(name_or_enum), set(available)
    if "uid" in have:
        have.add("index")
    missing = [
        f"{need} (from {_PROVIDERS.get(need, 'a field of that name in the batch')})"
        for need in required_inputs(name)
        if need not in have
    ]
    gdpo_keys = setting(config, "gdpo_reward_keys", None, who=name, root="algorithm")
    if name == AdvantageEstimator.GDPO.value and not gdpo_keys:
        missing.append("the names of the reward components (algorithm.gdpo_reward_keys)")
    if missing:
        raise AlgorithmError(f"algorithm.adv_estimator={name} misses {'; '.join(missing)}.")


def estimate_advantages(
    adv_estimator: str | AdvantageEstimator, tensors: Mapping[str, Tensor], non_tensors: Mapping[str, Any], config: Any
) -> tuple[Tensor, Tensor]:
    """Call an estimator with what its parameters name.

    Args:
        adv_estimator: a registered name.
        tensors: the batch's tensor fields; must hold ``token_level_rewards`` and ``response_mask``.
        non_tensors: its other fields; ``uid`` is handed over as ``index``.
        config: ``algorithm`` settings (``gamma``, ``lam``, ``norm_adv_by_std_in_grpo``, ...).

    Returns:
        (advantages, returns), [B, T] each.

    Rows that share a ``session_id`` (and a uid) are one trajectory, in the order of ``trajectory_index`` or as they
    stand: they are joined for the estimator and cut apart again, see `sessions`.

    Raises:
        AlgorithmError: an unknown name or a missing input.
    """
    if SESSION_KEY in non_tensors:
        mask = tensors["response_mask"]
        sessions = Sessions(non_tensors, len(mask))
        if sessions.longest > 1:
            fields = {k: sessions.join(v) for k, v in tensors.items() if v.dim() == 1 or v.shape == mask.shape}
            others = {k: sessions.pick(v) for k, v in non_tensors.items() if k != SESSION_KEY}
            joined = estimate_advantages(adv_estimator, fields, others, config)
            advantages, returns = (sessions.split(x, mask.shape[-1]) for x in joined)
            return advantages, returns
    fn = get_adv_estimator_fn(adv_estimator)
    check_adv_inputs(adv_estimator, {*tensors.keys(), *non_tensors.keys()}, config)
    offered: dict[str, Any] = {**non_tensors, **tensors}
    offered.update(config=config, non_tensor_batch=non_tensors, batch=tensors)
    if "uid" in non_tensors:
        offered["index"] = non_tensors["uid"]
    for key in _SETTINGS:
        value = setting(config, key, None, who=_name(adv_estimator), root="algorithm")
        if value is not None:
            offered[key] = value
    parameters = inspect.signature(fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        common = ("reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "values", "index")
        wanted = {*parameters, *common}
    else:
        wanted = set(parameters)
    try:
        return fn(**{name: value for name, value in offered.items() if name in wanted})
    except KeyError as error:
        # An estimator that looks a field up in `batch` or in its keyword arguments does not name what it needs.
        need = error.args[0] if error.args else None
        if need not in _PROVIDERS or need in offered:
            raise
        raise AlgorithmError(
            f"algorithm.adv_estimator={_name(adv_estimator)} reads {need}, which the batch lacks; it comes from "
            f"{_PROVIDERS[need]}. Named as a parameter of the estimator it is provided for."
        ) from error
