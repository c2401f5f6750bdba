"""A tokenizer has to give text back, or the run does not start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from raising import raises_with
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybridrl.chat.parsers.tool_parser import tool_parser_of
from hybridrl.config.schema.model import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.info import tokenizer_of
from hybridrl.models.tokenizer import check_vocabulary, load_tokenizer

TEXT = "Sort: 31 24\n\n#### 12"


def write_character_tokenizer(folder: Path, characters: str) -> None:
    """A custom tokenizer of single characters in the directory of a model, as `tokenizers` users write it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["<pad>", "<eos>", "<unk>", *dict.fromkeys(characters)]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")


ALL = "".join(chr(i) for i in range(32, 127)) + "\n"


def test_the_recorded_generic_class_is_honoured(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, ALL)
    damaged = AutoTokenizer.from_pretrained(tmp_path)
    assert damaged.decode(damaged.encode(TEXT, add_special_tokens=False)) != TEXT  # the trap is there
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT
    assert tokenizer.padding_side == "left"


def test_a_tokenizer_that_loses_text_is_refused_by_name(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, ALL)
    file = tmp_path / "tokenizer_config.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**recorded, "tokenizer_class": "Qwen2Tokenizer"}), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    for part in (str(tmp_path), "Qwen2Tokenizer", "comes back as", "PreTrainedTokenizerFast", "tokenizer_path"):
        assert part in str(caught.value)


def test_a_small_vocabulary_that_says_so_is_allowed(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, "0123456789 :#\nSort")
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("Sort: 12\n")) == "Sort: 12\n"


def test_the_tiny_model_passes(micro_model: Path) -> None:
    tokenizer = load_tokenizer(micro_model)
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


def test_pad_falls_back_to_eos(micro_model: Path, tmp_path: Path) -> None:
    shutil.copytree(micro_model, tmp_path / "copy")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        file = tmp_path / "copy" / name
        content = json.loads(file.read_text(encoding="utf-8"))
        content.pop("pad_token", None)
        file.write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path / "copy")
    assert tokenizer.pad_token_id is not None


def test_neither_pad_nor_eos(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, ALL)
    file = tmp_path / "tokenizer_config.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**recorded, "pad_token": None, "eos_token": None}), encoding="utf-8")
    with raises_with(ModelError, "pad_token", "eos_token"):
        load_tokenizer(tmp_path)


def test_custom_chat_template(micro_model: Path) -> None:
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    tokenizer = load_tokenizer(micro_model, custom_chat_template=template)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "[hi]"


def test_missing_or_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with raises_with(ModelError, "tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
    write_character_tokenizer(tmp_path / "broken", ALL)
    (tmp_path / "broken" / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="is not valid JSON"):
        load_tokenizer(tmp_path / "broken")


def test_ids_beyond_the_embeddings_are_refused(micro_model: Path) -> None:
    tokenizer = load_tokenizer(micro_model)
    check_vocabulary(tokenizer, len(tokenizer), micro_model)
    with pytest.raises(ModelError, match=r"with id \d+, but the model has only 100 embeddings"):
        check_vocabulary(tokenizer, 100, micro_model)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "</s>", "<|return|>", "<|call|>", "<|my_end|>"])
def test_ends_of_turns_that_the_files_do_not_mark_are_read_by_nobody(end: str, tmp_path: Path) -> None:
    """Tools, users and rewards read text without special tokens."""
    write_character_tokenizer(tmp_path, ALL)
    own = load_tokenizer(tmp_path)
    own.add_tokens([AddedToken(end, special=False, normalized=False)])
    own.save_pretrained(tmp_path)
    number = own.convert_tokens_to_ids(end)
    if end == "<|my_end|>":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [number, 1]}), encoding="utf-8")
    plain, text = load_tokenizer(tmp_path), f"Which city?{end}"
    ids = plain(text)["input_ids"]
    assert ids[-1] == number and plain.decode(ids, skip_special_tokens=True) == text  # the files do not mark it
    tokenizer = tokenizer_of(ModelConfig(path=str(tmp_path)))
    assert tokenizer(text)["input_ids"] == ids and len(tokenizer) == len(plain)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Which city?"
    for name in ("hermes", "gpt-oss", "llama3_json"):
        assert tool_parser_of(name, tokenizer).parse(text).content == "Which city?"
