"""The simulated user whom a language model plays: what the model is asked, and what becomes of its answers."""

import asyncio
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridrl.agents.interactions.load_interactions import load_interactions
from hybridrl.agents.interactions.model_user import ModelUser, conversation_of
from hybridrl.errors import RolloutError
from hybridrl.scored import Reason, UnscoredError
from hybridrl.utils.http_server import listening_socket

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from raising import raises_with
from scripted_chat_server import Script, server_of

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi, can you help me?"},
    {"role": "assistant", "content": "Sure. With what?"},
    {"role": "tool", "content": "12"},
]


class Asked(Script):
    """Keeps the questions."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        super().__init__(lines)
        self.questions: list[str] = []

    def answer(self, question: str) -> str | None:
        self.questions.append(question)
        return super().answer(question)


@pytest.fixture
def script() -> Iterator[tuple[Asked, str]]:
    """A server that answers from a script, and its address."""
    said = Asked(
        [
            {"contains": "bake", "answers": [r"  It is \boxed{cake}.  ", "Bye [END]", "   "]},
            {"contains": "own form", "answers": ["hm"]},
        ]
    )
    loop, listener = asyncio.new_event_loop(), listening_socket("127.0.0.1", 0)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = server_of(said, listener)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
    yield said, f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def reply(user: ModelUser, **kwargs: Any) -> tuple[bool, str, float | None, dict[str, Any]]:
    async def talk() -> tuple[bool, str, float | None, dict[str, Any]]:
        name = await user.start_interaction(None, **kwargs)
        return await user.generate_response(name, TALK, **kwargs)

    return asyncio.run(talk())


def test_a_model_plays_the_user(script: tuple[Asked, str]) -> None:
    said, url = script
    user = ModelUser({"name": "user", "url": url, "remove": ["\\boxed"], "attempts": 1})
    assert reply(user, task="You want to bake a cake.") == (False, "It is {cake}.", None, {})
    question = said.questions[0]
    assert "You want to bake a cake." in question and "Be kind." not in question and "12" not in question
    assert "You: Hi, can you help me?\nAssistant: Sure. With what?\n" in question
    assert reply(user, task="bake") == (True, "", None, {}), "the end is not shown"
    with pytest.raises(UnscoredError) as empty:
        reply(user, task="bake")
    with pytest.raises(UnscoredError) as refused:
        reply(user, task="swim")
    assert empty.value.unscored.reason is refused.value.unscored.reason is Reason.INFRA
    assert "said nothing" in str(empty.value.unscored) and "no answer to that" in str(refused.value.unscored)
    with raises_with(RolloutError, "interaction_kwargs.task"):
        reply(user)


def test_a_template_of_ones_own_gets_the_rows_entries(script: tuple[Asked, str], tmp_path: Path) -> None:
    said, url = script
    (tmp_path / "user.txt").write_text("own form: {{ task }} {{ mood }} {{ messages | length }} {{ end }}")
    user = ModelUser({"url": url, "template": str(tmp_path / "user.txt"), "end": "stop"})
    assert reply(user, task="a", mood="glad")[1] == "hm"
    assert said.questions == ["own form: a glad 4 stop"]
    with pytest.raises(UnscoredError, match="mood"):
        reply(user, task="a")


def test_parts_of_a_message_are_text() -> None:
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "image": None}, {"type": "text", "text": "this"}]
    assert conversation_of([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == (
        "You: Look: this\nAssistant: "
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, r"config\.url must be set"),
        ({"url": "host"}, r"config\.url=host: give an address"),
        ({"url": "URL", "model": "other"}, r"config\.model=other: the endpoint .* has script"),
        ({"url": "URL", "moodel": "x"}, r"config\.moodel=x: .*model"),
        ({"url": "URL", "timeout_s": "soon"}, r"config\.timeout_s"),
        ({"url": "URL", "template": "/nowhere.txt"}, r"config\.template=/nowhere\.txt"),
        ({"url": "http://127.0.0.1:9/v1"}, r"does not list its models"),
    ],
)
def test_a_user_that_cannot_work_is_refused_before_a_run(
    script: tuple[Asked, str], tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    given = {name: script[1] if value == "URL" else value for name, value in config.items()}
    file = tmp_path / "users.yaml"
    file.write_text(json.dumps({"interaction": [{"name": "user", "class_name": "model", "config": given}]}))
    with pytest.raises(RolloutError, match=named):
        load_interactions(str(file))


def test_the_server_of_a_script_is_hardened_and_says_what_it_serves(script: tuple[Asked, str]) -> None:
    for body in ("{}", "[]", '{"messages": 3}', "{"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{script[1]}/chat/completions", body.encode()), timeout=60)
        assert refused.value.code == 400 and json.load(refused.value)["error"]
    with urllib.request.urlopen(f"{script[1]}/models", timeout=60) as answer:
        assert json.load(answer)["data"][0]["id"] == "script"
    huge = urllib.request.Request(f"{script[1]}/chat/completions", b"{}", {"Content-Length": "99999999999"})
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(huge, timeout=60)
