"""The checks of a run, by the functions with which the run itself begins."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.check.answer_scores import check_metric, describe_answers
from hybridrl.check.expectation import describe_expectation
from hybridrl.check.findings import Findings
from hybridrl.check.row_lengths import describe_rows
from hybridrl.checkpoint import lock
from hybridrl.config import DataConfig, PairsDataConfig, PPOTrainerConfig, SupervisedConfig, SupervisedDataConfig
from hybridrl.config.checks.check_run import check, visible_gpus
from hybridrl.models.info import tokenizer_of
from hybridrl.plan.devices import Cluster
from hybridrl.registry import import_external_lib
from hybridrl.trainer.own_folder import settle_folder
from hybridrl.trainer.planning import with_plan

_SCORED = 4  # rows whose answers are scored


@dataclass(frozen=True)
class CheckOptions:
    """Options of a check.

    Attributes:
        rows: of the data, to render. As many as a batch has are read at least.
        elsewhere: the run will have other devices than this machine's.
        weights: whether the files of weights are on this machine.
    """

    rows: int
    elsewhere: bool = False
    weights: bool = True


def check_run(findings: Findings, config: Any, cluster: Cluster | None, options: CheckOptions) -> None:
    """Check a run.

    Args:
        config: the composed settings, which stay as they are.
        cluster: the devices, for predictions; None: they are not known.
        options: how it is checked.
    """
    model = config.actor_rollout_ref.model if isinstance(config, PPOTrainerConfig) else config.model
    findings.attempt(partial(import_external_lib, model.external_lib))
    for notice in findings.attempt(partial(check, config, options.elsewhere), ()):
        findings.say("notices", notice)
    config = copy.deepcopy(config)
    findings.attempt(partial(settle_folder, config))
    if isinstance(config, PPOTrainerConfig) and config.placement.auto:
        config = findings.attempt(partial(_planned, findings, config), config)
    missing = list(_missing_folders(Path(config.trainer.default_local_dir)))
    tokenizer = findings.attempt(partial(tokenizer_of, model))
    mean = None
    if isinstance(config, PPOTrainerConfig):
        mean = _check_ppo(findings, config, tokenizer, options)
    else:
        mean = _check_supervised(findings, config, tokenizer, options)
    findings.attempt(partial(describe_expectation, findings, config, cluster, mean))
    lock.release(Path(config.trainer.default_local_dir))
    for folder in missing:  # looking for a checkpoint creates them
        (folder / lock.LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


def _planned(findings: Findings, config: PPOTrainerConfig) -> PPOTrainerConfig:
    planned = with_plan(config)
    findings.facts["planned"] = dict(planned.placement.planned)
    findings.say("planned", *(f"{key}={value}" for key, value in planned.placement.planned.items()))
    check(planned, elsewhere=True)
    return planned


def _missing_folders(folder: Path) -> Iterator[Path]:
    """Yield a folder and those that hold it, as far as they do not exist."""
    while not folder.exists():
        yield folder
        folder = folder.parent


def _check_ppo(findings: Findings, config: PPOTrainerConfig, tokenizer: Any, options: CheckOptions) -> float | None:
    from hybridrl.reward import create_reward_manager
    from hybridrl.trainer.ppo import prepare_ppo
    from hybridrl.trainer.ppo.role_groups import resource_pools

    findings.attempt(partial(resource_pools, config))
    findings.attempt_all(prepare_ppo.checks_without_model(config))
    if tokenizer is None:
        return None
    kinds: dict[str, bool | None] = {"cpu": False, "cuda": True, "auto": options.elsewhere or bool(visible_gpus())}
    on_gpu = kinds[config.trainer.device]
    _attempt_each(findings, partial(prepare_ppo.checks_of_models, config, tokenizer, weights=options.weights))
    _attempt_each(findings, partial(prepare_ppo.checks_of_rollout, config, lambda _: on_gpu))
    count = max(options.rows, config.data.gen_batch_size or config.data.train_batch_size)
    some = partial(_some, prepare_ppo.read_data, options.rows)
    mean: float | None = findings.attempt(
        partial(describe_rows, findings, config, tokenizer, some, "max_prompt_length")
    )
    manager = findings.attempt(partial(create_reward_manager, config, tokenizer, 1))
    data = findings.attempt(partial(prepare_ppo.read_data, config, tokenizer, _rows_read(config.data, count)))
    if manager is None:
        return mean
    try:
        if data is None:
            findings.attempt(manager.check)  # loads the function
        else:
            findings.attempt(manager.start)
            trainer = findings.attempt(partial(prepare_ppo.trainer_of, config, tokenizer, manager, data))
            if trainer is not None:
                findings.attempt(partial(trainer.run.look_for_checkpoint, fetch=False))
            if config.reward.runs_functions and not config.reward.reward_model.is_judge and len(data[0]):
                columns = findings.attempt(partial(describe_answers, findings, manager, tokenizer, data[0], _SCORED))
                if columns and config.algorithm.filter_groups.enable:
                    check_metric(findings, str(config.algorithm.filter_groups.metric), columns)
            else:
                findings.say("reward", "no reward function of this process: a model, a judge or sessions score")
    finally:
        manager.close()
    return mean


def _rows_read(data: DataConfig | SupervisedDataConfig, count: int) -> int | None:
    """Return how many rows to read at most: all for a mixture, whose sources may begin anywhere."""
    return None if data.mixture.weights else count


def _check_supervised(
    findings: Findings, config: SupervisedConfig, tokenizer: Any, options: CheckOptions
) -> float | None:
    from hybridrl.observe.tracking import check_loggers
    from hybridrl.trainer.supervised import prepare_supervised

    findings.attempt(partial(check_loggers, config.trainer.logger))
    if tokenizer is None:
        return None
    findings.attempt_all(prepare_supervised.checks_of_model(config, tokenizer, weights=options.weights))
    sides = ("chosen", "rejected") if isinstance(config.data, PairsDataConfig) else ()
    some = partial(_some, prepare_supervised.read_data, options.rows)
    mean: float | None = findings.attempt(
        partial(describe_rows, findings, config, tokenizer, some, "max_length", sides)
    )
    count = max(options.rows, config.data.train_batch_size)
    data = findings.attempt(partial(prepare_supervised.read_data, config, tokenizer, _rows_read(config.data, count)))
    if data is not None:
        trainer = findings.attempt(partial(prepare_supervised.trainer_of, config, tokenizer, data))
        if trainer is not None:
            findings.attempt(partial(trainer.run.look_for_checkpoint, fetch=False))
    return mean


def _some(read: Callable[..., tuple[Any, Any]], rows: int, config: Any, tokenizer: Any) -> Any:
    """Some rows of the training data alone."""
    config.data.val_files = []
    return read(config, tokenizer, rows)[0]


def _attempt_each(findings: Findings, checks: Callable[[], Any]) -> None:
    """Run checks that are yielded; the settings may be so wrong that not all of them are."""

    def each() -> None:
        for step in checks():
            findings.attempt(step)

    findings.attempt(each)
