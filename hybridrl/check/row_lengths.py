"""Rows of the data as the model reads them: their text, and their lengths before anything is cut or left out."""

import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.check.findings import Findings
from hybridrl.errors import UserError

_SHOWN = 2
_LONG = 2**20  # tokens: no row is as long
_TEXT = 600  # characters of a row that are printed


def describe_rows(
    findings: Findings,
    config: Any,
    tokenizer: Any,
    read: Callable[[Any, Any], Any],
    limit_key: str,
    sides: tuple[str, ...] = (),
) -> float | None:
    """Add lengths of rows and two of them as text; return the mean length in tokens, None if no row can be read.

    Args:
        config: the settings of the run.
        read: returns the training data of a configuration, with some of their rows.
        limit_key: the setting of `data` that limits a row's tokens.
        sides: names of the parts of an item that have tokens of their own; empty: the item itself.
    """
    whole = copy.deepcopy(config)
    limit = getattr(config.data, limit_key)
    setattr(whole.data, limit_key, _LONG)
    for name, value in (("truncation", "left"), ("filter_overlong_prompts", False)):
        if hasattr(whole.data, name):
            setattr(whole.data, name, value)
    try:
        dataset = read(whole, tokenizer)
        items = [dataset[number] for number in range(len(dataset))]
    except UserError as error:
        findings.refuse(error)
        return None
    parts = [part for item in items for part in ([item[side] for side in sides] if sides else [item])]
    lengths = sorted(len(part["input_ids"]) for part in parts)
    over = sum(length > limit for length in lengths)
    mean = statistics.fmean(lengths)
    total = len(dataset.table) if hasattr(dataset, "table") else len(items)
    findings.facts["data"] = {
        "rows": total,
        "rendered": len(items),
        "tokens": {"mean": mean, "median": statistics.median(lengths), "largest": lengths[-1]},
        "limit": {f"data.{limit_key}": limit},
        "longer": over,
        "shown": [_text(tokenizer, item, sides) for item in items[:_SHOWN]],
    }
    findings.say(
        "data",
        f"{len(items)} of {total} rows rendered: {mean:.0f} tokens on average, {lengths[-1]} at most "
        f"(data.{limit_key}={limit})",
    )
    if over:
        findings.say("data", f"{over} of {len(lengths)} are longer; they are {_fate(config.data)}")
        if over > len(lengths) / 2:
            findings.warnings.append(
                f"data.{limit_key}={limit}: {over} of {len(lengths)} rendered sequences are longer, and are "
                f"{_fate(config.data)}; raise it"
            )
    for number, text in enumerate(findings.facts["data"]["shown"]):
        findings.say("data", f"row {number}:", *(f"    {line}" for line in _shortened(text).splitlines()))
    return mean


def _fate(data: Any) -> str:
    """The fate of rows that are too long."""
    if getattr(data, "filter_overlong_prompts", False):
        return "left out (data.filter_overlong_prompts=True)"
    if data.truncation == "error":
        return "refused (data.truncation=error)"
    return f"cut (data.truncation={data.truncation})"


def _text(tokenizer: Any, item: Mapping[str, Any], sides: tuple[str, ...]) -> str:
    """The text of an item; what is learnt of it stands between the marks `[[` and `]]`."""
    if sides:
        return "\n".join(f"{side}: {_marked(tokenizer, item[side])}" for side in sides)
    return _marked(tokenizer, item)


def _marked(tokenizer: Any, part: Mapping[str, Any]) -> str:
    ids, mask = part["input_ids"], part.get("loss_mask")
    if mask is None:
        return str(tokenizer.decode(ids))
    text, start = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or bool(mask[end]) != bool(mask[start]):
            piece = tokenizer.decode(ids[start:end])
            text += f"[[{piece}]]" if mask[start] else piece
            start = end
    return text


def _shortened(text: str) -> str:
    half = _TEXT // 2
    return text if len(text) <= _TEXT else f"{text[:half]} [... {len(text) - _TEXT} characters ...] {text[-half:]}"
