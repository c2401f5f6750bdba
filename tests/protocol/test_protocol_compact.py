"""Batches without their padding: what is packed comes back bit for bit, whatever the rows are."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hybridrl.protocol import DataProto, compact
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.trajectory import Trajectory

NOTHING_IS_TOO_SMALL = 0
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def assert_same(expected: TensorDict, actual: TensorDict) -> None:
    """Compare names, order, types, shapes and bits."""
    assert list(expected.keys()) == list(actual.keys())
    assert (expected.batch_size, expected.device) == (actual.batch_size, actual.device)
    for name in expected.keys():
        one, other = expected.get(name), actual.get(name)
        assert (one.dtype, one.layout, one.is_nested) == (other.dtype, other.layout, other.is_nested), name
        if one.is_nested:
            assert torch.equal(one.offsets(), other.offsets()) and torch.equal(one.values(), other.values()), name
            continue
        assert one.shape == other.shape, name
        raw = [tensor.flatten().clone().view(torch.uint8) for tensor in (one, other)]
        assert torch.equal(*raw), name


def packed(batch: DataProto) -> compact.PackedTensors | None:
    return compact.pack(batch.batch, NOTHING_IS_TOO_SMALL)


@st.composite
def generated(draw) -> DataProto:
    """Rows as a rollout returns them: prompts at the right of their columns, responses at the left of theirs."""
    made = []
    with_positions = draw(st.booleans())
    for number in range(draw(st.integers(1, 5))):
        prompt, response = draw(st.integers(1, 6)), draw(st.integers(0, 6))
        cut, whole = draw(st.integers(0, response)), prompt + response
        positions = torch.arange(whole).expand(4, whole).clone()
        if draw(st.booleans()):  # an image: its tokens share positions
            positions[1:, prompt // 2 : prompt] = prompt // 2
            positions[1:, prompt:] -= prompt // 3
        made.append(
            Trajectory(
                uid="p",
                sample=number,
                prompt_ids=draw(st.lists(st.integers(0, 2**17), min_size=prompt, max_size=prompt)),
                token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=response, max_size=response)),
                mask=draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)),
                log_probs=draw(st.lists(st.floats(width=32), min_size=response, max_size=response)),
                versions=[(3, cut), (4, response - cut)],
                positions=positions if with_positions else None,
            )
        )
    pad = draw(st.sampled_from([0, 7, 151643]))
    wider = draw(st.sampled_from([0, 1, 5, 9, 600]))  # wide rows are packed one by one
    before = max(len(one.prompt_ids) for one in made) + draw(st.integers(0, 3))
    after = max(len(one.token_ids) for one in made) + wider
    return batch_of(made, pad, before, after)


def with_further_fields(draw, batch: DataProto) -> DataProto:
    """Fields of every sort beside the model's inputs, some of them in the way of packing."""
    count, width = batch.batch["responses"].shape
    mask = batch.batch["response_mask"]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randn(count, width, generator=generator)
    further = {
        "advantages": torch.where(mask.bool(), values[:, :1], 0.0),  # one value per row
        "old_log_probs": torch.where(mask.bool(), values, -0.0).to(draw(st.sampled_from(FLOATS))),
        "returns": values,  # other values on padding
        "values": torch.full_like(values, float("nan")),
        "rewards_of_rows": values[:, :1].clone(),  # of no axis that is known
        "row_ids": torch.arange(count),
        "image_mask": torch.rand(count, batch.batch["input_ids"].shape[1], generator=generator) < 0.3,
        "routed_experts": torch.randint(0, 9, (*batch.batch["input_ids"].shape, 2, 2), generator=generator).byte(),
        "jagged": torch.nested.nested_tensor([torch.arange(row + 1) for row in range(count)], layout=torch.jagged),
    }
    for name in draw(st.sets(st.sampled_from(sorted(further)))):
        batch.batch[name] = further[name]
    for name in draw(
        st.sets(st.sampled_from(["attention_mask", "input_ids", "responses", "prompts", "response_mask"]))
    ):
        del batch.batch[name]
    return batch


@settings(max_examples=300)
@given(st.data())
def test_tensors_come_back_bit_for_bit(data) -> None:
    batch = with_further_fields(data.draw, data.draw(generated()))
    short = packed(batch)
    if short is not None:
        assert_same(batch.batch, short.unpack())
        assert_same(batch.batch, pickle.loads(pickle.dumps(short, protocol=5)))


@settings(max_examples=200)
@given(st.data())
def test_rows_are_selected_and_cut_like_those_of_the_batch(data) -> None:
    batch = with_further_fields(data.draw, data.draw(generated()))
    short = packed(batch)
    if short is None:
        return
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=7))
    taken, expected = short.take(np.asarray(rows, dtype=np.int64)), batch.select_idxs(rows)
    assert_same(expected.batch, taken.unpack())
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert_same(expected.slice(start, stop).batch, pickle.loads(pickle.dumps(taken.cut(start, stop), protocol=5)))
    names = data.draw(st.lists(st.sampled_from(sorted(batch.batch.keys())), unique=True, min_size=1))
    assert_same(expected.select(names).batch, taken.select(names).unpack())


@given(st.data())
def test_masks_and_positions_of_any_kind_come_back(data) -> None:
    count, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    further = data.draw(st.sampled_from([0, 0, 600]))
    cells = st.lists(st.integers(-3, 9), min_size=count * width, max_size=count * width)
    bits = st.lists(st.integers(0, 1), min_size=count * width, max_size=count * width)
    tensors = {
        "input_ids": torch.tensor(data.draw(cells)).view(count, width),
        "attention_mask": torch.tensor(data.draw(bits)).view(count, width),
        "position_ids": torch.tensor(data.draw(cells)).view(count, width),
        "loss_mask": torch.tensor(data.draw(bits)).view(count, width).to(torch.int8),
    }
    batch = DataProto.from_dict({name: torch.nn.functional.pad(value, (0, further)) for name, value in tensors.items()})
    short = packed(batch)
    assert short is None or (assert_same(batch.batch, short.unpack()) is None)


@pytest.mark.parametrize("faulty_row", [None, 5, 599])
def test_many_rows_are_packed_and_only_without_other_values_on_padding(faulty_row) -> None:
    batch, _ = long_tailed(600, 40, 40)
    whole = packed(batch)
    assert whole is not None
    if faulty_row is not None:
        before = batch.batch["attention_mask"][faulty_row].argmax()
        assert before > 0
        batch.batch["input_ids"][faulty_row, 0] = 9
    short = packed(batch)
    assert short is not None and (short.nbytes > whole.nbytes) == (faulty_row is not None)
    assert_same(batch.batch, pickle.loads(pickle.dumps(short, protocol=5)))
    rows = np.arange(590, 100, -7)
    assert_same(batch.select_idxs(rows.tolist()).batch, short.take(rows).unpack())


def long_tailed(rows: int = 64, prompt: int = 128, response: int = 1024) -> tuple[DataProto, int]:
    """A batch with log-normal lengths, and the number of its tokens."""
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(5.0, 1.0, rows).astype(int) + 1, response)
    made = [
        Trajectory(
            f"p{row // 8}",
            row % 8,
            generator.integers(0, 150_000, generator.integers(20, prompt)),
            generator.integers(0, 150_000, count),
            np.ones(count, dtype=np.uint8),
            -generator.random(count, dtype=np.float32),
            [(0, int(count))],
        )
        for row, count in enumerate(lengths.tolist())
    ]
    batch = batch_of(made, 0, prompt, response)
    return batch, int(batch.batch["attention_mask"].sum())


def sent_bytes(batch: DataProto) -> int:
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def test_the_inputs_of_a_model_cost_hardly_more_than_their_tokens() -> None:
    batch, tokens = long_tailed()
    inputs = batch.select(["responses", "input_ids", "attention_mask", "position_ids", "response_mask"])
    assert sent_bytes(inputs) < 1.1 * 4 * tokens
    received = pickle.loads(pickle.dumps(inputs, protocol=5))
    assert_same(inputs.batch, received.batch)


def test_log_probs_of_responses_travel_without_padding_alone_and_with_their_batch() -> None:
    batch, tokens = long_tailed()
    responses = int(batch.batch["response_mask"].sum())
    alone = batch.select(["rollout_log_probs"])
    assert sent_bytes(alone) < 1.1 * 4 * responses
    assert sent_bytes(batch) < 1.1 * 4 * (tokens + responses)
    for each in (alone, batch):
        assert_same(each.batch, pickle.loads(pickle.dumps(each, protocol=5)).batch)


def test_masks_with_holes_travel_as_bits() -> None:
    batch, tokens = long_tailed()
    holes = torch.rand(batch.batch["response_mask"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    batch.batch["response_mask"] = batch.batch["response_mask"] * holes
    inputs = batch.select(["responses", "input_ids", "attention_mask", "response_mask"])
    assert sent_bytes(inputs) < 1.1 * 4 * tokens
    assert_same(inputs.batch, pickle.loads(pickle.dumps(inputs, protocol=5)).batch)


def test_another_tensor_takes_the_place_of_a_field() -> None:
    batch, _ = long_tailed()
    short = packed(batch)
    assert short is not None
    mask = batch.batch["response_mask"].clone()
    mask[3:] = 0
    batch.batch["response_mask"] = mask
    assert_same(batch.batch, short.with_tensor("response_mask", mask).unpack())


def test_meta_info_and_columns_arrive_as_they_were() -> None:
    batch, _ = long_tailed()
    batch.meta_info = {"temperature": 0.7, "inner": batch.select(["rollout_log_probs"])}
    received = pickle.loads(pickle.dumps(batch, protocol=5))
    assert list(received.non_tensor_batch) == list(batch.non_tensor_batch)
    assert received.non_tensor_batch["uid"].tolist() == batch.non_tensor_batch["uid"].tolist()
    assert_same(batch.batch.select("rollout_log_probs"), received.meta_info["inner"].batch)
    assert received.meta_info["temperature"] == 0.7


def test_batches_without_padding_and_unknown_fields_are_sent_as_they_are() -> None:
    full = DataProto.from_dict({"old_log_probs": torch.rand(64, 512) + 1, "x": torch.zeros(64, 512)})
    assert compact.pack(full.batch) is None
    assert compact.pack(None) is None
