"""Rounding to dtypes of fewer bits that keeps small changes on average."""

from __future__ import annotations

import zlib

import torch


def rounded_by_chance(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Round each value to one of its two neighbours in `dtype`, so that the expected result is the value itself.

    With the spacing u of the numbers of `dtype` around x, and a uniform z in [0, 1),

        r(x) = u floor(x / u + z),    E r(x) = x

    To the nearest number, a change of W by less than u / 2 is lost where W is itself a number of `dtype`, and the first
    updates of an adapter are smaller than that nearly everywhere. Numbers of `dtype` stay as they are.

    Args:
        values: float32, of any shape.
        dtype: the result's; without loss there is nothing to round.
        name: of the tensor. z depends on it and on the place alone, so that equal values give equal results.
    """
    kind = torch.finfo(dtype)
    if kind.eps <= torch.finfo(values.dtype).eps:
        return values.to(dtype)
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
    chance = torch.rand(values.shape, generator=generator, device=values.device)
    exponent = torch.frexp(values).exponent - 1
    unit = torch.ldexp(torch.full_like(values, kind.eps), exponent).clamp(min=kind.smallest_normal * kind.eps)
    return (values / unit).add_(chance).floor_().mul_(unit).to(dtype)
