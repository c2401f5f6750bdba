"""Checks of a model's files: configuration, weights, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hybridrl.chat.turns import Turns
from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.model_check.check_rows import ModelCheckRow, checked
from hybridrl.models import loading
from hybridrl.models.chat import normal_messages
from hybridrl.models.info import check_files, checked_identity, eos_token_ids, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.models.rendering import rendered, unread_fields
from hybridrl.models.stored import open_language_model
from hybridrl.models.surplus import is_further, is_replaceable

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_QUESTION = {"role": "user", "content": "qzxj question"}


def check_configuration(model: ModelConfig) -> ModelCheckRow:
    """Return the row of the configuration."""
    return checked("configuration", lambda: _configuration(model))


def check_stored(model: ModelConfig, reads_weights: bool) -> Iterator[ModelCheckRow]:
    """Yield the rows of the weight files.

    Args:
        reads_weights: whether every weight is read and compared, or names and shapes alone.
    """
    yield checked("weights: names and shapes", lambda: _names(model))
    if reads_weights:
        yield checked("weights: in = out, bit by bit", lambda: _round_trip(model))


def check_text(model: ModelConfig) -> Iterator[ModelCheckRow]:
    """Yield the rows of tokenizer and chat template."""
    yield checked("tokenizer", lambda: _tokenizer(model))
    yield checked("end of a turn", lambda: _ends(model))
    yield checked("template: a conversation that goes on keeps its text", lambda: _append_only(model, tools=False))
    yield checked("template: the same with answers of tools", lambda: _append_only(model, tools=True), refused="no")
    yield checked("template: text in parts", lambda: _text_parts(model))
    yield checked("template: thoughts (reasoning_content)", lambda: _thoughts(model), refused="no")


def _configuration(model: ModelConfig) -> str:
    config = config_of(model)
    text: Any = config.get_text_config()
    module = loading.build_language_model(config, torch.float32, model.trust_remote_code)
    number = sum(parameter.numel() for parameter in module.parameters())
    tied = "tied" if getattr(text, "tie_word_embeddings", False) else "own"
    return (
        f"{config.model_type}, {type(module).__name__}, {_in_words(number)} parameters, "
        f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, vocabulary {text.vocab_size}, "
        f"{tied} output layer"
    )


def _in_words(number: int) -> str:
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def _names(model: ModelConfig) -> str:
    check_files(model)
    source = _stored(model)
    return f"{len(source)} tensors, {_in_bytes(sum(size for size, _ in source.values()))}"


def _in_bytes(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def _stored(model: ModelConfig) -> dict[str, tuple[int, Path]]:
    """Bytes and file of each stored tensor."""
    tensors: dict[str, tuple[int, Path]] = {}
    for file in sorted(Path(model.path).expanduser().glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                items = 1
                for size in part.get_shape():
                    items *= size
                tensors[name] = (items * _BYTES.get(part.get_dtype(), 1), file)
    return tensors


_BYTES: Mapping[str, int] = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def _round_trip(model: ModelConfig) -> str:
    """Compare the stored tensors with those that the model would be saved with, one layer at a time."""
    config = config_of(model)
    stored = open_language_model(model.path, config, "auto", model.trust_remote_code)
    files = _stored(model)
    expected = {name for name in files if not is_replaceable(name) or name.startswith("lm_head.")}
    expected -= {name for name in files if is_further(name, config)}
    different, not_finite, written = list[str](), list[str](), set[str]()
    for name, tensor in loading.to_checkpoint_names(stored.module, stored.tensors()):
        if name not in files:
            continue  # buffers that the model computes
        written.add(name)
        with safe_open(str(files[name][1]), framework="pt") as opened:
            original = opened.get_tensor(name)
        if tensor.dtype != original.dtype or not torch.equal(tensor.nan_to_num(), original.nan_to_num()):
            different.append(name)
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            not_finite.append(name)
    tied = set(getattr(stored.module, "all_tied_weights_keys", None) or ())
    unwritten = sorted(expected - written - tied)
    for names, fault in (
        (unwritten, "are read and would not be written again"),
        (different, "would be written with other values, or in another dtype"),
        (not_finite, "hold NaN or infinite values"),
    ):
        if names:
            raise ModelError(f"{len(names)} tensors {fault}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}")
    return f"{len(written)} tensors equal and finite"


def _tokenizer(model: ModelConfig) -> str:
    tokenizer = tokenizer_of(model)
    checked_identity(model, tokenizer)
    size = int(config_of(model).get_text_config().vocab_size)
    largest = max(tokenizer.get_vocab().values())
    gap = size - 1 - largest
    return (
        f"{type(tokenizer).__name__}, {len(tokenizer)} tokens, text survives a round trip; pad {tokenizer.pad_token!r}"
        + (f"; {gap} ids of the model stand for no token" if gap else "")
    )


def _ends(model: ModelConfig) -> str:
    tokenizer, config = tokenizer_of(model), config_of(model)
    ids = eos_token_ids(model.path, config, tokenizer)
    size = int(config.get_text_config().vocab_size)
    if not ids:
        raise ModelError("no EOS token is named by tokenizer, config.json or generation_config.json")
    if outside := [number for number in ids if not 0 <= number < size]:
        raise ModelError(f"the EOS ids {outside} are beyond the vocabulary of {size}")
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(number)!r} ({number})" for number in ids)
    if tokenizer.chat_template is None:
        return f"{names}; there is no chat template"
    answer = rendered(tokenizer, normal_messages([_QUESTION, {"role": "assistant", "content": "qzxj answer"}]))
    after = answer.split("qzxj answer", 1)[1]
    written = tokenizer.encode(after, add_special_tokens=False)
    if not set(written) & set(ids):
        raise ModelError(
            f"the template writes {after!r} after the model's turn, and no EOS token is in it: a model that writes "
            f"what it is taught never ends. EOS are {names}; correct eos_token_id in generation_config.json"
        )
    return names


def _append_only(model: ModelConfig, tools: bool) -> str:
    tokenizer = _with_template(model)
    turns = Turns(tokenizer, eos_token_ids(model.path, config_of(model), tokenizer))
    turns.check([_TOOL] if tools else None)
    return "append-only"


def _with_template(model: ModelConfig) -> Any:
    tokenizer = tokenizer_of(model)
    if tokenizer.chat_template is None:
        raise ModelError("the tokenizer has no chat template; name one by model.custom_chat_template")
    return tokenizer


def _text_parts(model: ModelConfig) -> str:
    tokenizer = _with_template(model)
    whole = rendered(tokenizer, normal_messages([_QUESTION]))
    part = {"type": "text", "text": _QUESTION["content"]}
    if rendered(tokenizer, normal_messages([{"role": "user", "content": [part]}])) != whole:
        raise ModelError("a text part becomes other text than the same text by itself")
    return "as text by itself"


def _thoughts(model: ModelConfig) -> str:
    tokenizer = _with_template(model)
    message = {"role": "assistant", "content": "qzxj answer", "reasoning_content": "qzxj thought"}
    if "reasoning_content" in unread_fields(tokenizer, [message]):
        raise ModelError("the template does not read them; rows with them are refused")
    rendered(tokenizer, normal_messages([_QUESTION, message]))
    return "written into the last turn"
