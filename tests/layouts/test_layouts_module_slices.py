"""Tensors of a checkpoint as parts of what a module keeps, against the conversion of real tensors."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from raising import raises_with
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.errors import ModelError
from hybridrl.layouts.module_slices import module_slices, within_shape
from hybridrl.layouts.slices import TensorSlice
from hybridrl.models import loading

Named = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Mixture of experts, of which transformers keeps all of a layer in two tensors."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
    )
    return AutoModelForCausalLM.from_config(config)


def test_a_conversion_that_needs_values_is_a_model_error() -> None:
    def convert(named: Named) -> Named:
        return ((name, tensor * tensor.max().item()) for name, tensor in named)

    with pytest.raises(ModelError, match="without weights"):
        module_slices(convert, {"w": (2, 2)})


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_row_shards_of_fused_experts_make_up_the_checkpoint(model: torch.nn.Module, shards: int) -> None:
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    slices = module_slices(lambda named: loading.to_checkpoint_names(model, named), shapes)
    expected = dict(loading.to_checkpoint_names(model, state.items()))
    assert slices.keys() == expected.keys() and any(".experts.4.gate_proj" in name for name in slices)
    for name, (source, tensor_slice, shape) in slices.items():
        assert shape == tuple(expected[name].shape)
        found, row = torch.full(shape, torch.nan), 0
        for local in state[source].chunk(shards):
            held = TensorSlice((row, *(0 for _ in local.shape[1:])), (row + len(local), *local.shape[1:]))
            row += len(local)
            both = tensor_slice.intersect(held)
            if both is not None:
                offsets, sizes = within_shape(both, tensor_slice, shape)
                part = local[both.within(held)].view(sizes)
                assert part.untyped_storage().data_ptr() == state[source].untyped_storage().data_ptr()
                found[tuple(slice(a, a + size) for a, size in zip(offsets, sizes, strict=True))] = part
        assert torch.equal(found, expected[name]), name


def test_what_is_computed_is_named() -> None:
    def convert(named: Named) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            yield f"{name}.same", tensor.view(2, 4)[1]
            yield f"{name}.turned", tensor.t().contiguous() + 1

    with raises_with(ModelError, "w.turned"):
        module_slices(convert, {"w": (2, 4)})
