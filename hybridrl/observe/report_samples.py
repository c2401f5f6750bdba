"""Chooses the samples that the report shows: of several steps, the best, the worst, and some of other prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.observe import jsonl
from hybridrl.observe.dump import dumped_steps
from hybridrl.observe.run_history import RunHistory

_STEPS = 6  # dumps of a kind that are shown
_PROMPTS = 4  # samples of a step besides the best and the worst


@dataclass(frozen=True)
class DumpedSample:
    """A row of a dump, and why it is shown: `best`, `worst` or ""."""

    row: Mapping[str, Any]
    mark: str = ""


def samples(history: RunHistory, kind: str) -> list[tuple[int, list[DumpedSample]]]:
    """Return samples of `rollouts` or `validation` by step.

    Dumps are in the run's folder or in the folder that the settings name.

    Raises:
        UserError: a line of a dump is damaged; the error names it.
    """
    place = dump_folder(history, kind)
    steps = spread(dumped_steps(place), _STEPS) if place is not None else []
    return [(step, choose(jsonl.read(place / f"{step}.jsonl"))) for step in steps] if place is not None else []


def dump_folder(history: RunHistory, kind: str) -> Path | None:
    """The folder of a run's dumps of `rollouts` or `validation`; None where there are none."""
    key = {"rollouts": "rollout_data_dir", "validation": "validation_data_dir"}[kind]
    trainer = history.config.get("trainer")
    elsewhere = trainer.get(key) if isinstance(trainer, Mapping) else None
    places = (history.folder / kind, Path(elsewhere) if elsewhere else None)
    return next((place for place in places if place is not None and dumped_steps(place)), None)


def choose(rows: Sequence[Mapping[str, Any]]) -> list[DumpedSample]:
    """Choose rows of one step: the best, the worst, and the first response of prompts that are evenly spaced.

    The prompts are the same in every step that has the same prompts, as validation does, so that answers to one prompt
    can be compared over the run.
    """
    first_of: dict[Any, int] = {}
    for number, row in enumerate(rows):
        first_of.setdefault(row.get("uid", row.get("input")), number)
    evenly_spaced = dict.fromkeys(spread(list(first_of.values()), _PROMPTS), "")
    scored = [
        (score, number) for number, row in enumerate(rows) if (score := jsonl.number(row.get("score"))) is not None
    ]
    finite = [pair for pair in scored if pair[0] == pair[0]]
    marked: dict[int, str] = {}
    if finite and min(finite)[0] < max(finite)[0]:
        best = max(finite, key=lambda pair: (pair[0], -pair[1]))
        marked = {best[1]: "best", min(finite)[1]: "worst"}
    return [
        DumpedSample(rows[number], mark)
        for number, mark in {**marked, **{n: marked.get(n, "") for n in evenly_spaced}}.items()
    ]


def prompt_order(prompt: str) -> int:
    """The place of a prompt in an order without meaning that is the same in each step and run."""
    return int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "backslashreplace"), digest_size=8).digest(), "big")


def first_prompts(prompts: Sequence[str], count: int) -> set[int]:
    """The numbers of about `count` samples, -1 for all: those of whole prompts that come first by `prompt_order`.

    All samples of a prompt are chosen together. Where the first prompt alone has more than `count`, it is chosen.
    """
    if count < 0:
        return set(range(len(prompts)))
    of_prompt: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        of_prompt.setdefault(prompt, []).append(number)
    selected: set[int] = set()
    for prompt in sorted(of_prompt, key=prompt_order) if count else ():
        if selected and len(selected) + len(of_prompt[prompt]) > count:
            break
        selected.update(of_prompt[prompt])
    return selected


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return at most `count` items, evenly spaced, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]
