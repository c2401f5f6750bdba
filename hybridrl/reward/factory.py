"""Reward managers made from the configuration, and checks that run before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.config.entry_settings import read_own
from hybridrl.config.schema.choices import SCORES
from hybridrl.config.schema.reward import CustomRewardConfig, RewardConfig, RewardPartConfig, ScoringConfig
from hybridrl.errors import RewardError
from hybridrl.protocol.bookkeeping import reserved
from hybridrl.reward.columns import check_keys
from hybridrl.reward.function import KEY, RewardFunction
from hybridrl.reward.judge_pool import JudgePool
from hybridrl.reward.no_function import NoFunction
from hybridrl.reward.processes.pool import RewardPool
from hybridrl.reward.signature import Form, ground_truth_of
from hybridrl.reward.weighted import Pool, WeightedPools
from hybridrl.scored import Reason, Unscored
from hybridrl.utils.user_code import load_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PPOTrainerConfig
    from hybridrl.protocol import DataProto
    from hybridrl.reward.manager import RewardManager

#: methods of verl's managers that nothing here calls
_METHODS_OF_VERL = ("run_single", "init_class")
#: failures of reward functions that do not end the run, by `reward.on_error`
_TOLERATED: Mapping[str | None, frozenset[Reason]] = {
    None: frozenset({Reason.INFRA}),
    "stop": frozenset(),
    **{name: frozenset({Reason.INFRA, Reason.GRADING}) for name in ("zero", "drop", "refill")},
}


def create_pool(reward: ScoringConfig, form: Form = "sample", num_workers: int | None = None) -> Pool:
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
    return WeightedPools(pools, weights, tolerates) if judge is None else _with_judge(pools, weights, judge, reward)


def _judge(reward: RewardConfig) -> RewardPool | JudgePool:
    """What asks the judge, by one process."""
    judge, module = reward.reward_model.judge, "pkg://hybridrl.reward.judge"
    settings: dict[str, Any] = {"template": judge.template, "system_prompt": judge.system_prompt}
    settings |= {"parse_path": judge.parse.path, "parse_name": judge.parse.name}
    if reward.reward_model.serves_judge:
        function = RewardFunction(module, "ask_or_read", settings, key="reward.reward_model.judge")
        return JudgePool(service_pool(reward, function, judge.timeout_s))
    names = ("url", "model", "max_concurrent", "attempts", "timeout_s", "token_env")
    settings |= {name: getattr(judge, name) for name in names}
    settings["sampling"] = {"temperature": judge.temperature, "max_tokens": judge.max_tokens, **judge.extra_body}
    function = RewardFunction(module, "compute_score", settings, key="reward.reward_model.judge")
    return service_pool(reward, function, judge.timeout_s)


def _with_judge(
    pools: Mapping[str, RewardPool],
    weights: Mapping[str, float],
    judge: RewardPool | JudgePool,
    reward: ScoringConfig,
) -> WeightedPools:
    assert isinstance(reward, RewardConfig)
    if "judge" in pools:
        raise RewardError("reward.functions.judge and reward.reward_model.judge have one name; rename the function")
    weight, tolerates = reward.reward_model.weight, _TOLERATED[reward.on_error]
    return WeightedPools({**pools, "judge": judge}, {**weights, "judge": weight}, tolerates)


def service_pool(reward: ScoringConfig, function: RewardFunction, timeout_s: float) -> RewardPool:
    """The pool, one process, for a function that asks a service for many samples at once."""
    return RewardPool(function, 1, timeout_s, _TOLERATED[getattr(reward, "on_error", "stop")])


def _arguments(function: CustomRewardConfig, reward: ScoringConfig) -> dict[str, Any]:
    """Further arguments of a function; the built-in scorers also get the settings of the sandbox."""
    given = dict(function.reward_kwargs or {})
    return given if function.path is not None else sandbox_settings(reward) | given


def sandbox_settings(reward: ScoringConfig) -> dict[str, Any]:
    """`reward.sandbox_fusion` as arguments of `default_compute_score`."""
    sandbox = reward.sandbox_fusion
    count = sandbox.max_local if sandbox.url is None else sandbox.max_concurrent
    found = {
        "sandbox_fusion_url": sandbox.url,
        "memory_limit_mb": sandbox.memory_limit_mb,
        "max_concurrent": count,
        "allow_unisolated": sandbox.allow_unisolated or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def check_reward(config: PPOTrainerConfig) -> None:
    """Refuse a reward function or manager that cannot work.

    The user's file is imported in a process of its own, as the pool will do it.

    Raises:
        RewardError: no such file, function or manager, an import that fails, parameters that do not fit.
    """
    pool = manager_class(config).create_pool(config, num_workers=1)
    if isinstance(pool, RewardPool) and pool.built_in:
        return
    with pool:
        pool.start(wait_for_one=True)


def check_dataset(config: PPOTrainerConfig, dataset: Any) -> None:
    """Refuse data that the built-in scorers cannot score, by file and row. A custom function may need anything.

    Args:
        config: the run's configuration.
        dataset: with `column(name)` and `locate(item)`, as `hybridrl.data.RLHFDataset`; others are checked with
            their first batch.

    Raises:
        RewardError: an unknown data source, or a row without ground truth.
    """
    from hybridrl.reward.score import check_data_source, check_ground_truth, check_machine

    if not manager_class(config).create_pool(config).built_in or not hasattr(dataset, "column"):
        return
    table = dataset.table
    key = config.data.reward_fn_key
    sources = dataset.column(key) if key in table.columns else [None] * len(dataset)
    known: set[str] = set()
    for item, (source, truth) in enumerate(zip(sources, ground_truths(dataset), strict=True)):
        try:
            if source not in known:
                check_data_source(source, key)
                known.add(source)
            check_ground_truth(truth, source)
        except RewardError as error:
            raise RewardError(f"{dataset.locate(item)}: {error}") from None
    check_machine(known, sandbox_settings(config.reward))


def ground_truths(dataset: Any) -> list[Any]:
    """Return the ground truth of every item, None where it has none.

    Args:
        dataset: with `table` and `column(name)`, as `hybridrl.data.RLHFDataset`.
    """
    names = [name for name in ("reward_model", "ground_truth") if name in dataset.table.columns]
    columns = [dataset.column(name) for name in names]
    return [
        ground_truth_of({name: column[item] for name, column in zip(names, columns, strict=True)})
        for item in range(len(dataset))
    ]


def check_columns(pool: Pool, columns: Sequence[str], has_ground_truth: bool, left_out: Collection[str] = ()) -> None:
    """Refuse functions with parameters that neither the settings nor the data provide.

    Args:
        pool: runs the functions; their processes are started if need be.
        columns: of the data.
        has_ground_truth: whether any row has a ground truth, in `reward_model` or a column of that name.
        left_out: columns of the data that batches do not carry, because they use the names themselves.

    Raises:
        RewardError: names the function, the parameter and the columns.
    """
    for label, how in pool.calls:
        for name in (*how.columns, *how.optional):
            if name in left_out:
                raise RewardError(
                    f"{label}: it has the parameter {name!r}, and a batch uses that name itself, so it does not carry "
                    f"the column {name!r} of the data. Rename the column and the parameter, for example to data_{name}."
                )
        fault = how.fault_in_columns(columns, has_ground_truth)
        if fault is not None:
            raise RewardError(f"{label}: {fault}.")


def check_read_columns(config: PPOTrainerConfig, columns: Collection[str]) -> None:
    """Refuse data with a column that the settings read from what the reward function returns.

    Raises:
        RewardError: names the setting and the column.
    """
    algorithm = config.algorithm
    read = dict.fromkeys(algorithm.gdpo_reward_keys or (), "algorithm.gdpo_reward_keys")
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in SCORES:
        read[str(algorithm.filter_groups.metric)] = "algorithm.filter_groups.metric"
    for name in read.keys() & set(columns):
        raise RewardError(
            f"{read[name]} reads {name!r} from what the reward function returns, and the data have a column of that "
            "name, which would be read where the function returns none. Rename the column, or the function's key."
        )


def create_reward_manager(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> RewardManager:
    """The manager that the configuration names, with pools for its functions (not started yet).

    Raises:
        RewardError: no such manager, or its settings do not fit.
    """
    cls = manager_class(config)
    return cls(config, tokenizer, cls.create_pool(config))


def manager_class(config: PPOTrainerConfig) -> type[RewardManager]:
    """The class of `reward.reward_manager`: registered, or from the user's file.

    Raises:
        RewardError: there is no such class, or it cannot be used as a manager here.
    """
    from hybridrl.reward.manager import get_reward_manager_cls

    settings = config.reward.reward_manager
    if settings.source == "register":
        return checked_manager(get_reward_manager_cls(settings.name), f"reward.reward_manager.name={settings.name}")
    path, name = settings.module.path, settings.module.name
    key = "reward.reward_manager.module"
    if not path or not name:
        raise RewardError(
            f"reward.reward_manager.source=importlib needs {key}.path and {key}.name; found path={path}, name={name}."
        )
    found = load_object(path, name, f"{key}.path", f"{key}.name", RewardError)
    return checked_manager(found, f"{key}.name={name}")


def checked_manager(found: Any, origin: str) -> type[RewardManager]:
    """Return a class that can be used as a manager.

    Args:
        found: what the setting names.
        origin: that setting, for messages.

    Raises:
        RewardError: it is no class of this kind, it is called otherwise, or it has methods that nothing here calls, as
            managers written for verl do.
    """
    from hybridrl.reward.manager import RewardManager

    name = getattr(found, "__qualname__", repr(found))
    if not inspect.isclass(found) or not issubclass(found, RewardManager):
        raise RewardError(
            f"{origin}: {name} does not derive from hybridrl.reward.RewardManager. Derive it from that class; "
            "what a manager written for verl computes in __call__ or run_single belongs into adjust (one sample's "
            "score) or score_batch (all of them), see docs/reward.md"
        )
    for method in _METHODS_OF_VERL:
        if hasattr(found, method):
            raise RewardError(
                f"{origin}: {name} defines {method}, which verl calls and hybridrl does not. Override adjust, "
                "score_batch or __call__ (docs/reward.md), or score in a reward function"
            )
    signature = inspect.signature(found)
    if {"num_examine", "compute_score"} & set(signature.parameters) or not _binds(
        signature, "config", "tokens", "pool"
    ):
        raise RewardError(
            f"{origin}: the constructor of {name} takes {signature}, and is called with (config, tokenizer, pool)"
        )
    signature = inspect.signature(found.__call__)
    if not _binds(signature, "self", "batch", return_dict=True):
        raise RewardError(
            f"{origin}: __call__ of {name} takes {signature}, and is called with (batch, return_dict=True)"
        )
    return found


def _binds(signature: inspect.Signature, *arguments: Any, **named: Any) -> bool:
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def ask(manager: Callable[..., Any], batch: DataProto) -> dict[str, Any]:
    """Have a manager score a batch; returns what `RewardManager.__call__` describes.

    Raises:
        RewardError: it returns something else; see `complete`.
    """
    name = getattr(manager, "__name__", type(manager).__name__)
    result = complete(manager(batch, return_dict=True), batch, f"the reward manager {name}")
    check_keys(result["reward_extra_info"], f"the reward manager {name}")
    return result


def complete(result: Any, batch: DataProto, source: str = "Sampler.score") -> dict[str, Any]:
    """Return the result of scoring a batch with all of its entries; see `RewardManager.__call__`.

    `reward_extra_info`, `metrics`, `failed` and `missing` may be left out. A row that failed and has no entry in
    `missing` has the reason `grading`, unless `reward.on_error` is `zero`.

    Args:
        result: what was returned.
        batch: what was scored.
        source: what returned it, for errors.

    Raises:
        RewardError: it is something else.
    """
    rewards = result.get("reward_tensor") if isinstance(result, Mapping) else None
    if rewards is None:
        found = (
            f"a dict with {', '.join(map(str, result)) or 'nothing'}" if isinstance(result, Mapping) else type(result)
        )
        raise RewardError(
            f"{source} returned {found} for return_dict=True; it must return a dict with "
            "'reward_tensor' [B, T], and may add 'reward_extra_info', 'metrics' and 'failed' (docs/reward.md)"
        )
    shape = batch.batch["responses"].shape
    is_tensor = isinstance(rewards, torch.Tensor)
    if not is_tensor or rewards.shape != shape:
        raise RewardError(
            f"{source} returned rewards of "
            f"{f'shape {list(rewards.shape)}' if is_tensor else f'type {type(rewards).__name__}'} for responses "
            f"{list(shape)}; it must return a tensor of their shape"
        )
    for key in ("failed", "missing"):
        found_of_key = result.get(key)
        if found_of_key is not None and len(found_of_key) not in (0, len(batch)):
            raise RewardError(f"{source} returned {len(found_of_key)} values of {key!r} for {len(batch)} responses")
    missing = result.get("missing") or [None] * len(batch)
    if strange := [one for one in missing if not (one is None or isinstance(one, Unscored))]:
        raise RewardError(f"{source} returned {strange[0]!r} in 'missing'; use Unscored or None")
    extra = dict(result.get("reward_extra_info") or {})
    for column, values in extra.items():
        if len(values) != len(batch):
            raise RewardError(f"{source} returned {len(values)} values of {column!r} for {len(batch)} responses")
    check_keys(extra, source, of_roles=True)
    return {"metrics": {}, **result, "reward_extra_info": extra, "missing": list(missing)}
