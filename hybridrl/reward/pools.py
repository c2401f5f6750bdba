"""The scorers that a reward manager gets, made from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.config.entry_settings import read_own
from hybridrl.config.schema.reward import CustomRewardConfig, RewardConfig, RewardPartConfig, ScoringConfig
from hybridrl.errors import RewardError
from hybridrl.protocol.bookkeeping import reserved
from hybridrl.reward.function import KEY, RewardFunction
from hybridrl.reward.processes.pool import RewardPool
from hybridrl.reward.scorers import JudgeScorer, NoFunction, SampleScorer, WeightedSum
from hybridrl.reward.signature import Form
from hybridrl.scored import Reason

#: failures of reward functions that do not end the run, by `reward.on_error`
_TOLERATED: Mapping[str | None, frozenset[Reason]] = {
    None: frozenset({Reason.INFRA}),
    "stop": frozenset(),
    **{name: frozenset({Reason.INFRA, Reason.GRADING}) for name in ("zero", "drop", "refill")},
}


def create_pool(reward: ScoringConfig, form: Form = "sample", num_workers: int | None = None) -> SampleScorer:
    """Return the pool, or the pools, for the functions that the configuration names; not started yet.

    With a reward model that scores alone, it is `NoFunction`.

    Args:
        reward: the settings.
        form: how to call a function whose parameter names do not show it.
        num_workers: processes per function; None: as the settings say.

    Raises:
        RewardError: the settings contradict each other.
    """
    judge = _judge(reward) if isinstance(reward, RewardConfig) and reward.reward_model.is_judge else None
    if isinstance(reward, RewardConfig) and not reward.runs_functions:
        return NoFunction() if judge is None else _with_judge({}, {}, judge, reward)
    custom, parts = reward.custom_reward_function, dict(reward.functions)
    count = num_workers or reward.num_workers
    tolerates = _TOLERATED[getattr(reward, "on_error", "stop")]  # evaluation has no such setting: it stops
    if not parts:
        if custom.path is None and custom.name is not None:
            raise RewardError(
                f"{KEY}.name={custom.name} is set but {KEY}.path is not. Set it to the file that holds {custom.name}."
            )
        function = RewardFunction(custom.path, custom.name, _arguments(custom, reward), form)
        pool = RewardPool(function, count, reward.timeout_s, tolerates)
        return pool if judge is None else _with_judge({"function": pool}, {"function": 1.0}, judge, reward)
    if custom.path is not None:
        raise RewardError(
            f"{KEY}.path={custom.path} and reward.functions are both set; make it an entry of the latter."
        )
    pools: dict[str, RewardPool] = {}
    weights: dict[str, float] = {}
    for name, values in parts.items():
        key = f"reward.functions.{name}"
        if name == "score" or reserved([name]):
            raise RewardError(
                f"{key}: each function's score is a column of its name, and the run itself uses a column {name!r}; "
                "call the function otherwise"
            )
        part, faults = read_own(RewardPartConfig, values, f"{key}.", reward)
        if faults:
            raise RewardError("; ".join(faults))
        function = RewardFunction(part.path, part.name, _arguments(part, reward), form, key, name)
        pools[name] = RewardPool(function, count, reward.timeout_s, tolerates)
        weights[name] = part.weight
    return WeightedSum(pools, weights, tolerates) if judge is None else _with_judge(pools, weights, judge, reward)


def _judge(reward: RewardConfig) -> SampleScorer:
    """Return the scorer that asks the judge, by one process."""
    judge, module = reward.reward_model.judge, "pkg://hybridrl.reward.judge"
    settings: dict[str, Any] = {"template": judge.template, "system_prompt": judge.system_prompt}
    settings |= {"parse_path": judge.parse.path, "parse_name": judge.parse.name}
    if reward.reward_model.serves_judge:
        function = RewardFunction(module, "ask_or_read", settings, key="reward.reward_model.judge")
        return JudgeScorer(service_pool(reward, function, judge.timeout_s))
    names = ("url", "model", "max_concurrent", "attempts", "timeout_s", "token_env")
    settings |= {name: getattr(judge, name) for name in names}
    settings["sampling"] = {"temperature": judge.temperature, "max_tokens": judge.max_tokens, **judge.extra_body}
    function = RewardFunction(module, "compute_score", settings, key="reward.reward_model.judge")
    return service_pool(reward, function, judge.timeout_s)


def _with_judge(
    pools: Mapping[str, SampleScorer],
    weights: Mapping[str, float],
    judge: SampleScorer,
    reward: ScoringConfig,
) -> WeightedSum:
    assert isinstance(reward, RewardConfig)
    if "judge" in pools:
        raise RewardError("reward.functions.judge and reward.reward_model.judge have one name; rename the function")
    weight, tolerates = reward.reward_model.weight, _TOLERATED[reward.on_error]
    return WeightedSum({**pools, "judge": judge}, {**weights, "judge": weight}, tolerates)


def service_pool(reward: ScoringConfig, function: RewardFunction, timeout_s: float) -> RewardPool:
    """The pool, one process, for a function that asks a service for many samples at once."""
    return RewardPool(function, 1, timeout_s, _TOLERATED[getattr(reward, "on_error", "stop")])


def _arguments(function: CustomRewardConfig, reward: ScoringConfig) -> dict[str, Any]:
    """Further arguments of a function; the built-in scorers also get the settings of the sandbox."""
    arguments = dict(function.reward_kwargs or {})
    return arguments if function.path is not None else sandbox_settings(reward) | arguments


def sandbox_settings(reward: ScoringConfig) -> dict[str, Any]:
    """`reward.sandbox_fusion` as arguments of `default_compute_score`."""
    sandbox = reward.sandbox_fusion
    count = sandbox.max_local if sandbox.url is None else sandbox.max_concurrent
    settings = {
        "sandbox_fusion_url": sandbox.url,
        "memory_limit_mb": sandbox.memory_limit_mb,
        "max_concurrent": count,
        "allow_unisolated": sandbox.allow_unisolated or None,
    }
    return {name: value for name, value in settings.items() if value is not None}
