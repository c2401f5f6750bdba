"""The conversations of a session's calls, with each message kept once, however many calls repeat it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.models.chat import Message
from hybridrl.serve.conversation import digest


@dataclass(frozen=True, eq=False, slots=True)
class Said:
    """A conversation: its last message, and the conversation before it."""

    message: Message
    before: "Said | None"

    @property
    def messages(self) -> list[Message]:
        """From the first message on."""
        found: list[Message] = []
        said: Said | None = self
        while said is not None:
            found.append(said.message)
            said = said.before
        return found[::-1]


class History:
    """Conversations that share their beginnings, and lists of tools that are kept once."""

    def __init__(self) -> None:
        self._said: dict[bytes, Said] = {}
        self._tools: dict[bytes, list[dict[str, Any]]] = {}

    def __len__(self) -> int:
        """Messages that are kept."""
        return len(self._said)

    def of(self, messages: Sequence[Message]) -> Said | None:
        """A conversation; None has no message."""
        said, key = None, b""
        for message in messages:
            key = digest(key, message)
            said = self._said.setdefault(key, Said(message, said))
        return said

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A list of tools."""
        listed = [dict(tool) for tool in tools]
        return self._tools.setdefault(digest(b"", listed), listed)
