"""The state of every random number generator of a process, as plain data that JSON holds exactly."""

import base64
import random
from typing import Any

import numpy as np
import torch

from hybridrl.utils import device

FORMAT = 1


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    # bytearray, because a tensor over immutable bytes would warn, and set_state needs its own memory.
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy, torch on CPU and torch on the current accelerator.

    Returns:
        Only dicts, lists, numbers and strings, about 20 kB; suitable for `json.dump` and for Ray.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "format": FORMAT,
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": [int(key) for key in keys],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": _encode(torch.get_rng_state()),
        "accelerator": [_encode(state) for state in device.get_rng_states()],
    }


def seed_rng(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on CPU and accelerator, with one 32-bit number."""
    random.seed(seed)
    np.random.seed(seed)
    device.manual_seed(seed)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that `rng_state` returned, so that the generators continue from there.

    An accelerator's state is restored if there is an accelerator.

    Raises:
        ValueError: the state has another format or is incomplete; nothing was set.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        actual = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"random state has format {actual!r}, expected {FORMAT}: it is not one taken by rng_state()")
    try:
        python, legacy = state["python"], state["numpy"]
        python_state = (python["version"], tuple(python["words"]), python["gauss"])
        keys = np.asarray(legacy["keys"], dtype=np.uint32)
        numpy_state = (legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"])
        torch_state = _decode(state["torch"])
        accelerator_states = [_decode(text) for text in state["accelerator"]]
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"random state is damaged: {exc!r}") from exc
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    device.set_rng_states(accelerator_states)
