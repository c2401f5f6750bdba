"""Checks of data before a model is loaded: whether reward functions can score them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema.choices import SCORES
from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.reward.pools import sandbox_settings
from hybridrl.reward.scorers import SampleScorer
from hybridrl.reward.signature import ground_truth_of

if TYPE_CHECKING:
    from hybridrl.config import PPOTrainerConfig


def check_rows(config: PPOTrainerConfig, dataset: Any) -> None:
    """Refuse data that the built-in scorers cannot score, by file and row.

    Args:
        config: the run's configuration.
        dataset: with `column(name)` and `locate(item)`, as `hybridrl.data.RLHFDataset`; others are checked with
            their first batch.

    Raises:
        RewardError: an unknown data source, or a row without ground truth.
    """
    from hybridrl.reward.score import check_data_source, check_ground_truth, check_machine

    if not hasattr(dataset, "column"):
        return
    table = dataset.table
    key = config.data.reward_fn_key
    sources = dataset.column(key) if key in table.columns else [None] * len(dataset)
    checked: set[str] = set()
    for item, (source, truth) in enumerate(zip(sources, ground_truths(dataset), strict=True)):
        try:
            if source not in checked:
                check_data_source(source, key)
                checked.add(source)
            check_ground_truth(truth, source)
        except RewardError as error:
            raise RewardError(f"{dataset.locate(item)}: {error}") from None
    check_machine(checked, sandbox_settings(config.reward))


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


def check_columns(
    pool: SampleScorer, columns: Sequence[str], has_ground_truth: bool, left_out: Collection[str] = ()
) -> None:
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
        if replaced := [name for name in how.with_default if name in columns]:
            notify(
                f"{label}: its parameters {', '.join(map(repr, replaced))} get the columns of these names of the data, "
                "and not their defaults; rename them if they mean something else"
            )
        if waiting := how.unfilled(columns, has_ground_truth):
            notify(
                f"{label}: its parameters {', '.join(map(repr, waiting))} keep their empty defaults, because the data "
                "have no such columns; take the ground truth as ground_truth, or set them in reward_kwargs"
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
