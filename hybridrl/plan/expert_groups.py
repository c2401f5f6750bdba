"""Whether FSDP2 can divide the experts of a planned model among ranks, by what a run itself checks."""

import functools
from typing import Any

from hybridrl.errors import ModelError


def divides_experts(path: str, trust_remote_code: bool, engine: Any, optim: Any) -> bool:
    """Return whether some `expert_parallel_size` above 1 is accepted for a model.

    Args:
        path: the model's folder; its weights need not be there.
        engine: settings of the training engine.
        optim: settings of the optimizer; None: the model is not updated.
    """
    from hybridrl.engine.fsdp.expert_parallel import (
        undivided_reason,
    )  # imports torch: mixtures of experts alone need it

    module = _without_weights(path, trust_remote_code)
    return module is not None and undivided_reason(module, engine, optim) is None


@functools.lru_cache(maxsize=8)
def _without_weights(path: str, trust_remote_code: bool) -> Any:
    """The model on the meta device; None if transformers cannot build it, which the run's own checks say."""
    import torch

    from hybridrl.models.loading import build_language_model
    from hybridrl.models.model_config import load_model_config

    try:
        return build_language_model(load_model_config(path, trust_remote_code), torch.float32, trust_remote_code)
    except ModelError:
        return None
