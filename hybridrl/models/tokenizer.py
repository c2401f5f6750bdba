"""Loading a tokenizer, and refusing one that loses text.

Whatever a policy reads and whatever a reward function judges passes through the tokenizer. One that silently drops
spaces or newlines makes a run that looks healthy and learns nothing, so text has to survive a round trip before a
run starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ModelError

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
# Classes that mean "tokenizer.json as it stands".
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Words, digits, single and double spaces, newlines, signs: what prompts, answers and chat templates are made of.
PROBES = ("Sort: 31524 7", "#### 12345", "one two\nthree\n\nfour", "x = (1 + 2) * 3 - 4 / 5", "a  b", "Yes, it is 42!")


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, custom_chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory (or of a hub name) for left-padded prompts.

    A directory whose `tokenizer_config.json` records a generic class (`PreTrainedTokenizerFast`,
    `TokenizersBackend`) is loaded from its `tokenizer.json` as it stands: `AutoTokenizer` would go by the
    model's type instead and rebuild, for a `qwen2` model, a `Qwen2Tokenizer` that drops every piece which
    byte-pair encoding cannot reach, spaces and newlines among them.

    Args:
        path: A directory, or a name on the model hub.
        trust_remote_code: Whether Python code in the directory may run.
        custom_chat_template: A Jinja chat template that replaces the tokenizer's own.

    Returns:
        A tokenizer that pads on the left and has a pad token. Without one of its own it pads with its EOS token:
        masks, never comparisons with the pad id, say what is padding.

    Raises:
        ModelError: there is no tokenizer, it has neither pad nor EOS token, or text does not survive encoding and
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

    Characters which the tokenizer openly answers with its unknown token are left out: a small vocabulary is the
    user's choice.

    Raises:
        ModelError: names the text that was lost and the usual cause.
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
    """Refuse a tokenizer that gives ids which a model with `vocabulary` embeddings does not have.

    Raises:
        ModelError: names the largest id.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocabulary:
        raise ModelError(
            f"the tokenizer of {path} knows token {token!r} with id {largest}, but the model has only {vocabulary} "
            "embeddings (vocab_size): they do not belong together; set actor_rollout_ref.model.tokenizer_path to the "
            "model's own"
        )


def looks_local(path: str | Path) -> bool:
    """Whether a name is meant as a path of this machine and not as `organisation/model` of a hub."""
    text = str(path)
    return isinstance(path, Path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text


def _from_pretrained(path: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast if _records_generic_class(path) else AutoTokenizer
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        return loader.from_pretrained(path, **options)
    except Exception as error:  # transformers raises whatever the broken file provokes
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
