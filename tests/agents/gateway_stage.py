"""A scripted model behind the real server, and agents that speak each dialect with the vendor's own client."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from template_families import ENDS, FAMILIES
from transformers import AutoTokenizer

from hybridrl.chat.session_images import ImageReader
from hybridrl.chat.turns import Turns
from hybridrl.config import ModelConfig
from hybridrl.models.vision import processor_of
from hybridrl.registry import TOOL_PARSERS
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.trace import trajectories_of
from hybridrl.serve import Listener, OpenAIServer, Served, create_app

TOKEN = "a-token-of-this-run"
LIMIT = 16384
ECHO = {
    "name": "echo",
    "description": "Says how long a text is.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "times": {"type": "integer"}}},
}


def _json(arguments: Mapping[str, Any]) -> str:
    """JSON as a model may write it: with spaces that no library would."""
    return json.dumps(arguments, separators=(" ,  ", " :"))


def _hermes(calls: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f'<tool_call>\n{{"name":"echo" ,"arguments":{_json(one)}}}\n</tool_call>' for one in calls)


def _tags(calls: Sequence[Mapping[str, Any]]) -> str:
    parameters = ["".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in one.items()) for one in calls]
    return "".join(f"<tool_call>\n<function=echo>\n{one}</function>\n</tool_call>\n" for one in parameters)


def _glm(calls: Sequence[Mapping[str, Any]]) -> str:
    pairs = [
        "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in one.items())
        for one in calls
    ]
    return "".join(f"<tool_call>echo\n{one}</tool_call>" for one in pairs)


def _harmony(calls: Sequence[Mapping[str, Any]]) -> str:
    return f"<|channel|>commentary to=functions.echo <|constrain|>json<|message|>{_json(calls[0])}"


def _kimi(calls: Sequence[Mapping[str, Any]]) -> str:
    marked = [
        f"<|tool_call_begin|>functions.echo:{number}<|tool_call_argument_begin|>{_json(one)}<|tool_call_end|>"
        for number, one in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(marked)}<|tool_calls_section_end|>"


def _deepseek(calls: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"<｜tool▁call▁begin｜>echo<｜tool▁sep｜>{_json(one)}<｜tool▁call▁end｜>" for one in calls)


def _llama(calls: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f'{{"name": "echo", "parameters": {_json(one)}}}' for one in calls)


#: family -> (its `multi_turn.format`, how its model writes calls)
FORMATS: Mapping[str, tuple[str, Callable[[Sequence[Mapping[str, Any]]], str]]] = {
    "qwen": ("hermes", _hermes),
    "qwen3_coder": ("qwen3_coder", _tags),
    "thinking": ("hermes", lambda calls: "so what\n</think>\n" + _hermes(calls)),
    "llama3": ("llama3_json", _llama),
    "glm": ("glm", _glm),
    "gpt-oss": ("gpt-oss", _harmony),
    "kimi": ("kimi", _kimi),
    "deepseek": ("deepseek", _deepseek),
}
assert FORMATS.keys() == FAMILIES.keys()


@dataclass
class Script:
    """Plays the model: answers each request with the next text, and notes what passes.

    Attributes:
        texts: what it writes next; a text that ends with "..." is cut by the length limit.
        calls: (prompt, completion) of each request.
        held: requests wait for it before they are answered.
        hides: each turn begins with a token that its text does not show.
    """

    tokenizer: Any
    end: int
    texts: list[str] = field(default_factory=list)
    calls: list[tuple[list[int], Completion]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    held: asyncio.Event | None = None
    hides: bool = False
    fault: Exception | None = None

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        if self.fault is not None:
            raise self.fault
        if self.held is not None:
            await self.held.wait()
        if request.id in self.aborted:
            return Completion(request.id, [], [], "abort")
        text = self.texts.pop(0) if self.texts else "ok"
        cut = text.endswith("...")
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *([] if cut else [self.end])]
        dice = random.Random(len(self.calls))
        if self.hides:  # text does not show this token, so that whoever tokenises the text gets others
            ids.insert(0, self.tokenizer.pad_token_id)
        log_probs = [-dice.random() for _ in ids]
        versions = [(3, 1), (4, len(ids) - 1)]
        completion = Completion(request.id, ids, log_probs, "length" if cut else "stop", versions)
        self.calls.append((list(request.prompt_ids), completion))
        return completion

    async def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids
        if self.held is not None:
            self.held.set()

    async def stats(self) -> dict[str, dict[str, float]]:
        return {}

    async def health(self) -> str | None:
        return None


class Stage:
    """The server over a scripted model.

    Args:
        model: plays it.
        served: as the server knows it.
    """

    def __init__(self, model: Script, served: Served) -> None:
        self.model, self.tokenizer = model, model.tokenizer
        self.opened: list[str] = []
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.listener = Listener("127.0.0.1")
        self.server = OpenAIServer(create_app(self.model, served, TOKEN, max_sessions=64), self.listener.socket)
        self.do(self.server.start())
        self.root = self.listener.url.removesuffix("/v1")
        self.http = httpx.Client(base_url=self.root, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def open(self, **settings: Any) -> str:
        """The id of a new session."""
        answer = self.http.post("/sessions", json=settings)
        assert answer.status_code == 200, answer.text
        self.opened.append(answer.json()["id"])
        return self.opened[-1]

    def close_sessions(self) -> None:
        while self.opened:
            self.http.delete(f"/sessions/{self.opened.pop()}")

    def trace(self, session: str) -> dict[str, Any]:
        return self.http.get(f"/sessions/{session}/trace").json()

    def close(self) -> None:
        self.http.close()
        self.do(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


class GatewayStage(Stage):
    """The server over a scripted model of one family."""

    def __init__(self, model: Path, family: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = FAMILIES[family].template
        ends = tokenizer.convert_tokens_to_ids(list(ENDS))
        self.family = family
        name, self.write = FORMATS[family]
        self.turns = Turns(tokenizer, ends)
        served = Served("tiny", tokenizer, LIMIT, len(tokenizer), True, self.turns, TOOL_PARSERS.get(name)(), ends)
        super().__init__(Script(tokenizer, tokenizer.convert_tokens_to_ids(FAMILIES[family].end)), served)


class SeeingStage(Stage):
    """The server over a scripted model that reads images.

    Args:
        model: of `hybridrl.models.tiny_vision`.
        most: images of a request.
        limit: tokens of prompt and response.
    """

    def __init__(self, model: Path, most: int | None = None, limit: int = LIMIT) -> None:
        processor = processor_of(ModelConfig(path=str(model)))
        assert processor is not None
        tokenizer = AutoTokenizer.from_pretrained(model)
        ends = [tokenizer.eos_token_id]
        turns = Turns(tokenizer, ends, processor=processor)
        images = ImageReader(processor, most)
        parser = TOOL_PARSERS.get("hermes")()
        served = Served("tiny", tokenizer, limit, len(tokenizer), True, turns, parser, ends, images=images)
        super().__init__(Script(tokenizer, tokenizer.eos_token_id), served)


@contextmanager
def staged(model: Path, family: str) -> Iterator[GatewayStage]:
    stage = GatewayStage(model, family)
    try:
        yield stage
    finally:
        stage.close()


# ------------------------------------------------------------------ agents


@dataclass
class Said:
    """What an agent understood of a turn: its text, and (id, arguments) of its calls."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    ended: str


class ChatAgent:
    """Holds a conversation with the `openai` client's chat completions."""

    def __init__(self, url: str, key: str, stream: bool) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.history: list[Any] = []
        self.stream = stream

    def ask(self, text: str) -> Said:
        self.history.append({"role": "user", "content": text})
        return self.go_on()

    def answer(self, results: Sequence[tuple[str, str]]) -> Said:
        self.history += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
        return self.go_on()

    def go_on(self) -> Said:
        tools: Any = [{"type": "function", "function": ECHO}]
        asked: Any = {"model": "gpt-7", "messages": self.history, "tools": tools, "max_tokens": 500}
        if self.stream:
            with self.client.chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
                found: Any = events.current_completion_snapshot  # the final one is refused where it was cut
        else:
            found = self.client.chat.completions.create(**asked)
        message = found.choices[0].message
        self.history.append(message)
        calls = [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        return Said(message.content or "", calls, found.choices[0].finish_reason)

    def change_first(self, text: str) -> None:
        self.history[0] = {"role": "user", "content": text}


class ResponsesAgent(ChatAgent):
    """The same with its responses."""

    def answer(self, results: Sequence[tuple[str, str]]) -> Said:
        self.history += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]
        return self.go_on()

    def go_on(self) -> Said:
        asked: Any = {
            "model": "gpt-7",
            "input": self.history,
            "tools": [{"type": "function", "strict": False, **ECHO}],
            "max_output_tokens": 500,
        }
        if self.stream:
            with self.client.responses.stream(**asked) as events:
                last: Any = list(events)[-1]
                assert last.type in ("response.completed", "response.incomplete")
                found: Any = last.response
        else:
            found = self.client.responses.create(**asked)
        self.history += found.output
        calls = [(one.call_id, json.loads(one.arguments)) for one in found.output if one.type == "function_call"]
        ended = "length" if found.incomplete_details else "tool_calls" if calls else "stop"
        return Said(found.output_text, calls, ended)


class MessagesAgent(ChatAgent):
    """The same with the `anthropic` client."""

    def __init__(self, url: str, key: str, stream: bool) -> None:
        self.client: Any = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        self.history = []
        self.stream = stream

    def answer(self, results: Sequence[tuple[str, str]]) -> Said:
        blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        self.history.append({"role": "user", "content": blocks})
        return self.go_on()

    def go_on(self) -> Said:
        tool = {"name": "echo", "description": ECHO["description"], "input_schema": ECHO["parameters"]}
        asked: Any = {"model": "claude-9", "messages": self.history, "tools": [tool], "max_tokens": 500}
        if self.stream:
            with self.client.messages.stream(**asked) as events:
                found = events.get_final_message()
        else:
            found = self.client.messages.create(**asked)
        self.history.append({"role": "assistant", "content": found.content})
        calls = [(block.id, dict(block.input)) for block in found.content if block.type == "tool_use"]
        text = "".join(block.text for block in found.content if block.type == "text")
        reasons = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        return Said(text, calls, reasons[found.stop_reason])


AGENTS = {"chat": ChatAgent, "responses": ResponsesAgent, "messages": MessagesAgent}


# ------------------------------------------------------------------ what must hold


def check_trained_once(trace: Mapping[str, Any], calls: Sequence[tuple[list[int], Completion]]) -> list[Any]:
    """Every generated token is trained on once, behind the tokens that it was sampled behind; the trajectories."""
    found = trajectories_of(trace, "prompt 0", 2)
    wanted: dict[tuple[int, ...], list[tuple[int, float, int]]] = {}
    for prompt, completion in calls:
        versions = [version for version, count in completion.versions for _ in range(count)]
        for number, token in enumerate(completion.token_ids):
            place = (*prompt, *completion.token_ids[:number])
            wanted.setdefault(place, []).append((token, completion.log_probs[number], versions[number]))
    for one in found:
        whole = [*one.prompt_ids, *one.token_ids]
        versions = [version for version, count in one.versions for _ in range(count)]
        for number, trained in enumerate(one.mask):
            if trained:
                here = (one.token_ids[number], one.log_probs[number], versions[number])
                wanted[tuple(whole[: len(one.prompt_ids) + number])].remove(here)
    assert not any(wanted.values()), "generated tokens are left out"
    return found
