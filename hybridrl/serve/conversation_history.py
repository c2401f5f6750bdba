"""The conversations of a session's calls, with each message kept once, however many calls repeat it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.models.chat import Message
from hybridrl.serve.conversation import digest


@dataclass(frozen=True, eq=False, slots=True)
class ConversationNode:
    """A conversation: its last message, and the conversation before it."""

    message: Message
    before: "ConversationNode | None"

    @property
    def messages(self) -> list[Message]:
        """All messages, the first one first."""
        newest_first: list[Message] = []
        conversation: ConversationNode | None = self
        while conversation is not None:
            newest_first.append(conversation.message)
            conversation = conversation.before
        return newest_first[::-1]


class History:
    """Conversations that share their beginnings, and lists of tools that are kept once."""

    def __init__(self) -> None:
        self._conversations: dict[bytes, ConversationNode] = {}
        self._tools: dict[bytes, list[dict[str, Any]]] = {}

    def __len__(self) -> int:
        """Number of stored messages."""
        return len(self._conversations)

    def of(self, messages: Sequence[Message]) -> ConversationNode | None:
        """A conversation; None has no message."""
        conversation, key = None, b""
        for message in messages:
            key = digest(key, message)
            conversation = self._conversations.setdefault(key, ConversationNode(message, conversation))
        return conversation

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A list of tools."""
        listed = [dict(tool) for tool in tools]
        return self._tools.setdefault(digest(b"", listed), listed)
