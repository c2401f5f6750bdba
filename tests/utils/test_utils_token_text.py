"""Texts of single tokens: joined they are the text of all."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import made
from transformers import AutoTokenizer

from hybridrl.observe.report_samples import first_prompts
from hybridrl.utils.token_text import TokenTexts

TOKENIZERS = {kind: made(kind) for kind in ("bytes", "words")}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(max_size=30))
def test_texts_of_tokens_joined_are_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer("a " + text, add_special_tokens=False)["input_ids"]
    texts = TokenTexts(tokenizer)(ids)
    assert len(texts) == len(ids)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert ("".join(texts) if kind == "bytes" else "".join(texts).lstrip(" ")) == text


def test_the_token_that_completes_a_character_has_it() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer("x€y", add_special_tokens=False)["input_ids"]
    texts = TokenTexts(tokenizer)(ids)
    assert [text for text in texts if text] == ["x", "€", "y"] and len(texts) == 5


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_any_tokens_have_texts(kind: str, data: st.DataObject) -> None:
    """Of tokens that no text has, such as halves of characters, none is lost and none raises."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    texts = TokenTexts(tokenizer)(ids)
    assert len(texts) == len(ids)
    if kind == "bytes":
        anchor = tokenizer("a", add_special_tokens=False)["input_ids"]
        assert "a" + "".join(texts) == tokenizer.decode([*anchor, *ids])
    named = sum(text.count("<|end|>") for text in texts)
    assert named >= ids.count(tokenizer.eos_token_id)


def test_special_tokens_of_a_model_are_shown(micro_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro_model)
    texts = TokenTexts(tokenizer)([tokenizer.eos_token_id, *tokenizer("3 1", add_special_tokens=False)["input_ids"]])
    assert texts[0] == tokenizer.eos_token and "".join(texts[1:]) == "3 1"


@given(prompts=st.lists(st.sampled_from("abcdefgh"), max_size=40), count=st.integers(-1, 40))
def test_whole_prompts_are_chosen_and_the_same_ones_in_every_order(prompts: list[str], count: int) -> None:
    chosen = first_prompts(prompts, count)
    names = {prompts[number] for number in chosen}
    assert chosen == {number for number, prompt in enumerate(prompts) if prompt in names}
    backwards = prompts[::-1]
    assert {backwards[number] for number in first_prompts(backwards, count)} == names
    if count < 0:
        assert len(chosen) == len(prompts)
    elif len(names) > 1:
        assert len(chosen) <= count
    else:
        assert bool(names) == bool(prompts and count)
