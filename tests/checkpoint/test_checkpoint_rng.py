"""Random state that goes through JSON and comes back."""

import json
import random

import numpy as np
import pytest
import torch

from hybridrl.utils.rng import rng_state, set_rng_state


def draw() -> list[float]:
    """Numbers from every generator, normal ones included (Python and NumPy keep a second one for later)."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.rand(5).tolist(),
        *torch.randn(17).tolist(),
    ]


@pytest.mark.parametrize("warm_up", [0, 1, 2, 700])
def test_the_numbers_go_on_from_the_state(warm_up: int) -> None:
    for _ in range(warm_up):
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(3)
    text = json.dumps(rng_state())
    first = draw()
    assert draw() != first
    set_rng_state(json.loads(text))
    assert draw() == first


def test_taking_the_state_changes_nothing() -> None:
    set_rng_state(rng_state())
    text = json.dumps(rng_state())
    first = draw()
    set_rng_state(json.loads(text))
    rng_state()
    assert draw() == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"torch": "?"}, "damaged"),
        ({"numpy": {}}, "damaged"),
        ({"python": None}, "damaged"),
    ],
)
def test_a_foreign_state_is_refused_and_nothing_is_set(change: dict, message: str) -> None:
    good = rng_state()
    first = draw()
    set_rng_state(good)
    with pytest.raises(ValueError, match=message):
        set_rng_state(good | change)
    assert draw() == first
