"""`verl.utils.tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import processor_of

__all__ = ["hf_processor", "hf_tokenizer"]


def hf_tokenizer(
    name_or_path: str | Path, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> Any:
    """Load a tokenizer, which always has a pad token.

    Args:
        correct_pad_token, correct_gemma2: must be True: both corrections are always made.
        kwargs: `trust_remote_code`, `custom_chat_template`.

    Raises:
        ModelError: the tokenizer cannot be loaded, or an argument has another value.
    """
    if not (correct_pad_token and correct_gemma2):
        raise ModelError("hf_tokenizer: correct_pad_token and correct_gemma2 cannot be False; leave them out.")
    return load_tokenizer(name_or_path, **kwargs)


def hf_processor(name_or_path: str | Path, **kwargs: Any) -> Any:
    """Return what prepares a model's images for `create_rl_dataset`; None for a model without vision.

    Args:
        kwargs: `trust_remote_code`; others, such as `use_fast`, have no effect.
    """
    return processor_of(ModelConfig(path=str(name_or_path), trust_remote_code=kwargs.get("trust_remote_code", False)))
