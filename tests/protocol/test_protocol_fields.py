"""Which axis a field has is declared and never guessed from its width."""

import pytest
import torch
from raising import raises_with

from hybridrl.protocol import fields
from hybridrl.protocol.fields import Field, Widths, field_of, narrow, padded, register_field, widen

WIDTHS = Widths(prompt=3, response=4)


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "FIELDS", dict(fields.FIELDS))


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("width", [1, 3, 4, 7, 9])
def test_an_unregistered_tensor_with_columns_is_refused_whatever_its_width(width: int) -> None:
    with pytest.raises(ValueError, match=r"'my_feature'.*register_field\('my_feature', axis=") as caught:
        narrow("my_feature", numbered(2, width), WIDTHS, 0, 2)
    assert all(axis in str(caught.value) for axis in ("row", "prompt", "response", "sequence"))
    register_field("my_feature", "row")
    assert narrow("my_feature", numbered(2, width), WIDTHS, 1, 2).shape == (2, width)
    assert widen("my_feature", numbered(2, width), WIDTHS, 5, 6, 0).shape == (2, width)


def test_one_number_per_row_needs_no_registration() -> None:
    """Also where the batch has as many rows as columns."""
    column = numbered(4)
    assert field_of("my_score", column) == Field("row")
    assert narrow("my_score", column, WIDTHS, 1, 2) is column and widen("my_score", column, WIDTHS, 9, 9, 0) is column


def test_contradicting_registrations_are_refused() -> None:
    register_field("my_logits", "response", fill=-1.0, dim=2)
    register_field("my_logits", "response", fill=-1.0, dim=2)
    with raises_with(ValueError, "my_logits"):
        register_field("my_logits", "sequence")
    with pytest.raises(ValueError, match="responses"):
        register_field("responses", "response", fill=0)
    with raises_with(ValueError, "'column'", "row, prompt, response, sequence"):
        register_field("my_other", "column")  # type: ignore[arg-type]


def test_every_axis_is_cut_and_widened_at_its_own_ends() -> None:
    register_field("experts", "sequence", fill=-1)
    register_field("per_head", "response", dim=2)
    tensors = {
        "prompts": numbered(2, 3),
        "responses": numbered(2, 4),
        "input_ids": numbered(2, 7),
        "response_mask": numbered(2, 4),
        "position_ids": numbered(2, 3, 7),  # three positions per token: the axis is the last dimension
        "experts": numbered(2, 7, 5),  # five numbers per token: the axis is dimension 1
        "per_head": numbered(2, 6, 4),
    }
    cut = {name: narrow(name, tensor, WIDTHS, skip=1, columns=2) for name, tensor in tensors.items()}
    assert torch.equal(cut["prompts"], tensors["prompts"][:, 1:])
    assert torch.equal(cut["responses"], tensors["responses"][:, :2])
    assert torch.equal(cut["input_ids"], tensors["input_ids"][:, 1:5])
    assert torch.equal(cut["position_ids"], tensors["position_ids"][..., 1:5])
    assert torch.equal(cut["experts"], tensors["experts"][:, 1:5])
    assert torch.equal(cut["per_head"], tensors["per_head"][..., :2])

    again = {name: widen(name, t, Widths(2, 2), prompt=3, response=4, pad_token_id=99) for name, t in cut.items()}
    for name, tensor in tensors.items():
        assert again[name].shape == tensor.shape and again[name].dtype == tensor.dtype
    assert again["input_ids"][0].tolist() == [99, 2, 3, 4, 5, 99, 99]
    assert again["prompts"][0].tolist() == [99, 2, 3] and again["responses"][0].tolist() == [1, 2, 99, 99]
    assert again["response_mask"][0].tolist() == [1, 2, 0, 0]
    assert again["position_ids"][0, 1].tolist() == [0, 9, 10, 11, 12, 0, 0]
    assert again["experts"][0, :, 0].tolist() == [-1, 6, 11, 16, 21, -1, -1]


@pytest.mark.parametrize(("name", "shape"), [("advantages", (2, 7)), ("input_ids", (2, 4)), ("response_mask", (2,))])
def test_a_registered_field_of_another_width_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=name):
        narrow(name, numbered(*shape), WIDTHS, 0, 2)


def test_a_jagged_batch_becomes_a_padded_one() -> None:
    prompts, responses = [[5, 6], [7, 8, 9]], [[1, 2, 3, 4], [1]]

    def jagged(rows: list[list[int]]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    whole = [p + r for p, r in zip(prompts, responses, strict=True)]
    batch = {
        "prompts": jagged(prompts),
        "input_ids": jagged(whole),
        "attention_mask": jagged([[1] * len(row) for row in whole]),
        "response_mask": jagged([[1, 0, 0, 1], [1]]),
        "score": torch.tensor([0.5, 1.0]),
    }
    got = padded(batch, pad_token_id=99)
    assert got["input_ids"].tolist() == [[99, 5, 6, 1, 2, 3, 4], [7, 8, 9, 1, 99, 99, 99]]
    assert got["prompts"].tolist() == [[99, 5, 6], [7, 8, 9]]
    assert got["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]
    assert got["response_mask"].tolist() == [[1, 0, 0, 1], [1, 0, 0, 0]]
    assert got["score"] is batch["score"]
    with pytest.raises(ValueError, match="advantages"):
        padded({**batch, "advantages": torch.zeros(2, 4)})
