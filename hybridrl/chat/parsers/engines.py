"""Parsers of tool calls that vLLM and SGLang bring, for formats that none of ours reads.

An engine's parser returns text that it cannot read as content, or drops it. Here it is a malformed call, as in every
other format. One that it drops next to calls that it reads cannot be seen from here.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.chat.parsers.tool_parser import ABOUT_CALLS, Call, MalformedCall, Parsed, ToolParser, without_thoughts


class EngineParser(ToolParser):
    """A parser of an inference engine.

    Attributes:
        name: the engine's name of the format.
        tokenizer: of the model.
    """

    name: str

    def use(self, tokenizer: Any) -> None:
        self.tokenizer = _Tokenizer(tokenizer)
        special = [token for token in tokenizer.all_special_tokens if token]
        self._ends = [token for token in special if token == tokenizer.eos_token or not ABOUT_CALLS.search(token)]
        self._added = [token for token in tokenizer.get_added_vocab() if ABOUT_CALLS.search(token)]

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        text = self._without_end(without_thoughts(text))
        try:
            content, calls, marks = self.read(text, tools)
        except Exception as error:  # a parser never raises, whatever the model wrote; the engines' own may
            return Parsed("", [MalformedCall(text, f"{self._label} raised {type(error).__name__} ({error})")])
        begins = [content.find(mark) for mark in {*marks, *self._added} if mark and mark in content]
        if begins:
            rest = content[min(begins) :]
            content, calls = content[: min(begins)], [*calls, MalformedCall(rest, f"{self._label} cannot read it")]
        elif not calls and (content.strip() != text.strip() or self.has_call(text, tools)):
            content, calls = "", [MalformedCall(text, f"{self._label} cannot read it, or the tool is unknown")]
        return Parsed(content.strip(), calls)

    @abstractmethod
    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call], set[str]]:
        """Run the engine's parser; returns the content, the calls, and the texts that begin a call."""

    def has_call(self, text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the engine sees the beginning of a call; where it cannot say, `read` returns what begins one."""
        return False

    @property
    def _label(self) -> str:
        return f"the parser {self.name}"

    def _without_end(self, text: str) -> str:
        """The text without the special tokens that end the turn."""
        while end := next((token for token in self._ends if text.endswith(token)), None):
            text = text.removesuffix(end)
        return text


class _Tokenizer:
    """A tokenizer that makes its vocabulary once: parsers have a state, so each turn has a parser of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocab: dict[str, int] | None = None

    def get_vocab(self) -> dict[str, int]:
        if self._vocab is None:
            self._vocab = dict(self._tokenizer.get_vocab())
        return self._vocab

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled and has no tokenizer yet
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
