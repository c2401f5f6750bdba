"""Rotary positions whose frequencies depend on the length of sequences.

transformers chooses the frequencies of some types by the longest sequence of a call. Beyond a length of the model, the
log-probabilities of a row would depend on the other rows of its micro-batch, and differ from those of the sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from hybridrl.errors import ModelError

_DYNAMIC, _LONG = "dynamic", "longrope"
_OTHER_TYPE = "set model.override_config.rope_parameters to a type of fixed frequencies, such as yarn or linear"
_INSTEAD = {
    _DYNAMIC: _OTHER_TYPE,
    _LONG: "set model.override_config.rope_parameters.short_factor to the model's long_factor, which then holds for "
    "every length, in training and in generation",
}


def length_dependent_types(config: PreTrainedConfig) -> set[str]:
    """The model's types of rotary frequencies that depend on the length."""
    return {kind for kind, _ in _length_dependent(config.get_text_config())}


def check_length(config: PreTrainedConfig, tokens: int, subject: str) -> None:
    """Refuse sequences for which the model's rotary frequencies would depend on other sequences.

    Args:
        tokens: of the longest sequence.
        subject: the sequences, or the settings that allow them; the error begins with it.

    Raises:
        ModelError: it names the type of rotary frequencies, the length up to which they are fixed, and what to change.
    """
    text = config.get_text_config()
    for kind, entries in _length_dependent(text):
        limit = getattr(text, "max_position_embeddings", None)
        if kind == _LONG:
            name = "original_max_position_embeddings"
            limit = entries.get(name) or getattr(text, name, None) or limit
        if limit is not None and tokens > limit:
            raise ModelError(
                f"{subject}: {tokens} tokens. Rotary frequencies of rope_type={kind} depend on the longest sequence of "
                f"a micro-batch beyond {limit} tokens, so log-probabilities of a sequence would depend on the others. "
                f"Lower the length to {limit}, or {_INSTEAD[kind]}"
            )


def _length_dependent(text: PreTrainedConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each such type with its entries. A configuration may have one for each kind of layer."""
    settings = text.to_dict()
    for name in ("rope_parameters", "rope_scaling"):
        entries = settings.get(name)
        if isinstance(entries, Mapping):
            for parameters in (entries, *(part for part in entries.values() if isinstance(part, Mapping))):
                kind = str(parameters.get("rope_type", parameters.get("type", "default")))
                same = kind == _LONG and list(parameters.get("short_factor") or ()) == list(
                    parameters.get("long_factor") or ()
                )
                if kind in _INSTEAD and not same:
                    yield kind, parameters
