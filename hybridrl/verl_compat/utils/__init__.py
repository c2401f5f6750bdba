"""`verl.utils`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.verl_compat.utils.config import omega_conf_to_dataclass
    from hybridrl.verl_compat.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer", "omega_conf_to_dataclass"]


def __getattr__(name: str) -> Any:
    # Lazy: `verl.utils.reward_score` is imported by processes that have no torch.
    if name in ("hf_processor", "hf_tokenizer"):
        from hybridrl.verl_compat.utils import tokenizer

        return getattr(tokenizer, name)
    if name == "omega_conf_to_dataclass":
        from hybridrl.verl_compat.utils.config import omega_conf_to_dataclass

        return omega_conf_to_dataclass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
