"""What the quickstart is made of: the sorting task, the tiny model and its tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hybridrl.data.preprocess import sort
from hybridrl.errors import UserError
from hybridrl.models import tiny


def test_sort_rows_are_sorted_disjoint_and_complete(tmp_path: Path) -> None:
    sort.main(["--out", str(tmp_path), "--seed", "3", "--train-size", "500", "--test-size", "100", "--length", "3"])
    train, test = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("train", "test"))
    assert (len(train), len(test)) == (500, 100)
    digits = {}
    for name, table in (("train", train), ("test", test)):
        contents = [prompt[0]["content"] for prompt in table["prompt"]]
        assert all(prompt[0]["role"] == "user" and len(prompt) == 1 for prompt in table["prompt"])
        digits[name] = [content.removeprefix("Sort: ") for content in contents]
        answers = [row["ground_truth"] for row in table["reward_model"]]
        assert answers == ["".join(sorted(text)) for text in digits[name]]
        assert {len(text) for text in digits[name]} == {3}
        assert set(table["data_source"]) == {"hybridrl/sort"}
        assert [row["index"] for row in table["extra_info"]] == list(range(len(table)))
        assert {row["split"] for row in table["extra_info"]} == {name}
    assert len(set(digits["train"]) | set(digits["test"])) == 600

    for name, rl in (("sft_train", train), ("sft_val", test)):
        for messages, prompt, reward in zip(
            pd.read_parquet(tmp_path / f"{name}.parquet")["messages"], rl["prompt"], rl["reward_model"], strict=True
        ):
            assert messages[0] == prompt[0]
            assert messages[1] == {"role": "assistant", "content": "#### " + reward["ground_truth"]}


def test_sort_data_depends_on_the_seed_alone(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> str:
        folder = sort.write_sort_data(tmp_path / name, seed=seed, train_size=50, test_size=5)
        return hashlib.sha256((folder / "train.parquet").read_bytes()).hexdigest()

    assert digest("a", 1) == digest("b", 1) != digest("c", 2)


def test_more_prompts_than_there_are_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises_with(UserError, "1100 different prompts", 1000, "3 digits"):
        sort.write_sort_data(tmp_path, train_size=1000, test_size=100, length=3)
    with pytest.raises(SystemExit) as ended:
        sort.main(["--out", str(tmp_path), "--length", "2"])
    assert ended.value.code == 2
    assert "raise --length" in capsys.readouterr().err


@pytest.fixture(scope="module", params=["as AutoTokenizer finds it", "as tokenizer.json stands"])
def tokenizer(request: pytest.FixtureRequest, tiny_model: Path) -> PreTrainedTokenizerFast:
    """Both ways in which programs load a tokenizer; transformers rebuilds it from the model's type in the first."""
    cls = AutoTokenizer if request.param.startswith("as Auto") else PreTrainedTokenizerFast
    return cls.from_pretrained(tiny_model)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    import unicodedata

    text = unicodedata.normalize("NFC", text)  # Qwen2's own normalisation
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_one_token_a_character_role_and_mark(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "Sort: 21"}, {"role": "assistant", "content": "#### 12"}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    tokens = [tokenizer.decode([token]) for token in prompt]
    assert tokens == ["<|im_start|>", "user", "\n", *"Sort: 21", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert [tokenizer.decode([token]) for token in whole[len(prompt) :]] == ["####", " ", "1", "2", "<|im_end|>", "\n"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id not in whole


def test_tiny_model_is_as_asked_and_the_same_every_time(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.dtype == torch.float32
    assert 0.33e6 < model.num_parameters() < 0.37e6
    assert model.config.hidden_size // model.config.num_attention_heads == 32  # vLLM refuses smaller heads
    assert model.get_input_embeddings().num_embeddings == len(AutoTokenizer.from_pretrained(tiny_model))
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tiny_model).eos_token_id

    def weights(folder: Path) -> bytes:
        return (folder / "model.safetensors").read_bytes()

    state = torch.get_rng_state()
    assert weights(tiny.build_tiny_model(tmp_path / "again")) == weights(tiny_model)
    assert torch.equal(torch.get_rng_state(), state), "building a model must not touch the caller's random numbers"
    assert weights(tiny.build_tiny_model(tmp_path / "other", seed=1)) != weights(tiny_model)


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tiny.main(["--out", str(tmp_path / "model"), "--hidden", "100", "--heads", "3"])
    assert ended.value.code == 2
    assert "hidden=100, heads=3, kv_heads=2 do not fit together" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
