"""What a classifier of steps reads, scores and pays, against transformers' own classifiers on the rendered text."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, Qwen2Model

from hybridrl.config import PPOTrainerConfig
from hybridrl.engine import create_train_engine
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.errors import ModelError
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.protocol import DataProto, object_array
from hybridrl.reward.conversations import Conversations
from hybridrl.reward.step_conversations import StepConversations, reader_of

PROMPTS = [
    [{"role": "user", "content": "Sort: 31524"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}],
    [{"role": "user", "content": "?"}],
    [{"role": "user", "content": "One"}],
    [{"role": "user", "content": "Two"}],
]
ANSWERS = ["First 1.\n\nThen 2.\n\n= 12", "seven", "", "a\n\n\n\nb\n\n", "\n\nlate\n\nx"]
#: the steps of these answers, and the number of characters up to the end of each
STEPS = [["First 1.", "Then 2.", "= 12"], ["seven"], [""], ["a", "b"], ["", "late", "x"]]
ENDS = [[10, 19, 23], [5], [0], [5, 8], [2, 8, 9]]
FINISHED = [True, False, True, True, True]


@pytest.fixture(scope="module")
def step_models(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random classifiers of tokens on the backbone of `micro_model`: one label, two, and a head of two maps."""
    found = {}
    for name, labels in (("one", 1), ("two", 2)):
        folder = tmp_path_factory.mktemp(name) / "model"
        model = AutoModelForTokenClassification.from_pretrained(micro_model, num_labels=labels, dtype=torch.float32)
        with torch.no_grad():
            model.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(labels))
            model.score.bias.normal_(generator=torch.Generator().manual_seed(labels))
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(micro_model).save_pretrained(folder)
        found[name] = folder
    deep = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(found["two"], deep)
    weights, noise = load_file(deep / "model.safetensors"), torch.Generator().manual_seed(3)
    width = weights.pop("score.weight").shape[1]
    del weights["score.bias"]
    for name, shape in (("0.weight", (width, width)), ("0.bias", (width,)), ("2.weight", (2, width)), ("2.bias", (2,))):
        weights[f"score.{name}"] = torch.randn(shape, generator=noise)
    save_file(weights, deep / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(deep)
    config.architectures = ["Qwen2ForProcessRewardModel"]
    config.save_pretrained(deep)
    return found | {"deep": deep}


def settings(folder: Path, **steps: Any) -> PPOTrainerConfig:
    config = PPOTrainerConfig()
    part = config.reward.reward_model
    part.enable, part.model.path, part.steps.enable = True, str(folder), True
    for name, value in steps.items():
        setattr(part.steps, name, value)
    return config


def answered(tokenizer: Any) -> DataProto:
    """The prompts with their answers, as a rollout returns them."""
    heads = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in PROMPTS]
    prompts = tokenizer(heads, add_special_tokens=False)["input_ids"]
    responses = [
        [*tokenizer.encode(text, add_special_tokens=False), *[tokenizer.eos_token_id] * done]
        for text, done in zip(ANSWERS, FINISHED, strict=True)
    ]
    left, right = max(map(len, prompts)), max(map(len, responses))
    ids = torch.full((len(prompts), left + right), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        whole = slice(left - len(prompt), left + len(response))
        ids[row, whole], mask[row, whole] = torch.tensor([*prompt, *response]), 1
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "responses": ids[:, left:],
            "response_mask": mask[:, left:].clone(),
        },
        non_tensors={"raw_prompt": object_array(PROMPTS)},
    )


def probability(logits: torch.Tensor) -> torch.Tensor:
    """Of the second of two labels; of one label the number itself."""
    return logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, 1]


def expected(folder: Path, mark: str) -> list[list[float]]:
    """What transformers says behind each mark of the whole text, one conversation at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    deep = "score.0.weight" in weights
    kind: Any = Qwen2Model if deep else AutoModelForTokenClassification
    model, found = kind.from_pretrained(folder, dtype=torch.float32).eval(), []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        places = []
        for step in steps:
            text += step + mark
            places.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]) - 1)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            if deep:
                inner = model(ids).last_hidden_state[0] @ weights["score.0.weight"].T + weights["score.0.bias"]
                logits = inner.relu() @ weights["score.2.weight"].T + weights["score.2.bias"]
            else:
                logits = model(input_ids=ids).logits[0]
        found.append(probability(logits[places]).tolist())
    return found


def scored(config: PPOTrainerConfig, read: DataProto) -> torch.Tensor:
    """What the reward model's worker gets of this process's engine."""
    part = config.reward.reward_model
    engine = create_train_engine("step_model", "fsdp2", model=part.model, engine=part.fsdp_config, optim=None)
    engine.initialize()
    return engine.infer(read, MicroBatching(size=3), outputs=("values",))["values"]


@pytest.mark.parametrize(("kind", "mark"), [("one", None), ("two", "\n"), ("deep", "<|im_start|>")])
def test_steps_score_as_in_transformers_and_are_paid_where_they_end(
    micro_model: Path, step_models: dict[str, Path], kind: str, mark: str | None
) -> None:
    tokenizer, config = load_tokenizer(micro_model), settings(step_models[kind], mark=mark)
    reader, batch = reader_of(config, tokenizer), answered(tokenizer)
    assert isinstance(reader, StepConversations)
    read = reader(batch)
    rewards, columns = reader.rewards(scored(config, read), read, batch)
    wanted = expected(step_models[kind], "\n\n" if mark is None else mark)
    assert [len(one) for one in columns["rm_step_scores"]] == [len(steps) for steps in STEPS]
    for found, one, row, ends in zip(columns["rm_step_scores"], wanted, rewards, ENDS, strict=True):
        assert found == pytest.approx(one, abs=1e-5)
        places = torch.zeros(len(row))
        for end, score in zip(ends, one, strict=True):
            places[max(end - 1, 0)] += score
        torch.testing.assert_close(row, places, atol=1e-5, rtol=0)
    assert columns["rm_scores"] == pytest.approx([sum(one) for one in wanted], abs=1e-5)
    spread = [score for one in wanted for score in one]
    assert max(spread) - min(spread) > 1e-2


@pytest.mark.parametrize("reward", ["mean", "min", "product", "last"])
def test_one_number_of_all_steps_stands_at_the_end(
    micro_model: Path, step_models: dict[str, Path], reward: str
) -> None:
    tokenizer = load_tokenizer(micro_model)
    reader, batch = StepConversations(settings(step_models["one"], reward=reward), tokenizer), answered(tokenizer)
    read = reader(batch)
    scores = torch.randn(read.batch["response_mask"].shape, generator=torch.Generator().manual_seed(1))
    rewards, columns = reader.rewards(scores, read, batch)
    numbers = {
        "mean": lambda x: x.mean(),
        "min": lambda x: x.min(),
        "product": lambda x: x.prod(),
        "last": lambda x: x[-1],
    }
    wanted = [numbers[reward](torch.tensor(one)).item() for one in columns["rm_step_scores"]]
    assert columns["rm_scores"] == pytest.approx(wanted, abs=1e-6)
    last = batch.batch["response_mask"].sum(1) - 1
    assert (rewards != 0).nonzero().tolist() == [[row, place] for row, place in enumerate(last.tolist())]


def test_text_of_tools_is_read_and_paid_at_the_last_generated_token_before_it(
    micro_model: Path, step_models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(micro_model)
    reader, batch = StepConversations(settings(step_models["one"]), tokenizer), answered(tokenizer)
    plain = reader(batch)
    batch.batch["response_mask"][0, 8:19] = 0  # the first separator and the whole second step
    read = reader(batch)
    assert torch.equal(read.batch["input_ids"], plain.batch["input_ids"])
    rewards, columns = reader.rewards(read.batch["response_mask"].float(), read, batch)
    assert columns["rm_step_scores"][0] == [1.0, 1.0, 1.0]
    assert rewards[0].nonzero().tolist() == [[7], [22]] and rewards[0, 7] == 2
    assert "scores steps of the response as a text" in capsys.readouterr().err


def test_what_a_response_says_moves_no_mark(micro_model: Path, step_models: dict[str, Path]) -> None:
    """A response that writes the mark itself has the steps that its separators make."""
    tokenizer, config = load_tokenizer(micro_model), settings(step_models["one"], mark="+", separator="e")
    reader, batch = StepConversations(config, tokenizer), answered(tokenizer)
    batch.batch["responses"][3, :3] = torch.tensor(tokenizer.encode("a+b"))
    batch.batch["responses"][3, 3:] = tokenizer.pad_token_id
    batch.batch["attention_mask"][3, -batch.batch["responses"].shape[1] :] = 0
    batch.batch["attention_mask"][3, -batch.batch["responses"].shape[1] :][:3] = 1
    assert reader(batch).batch["response_mask"].sum(1).tolist()[3] == 1


def test_models_that_score_no_steps_are_refused(
    micro_model: Path, micro_reward_model: Path, step_models: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(micro_model)
    for folder, named in (
        (micro_reward_model, r"its class is Qwen2ForSequenceClassification.*steps\.enable=False for other"),
        (micro_model, r"its class is Qwen2ForCausalLM"),
    ):
        with pytest.raises(ModelError, match=named):
            StepConversations(settings(folder), tokenizer)
    with raises_with(ModelError, "2 labels", "steps.enable=True"):
        whole = settings(step_models["two"])
        whole.reward.reward_model.steps.enable = False
        reader_of(whole, tokenizer)
    three = tmp_path / "three"
    shutil.copytree(step_models["two"], three)
    weights = load_file(three / "model.safetensors")
    weights["score.weight"] = torch.zeros(3, weights["score.weight"].shape[1])
    save_file(weights, three / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"its head has 3 labels, and a classifier of steps"):
        StepConversations(settings(three), tokenizer)
    critic = settings(step_models["one"])
    critic.reward.reward_model.steps.enable = False
    assert isinstance(reader_of(critic, tokenizer), Conversations), "a saved critic scores whole responses"
