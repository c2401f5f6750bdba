"""Facts about a model that the rest of the library needs: the tokens that end a response, and the model's identity."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.loading import check_weights
from hybridrl.models.model_config import ROPE_NAMES, config_of
from hybridrl.models.stored import check_names
from hybridrl.models.tokenizer import check_vocabulary, load_tokenizer, mark_ends


def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a `model` group of the configuration names.

    Tokens that end the model's turns are special tokens of it, whether its files say so or not. So tools, simulated
    users and rewards, which read text without special tokens, do not see them.
    """
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code, model.custom_chat_template)
    ends: list[int] = []
    with contextlib.suppress(ModelError):  # who loads the model tells
        ends = eos_token_ids(model.path, config_of(model), tokenizer)
    mark_ends(tokenizer, ends)
    return tokenizer


def check_files(model: ModelConfig) -> None:
    """Refuse weights of a local folder that are missing or incomplete, or are not those of the model's configuration.

    Raises:
        ModelError: names the file or the tensors.
    """
    check_weights(model.path)
    if Path(model.path).expanduser().is_dir():
        check_names(model.path, config_of(model), model.trust_remote_code)


def engine_overrides(model: ModelConfig) -> dict[str, Any]:
    """Return `override_config` as an inference engine needs it to compute the model that is trained.

    Training merges mappings into those of config.json; an engine replaces those with them.
    """
    merged, overrides = config_of(model), {}
    for name, value in model.override_config.items():
        if name in ROPE_NAMES and hasattr(merged, "rope_parameters"):
            overrides["rope_parameters"] = dict(merged.rope_parameters)
        elif name != "attn_implementation":  # of the trainer
            current = getattr(merged, name)
            overrides[name] = dict(current) if isinstance(current, dict) else value
    return overrides


def checked_identity(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the `model_identity` of a `model` group, after checking that the tokenizer fits.

    Raises:
        ModelError: there is no readable configuration, or the tokenizer has more tokens than the model.
    """
    config = config_of(model)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary is not None:
        check_vocabulary(tokenizer, vocabulary, model.tokenizer_path or model.path)
    return model_identity(config, tokenizer)


def check_same_tokenizer(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, key: str, path: str = "path") -> None:
    """Refuse a model whose tokenizer gives other ids than the tokenizer that made the batches.

    Args:
        model: the other model's group.
        tokenizer: the policy's tokenizer.
        key: the group's name in the configuration, e.g. `critic.model`.
        path: the setting in this group that names the model. A group with another name for it has no tokenizer_path.

    Raises:
        ModelError: it has no readable tokenizer, or one with another vocabulary; the error names the first difference.
    """
    ours, theirs = tokenizer.get_vocab(), tokenizer_of(model).get_vocab()
    if ours == theirs:
        return
    token = min(set(ours.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))[0]
    raise ModelError(
        f"{key}: the tokenizer of {model.tokenizer_path or model.path} is not the policy's: token {token!r} has id "
        f"{theirs.get(token, 'none')} there and {ours.get(token, 'none')} in the policy's. It would read the policy's "
        f"token ids as other text: set {key}.{path} to a model with the policy's tokenizer"
        + (
            f", or, if its embeddings are made for that tokenizer, {key}.tokenizer_path to it." * (path == "path")
            or "."
        )
    )


def eos_token_ids(path: str | Path, config: PreTrainedConfig, tokenizer: Any) -> list[int]:
    """Return every id that the tokenizer, the generation config or the model config names as EOS, ascending.

    Chat models often name several (end of turn, end of text), and not all in one place. A response ends at the first
    occurrence of any of them.

    Args:
        path: the model's directory; its `generation_config.json` is read if it exists.
        config: the model's configuration.
        tokenizer: has `eos_token_id`.
    """
    sources = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    with contextlib.suppress(OSError):  # the file is optional: many base models have none
        sources.append(GenerationConfig.from_pretrained(path).eos_token_id)
    eos_ids: set[int] = set()
    for ids in sources:
        if ids is not None:
            eos_ids.update([ids] if isinstance(ids, int) else ids)
    return sorted(eos_ids)


def model_identity(config: PreTrainedConfig, tokenizer: Any) -> dict[str, Any]:
    """Return what must agree between a checkpoint and the run that resumes from it: architecture, sizes, vocabulary.

    Returns:
        Plain data: `model_type`, the sizes that the configuration names, and a digest of the vocabulary.
    """
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    text = getattr(config, "text_config", config)
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return {
        "model_type": config.model_type,
        **{name: value for name in names if (value := getattr(text, name, None)) is not None},
        "vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest(),
    }
