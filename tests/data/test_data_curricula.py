"""Curricula: shares against an independent calculation, states, and what may not be returned."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.config import ConfigError, load_config
from hybridrl.config.schema.data import CurriculumConfig
from hybridrl.data import DataError, PromptLoader, register_curriculum
from hybridrl.data.curricula import CurriculumSampler
from hybridrl.data.group_scores import GroupScore, group_scores
from hybridrl.protocol import DataProto
from hybridrl.registry import CURRICULA

NAMES = ("a", "b", "c")
ROWS = 5  # of each source
BASE = np.array([0.5, 0.3, 0.2])  # their shares without a curriculum


def sampler_of(**changes) -> CurriculumSampler:
    items = {name: list(range(n * ROWS, (n + 1) * ROWS)) for n, name in enumerate(NAMES)}
    weights = dict(zip(NAMES, 10 * BASE, strict=True))
    config = CurriculumConfig(**{"name": "mixed_groups", "floor": 0.2, "smoothing": 0.75} | changes)
    return CurriculumSampler(items, list(range(3 * ROWS)), weights, 3, settings=config)


def batch_of(groups: list[GroupScore]) -> DataProto:
    """A batch after its step, in which other prompts were trained on than those that were scored."""
    columns = {"uid": np.array(["0-0"], dtype=object), "index": np.array([0], dtype=object)}
    return DataProto.from_dict(
        tensors={"x": torch.zeros(1, 1)}, non_tensors=columns, meta_info={"scored_groups": groups}
    )


STEPS = st.lists(
    st.lists(st.builds(GroupScore, st.integers(0, 3 * ROWS - 1), st.sampled_from([0, 0.25, 1]), st.booleans())),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, name=st.sampled_from(["mixed_groups", "target_pass_rate"]), target=st.sampled_from([0.3, 0.5, 0.8]))
def test_shares_follow_the_formula(steps, name, target):
    """Sums of 0.75^(steps of the source since) over all prompts, as a sum over the whole past."""
    sampler = sampler_of(name=name, target=target)
    for number in range(len(steps)):
        sampler.update(batch_of(steps[number]))
        useful: list[float | None] = []
        for source in range(3):
            own = [[g for g in step if g.row // ROWS == source] for step in steps[: number + 1]]
            scored = [groups for groups in own if groups]
            weights = [0.75 ** (len(scored) - 1 - k) for k, groups in enumerate(scored) for _ in groups]
            flat = [group for groups in scored for group in groups]
            if not flat:
                useful.append(None)
            elif name == "mixed_groups":
                useful.append(float(np.average([group.mixed for group in flat], weights=weights)))
            else:
                rate = float(np.average([group.mean for group in flat], weights=weights))
                useful.append(1 - abs(rate - target) / max(target, 1 - target))
        measured = [value for value in useful if value is not None]
        mean = np.mean(measured) if measured else 1.0
        values = np.array([mean if value is None else value for value in useful])
        total = float(BASE @ values)
        expected = BASE * (0.2 + 0.8 * values / total) if total > 1e-12 else BASE
        shares = np.array(list(sampler.shares.values()))
        assert shares == pytest.approx(expected, abs=1e-9)
        assert shares.sum() == pytest.approx(1) and (shares / BASE).min() >= 0.2 - 1e-9


class Plain:
    """Rows of three sources."""

    pad_token_id = 0

    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, item: int) -> dict:
        return {"input_ids": [1, 2], "index": item}


def trained_on(loader: PromptLoader, steps: int) -> list[tuple[list[str], dict[str, float]]]:
    """The uids and metrics of the next steps; which prompts have mixed samples depends on the row and the epoch."""
    results: list[tuple[list[str], dict[str, float]]] = []
    while len(results) < steps:
        for batch in loader:
            rows, uids = (batch.non_tensor_batch[name].tolist() for name in ("index", "uid"))
            mixed = [(row + int(uid[0])) % (row // ROWS + 2) == 0 for row, uid in zip(rows, uids, strict=True)]
            groups = [GroupScore(row, 0.1 * (row % 7), varies) for row, varies in zip(rows, mixed, strict=True)]
            results.append((uids, loader.after_step(batch, groups)))
            if len(results) == steps:
                break
    return results


@pytest.mark.parametrize("stop", range(12))
def test_a_resumed_curriculum_goes_on_as_if_never_stopped(stop):
    expected = trained_on(PromptLoader(Plain(), 3, sampler_of()), 14)  # 5 steps an epoch
    weights = [metrics["data/mixture/b/weight"] for _, metrics in expected]
    assert len(set(weights)) == len(weights)  # each step changes them
    before, after = (PromptLoader(Plain(), 3, sampler_of()) for _ in range(2))
    head = trained_on(before, stop)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert head + trained_on(after, 14 - stop) == expected


def test_metrics_of_a_step():
    sampler = sampler_of()
    batch = batch_of([GroupScore(0, 1.0, False), GroupScore(1, 0.5, True), GroupScore(5, 0.25, True)])
    sampler.update(batch)
    mean = (0.5 + 1) / 2  # of the usefulness of a and b, for c
    total = 0.5 * 0.5 + 0.3 * 1 + 0.2 * mean
    useful = {"a": 0.5, "b": 1.0, "c": mean}
    shares = {name: base * (0.2 + 0.8 * useful[name] / total) for name, base in zip(NAMES, BASE, strict=True)}
    expected = {f"data/mixture/{name}/weight": share for name, share in shares.items()}
    expected |= {"data/mixture/a/share": 1, "data/mixture/b/share": 0, "data/mixture/c/share": 0}
    expected |= {"data/mixture/a/pass_rate": 0.75, "data/mixture/b/pass_rate": 0.25}  # nothing of c was scored
    assert sampler.metrics(batch) == pytest.approx(expected)


def test_scores_of_prompts_are_of_samples_and_not_of_rows():
    """A session in two rows is one sample; a prompt with one scored sample of two has the mean of that one."""
    scores = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.5, 0.0], [0.3, 0.0]])
    batch = DataProto.from_dict(
        tensors={"token_level_scores": scores},
        non_tensors={
            "uid": np.array(["0-7", "0-7", "0-7", "0-2"], dtype=object),
            "sample": np.array([0, 1, 1, 1], dtype=object),
            "index": np.array([7, 7, 7, np.int64(2)], dtype=object),
        },
    )
    (first, second) = group_scores(batch)
    assert first == GroupScore(7, 1.0, False) and json.dumps(first)  # both samples have 1
    assert (second.row, second.mixed) == (2, False) and second.mean == pytest.approx(0.3)
    assert json.loads(json.dumps(second))[0] == 2


@dataclass(frozen=True)
class OrderSettings:
    solved: float = 0.8


def by_order(records, settings: OrderSettings):
    """Sources up to the first that is not solved yet."""
    open_ones = [name for name in NAMES if name not in records or records[name].pass_rate < settings.solved]
    return {name: float(name in (open_ones or NAMES)[:1]) for name in records}


@pytest.fixture
def ordered():
    register_curriculum("by_order", settings=OrderSettings)(by_order)
    yield
    CURRICULA.remove("by_order")


def test_a_curriculum_of_ones_own_has_settings_of_its_own(ordered):
    words = ["data.mixture.weights={a: 1, b: 1}", "data.mixture.curriculum.name=by_order"]
    config = load_config("ppo_trainer", [*words, "data.mixture.curriculum.solved=0.5"])
    assert config.data.mixture.curriculum.own == OrderSettings(0.5)
    with raises_with(ConfigError, "data.mixture.curriculum.solvd", "solved"):
        load_config("ppo_trainer", [*words, "data.mixture.curriculum.solvd=0.5"])
    settings_ = config.data.mixture.curriculum
    sampler = CurriculumSampler({"a": [0], "b": [1]}, [0, 1], {"a": 1, "b": 1}, settings=settings_)
    sampler.update(batch_of([GroupScore(0, 0.6, True), GroupScore(1, 0.1, True)]))
    assert sampler.shares == pytest.approx({"a": 0.05, "b": 0.95})  # a is solved


@pytest.mark.parametrize("returned", [{}, {"a": -1.0}, {"a": float("nan")}, {"a": 1.0, "z": 1.0}, {"a": "1"}])
def test_what_a_curriculum_may_not_return(returned):
    register_curriculum("wrong")(lambda records, settings: returned)
    try:
        with raises_with(DataError, "data.mixture.curriculum.name", "wrong", "a"):
            sampler_of(name="wrong").update(batch_of([GroupScore(0, 1.0, True)]))
    finally:
        CURRICULA.remove("wrong")


def test_scores_that_are_no_pass_rates_are_refused_by_name():
    with raises_with(DataError, "target_pass_rate", "b", -0.5, "mixed_groups"):
        sampler_of(name="target_pass_rate").update(batch_of([GroupScore(ROWS, -0.5, True)]))


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("name=hardest", ["data.mixture.curriculum.name", "hardest", "mixed_groups", "target_pass_rate"]),
        ("floor=0", ["data.mixture.curriculum.floor", 0]),
        ("target=0.3", ["data.mixture.curriculum.target", "target_pass_rate"]),
    ],
)
def test_settings_of_a_curriculum_are_checked(word, facts):
    from hybridrl.config import validate

    words = ["data.mixture.weights={a: 1}", "data.mixture.curriculum.name=mixed_groups"]
    with raises_with(ConfigError, *facts):
        validate(load_config("ppo_trainer", [*words, f"data.mixture.curriculum.{word}"]))


def test_rows_that_are_read_ahead_are_refused():
    with raises_with(DataError, "dataloader_num_workers=2", "CurriculumSampler.update"):
        PromptLoader(Plain(), 3, sampler_of(), num_workers=2)
