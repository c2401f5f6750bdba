"""Frozen linear layers in 4 bits (NF4), as QLoRA keeps a base (Dettmers et al., 2023, arXiv 2305.14314).

A row of a weight W [n, m] is cut into blocks of 64 neighbouring elements. With the scale s of a block, which is the
largest absolute value in it as a number of bfloat16, an element w becomes the code k of the nearest of 16 levels, and
stands for w' from then on:

    k = argmin_j |w / s - q_j|,    w' = s q_k

The levels q are quantiles of the normal distribution, with 0 and both ends. One tensor of bytes [n, c] holds a layer:
in each row the codes, two in a byte, then the scales of the row's blocks. Rows do not depend on each other, so that
FSDP2 cuts them as those of any other parameter, and the number of ranks changes nothing. They take
1/2 + 2/64 = 0.53 bytes per element.

The parameter has the dtype of the computation, and its values mean nothing: FSDP2 would convert another dtype, and
before PyTorch 2.13 it takes no integers at all (pytorch/pytorch#185239).

Shapes: n outputs, m inputs of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hybridrl.errors import ModelError
from hybridrl.models import lora
from hybridrl.models.value import ValueModel
from hybridrl.models.vision import is_vision_model, vision_tower

#: the 16 levels, which `bitsandbytes` has, too
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
#: elements that share a scale: the first of these that divides the width of a layer
BLOCKS = (64, 32)
_ALIGNED = torch.float32.itemsize
_AT_ONCE = 1 << 24  # elements, which bounds the memory of what is computed on the way


class FourBitLinear(nn.Module):
    """A frozen linear layer whose weight is kept in 4 bits.

    Each pass makes a weight of the input's dtype and drops it again; it is made once more for the backward pass.

    Args:
        layer: the layer whose place it takes. Its values are not read: they are put into `weight` by `pack`.

    Attributes:
        weight: the bytes [n, c], seen as numbers of the layer's dtype.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        size = (self.out_features, packed_width(self.in_features) // layer.weight.dtype.itemsize)
        self.weight = nn.Parameter(layer.weight.new_empty(size), requires_grad=False)
        self.bias = None if layer.bias is None else layer.bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs [..., n] of inputs [..., m]."""
        outputs: torch.Tensor = _Product.apply(inputs, self.weight, self.bias, self.in_features)
        return outputs

    def extra_repr(self) -> str:
        """Describe the layer for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """x W'^T + b, which keeps the bytes of W' for the backward pass and not its values; W' and b are frozen."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.width = width
        return functional.linear(inputs, unpack(packed, width, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (packed,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return gradient @ unpack(packed, ctx.width, gradient.dtype), None, None, None


def convert(module: nn.Module) -> list[str]:
    """Put 4-bit layers in the place of a module's linear layers, without values; the module is on the meta device.

    The output layer, a value head, routers, the factors of an adapter and a vision tower stay as they are; so do
    embeddings and norms.

    Returns:
        The names of linear layers whose width no block divides, which stay as they are, too.

    Raises:
        ModelError: no layer can be in 4 bits, or most weights would be in none (experts in one tensor).
    """
    within: Any = module.backbone if isinstance(module, ValueModel) else module
    if lora.has_fused_experts(within):
        raise ModelError(
            "model.load_in_4bit=True: the experts of a layer are one tensor in this model, and would stay in 16 bits; "
            "set it to False"
        )
    seeing = vision_tower(within) if is_vision_model(within.config) else None
    apart = set() if seeing is None else {id(part) for part in seeing.modules()}
    named = {name: within.get_submodule(name) for name in lora.linear_layers(within)}
    layers = {
        name: layer
        for name, layer in named.items()
        if isinstance(layer, nn.Linear) and id(layer) not in apart and not lora.is_own(f"{name}.weight")
    }
    uneven = [name for name, layer in layers.items() if block_of(layer.in_features) is None]
    if len(uneven) == len(layers):
        raise ModelError(
            f"model.load_in_4bit=True: {type(within).__name__} has no linear layer whose width is a multiple of "
            f"{BLOCKS[-1]}; set it to False"
        )
    for name, layer in layers.items():
        if name not in uneven:
            within.set_submodule(name, FourBitLinear(layer))
    return uneven


def layers_of(module: nn.Module) -> dict[str, FourBitLinear]:
    """The 4-bit layers of a module, by the names of their weights."""
    return {f"{name}.weight": part for name, part in module.named_modules() if isinstance(part, FourBitLinear)}


def elements(module: nn.Module) -> int:
    """The number of weights in a module, those in 4 bits included."""
    return sum(count for _, count in _parameter_sizes(module))


def stored_bytes(module: nn.Module) -> int:
    """The bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter, _ in _parameter_sizes(module))


def _parameter_sizes(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    own = {id(part.weight): part.out_features * part.in_features for part in layers_of(module).values()}
    for parameter in module.parameters():
        yield parameter, own.get(id(parameter), parameter.numel())


def block_of(width: int) -> int | None:
    """Elements of a row of this width that share a scale; None if no block divides it."""
    return next((block for block in BLOCKS if width % block == 0), None)


def packed_width(width: int) -> int:
    """Bytes of a packed row, which are whole numbers of float32."""
    block = block_of(width)
    assert block is not None
    used = width // 2 + width // block * torch.bfloat16.itemsize
    return -(-used // _ALIGNED) * _ALIGNED


@torch.no_grad()
def pack(weight: torch.Tensor) -> torch.Tensor:
    """The bytes [n, c] of a weight [n, m]. The same weight gives the same bytes on every device."""
    rows, width = weight.shape
    block = block_of(width)
    assert block is not None
    packed = torch.zeros(rows, packed_width(width), dtype=torch.uint8, device=weight.device)
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    for part, to in zip(_parts(weight, width), _parts(packed, width), strict=True):
        blocks = part.float().reshape(-1, width // block, block)
        scales = blocks.abs().amax(dim=-1).bfloat16()
        shares = blocks / scales.float().masked_fill(scales == 0, 1.0)[..., None]
        codes = torch.bucketize(shares, between, out_int32=True).view(-1, width // 2, 2)
        to[:, : width // 2] = (codes[..., 0] << 4 | codes[..., 1]).to(torch.uint8)
        to[:, width // 2 : width // 2 + 2 * scales.shape[1]] = scales.view(torch.uint8)
    return packed


@torch.no_grad()
def unpack(packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, m] that bytes [n, c] stand for: s q_k in float32, rounded to `dtype`.

    Args:
        packed: also seen as numbers of another dtype.
        width: m.
    """
    rows, block = len(packed), block_of(width)
    assert block is not None
    packed, table = packed.view(torch.uint8), _pairs(packed.device)
    scales_end = width // 2 + 2 * (width // block)
    weight = torch.empty(rows, width, dtype=dtype, device=packed.device)
    for part, to in zip(_parts(packed, width), _parts(weight, width), strict=True):
        scales = part[:, width // 2 : scales_end].contiguous().view(torch.bfloat16).float()
        values = functional.embedding(part[:, : width // 2].int(), table).view(-1, width // block, block)
        torch.mul(values, scales[..., None], out=to.view(values.shape))
    return weight


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two levels [256, 2] of each byte."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=-1)


def _parts(tensor: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Rows that are computed at once."""
    return tensor.split(max(1, _AT_ONCE // width))
