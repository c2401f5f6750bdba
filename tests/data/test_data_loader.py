"""The loader: shapes, order, uids, and a place that survives a stop anywhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.config import DataConfig
from hybridrl.data import (
    DataError,
    EpochSampler,
    PromptLoader,
    create_rl_dataset,
    create_train_loader,
    create_val_loader,
)
from hybridrl.data.loader import pad, position_ids


class Numbers:
    """Row i is a prompt of i + 1 tokens, each i + 1."""

    pad_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int) -> dict:
        return {"input_ids": [item + 1] * (item + 1), "index": item, "extra_info": {"index": item}}


def loader(size: int = 10, batch: int = 3, *, shuffle: bool = True, seed: int = 5, **settings) -> PromptLoader:
    return PromptLoader(Numbers(size), batch, EpochSampler(size, shuffle, seed), **settings)


def uids(batches) -> list[list[str]]:
    return [batch.non_tensor_batch["uid"].tolist() for batch in batches]


def take(source: PromptLoader, count: int) -> list:
    """The next ``count`` batches, over as many epochs as it takes."""
    batches: list = []
    while len(batches) < count:
        for batch in source:
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), left=st.booleans())
def test_padding_keeps_every_sequence_under_its_mask(lengths, left):
    sequences = [list(range(1, length + 1)) for length in lengths]
    ids, mask = pad(sequences, 0, left)
    assert ids.shape == mask.shape == (len(lengths), max(lengths)) and ids.dtype == torch.int64
    for row, sequence in enumerate(sequences):
        assert ids[row][mask[row].bool()].tolist() == sequence
        assert position_ids(mask)[row][mask[row].bool()].tolist() == list(range(len(sequence)))
        edge = mask[row] if left else mask[row].flip(0)
        assert (edge.diff() >= 0).all()  # padding on one side only


def test_a_batch_is_as_wide_as_its_longest_prompt():
    batch = next(iter(loader(shuffle=False, batch=4)))
    assert batch.batch["input_ids"].tolist() == [[0, 0, 0, 1], [0, 0, 2, 2], [0, 3, 3, 3], [4, 4, 4, 4]]
    assert batch.batch["position_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert uids([batch]) == [["0-0", "0-1", "0-2", "0-3"]]
    assert batch.non_tensor_batch["extra_info"].tolist() == [{"index": i} for i in range(4)]


def test_each_epoch_has_another_order_of_the_same_rows():
    source = loader(size=9)
    epochs = [[b.non_tensor_batch["index"].tolist() for b in source] for _ in range(3)]
    flat = [[i for batch in epoch for i in batch] for epoch in epochs]
    assert all(sorted(order) == list(range(9)) for order in flat)
    assert len({tuple(order) for order in flat}) == 3
    assert flat == [np.random.default_rng([5, epoch]).permutation(9).tolist() for epoch in range(3)]


def test_uids_are_unique_over_epochs_and_the_same_in_another_run():
    first, second = uids(take(loader(), 9)), uids(take(loader(), 9))
    assert first == second and len({uid for batch in first for uid in batch}) == 27


def test_a_row_drawn_twice_in_a_batch_is_two_prompts():
    batch = next(iter(PromptLoader(Numbers(3), 3, [1, 1, 1])))  # any iterable of row numbers is a sampler
    assert uids([batch]) == [["0-1", "0-1-1", "0-1-2"]]


class WithReplacement(torch.utils.data.Sampler):
    """Draws each row of an epoch anew, from the seed and the epoch."""

    def __init__(self, size: int, high: int) -> None:
        self.size, self.high, self.epoch = size, high, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(np.random.default_rng([3, self.epoch]).integers(self.high, size=self.size).tolist())


def repeating(high: int = 3) -> PromptLoader:
    return PromptLoader(Numbers(9), 3, WithReplacement(9, high))


@settings(max_examples=20, deadline=None)
@given(high=st.integers(1, 9), stop=st.integers(0, 8))
def test_every_draw_is_a_prompt_of_its_own_also_after_a_resume(high, stop):
    expected = uids(take(repeating(high), 9))
    flat = [uid for batch in expected for uid in batch]
    assert len(set(flat)) == 27
    drawn = [row for epoch in range(3) for row in np.random.default_rng([3, epoch]).integers(high, size=9).tolist()]
    assert [tuple(map(int, uid.split("-")[:2])) for uid in flat] == [(n // 9, row) for n, row in enumerate(drawn)]
    before, after = repeating(high), repeating(high)
    head = uids(take(before, stop)) if stop else []
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert head + uids(take(after, 9 - stop)) == expected


def test_a_pass_that_is_alike_has_the_same_uids_of_rows_drawn_twice():
    source = PromptLoader(Numbers(3), 1, [1, 1, 2], every_epoch_alike=True)
    assert uids(source) == uids(source) == [["0-1"], ["0-1-1"], ["0-2"]]


def test_the_state_of_an_ordinary_epoch_holds_no_row():
    source = loader(size=300)
    take(source, 50)
    assert source.state_dict()["draws"] == {}


# 3 batches an epoch: mid-epoch, both boundaries, second and third epoch. With processes that read ahead the first
# boundary and both sides of it.
@pytest.mark.parametrize(("workers", "stop"), [*((0, stop) for stop in range(8)), (2, 0), (2, 2), (2, 3), (2, 4)])
def test_resume_at_any_batch_goes_on_as_if_never_stopped(workers, stop):
    expected = uids(take(loader(), 9))
    before = loader(num_workers=workers)
    head = uids(take(before, stop)) if stop else []
    state = json.loads(json.dumps(before.state_dict()))
    after = loader(num_workers=workers)
    after.load_state_dict(state)
    assert after.epoch == stop // 3 and after.batches_done == stop % 3
    assert head + uids(take(after, 9 - stop)) == expected


def test_state_taken_inside_the_loop_while_the_last_batch_is_in_hand():
    """A trainer saves in the loop's body; after the last batch of an epoch the next epoch must follow, not nothing."""
    source, states = loader(), []
    for _ in source:
        states.append(source.state_dict())
    after = loader()
    after.load_state_dict(states[-1])
    assert uids(after) == uids(take(loader(), 6)[3:])


def test_resume_after_resume():
    source, seen = loader(), []
    for _ in range(9):
        again = loader()
        again.load_state_dict(source.state_dict())
        source = again
        seen += uids(take(source, 1))
    assert seen == uids(take(loader(), 9))


def test_break_and_go_on():
    source = loader()
    assert uids(take(source, 2)) + uids(take(source, 7)) == uids(take(loader(), 9))


def test_reading_draws_nothing_from_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    take(loader(), 5)
    assert torch.equal(torch.rand(3), expected)


def test_place_in_other_data_is_refused_in_mid_epoch_only():
    source = loader()
    take(source, 2)
    with raises_with(DataError, "batch_size", 3, 2):
        loader(batch=2).load_state_dict(source.state_dict())
    with raises_with(DataError, "seed was 5", "is 6"):
        loader(seed=6).load_state_dict(source.state_dict())
    take(source, 1)
    other = loader(batch=2)
    other.load_state_dict(source.state_dict())
    assert len(uids(other)) == 5 and other.epoch == 2


def test_batch_larger_than_the_data():
    with raises_with(DataError, "data.train_batch_size=11", "10 rows"):
        loader(batch=11)
    assert len(loader(batch=11, drop_last=False)) == 1


def test_dataset_that_returns_something_else():
    class Wrong(Numbers):
        def __getitem__(self, item):
            return {"prompt": "x"}

    with raises_with(DataError, "'input_ids'", "found: prompt"):
        next(iter(PromptLoader(Wrong(4), 2)))


CUSTOM = '''
from torch.utils.data import Sampler

class Backwards(Sampler):
    """Stateless: the loader replays it."""
    def __init__(self, data_source, data_config):
        self.size = len(data_source)
    def __len__(self):
        return self.size
    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

class Drifting(Backwards):
    """Keeps a place and a count of epochs in its state, as a curriculum would."""
    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.rounds, self.place, self.restored = 0, 0, False
    def __iter__(self):
        if not self.restored:
            self.place = 0
        self.restored = False
        while self.place < self.size:
            self.place += 1
            yield (self.place - 1 + self.rounds) % self.size
        self.rounds += 1
    def state_dict(self):
        return {"rounds": self.rounds, "place": self.place}
    def load_state_dict(self, state):
        self.rounds, self.place, self.restored = state["rounds"], state["place"], True

class NoJson(Drifting):
    def state_dict(self):
        return {"set": {1, 2}}

class Unfit:
    def __init__(self, size): pass
'''


def custom(tmp_path, name: str) -> PromptLoader:
    file = tmp_path / "samplers.py"
    file.write_text(CUSTOM)
    config = DataConfig(train_batch_size=3)
    config.sampler.class_path, config.sampler.class_name = str(file), name
    return create_train_loader(config, Numbers(9))


@pytest.mark.parametrize("name", ["Backwards", "Drifting"])
@pytest.mark.parametrize("stop", range(7))
def test_custom_sampler_is_resumed(tmp_path, name, stop):
    expected = uids(take(custom(tmp_path, name), 9))
    if name == "Backwards":
        assert expected[0] == ["0-8", "0-7", "0-6"]
    before, after = custom(tmp_path, name), custom(tmp_path, name)
    head = uids(take(before, stop)) if stop else []
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    rest = uids(after)  # one pass: what is left of the epoch, or the whole next one, but never nothing
    assert len(rest) == 3 - stop % 3
    assert head + rest + uids(take(after, 9 - stop - len(rest))) == expected


def test_custom_sampler_that_does_not_fit(tmp_path):
    with pytest.raises(DataError, match=r"Unfit .* called as Unfit\(data_source=, data_config=\)"):
        custom(tmp_path, "Unfit")
    with raises_with(DataError, "JSON", "NoJson"):
        source = custom(tmp_path, "NoJson")
        take(source, 1)
        source.state_dict()


def test_loaders_of_the_configuration(write, rows, tokenizer):
    config = DataConfig(train_batch_size=2, seed=None)
    dataset = create_rl_dataset(write("a.parquet", rows), config, tokenizer)
    train, val = create_train_loader(config, dataset), create_val_loader(config, dataset)
    assert len(train) == 3 and len(next(iter(train))) == 2
    config.validation_shuffle = True
    shuffled = create_val_loader(config, dataset)
    assert uids(shuffled) == uids(shuffled)  # each pass alike: a resumed run has made fewer of them
    (batch,) = list(val)
    assert batch.non_tensor_batch["index"].tolist() == list(range(7))
    config.val_batch_size = 3
    assert [len(batch) for batch in create_val_loader(config, dataset)] == [3, 3, 1]


class Curriculum(torch.utils.data.Sampler):
    """Draws the row after the longest response that it has seen."""

    def __init__(self, size: int) -> None:
        self.size, self.seen, self.next = size, [], 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        for _ in range(self.size):
            yield self.next

    def update(self, batch) -> None:
        self.seen.append(batch.non_tensor_batch["uid"].tolist())
        self.next = int(batch.batch["input_ids"].max())


def test_curriculum_sampler_decides_the_next_rows():
    sampler = Curriculum(6)
    source = PromptLoader(Numbers(6), 1, sampler)
    drawn = []
    for batch in source:
        drawn.append(int(batch.non_tensor_batch["index"][0]))
        source.after_step(batch)
        if len(drawn) == 4:
            break
    assert drawn == [0, 1, 2, 3]
    assert sampler.seen == [["0-0"], ["0-1"], ["0-2"], ["0-3"]]


def test_dataset_hook_sees_each_batch():
    class Watching(Numbers):
        def on_batch_end(self, batch) -> None:
            self.seen = batch

    source = PromptLoader(Watching(4), 2)
    batch = next(iter(source))
    source.after_step(batch)
    assert source.dataset.seen is batch


def test_hooks_that_reading_ahead_would_make_useless_are_refused():
    with raises_with(DataError, "dataloader_num_workers=2", "Curriculum.update", "dataloader_num_workers=0"):
        PromptLoader(Numbers(6), 1, Curriculum(6), num_workers=2)


def test_curriculum_without_a_state_is_told(capsys):
    PromptLoader(Numbers(6), 1, Curriculum(6))
    told = capsys.readouterr().err
    assert "Curriculum" in told and "state_dict" in told

    class Saved(Curriculum):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    PromptLoader(Numbers(6), 1, Saved(6))
    assert not capsys.readouterr().err
