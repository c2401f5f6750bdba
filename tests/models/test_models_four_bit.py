"""Weights in 4 bits: against the definition, torchao's NF4, and each other."""

from __future__ import annotations

import copy

import pytest
import torch
from four_bit_tools import LAYERS
from raising import raises_with
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2MoeConfig

from hybridrl.errors import ModelError
from hybridrl.models import four_bit


def rounded(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return four_bit.unpack(four_bit.pack(weight), weight.shape[1], dtype)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_levels_are_the_quantiles_of_the_paper() -> None:
    """Eight parts of the positive half and seven of the negative one, of a normal distribution, scaled to end at 1."""
    end = 0.9677083
    positive = torch.special.ndtri(torch.linspace(end, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(end, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive.flip(0)]) / positive.max()
    torch.testing.assert_close(torch.tensor(four_bit.LEVELS, dtype=torch.float64), levels, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("rows", "width", "block"), [(7, 192, 64), (5, 96, 32), (3, 32, 32)])
def test_each_weight_becomes_the_nearest_level_of_its_block(rows: int, width: int, block: int) -> None:
    weight = drawn(rows, width)
    weight[0, :block] = 0.0  # a block without a scale
    blocks = weight.view(rows, -1, block)
    scales = blocks.abs().amax(-1, keepdim=True).bfloat16().float()
    choices = scales[..., None] * torch.tensor(four_bit.LEVELS)
    nearest = (blocks[..., None] - choices).abs().argmin(-1, keepdim=True)
    expected = choices.expand(*blocks.shape, 16).gather(-1, nearest).view(rows, width)
    assert torch.equal(rounded(weight), expected)
    assert torch.equal(rounded(weight, torch.bfloat16), expected.bfloat16())
    assert torch.equal(four_bit.pack(rounded(weight)), four_bit.pack(weight))  # what is rounded stays
    assert four_bit.pack(weight).nbytes == rows * (-(-(width // 2 + 2 * width // block) // 4) * 4)


def test_the_codes_are_those_of_torchao() -> None:
    """Its levels have four digits and its scales other ones, so one code in a thousand may differ."""
    from torchao.quantization import NF4Tensor

    weight = drawn(64, 256)
    for one in weight.view(-1, 64):  # with scales that bfloat16 holds
        one[one.abs().argmax()] = 0.0625
    theirs = NF4Tensor.from_tensor(weight, 64, 256)
    ours = four_bit.pack(weight)[:, :128].reshape(-1)
    assert (ours != theirs.quantized_data).float().mean() < 1e-3
    torch.testing.assert_close(rounded(weight), theirs.get_original_weight(), atol=6e-3, rtol=0)
    assert (rounded(weight) - theirs.get_original_weight()).abs().mean() < 5e-6


def test_rows_and_parts_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(10, 64)
    packed = four_bit.pack(weight)
    assert torch.equal(torch.cat([four_bit.pack(part) for part in weight.split(3)]), packed)
    assert torch.equal(four_bit.pack(weight.bfloat16()), four_bit.pack(weight.bfloat16().float()))
    monkeypatch.setattr(four_bit, "_AT_ONCE", 128)
    assert torch.equal(four_bit.pack(weight), packed)
    assert torch.equal(four_bit.unpack(packed, 64, torch.float32), rounded(weight))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_with_the_rounded_weight(bias: bool) -> None:
    plain = nn.Linear(64, 48, bias=bias)
    layer = four_bit.FourBitLinear(copy.deepcopy(plain))
    with torch.no_grad():
        layer.weight.copy_(four_bit.pack(plain.weight).view(torch.float32))
        plain.weight.copy_(rounded(plain.weight))
    found, expected = (drawn(2, 5, 64, seed=3).requires_grad_() for _ in range(2))
    (layer(found) ** 2).sum().backward()
    (plain(expected) ** 2).sum().backward()
    torch.testing.assert_close(layer(found), plain(expected))
    torch.testing.assert_close(found.grad, expected.grad)
    assert layer.weight.grad is None


def test_what_stays_as_it_is(vision_models) -> None:
    """Output layer, embeddings, norms, and the vision tower."""
    for path in (path for name, path in vision_models.items() if not name.endswith("_moe")):
        config = AutoConfig.from_pretrained(path)
        from hybridrl.models.loading import build_language_model

        module = build_language_model(config, torch.bfloat16)
        before = {name: parameter.dtype for name, parameter in module.named_parameters()}
        left = four_bit.convert(module)
        packed = set(four_bit.layers_of(module))
        assert before == {name: parameter.dtype for name, parameter in module.named_parameters()}
        expected = {name for name in before if ".visual." not in name and name.endswith(LAYERS) and "layers" in name}
        assert packed == expected - {f"{name}.weight" for name in left} and packed
        assert four_bit.elements(module) == sum(
            p.numel() for p in build_language_model(config, torch.bfloat16).parameters()
        )


def test_models_that_gain_nothing_are_refused() -> None:
    experts = Qwen2MoeConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        vocab_size=64,
    )
    with torch.device("meta"), raises_with(ModelError, "load_in_4bit=True"):
        four_bit.convert(AutoModelForCausalLM.from_config(experts))
    narrow = AutoConfig.for_model("qwen2", hidden_size=24, intermediate_size=40, num_hidden_layers=1, vocab_size=64)
    narrow.num_attention_heads = narrow.num_key_value_heads = 2
    with torch.device("meta"), pytest.raises(ModelError, match="no linear layer whose width is a multiple of 32"):
        four_bit.convert(AutoModelForCausalLM.from_config(narrow))
