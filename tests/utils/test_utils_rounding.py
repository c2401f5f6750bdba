"""Rounding by chance: neighbours in the dtype, right on average, and the same each time."""

import numpy as np
import pytest
import torch

from hybridrl.utils.rounding import rounded_by_chance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_become_one_of_their_neighbours_and_are_right_on_average(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    magnitudes = 2.0 ** torch.randint(-12, 4, (200_000,))
    values = magnitudes * (1 + torch.rand(200_000)) * torch.randn(200_000).sign()
    got = rounded_by_chance(values, dtype, "w")
    bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    spacing = torch.from_numpy(2.0 ** (np.floor(np.log2(np.abs(values.numpy()))) - bits)).float()
    error = (got.float() - values) / spacing
    assert got.dtype == dtype and error.abs().max() < 1
    assert error.abs().max() > 0.9 and error.mean().abs() < 0.005  # to the nearest it would be 0.5 at most
    assert torch.equal(rounded_by_chance(values, dtype, "w"), got)
    assert not torch.equal(rounded_by_chance(values, dtype, "v"), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_the_dtype_stay_as_they_are(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.float().abs().isfinite() & (every.float().abs() < 1e30)]
    normal = every[(every.float().abs() >= torch.finfo(dtype).smallest_normal) | (every == 0)]
    assert torch.equal(rounded_by_chance(normal.float(), dtype, "w"), normal)


def test_a_dtype_without_loss_is_a_cast() -> None:
    values = torch.randn(50)
    assert torch.equal(rounded_by_chance(values, torch.float32, "w"), values)
