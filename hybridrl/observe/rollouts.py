"""The page of rollouts, `rollouts.html`: single samples with their turns and tokens, in one file without network.

Its data are a part of the dumps: as many samples as `trainer.report_rollouts` allows, from up to `_STEPS` steps of each
kind, whole prompts, and the same prompts in each step that has them, so that answers before and after can be compared.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.observe import jsonl
from hybridrl.observe.dump import dumped_steps
from hybridrl.observe.report_samples import dump_folder, first_prompts, spread
from hybridrl.observe.run_history import RunHistory
from hybridrl.utils.files import replacing

ROLLOUTS = "rollouts.html"
_TEMPLATE = "rollouts.html.jinja"
_SCRIPT = "rollouts.js"
_STEPS = 24  # of each kind
_DEFAULT = 2000  # samples on the page of a run whose settings are not known
_TOKENS = 8000  # of a sample; the middle of a longer one is left out
_CHARACTERS = 40_000  # of a text; likewise
_KINDS = {"validation": "validation", "rollouts": "training"}
#: columns of a dump that the page shows in a place of their own
_PLACED = ("input", "output", "gts", "score", "step", "uid", "rollout")


def write_rollouts(history: RunHistory) -> Path | None:
    """Write `rollouts.html` into the run's folder; without samples there is none, and an earlier one is removed.

    Raises:
        UserError: a line of a dump is damaged; the error names it.
    """
    path = history.folder / ROLLOUTS
    data = select_samples(history, _limit(history))
    if not data["dumps"]:
        path.unlink(missing_ok=True)
        return None
    with replacing(path) as temporary:
        temporary.write_text(_page(history.title, data), encoding="utf-8")
    return path


def select_samples(history: RunHistory, limit: int) -> dict[str, Any]:
    """The data of the page: `dumps`, each of one step, and `notes` that say what was left out.

    Args:
        limit: most samples; whole prompts are chosen, so it can be exceeded by the samples of one prompt per step.
    """
    dumps_by_kind = {kind: (folder, dumped_steps(folder)) for kind in _KINDS if (folder := dump_folder(history, kind))}
    kinds = [kind for kind in dumps_by_kind if dumps_by_kind[kind][1]] if limit else []
    dumps: list[dict[str, Any]] = []
    notes: list[str] = []
    for kind in kinds:
        folder, steps = dumps_by_kind[kind]
        selected_steps = spread(steps, min(_STEPS, max(2, limit // len(kinds))))
        if len(selected_steps) < len(steps):
            notes.append(f"{_KINDS[kind]}: {len(selected_steps)} of {len(steps)} steps with samples")
        quota, total_rows, selected_rows = max(1, limit // len(kinds) // len(selected_steps)), 0, 0
        for step in selected_steps:
            rows = jsonl.read(folder / f"{step}.jsonl")
            numbers = sorted(first_prompts([str(row.get("input", "")) for row in rows], quota))
            dumps.append({"kind": _KINDS[kind], "step": step, "samples": [_compact(rows[n]) for n in numbers]})
            total_rows, selected_rows = total_rows + len(rows), selected_rows + len(numbers)
        if selected_rows < total_rows:
            notes.append(f"{_KINDS[kind]}: {selected_rows:,} of {total_rows:,} samples of these steps")
    without = sum("tokens" not in sample for dump in dumps for sample in dump["samples"])
    cut = sum(sample.get("cut", 0) for dump in dumps for sample in dump["samples"])
    if cut:
        notes.append(f"the middle of {cut:,} long samples is left out")
    if without:
        notes.append(f"{without:,} samples have text alone (trainer.dump_tokens)")
    return {"dumps": dumps, "notes": notes, "limit": limit}


def _limit(history: RunHistory) -> int:
    trainer = history.config.get("trainer")
    limit = trainer.get("report_rollouts") if isinstance(trainer, Mapping) else None
    return limit if isinstance(limit, int) else _DEFAULT


def _page(title: str, data: Mapping[str, Any]) -> str:
    import jinja2

    here = Path(__file__)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    script = here.with_name(_SCRIPT).read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return environment.from_string(here.with_name(_TEMPLATE).read_text(encoding="utf-8")).render(
        title=title,
        script=script,
        # no other script runs, whatever a text of the run contains
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)).decode(),
    )


def _compact(row: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as the script reads it."""
    rollout = row.get("rollout")
    rollout = dict(rollout) if isinstance(rollout, Mapping) else {}
    tokens = rollout.pop("tokens", None)
    cutter = _Cutter()
    sample: dict[str, Any] = {
        "uid": str(row.get("uid", "")),
        "prompt": cutter.text(row.get("input")),
        "output": cutter.text(row.get("output")),
        "score": jsonl.number(row.get("score")),
        "expected": cutter.text(row.get("gts")),
        "session": cutter.whole(rollout),
        "columns": {name: cutter.whole(value) for name, value in row.items() if name not in _PLACED},
    }
    if sample["score"] is not None and not math.isfinite(sample["score"]):
        sample["score"], sample["columns"]["score"] = None, str(row.get("score"))
    if isinstance(tokens, Mapping):
        sample["tokens"] = _tokens(tokens, cutter)
    if cutter.cut:
        sample["cut"] = 1
    return sample


def _tokens(tokens: Mapping[str, Any], cutter: "_Cutter") -> dict[str, Any]:
    """Return a sample's tokens; the middle of too many is left out, and `gap` is then (position, number of tokens)."""
    count = len(tokens.get("ids") or ())
    head = count if count <= _TOKENS else _TOKENS // 2
    tail = count - _TOKENS // 2

    def trimmed(values: Sequence[Any]) -> list[Any]:
        return list(values) if head == count else [*values[:head], *values[tail:]]

    def numbers(name: str, digits: int) -> list[float | None] | None:
        values = tokens.get(name)
        return values and [_rounded(value, digits) for value in trimmed(values)]

    fields: dict[str, Any] = {
        "ids": trimmed(tokens.get("ids") or ()),
        "texts": trimmed(tokens.get("texts") or ()),
        "mask": "".join(str(int(bool(value))) for value in trimmed(tokens.get("mask") or [1] * count)),
        "log_probs": numbers("log_probs", 3),
        "old_log_probs": numbers("old_log_probs", 3),
        "advantages": numbers("advantages", 4),
        "prompt": len(tokens.get("prompt_ids") or ()),
        "versions": tokens.get("versions"),
    }
    shift = count - len(fields["ids"])
    fields["rewards"] = [
        (place if place < head else place - shift, _rounded(reward, 4))
        for place, reward in tokens.get("rewards") or ()
        if place < head or place >= tail
    ]
    if shift:
        cutter.cut = True
        fields["gap"] = (head, shift)
    return fields


def _rounded(value: Any, digits: int) -> float | None:
    number = jsonl.number(value)
    return round(number, digits) if number is not None and math.isfinite(number) else None


class _Cutter:
    """Leaves out the middle of long texts, and remembers whether it did.

    Attributes:
        cut: whether anything was left out.
    """

    def __init__(self) -> None:
        self.cut = False

    def text(self, value: Any) -> str:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
        if len(text) <= _CHARACTERS:
            return text
        self.cut = True
        half = _CHARACTERS // 2
        return f"{text[:half]}\n[{len(text) - _CHARACTERS:,} characters left out]\n{text[-half:]}"

    def whole(self, value: Any) -> Any:
        """A value with all texts in it cut."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {str(name): self.whole(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self.whole(entry) for entry in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
