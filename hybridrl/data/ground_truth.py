"""Tells which rows have no ground truth, before a model is loaded."""

from __future__ import annotations

from typing import Any

from hybridrl.data.table import REWARD_MODEL
from hybridrl.notify import notify
from hybridrl.reward.column_checks import ground_truths

#: missing values of Python, NumPy, pandas, JSON and spreadsheets as text
_NO_VALUES = ("None", "nan", "NaN", "NaT", "<NA>", "NA", "N/A", "#N/A", "null", "NULL")


def report_missing(dataset: Any, key: str) -> None:
    """Report rows for which a reward function receives `ground_truth=None`.

    A function may need no ground truth. But a file whose answers are in another column looks the same, and a reward
    that compares with None is 0 for the whole run.

    Args:
        dataset: with `table`, `column(name)` and `locate(item)`, as `hybridrl.data.RLHFDataset`; others are skipped.
        key: the configuration key that named the files.
    """
    if not hasattr(dataset, "column") or not hasattr(dataset, "table"):
        return
    values = ground_truths(dataset)
    missing = [item for item, value in enumerate(values) if value is None]
    if len(missing) == len(values):
        notify(
            f"{key}: no row has a ground truth ({REWARD_MODEL}.ground_truth, or a column ground_truth), so a reward "
            "function that takes ground_truth receives None. If another column holds it, name that with "
            f"data.ground_truth_key (columns: {', '.join(dataset.table.columns)})"
        )
    elif missing:
        notify(
            f"{key}: {len(missing)} of {len(values)} rows have no ground truth; the reward function receives None for "
            f"them. The first is {dataset.locate(missing[0])}",
            "warning",
        )
    empty = [item for item, value in enumerate(values) if isinstance(value, str) and not value.strip()]
    if empty:
        notify(
            f"{key}: {len(empty)} of {len(values)} rows have an empty text as ground truth. The first is "
            f"{dataset.locate(empty[0])}",
            "warning",
        )
    texts = {item: value.strip() for item, value in enumerate(values) if isinstance(value, str)}
    if unreadable := [item for item, text in texts.items() if text in _NO_VALUES]:
        notify(
            f"{key}: {len(unreadable)} of {len(values)} rows have {texts[unreadable[0]]!r} as ground truth, a missing "
            f"value that was written as text. The first is {dataset.locate(unreadable[0])}",
            "warning",
        )
    if stored := [item for item, value in enumerate(values) if isinstance(value, bytes)]:
        notify(
            f"{key}: {len(stored)} of {len(values)} rows have bytes as ground truth ({values[stored[0]][:20]!r}), "
            "which equal no text of a response. If they are text, write the column as text (a string of Parquet). The "
            f"first is {dataset.locate(stored[0])}",
            "warning",
        )
    others = dataset.column("ground_truth") if "ground_truth" in dataset.table.columns else [None] * len(values)
    different = [item for item, other in enumerate(others) if other is not None and str(other) != str(values[item])]
    if different:
        notify(
            f"{key}: {len(different)} of {len(values)} rows have another value in their column 'ground_truth' than in "
            f"{REWARD_MODEL}.ground_truth, which is the one that reward functions get. The first is "
            f"{dataset.locate(different[0])}",
            "warning",
        )
