"""Mixtures of sources: shares of every window, coverage within a source, resuming, and faults by name."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.config import ConfigError, DataConfig, SFTDataConfig, load_config, validate
from hybridrl.data import DataError, PromptLoader, create_rl_dataset, create_sft_dataset, create_sft_loader
from hybridrl.data.dataset_factory import create_train_loader
from hybridrl.data.source_mixture import MixtureSampler, file_names

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


class Plain:
    """Rows whose `index` is ten times their position."""

    pad_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int) -> dict:
        return {"input_ids": [1, 2], "index": 10 * item}


def mixture(weights: list[float], rows: list[int], batch_size: int = 1, seed: int = 4) -> MixtureSampler:
    """A sampler of sources `0`, `1`, ...: row i of all is of the source that `rows` counts it into."""
    ends = [0, *itertools.accumulate(rows)]
    items = {str(n): list(range(ends[n], ends[n + 1])) for n in range(len(rows))}
    shares = {str(n): weight for n, weight in enumerate(weights)}
    indices = [10 * item for item in range(ends[-1])]
    return MixtureSampler(items, indices, shares, batch_size, shuffle=True, seed=seed)


def sources_of(sampler: MixtureSampler, draws: int) -> tuple[list[int], list[str]]:
    """The rows of the next draws, over as many epochs as it takes, and their sources."""
    epochs = itertools.chain.from_iterable(iter(sampler) for _ in itertools.count())
    rows = list(itertools.islice(epochs, draws))
    return rows, [str(sampler.source_of(10 * row)) for row in rows]


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, data=st.data())
def test_every_window_has_the_shares(weights, data):
    rows = data.draw(st.lists(st.integers(1, 20), min_size=len(weights), max_size=len(weights)))
    draws = 400
    _, sources = sources_of(mixture(weights, rows), draws)
    shares = np.array(weights) / sum(weights)
    counts = np.zeros((draws + 1, len(weights)))
    for number, source in enumerate(sources):
        counts[number + 1] = counts[number]
        counts[number + 1, int(source)] += 1
    difference = counts - np.arange(draws + 1)[:, None] * shares
    bound = 1 - 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0
    assert np.abs(difference).max() <= bound + 1e-9  # of the first n draws
    assert (difference.max(0) - difference.min(0)).max() <= 2 * bound + 1e-9  # of any window


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, data=st.data())
def test_within_a_source_each_row_is_drawn_once_before_any_again(weights, data):
    rows = data.draw(st.lists(st.integers(1, 12), min_size=len(weights), max_size=len(weights)))
    drawn, sources = sources_of(mixture(weights, rows), 150)
    for source, size in enumerate(rows):
        own = [row for row, name in zip(drawn, sources, strict=True) if name == str(source)]
        for start in range(0, len(own), size):
            assert len(set(own[start : start + size])) == len(own[start : start + size])


def test_another_source_leaves_the_order_within_a_source():
    def order(weights, rows):
        return [row for row in sources_of(mixture(weights, rows), 60)[0] if row < 5]

    shorter, longer = sorted((order([1, 1], [5, 7]), order([1, 2, 3], [5, 7, 9])), key=len)
    assert len(shorter) >= 10 and longer[: len(shorter)] == shorter
    assert shorter[:5] != shorter[5:10]  # each pass has a permutation of its own


def loader(workers: int = 0, weights: tuple[float, ...] = (1, 3), rows: tuple[int, ...] = (4, 13)) -> PromptLoader:
    sampler = mixture(list(weights), list(rows), batch_size=4)
    return PromptLoader(Plain(sum(rows)), 4, sampler, num_workers=workers)


def uids(source: PromptLoader, count: int) -> list[list[str]]:
    batches = itertools.chain.from_iterable(iter(source) for _ in itertools.count())
    return [batch.non_tensor_batch["uid"].tolist() for batch in itertools.islice(batches, count)]


# 4 batches an epoch, of 17 rows; a source of 4 rows repeats from the second epoch on
@pytest.mark.parametrize(("workers", "stop"), [*((0, stop) for stop in range(10)), (2, 3), (2, 4), (2, 5)])
def test_a_resumed_mixture_goes_on_as_if_never_stopped(workers, stop):
    expected = uids(loader(), 14)
    assert len({uid for batch in expected for uid in batch}) == 56
    assert [sum(int(uid.split("-")[1]) < 40 for uid in batch) for batch in expected] == [1] * 14  # a quarter of each
    before, after = loader(workers), loader(workers)
    head = uids(before, stop) if stop else []
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.epoch == stop // 4 and head + uids(after, 14 - stop) == expected


def test_weights_may_change_in_a_resumed_run_and_sources_only_between_epochs():
    before, after = loader(), loader(weights=(3, 1))
    uids(before, 2)
    after.load_state_dict(before.state_dict())
    assert [sum(int(uid.split("-")[1]) < 40 for uid in batch) for batch in uids(after, 4)] == [3] * 4
    other = loader(weights=(1, 1, 2), rows=(4, 9, 4))
    with raises_with(DataError, "sources"):
        other.load_state_dict(before.state_dict())
    uids(before, 2)
    other.load_state_dict(before.state_dict())
    assert sorted(Counter(int(uid.split("-")[1]) // 40 for uid in uids(other, 1)[0]).values())[-1] <= 2


def rows_of(**sizes: int) -> list[dict]:
    return [
        {
            "data_source": name,
            "prompt": [{"role": "user", "content": f"Sort: {n}"}],
            "reward_model": {"style": "rule", "ground_truth": str(n)},
        }
        for name, size in sizes.items()
        for n in range(size)
    ]


def of_config(write, tokenizer, weights: dict[str, float], **changes) -> PromptLoader:
    config = DataConfig(train_batch_size=changes.pop("train_batch_size", 4))
    config.mixture.weights, config.mixture.column = weights, changes.pop("column", "data_source")
    files = [write("a/math.jsonl", rows_of(math=6)), write("b/code.parquet", rows_of(code=3, chat=2))]
    return create_train_loader(config, create_rl_dataset(files, config, tokenizer))


@pytest.fixture
def write_below(write, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return write


def test_sources_of_a_column_and_of_files(write_below, tokenizer):
    source = of_config(write_below, tokenizer, {"math": 1, "code": 2, "chat": 1})
    columns = [batch.non_tensor_batch["data_source"].tolist() for batch in source]
    assert [Counter(batch) for batch in columns] == [{"math": 1, "code": 2, "chat": 1}] * 2  # 11 rows, batches of 4
    files = of_config(write_below, tokenizer, {"math": 1, "code": 3}, column=None)
    assert [sum(row < 6 for row in batch.non_tensor_batch["index"]) for batch in files] == [1, 1]
    left_out = of_config(write_below, tokenizer, {"math": 0, "code": 1, "chat": 1}, train_batch_size=5)
    (batch,) = list(left_out)
    assert Counter(batch.non_tensor_batch["data_source"]) in ({"code": 3, "chat": 2}, {"code": 2, "chat": 3})


def test_names_of_files_are_as_long_as_they_have_to_be():
    names = file_names(["x/a/train.jsonl.gz", "x/b/train.parquet", "y/math.v2.csv", "openai/gsm8k@main:train"])
    assert list(names.values()) == ["a/train", "b/train", "math.v2", "gsm8k@main:train"]


@pytest.mark.parametrize(
    ("weights", "changes", "facts"),
    [
        ({"math": 1, "code": 1, "poems": 1}, {}, ["poems", "math", "6 rows", "chat", "2 rows"]),
        ({"math": 1, "code": 1}, {}, ["chat", "code", "3 rows", 0]),
        ({"math": 0, "code": 1, "chat": 1}, {"train_batch_size": 6}, ["5 rows", "data.train_batch_size", 6]),
        ({"math": 1}, {"column": "topic"}, ["'topic'", "data.mixture.column", "null"]),
    ],
)
def test_weights_that_do_not_fit_the_data_are_refused(write_below, tokenizer, weights, changes, facts):
    with raises_with(DataError, *facts):
        of_config(write_below, tokenizer, weights, **changes)


def test_a_row_without_a_source_is_refused(write, tokenizer):
    config = DataConfig(train_batch_size=1)
    config.mixture.weights = {"math": 1}
    file = write("rows.jsonl", [*rows_of(math=2), {**rows_of(math=1)[0], "data_source": None}])
    with raises_with(DataError, "rows.jsonl", "data.mixture.column", "null"):
        create_train_loader(config, create_rl_dataset(file, config, tokenizer))


@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer"])
@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("weights={a: -1, b: 2}", ["data.mixture.weights.a", -1]),
        ("weights={a: x}", ["data.mixture.weights.a", "x"]),
        ("weights={a: 0, b: 0.0}", ["data.mixture.weights", "a", "b"]),
        ("column=topic", ["data.mixture.column", "topic", "data.mixture.weights"]),
    ],
)
def test_weights_that_are_none_are_refused_before_anything_starts(root, word, facts):
    with raises_with(ConfigError, *facts):
        validate(load_config(root, [f"data.mixture.{word}"]))


def test_a_sampler_of_ones_own_and_weights_are_refused_together(tmp_path):
    words = ["data.mixture.weights={a: 1}", "data.sampler.class_path=mine.py", "data.sampler.class_name=Mine"]
    with raises_with(ConfigError, "data.mixture.weights", "data.sampler.class_path", "mine.py"):
        validate(load_config("ppo_trainer", words))


def test_supervised_training_mixes_too(write, tokenizer):
    def conversations(name: str, size: int):
        turns = [{"role": "user", "content": "Sort: 21"}, {"role": "assistant", "content": "#### 12"}]
        return write(f"{name}.jsonl", [{"messages": turns}] * size)

    config = SFTDataConfig(max_length=64)
    config.mixture.weights, config.mixture.column = {"large": 1, "small": 1}, None
    files = [conversations("large", 14), conversations("small", 2)]
    source = create_sft_loader(config, create_sft_dataset(files, config, tokenizer), 4)
    batches = list(source)
    assert len(batches) == 4
    for batch in batches:
        assert sorted(index >= 14 for index in batch.non_tensor_batch["index"]) == [False, False, True, True]
        assert source.after_step(batch) == {
            f"data/mixture/{name}/{what}": 0.5 for name in ("large", "small") for what in ("share", "weight")
        }
