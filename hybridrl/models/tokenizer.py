"""Loads a tokenizer, and refuses one that loses text.

Everything that a policy reads and that a reward function scores passes through the tokenizer. A run with a tokenizer
that silently drops spaces or newlines looks healthy and learns nothing. Text therefore has to survive a round trip
before a run starts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ModelError
from hybridrl.utils.end_tokens import END_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
# Classes that mean "use tokenizer.json as it is".
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Words, digits, single and double spaces, newlines, signs: the parts of prompts, answers and chat templates.
PROBES = ("Sort: 31524 7", "#### 12345", "one two\nthree\n\nfour", "x = (1 + 2) * 3 - 4 / 5", "a  b", "Yes, it is 42!")


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, custom_chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory (or of a hub name) for left-padded prompts.

    A directory whose `tokenizer_config.json` records a generic class (`PreTrainedTokenizerFast`,
    `TokenizersBackend`) is loaded from its `tokenizer.json` unchanged. `AutoTokenizer` would use the model's type
    instead. For a `qwen2` model it would rebuild a `Qwen2Tokenizer` that drops every piece that byte-pair encoding
    cannot reach, including spaces and newlines.

    Args:
        path: A directory, or a name on the model hub.
        trust_remote_code: Whether Python code in the directory may run.
        custom_chat_template: A Jinja chat template that replaces the tokenizer's own.

    Returns:
        A tokenizer that pads on the left and has a pad token. If it has no pad token of its own, it pads with its EOS
        token; padding is marked by masks, never by comparison with the pad id.

    Raises:
        ModelError: there is no tokenizer, it has neither a pad nor an EOS token, or text does not survive encoding and
            decoding.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer's files there "
                "or name their directory with actor_rollout_ref.model.tokenizer_path"
            )
        path = folder
    elif looks_local(path):
        raise ModelError(
            f"tokenizer directory {folder} does not exist; set actor_rollout_ref.model.path or .tokenizer_path"
        )
    tokenizer = _from_pretrained(path, trust_remote_code)
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {path} has neither a pad_token nor an eos_token; set one in tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    check_round_trip(tokenizer, path)
    return tokenizer


def check_round_trip(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Refuse a tokenizer that loses text.

    Characters that the tokenizer maps to its unknown token are left out, because a small vocabulary is the user's
    choice.

    Raises:
        ModelError: text was lost; the error names the text and the usual cause.
    """
    for probe in PROBES:
        text = "".join(char for char in probe if char.isspace() or not _is_unknown(tokenizer, char))
        ids = tokenizer.encode(text, add_special_tokens=False)
        if (
            tokenizer.unk_token_id is not None
            and tokenizer.unk_token_id in ids
            and tokenizer.unk_token_id != tokenizer.eos_token_id
        ):
            continue
        decoded = tokenizer.decode(ids)
        if decoded == text or decoded.strip(" ") == text.strip(" "):
            continue
        name = type(tokenizer).__name__
        raise ModelError(
            f"the tokenizer of {path} ({name}) does not give text back: {text!r} comes back as {decoded!r}. "
            "Rewards would be computed "
            "on damaged text. The usual cause: AutoTokenizer picks its class by the model's type "
            "(Qwen2Tokenizer for qwen2) and rebuilds "
            'a custom tokenizer wrongly. Set "tokenizer_class": "PreTrainedTokenizerFast" in '
            "tokenizer_config.json, which takes "
            "tokenizer.json as it stands, or name another tokenizer with actor_rollout_ref.model.tokenizer_path"
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocabulary: int, path: str | Path) -> None:
    """Refuse a tokenizer that gives ids that a model with `vocabulary` embeddings does not have.

    Raises:
        ModelError: the tokenizer has such ids; the error names the largest.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocabulary:
        raise ModelError(
            f"the tokenizer of {path} knows token {token!r} with id {largest}, but the model has only {vocabulary} "
            "embeddings (vocab_size): they do not belong together; set actor_rollout_ref.model.tokenizer_path to the "
            "model's own"
        )


def mark_ends(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """Make special tokens of added tokens that end a turn. Texts have the same ids as before.

    Args:
        tokenizer: of the model.
        ends: ids of its EOS tokens; the usual end tokens count, too.
    """
    for number, token in tokenizer.added_tokens_decoder.items():
        if not token.special and (number in ends or token.content in END_TOKENS):
            marked = copy.copy(token)
            marked.special = True
            tokenizer.add_tokens([marked], special_tokens=True)


def looks_local(path: str | Path) -> bool:
    """Return whether a name is meant as a path on this machine and not as `organisation/model` on a hub."""
    text = str(path)
    return isinstance(path, Path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text


def _from_pretrained(path: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast if _records_generic_class(path) else AutoTokenizer
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        return loader.from_pretrained(path, **options)
    except Exception as error:  # transformers may raise anything for a broken file
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {type(error).__name__}: {error}") from error


def _records_generic_class(path: str | Path) -> bool:
    folder = Path(path)
    config_file = folder / "tokenizer_config.json"
    if not config_file.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{config_file} is not valid JSON: {error}") from error
    return config.get("tokenizer_class") in GENERIC_CLASSES and not config.get("auto_map")


def _is_unknown(tokenizer: PreTrainedTokenizerBase, char: str) -> bool:
    unknown = tokenizer.unk_token_id
    return unknown is not None and unknown in tokenizer.encode(char, add_special_tokens=False)
