"""What a reward model reads and scores, against transformers' own classifier on the rendered text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Tokenizer

from hybridrl.config import PPOTrainerConfig
from hybridrl.engine import create_train_engine
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.errors import ModelError, RewardError
from hybridrl.models.model_config import config_of
from hybridrl.models.tiny import CHAT_TEMPLATE, build_tokenizer
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.value import head_shapes, value_config
from hybridrl.protocol import DataProto, object_array
from hybridrl.reward.conversations import Conversations

ANSWERS = ["#### 12345", "seven", "", "a longer answer, with (signs) and\nlines"]
FINISHED = [True, False, True, True]  # the second one was cut at the length limit
PROMPTS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Sort: 31524"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}],
    [{"role": "user", "content": "?"}],
    [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "x"}],
]
OTHER_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


def settings(folder: Path, **changed: Any) -> PPOTrainerConfig:
    config = PPOTrainerConfig()
    config.reward.reward_model.enable = True
    config.reward.reward_model.model.path = str(folder)
    for name, value in changed.items():
        setattr(config.reward.reward_model, name, value)
    return config


def answered(tokenizer: Any, answers: list[str] = ANSWERS) -> DataProto:
    """The prompts with their answers, as a rollout returns them."""
    heads = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in PROMPTS]
    prompts = tokenizer(heads, add_special_tokens=False)["input_ids"]
    responses = [
        [*tokenizer.encode(text, add_special_tokens=False), *[tokenizer.eos_token_id] * done]
        for text, done in zip(answers, FINISHED, strict=True)
    ]
    left, right = max(map(len, prompts)), max(map(len, responses))
    ids = torch.full((len(prompts), left + right), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        whole = slice(left - len(prompt), left + len(response))
        ids[row, whole], mask[row, whole] = torch.tensor([*prompt, *response]), 1
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "responses": ids[:, left:]},
        non_tensors={"raw_prompt": object_array(PROMPTS)},
    )


def expected(folder: Path, template: str | None = None, max_length: int | None = None) -> torch.Tensor:
    """The scores that transformers computes for the conversations, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        text = tokenizer.apply_chat_template(
            [*prompt, {"role": "assistant", "content": answer}], tokenize=False, chat_template=template
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][:, :max_length]
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits[0, 0])
    return torch.stack(scores)


def scored(config: PPOTrainerConfig, batch: DataProto) -> torch.Tensor:
    """The scores of this process's engine for a batch of `Conversations`."""
    part = config.reward.reward_model
    engine = create_train_engine("value_model", "fsdp2", model=part.model, engine=part.fsdp_config, optim=None)
    engine.initialize()
    return engine.infer(batch, MicroBatching(size=3), outputs=("values",))["values"][:, -1]


@pytest.fixture(scope="module")
def other_tokenizer(micro_reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reward model with a vocabulary in another order, and the same chat template."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(micro_reward_model, folder)
    first = build_tokenizer()
    words = sorted(first.get_vocab(), key=lambda word: (len(word), word))
    other = Qwen2Tokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        unk_token=None,
        pad_token=first.pad_token,
        eos_token=first.eos_token,
        extra_special_tokens=["<|im_start|>"],
    )
    other.chat_template = first.chat_template
    other.save_pretrained(folder)
    return folder


def test_tokens_as_generated_score_as_the_rendered_text(micro_model: Path, micro_reward_model: Path) -> None:
    tokenizer = load_tokenizer(micro_model)
    config = settings(micro_reward_model)
    conversations = Conversations(config, tokenizer)
    assert not conversations.renders
    batch = conversations(answered(tokenizer))
    torch.testing.assert_close(scored(config, batch), expected(micro_reward_model), atol=1e-5, rtol=1e-5)
    conversations.renders = True
    again = conversations(answered(tokenizer))
    assert torch.equal(again.batch["input_ids"], batch.batch["input_ids"])


def test_another_tokenizer_reads_the_messages_anew(micro_model: Path, other_tokenizer: Path) -> None:
    tokenizer, config = load_tokenizer(micro_model), settings(other_tokenizer)
    batch = Conversations(config, tokenizer)(answered(tokenizer))
    torch.testing.assert_close(scored(config, batch), expected(other_tokenizer), atol=1e-5, rtol=1e-5)


def test_another_template_reads_the_messages_anew(micro_model: Path, micro_reward_model: Path) -> None:
    tokenizer, config = load_tokenizer(micro_model), settings(micro_reward_model)
    config.reward.reward_model.model.custom_chat_template = OTHER_TEMPLATE
    batch = Conversations(config, tokenizer)(answered(tokenizer))
    torch.testing.assert_close(
        scored(config, batch), expected(micro_reward_model, OTHER_TEMPLATE), atol=1e-5, rtol=1e-5
    )


def test_sessions_with_tools_that_are_read_as_one_answer_are_told(
    micro_model: Path, micro_reward_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, config = load_tokenizer(micro_model), settings(micro_reward_model)
    conversations, batch = Conversations(config, tokenizer), answered(tokenizer)
    width = batch.batch["responses"].shape[1]
    batch.batch["response_mask"] = batch.batch["attention_mask"][:, -width:].clone()
    conversations.renders = True
    conversations(batch)
    batch.batch["response_mask"][3, 1] = 0  # a token of a tool
    conversations.renders = False
    conversations(batch)
    assert "session with tools" not in capsys.readouterr().err
    conversations.renders = True
    conversations(batch)
    assert "session with tools" in capsys.readouterr().err


def test_a_padding_token_that_ends_turns_is_not_scored(micro_model: Path, micro_reward_model: Path) -> None:
    """transformers scores the last token that is not `pad_token_id`, which many reward models set to EOS."""
    tokenizer, config = load_tokenizer(micro_model), settings(micro_reward_model)
    part = config.reward.reward_model
    part.model.custom_chat_template = OTHER_TEMPLATE
    batch = Conversations(config, tokenizer)(answered(tokenizer))
    part.model.override_config = {"pad_token_id": tokenizer.eos_token_id}
    shorter = Conversations(config, tokenizer)(answered(tokenizer))
    count = batch.batch["attention_mask"].sum(1) - shorter.batch["attention_mask"].sum(1)
    assert count.tolist() == [1, 1, 1, 1]
    model = AutoModelForSequenceClassification.from_pretrained(micro_reward_model, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.eos_token_id
    ids = batch.batch["input_ids"][3:, :-1]
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=batch.batch["attention_mask"][3:, :-1]).logits[:, 0]
    torch.testing.assert_close(scored(config, shorter)[3:], found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, OTHER_TEMPLATE], ids=["newline", "end_of_turn"])
def test_a_model_that_was_trained_here_reads_what_it_was_trained_on(
    micro_model: Path, micro_reward_model: Path, tmp_path: Path, template: str
) -> None:
    """Also where its padding token ends turns, and whichever way conversations are read."""
    from hybridrl.config.schema.data import PairsDataConfig
    from hybridrl.data.preference_dataset import PreferenceDataset

    tokenizer = load_tokenizer(micro_model, custom_chat_template=template)
    trained = value_config(config_of(settings(micro_reward_model).reward.reward_model.model), bias=False)
    trained.pad_token_id = tokenizer.eos_token_id
    folder = tmp_path / "trained"
    shutil.copytree(micro_reward_model, folder)
    trained.save_pretrained(folder)
    answers = [f"{answer or '-'}" for answer in ANSWERS]
    pairs = [
        {"chosen": [*prompt, {"role": "assistant", "content": answer}],
         "rejected": [*prompt, {"role": "assistant", "content": "no"}]}
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]  # fmt: skip
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    data = PreferenceDataset(str(file), tokenizer, PairsDataConfig(max_length=200))
    config = settings(folder)
    config.reward.reward_model.model.custom_chat_template = template
    conversations = Conversations(config, tokenizer)
    assert not conversations.renders
    for renders in (False, True):
        conversations.renders = renders
        batch = conversations(answered(tokenizer, answers)).batch
        for item, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
            assert ids[mask].tolist()[:-1] == data[item]["chosen"]["input_ids"]


def test_long_conversations_are_cut(micro_model: Path, micro_reward_model: Path, capsys) -> None:
    tokenizer, config = load_tokenizer(micro_model), settings(micro_reward_model, max_length=60)
    batch = Conversations(config, tokenizer)(answered(tokenizer))
    wanted = expected(micro_reward_model, max_length=60)
    assert not torch.equal(wanted, expected(micro_reward_model))
    torch.testing.assert_close(scored(config, batch), wanted, atol=1e-5, rtol=1e-5)
    assert "reward.reward_model.max_length=60" in capsys.readouterr().err


def test_prompts_with_images_are_refused(micro_model: Path, micro_reward_model: Path) -> None:
    tokenizer = load_tokenizer(micro_model)
    batch, conversations = answered(tokenizer), Conversations(settings(micro_reward_model), tokenizer)
    batch.non_tensor_batch["multi_modal_inputs"] = object_array([{}, {}, {}, {}])
    conversations(batch)
    batch.non_tensor_batch["multi_modal_inputs"] = object_array([{}, {"pixel_values": torch.ones(1)}, {}, {}])
    with pytest.raises(RewardError, match=r"reads text.*images"):
        conversations(batch)


def changed(source: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a model with other tensors; None removes one."""
    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    for name, value in tensors.items():
        state.pop(name.replace("__", "."))
        if value is not None:
            state[name.replace("__", ".")] = value
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_models_that_cannot_score_are_refused(micro_model: Path, micro_reward_model: Path, tmp_path: Path) -> None:
    two = changed(micro_reward_model, tmp_path / "two", score__weight=torch.zeros(2, 32))
    headless = changed(micro_reward_model, tmp_path / "headless", score__weight=None)
    silent = tmp_path / "silent"
    shutil.copytree(micro_reward_model, silent)
    for file in silent.glob("*token*"):
        file.unlink()
    for folder, named in (
        (micro_model, r"Qwen2ForCausalLM generates text.*reward\.reward_model\.judge\.enable"),
        (two, "2 labels"),
        (headless, r"no head \(score.weight\)"),
        (silent, "holds no tokenizer"),
    ):
        with pytest.raises(ModelError, match=rf"reward\.reward_model\.model.*{named}"):
            Conversations(settings(folder), load_tokenizer(micro_model))


def test_a_tokenizer_without_a_template_is_refused_where_one_is_needed(
    micro_model: Path, other_tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(other_tokenizer, folder)
    (folder / "chat_template.jinja").unlink()
    with raises_with(ModelError, "reward.reward_model.model.custom_chat_template"):
        Conversations(settings(folder), load_tokenizer(micro_model))


def test_the_head_of_a_model_on_the_hub_is_found_in_the_cache(
    micro_reward_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--someone--rewards"
    shutil.copytree(micro_reward_model, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert head_shapes("someone/rewards") == {"score.weight": (1, 32)}
