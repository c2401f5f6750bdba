"""Text between turns: what families of chat templates write, and templates that cannot be continued."""

from pathlib import Path

import pytest
from template_families import BROKEN, ENDS, FAMILIES, write_model
from transformers import AutoTokenizer

from hybridrl.agents import FunctionCall
from hybridrl.chat.turns import Turns, answers_of
from hybridrl.errors import RolloutError

ECHO = {"type": "function", "function": {"name": "echo", "description": "", "parameters": {"type": "object"}}}
CALL = FunctionCall("echo", {"text": "abc"})


@pytest.fixture(scope="module")
def model(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(micro_model, tmp_path_factory.mktemp("families"))


def turns_of(model: Path, template: str, mode: str = "strict") -> Turns:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    return Turns(tokenizer, tokenizer.convert_tokens_to_ids(list(ENDS)), {}, mode)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_a_turn_is_what_the_template_writes(model, name) -> None:
    family = FAMILIES[name]
    turns = turns_of(model, family.template)
    turns.check([ECHO])
    end = turns.tokenizer.convert_tokens_to_ids(family.end)
    answers = answers_of([(CALL, "ANSWER")])
    ended = turns.following(end, answers, [ECHO], [CALL])
    cut = turns.following(end + 1000, answers, [ECHO], [CALL])
    assert turns.tokenizer.decode(ended) == family.behind
    assert cut == [end, *ended]  # the model did not end its turn itself: the template's end is added


@pytest.mark.parametrize("name", FAMILIES)
def test_a_session_by_turns_is_the_conversation_that_the_template_renders(model, name) -> None:
    """The whole conversation rendered at once has the same tokens, for turns of the model that the template knows."""
    turns = turns_of(model, FAMILIES[name].template)
    tokenizer, end = turns.tokenizer, turns.tokenizer.convert_tokens_to_ids(FAMILIES[name].end)
    messages = [{"role": "user", "content": "How long is abc?"}]
    ids, arguments = turns.prompt(messages, [ECHO]), {"text": "abc"}
    for answer in ("3", "still 3"):
        as_text = '{"text": "abc"}' if name == "kimi" else arguments
        made = {"id": "call00001", "type": "function", "function": {"name": "echo", "arguments": as_text}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [made]}, *answers_of([(CALL, answer)])]
        text = tokenizer.apply_chat_template(messages, tools=[ECHO], add_generation_prompt=True, tokenize=False)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert whole[: len(ids)] == ids or name in ("thinking", "gpt-oss")  # the opening of a turn is not in history
        following = turns.following(end, answers_of([(CALL, answer)]), [ECHO], [CALL])
        assert whole[len(whole) - len(following) :] == following
        assert whole[len(whole) - len(following) - 1] == end
        ids = whole


def test_several_answers_follow_in_one_block(model) -> None:
    turns = turns_of(model, FAMILIES["qwen"].template)
    two = [CALL, FunctionCall("other", {})]
    ids = turns.following(2, answers_of([(two[0], "one"), (two[1], "two")]), [ECHO], two)
    assert turns.tokenizer.decode(ids[-len("</tool_response><|im_end|>\n<|im_start|>") :]).count("user") == 0
    text = turns.tokenizer.decode(ids)
    assert text.count("<|im_start|>user") == 1 and text.index("one") < text.index("two")


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_cannot_be_continued_is_refused(model, name) -> None:
    template, word = BROKEN[name]
    with pytest.raises(RolloutError, match=word) as caught:
        turns_of(model, template).check([ECHO])
    assert str(model) in str(caught.value) and "custom_chat_template" in str(caught.value)


def test_the_check_can_be_loosened(model) -> None:
    template = FAMILIES["qwen"].template.replace(
        "<|im_start|>user{% endif %}", "<|im_start|>user{% endif %}{{ '\n' if loop.index0 > 3 }}"
    )
    with pytest.raises(RolloutError, match="for the same answer"):
        turns_of(model, template).check([ECHO])
    turns_of(model, template, "ignore_strippable").check([ECHO])
    counts = BROKEN["counts answers"][0]
    with pytest.raises(RolloutError, match="for the same answer"):
        turns_of(model, counts, "ignore_strippable").check([ECHO])
    turns_of(model, counts, "disable").check([ECHO])


def test_texts_of_megabytes_between_turns_are_not_tokenised_whole(model: Path) -> None:
    turns = turns_of(model, FAMILIES["qwen"].template)
    limited = Turns(turns.tokenizer, turns.tokenizer.convert_tokens_to_ids(list(ENDS)), limit=32)
    end, text = turns.tokenizer.convert_tokens_to_ids(FAMILIES["qwen"].end), "3 dogs; " * 5000
    messages = [{"role": "user", "content": text}]
    for long, whole in (
        (limited.prompt(messages), turns.prompt(messages)),
        (limited.following(end + 1000, messages), turns.following(end + 1000, messages)),
    ):
        assert len(long) == 64 < len(whole)
        assert (long[:32], long[-32:]) == (whole[:32], whole[-32:])
    short = [{"role": "user", "content": "3"}]
    assert limited.prompt(short) == turns.prompt(short)
