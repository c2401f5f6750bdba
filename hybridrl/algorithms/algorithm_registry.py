"""Advantage estimators and policy losses by name, and how to add your own.

An estimator is called with keywords and returns (advantages, returns), both [B, T]:

    @register_adv_est("mine", compares_samples=True, settings=MySettings)
    def mine(token_level_rewards, response_mask, index, settings, **kwargs): ...

It receives the inputs that its parameters name; see `estimate_advantages`. A policy loss is a function of the tokens
(see `hybridrl.algorithms.policy_losses.tokens.policy_loss`) or a function with verl's signature:

    @register_policy_loss("mine")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None): ...
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, StrEnum
from typing import Any

from torch import Tensor

from hybridrl.algorithms.config_access import ConfigView, checked_counts, read_settings, setting
from hybridrl.algorithms.sessions import SESSION_KEY, split_sessions
from hybridrl.errors import AlgorithmError
from hybridrl.registry import ADV_ESTIMATORS, POLICY_LOSSES, with_inputs
from hybridrl.utils.entry_metadata import EstimatorMetadata, LossMetadata

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
PrepareFn = Callable[..., Tensor]

#: verl's names for the entries that were imported
ADV_ESTIMATOR_REGISTRY: dict[str, AdvantageFn] = ADV_ESTIMATORS.objects
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = POLICY_LOSSES.objects

#: verl's enum of the built-in estimators
AdvantageEstimator: Any = StrEnum(  # type: ignore[misc]
    "AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATORS.names()}
)


def _name(name_or_enum: Any) -> str:
    return name_or_enum.value if isinstance(name_or_enum, Enum) else str(name_or_enum)


def import_modules(package: str, path: Iterable[str], prefix: str) -> dict[str, Any]:
    """Import every module of a package.

    Returns:
        The functions of these modules whose names begin with `prefix`.
    """
    modules = [importlib.import_module(f"{package}.{module_info.name}") for module_info in pkgutil.iter_modules(path)]
    return {name: fn for module in modules for name, fn in vars(module).items() if name.startswith(prefix)}


def register_adv_est(
    name_or_enum: str | Enum,
    *,
    needs: Iterable[str] = (),
    compares_samples: bool = False,
    alone: bool = False,
    smallest_group: int | None = None,
    unbiased: bool = False,
    reads_components: bool = False,
    settings: type | None = None,
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Return a decorator that registers an advantage estimator. A name taken by another function is refused.

    Args:
        name_or_enum: value of `algorithm.adv_estimator`.
        needs, compares_samples, alone, smallest_group, unbiased, reads_components: see
            `hybridrl.utils.entry_metadata.EstimatorMetadata`. A parameter without a default is a required input,
            whether it is listed or not.
        settings: dataclass of its own settings, which become keys of `algorithm`. The estimator reads them from its
            parameter `settings`.
    """

    def decorate(fn: AdvantageFn) -> AdvantageFn:
        metadata = EstimatorMetadata(
            needs=tuple(needs),
            compares_samples=compares_samples,
            alone=alone,
            smallest_group=smallest_group,
            unbiased=unbiased,
            reads_components=reads_components,
            settings=settings,
        )
        inputs = [name for name in _required(fn) if name != "index"]  # the uid, which every batch has
        ADV_ESTIMATORS.add(_name(name_or_enum), fn, with_inputs(metadata, inputs))
        return fn

    return decorate


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageFn:
    """Return the estimator of a name; raise AlgorithmError with the known names if there is none."""
    estimator: AdvantageFn = ADV_ESTIMATORS.get(_name(name_or_enum))
    return estimator


def register_policy_loss(
    name: str,
    *,
    settings: type | None = None,
    needs: Iterable[str] = (),
    requires: Iterable[str] = (),
    prepare: PrepareFn | None = None,
    prepare_needed: Callable[[Any], bool] | None = None,
    samplers_old: bool = False,
    whole_sequences: bool | Callable[[Any], bool] = False,
    compares_samples: bool = False,
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Return a decorator that registers a policy loss. A name taken by another function is refused.

    Args:
        name: value of `actor.policy_loss.loss_mode`.
        settings: dataclass of its own settings, which become keys of `actor.policy_loss`. The loss reads them as
            `config.policy_loss.<name>`.
        needs, requires, samplers_old, compares_samples: see `hybridrl.utils.entry_metadata.LossMetadata`.
        prepare: preliminary pass of a loss that needs the whole mini-batch, to choose tokens or to normalise:
            `prepare(old_log_prob, log_prob, advantages, response_mask, config, seed, row_ids=None) -> Tensor [B, T]`.
            The caller of the update runs it once per mini-batch, without gradients, on the log-probabilities of the
            policy before that update. It passes each micro-batch its rows as the keyword `prepared`. The pass gets the
            fields of `needs` as further keywords, and that of a loss which compares samples `group_ids` [B], the
            prompt of each row.
        prepare_needed: returns whether a config needs `prepare`; None: every config does.
        whole_sequences: whether the loss reads sums over whole sequences, or a function that returns this for a config.
            Where sequences have several rows, such a loss gets the keyword `sequences` (`algorithms.sequences`), and
            its `prepare` the keyword `sequence_ids` [B].
    """

    def decorate(fn: PolicyLossFn) -> PolicyLossFn:
        metadata = LossMetadata(
            needs=tuple(needs),
            requires=tuple(requires),
            settings=settings,
            samplers_old=samplers_old,
            prepare=prepare,
            prepare_needed=prepare_needed,
            whole_sequences=whole_sequences,
            compares_samples=compares_samples,
        )
        POLICY_LOSSES.add(name, fn, metadata)
        return fn

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return the policy loss of a name; raise AlgorithmError with the known names if there is none."""
    loss_fn: PolicyLossFn = POLICY_LOSSES.get(name)
    return loss_fn


def call_policy_loss(
    name: str, *, counts: Mapping[str, Any], config: Any, **tensors: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Call a policy loss with the counts of the whole mini-batch in the form that it expects.

    A loss with the parameter `counts` gets them as that argument. Any other loss is written for verl and reads them
    from `config.global_batch_info`.

    Args:
        name: name of the loss.
        counts: counts of the whole mini-batch, as `agg_loss` takes them.
        config: the actor's settings.
        tensors: the loss's other keyword arguments.

    Raises:
        AlgorithmError: the loss does not accept these arguments, or does not return a loss and metrics (verl's older
            form of four values, loss, clip fraction, KL and lower clip fraction, is accepted).
    """
    fn = get_policy_loss_fn(name)
    parameters = inspect.signature(fn).parameters
    if "counts" in parameters:
        tensors["counts"] = checked_counts(counts)
    else:
        config = ConfigView(config, global_batch_info=checked_counts(counts))
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {"config": config, **tensors}
    optional = {key for key, value in arguments.items() if value is None}
    arguments = {
        key: value for key, value in arguments.items() if open_ended or key in parameters or key not in optional
    }
    missing = [
        p.name for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in arguments
    ]  # fmt: skip
    surplus = [] if open_ended else [key for key in arguments if key not in parameters]
    if missing or surplus:
        problem = f"requires {', '.join(missing)}, which nothing provides" if missing else f"lacks {', '.join(surplus)}"
        raise AlgorithmError(
            f"{POLICY_LOSSES.key}={name}: the function {getattr(fn, '__qualname__', fn)} {problem}. A policy loss is "
            "written as loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, "
            "rollout_is_weights=None) and returns (loss, metrics); see docs/extending.md."
        )
    return _checked_loss(name, fn(**arguments))


def _checked_loss(name: str, result: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return (loss, metrics) from a loss's return value."""
    if isinstance(result, tuple) and len(result) == 4:
        loss, clipped, kl, lower = result
        result = loss, {"actor/pg_clipfrac": clipped, "actor/ppo_kl": kl, "actor/pg_clipfrac_lower": lower}
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        returned = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise AlgorithmError(
            f"{POLICY_LOSSES.key}={name} returned {returned}; a policy loss returns (loss, metrics), metrics a dict, "
            "or (loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)."
        )
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise AlgorithmError(
            f"{POLICY_LOSSES.key}={name} returned a loss of {getattr(loss, 'shape', type(loss).__name__)}; it must be "
            "one number with a gradient: aggregate it with agg_loss."
        )
    return loss, dict(metrics)


def get_policy_loss_prepare_fn(name: str, config: Any = None) -> PrepareFn | None:
    """Return the preliminary pass of a loss over the whole mini-batch, or None for a loss that needs none.

    If `config`, the actor's settings, is given, the result is also None if these settings do not need the pass.
    """
    get_policy_loss_fn(name)  # imports it
    metadata = POLICY_LOSSES.metadata(name)
    if config is not None and metadata.prepare_needed is not None and not metadata.prepare_needed(config):
        return None
    return metadata.prepare


def reads_whole_sequences(name: str, config: Any) -> bool:
    """Whether a policy loss reads sums over whole sequences with these settings of the actor."""
    get_policy_loss_fn(name)  # imports it
    reads = POLICY_LOSSES.metadata(name).whole_sequences
    return reads if isinstance(reads, bool) else reads(config)


# Where an estimator's input comes from, for messages.
_PROVIDERS = {
    "values": "a critic (critic.enable=True, or leave it null)",
    "index": "the prompts' uid (non_tensor_batch['uid'])",
    "reward_baselines": "the greedy baseline pass, which the trainer runs for an estimator that names reward_baselines",
    "old_log_probs": "the old-log-prob pass of the actor, actor_rollout_ref.actor.recompute_old_log_prob=always",
    "prompt_values": "the trainer, which tracks them for an estimator that names prompt_values",
    "sum_pi_squared": "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
    "process_rewards": "the role prime, which takes part for algorithm.adv_estimator=prime",
    "turn_states": "sessions on environments, actor_rollout_ref.rollout.agent.default_agent_loop=env_agent",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
}
# Estimator parameters that do not come from a field of the same name.
_SETTINGS = ("gamma", "lam", "norm_adv_by_std_in_grpo")


def _required(fn: Callable[..., Any]) -> list[str]:
    """Parameters that an estimator requires in addition to those that every estimator is offered."""
    offered = {"token_level_rewards", "response_mask", "config", "settings", "batch", "non_tensor_batch", *_SETTINGS}
    return [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in offered
    ]


def required_inputs(name_or_enum: str | Enum) -> tuple[str, ...]:
    """Inputs that an estimator requires in addition to rewards, mask, settings and the whole batch.

    The input `index` is the uid.
    """
    name = _name(name_or_enum)
    return with_inputs(ADV_ESTIMATORS.metadata(name), _required(get_adv_estimator_fn(name))).needs


def named_inputs(name_or_enum: str | Enum) -> frozenset[str]:
    """Everything that an estimator names as a parameter, with or without a default."""
    return frozenset(inspect.signature(get_adv_estimator_fn(name_or_enum)).parameters) | set(
        ADV_ESTIMATORS.metadata(_name(name_or_enum)).needs
    )


_ESTIMATOR_FORM = (
    "An estimator is written as estimator(token_level_rewards, response_mask, index, config, ...), with the inputs "
    "that it needs by name, and returns (advantages, returns), two tensors of the shape of response_mask; see "
    "docs/extending.md."
)


def _checked_estimate(name: str, result: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) from an estimator's return value."""
    pair = result if isinstance(result, tuple | list) and len(result) == 2 else ()
    if pair and all(isinstance(item, Tensor) and item.shape == mask.shape for item in pair):
        advantages, returns = pair
        return advantages, returns
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    returned = ", ".join(
        f"a tensor of shape {list(item.shape)}" if isinstance(item, Tensor) else type(item).__name__ for item in outputs
    )
    wrong = f"where response_mask is {list(mask.shape)}" if pair else "which is not a pair (advantages, returns)"
    raise AlgorithmError(f"algorithm.adv_estimator={name} returned {returned or 'nothing'}, {wrong}. {_ESTIMATOR_FORM}")


def check_adv_inputs(name_or_enum: str | Enum, available: Iterable[str], config: Any = None) -> None:
    """Refuse, before training starts, an estimator whose inputs the run will not provide.

    Args:
        name_or_enum: `algorithm.adv_estimator`.
        available: names of the fields that the run will have (`values`, `reward_baselines`, `sum_pi_squared`,
            ...); `index` or `uid` for the prompts' ids.
        config: `algorithm` settings.

    Raises:
        AlgorithmError: inputs are missing; the message names each with the setting that provides it. Or the name
            chooses something that is no estimator.
    """
    name, have = _name(name_or_enum), set(available)
    fn = get_adv_estimator_fn(name)
    if inspect.isclass(fn) or not callable(fn):
        raise AlgorithmError(f"algorithm.adv_estimator={name} is {fn!r}, not a function. {_ESTIMATOR_FORM}")
    if "uid" in have:
        have.add("index")
    missing = [
        f"{need} (from {_PROVIDERS.get(need, 'a field of that name in the batch')})"
        for need in required_inputs(name)
        if need not in have
    ]
    keys = setting(config, "gdpo_reward_keys", None, who=name, root="algorithm")
    if ADV_ESTIMATORS.metadata(name).reads_components and not keys:
        missing.append("the names of the reward components (algorithm.gdpo_reward_keys)")
    if missing:
        raise AlgorithmError(f"algorithm.adv_estimator={name} misses {'; '.join(missing)}. {_ESTIMATOR_FORM}")


def estimate_advantages(
    adv_estimator: str | Enum, tensors: Mapping[str, Tensor], non_tensors: Mapping[str, Any], config: Any
) -> tuple[Tensor, Tensor]:
    """Call an estimator with the inputs that its parameters name.

    Args:
        adv_estimator: a registered name.
        tensors: the batch's tensor fields; must hold `token_level_rewards` and `response_mask`.
        non_tensors: its other fields; `uid` is passed as `index`.
        config: `algorithm` settings (`gamma`, `lam`, `norm_adv_by_std_in_grpo`, ...).

    Returns:
        (advantages, returns), [B, T] each.

    Rows that share a `session_id` (and a uid) are one trajectory, in the order of `trajectory_index` or, without it, in
    the order of the batch. They are joined for the estimator and split again; see `sessions`. Components of the reward
    are summed over the rows, as the reward is.

    Raises:
        AlgorithmError: the name is unknown, or an input is missing.
    """
    mask = tensors["response_mask"]
    if (sessions := split_sessions(non_tensors, len(mask))) is not None:
        fields = {k: sessions.join(v) for k, v in tensors.items() if v.dim() == 1 or v.shape == mask.shape}
        others = {k: sessions.pick(v) for k, v in non_tensors.items() if k != SESSION_KEY}
        if ADV_ESTIMATORS.metadata(_name(adv_estimator)).reads_components:
            parts = setting(config, "gdpo_reward_keys", None, who=_name(adv_estimator), root="algorithm") or ()
            others |= {k: sessions.totals(non_tensors[k]) for k in parts if k in non_tensors}
        joined = estimate_advantages(adv_estimator, fields, others, config)
        advantages, returns = (sessions.split(x, mask.shape[-1]) for x in joined)
        return advantages, returns
    fn = get_adv_estimator_fn(adv_estimator)
    check_adv_inputs(adv_estimator, {*tensors.keys(), *non_tensors.keys()}, config)
    parameters = inspect.signature(fn).parameters
    # A column of the data or of the reward function is no setting: a parameter with a value of its own keeps it.
    settings = {
        name
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty and parameter.default is not None
    }
    columns = {k: v for k, v in non_tensors.items() if k not in {*settings, *_SETTINGS, "settings"}}
    offered: dict[str, Any] = {**columns, **tensors}
    offered.update(config=config, non_tensor_batch=non_tensors, batch=tensors)
    if "uid" in non_tensors:
        offered["index"] = non_tensors["uid"]
    own = ADV_ESTIMATORS.settings(_name(adv_estimator))
    if own is not None:
        offered["settings"] = read_settings(own, config, who=_name(adv_estimator), root="algorithm")
    for key in _SETTINGS:
        value = setting(config, key, None, who=_name(adv_estimator), root="algorithm")
        if value is not None:
            offered[key] = value
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        common = ("reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "values", "index")
        accepted_names = {*parameters, *common}
    else:
        accepted_names = set(parameters)
    try:
        result = fn(**{name: value for name, value in offered.items() if name in accepted_names})
    except KeyError as error:
        # An estimator that reads a field from `batch` or from its keyword arguments does not declare it.
        need = error.args[0] if error.args else None
        if need not in _PROVIDERS or need in offered:
            raise
        raise AlgorithmError(
            f"algorithm.adv_estimator={_name(adv_estimator)} reads {need}, which the batch lacks; it comes from "
            f"{_PROVIDERS[need]}. Named as a parameter of the estimator it is provided for."
        ) from error
    return _checked_estimate(_name(adv_estimator), result, tensors["response_mask"])
