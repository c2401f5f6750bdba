"""Sessions of the server: which conversations they hold, as messages and as exact tokens.

A session keeps its calls as a `TokenTree`. A request whose messages begin with those of an earlier call, its answer
included, continues that call's tokens: only the messages after it are rendered, by difference (`Turns.following`). Any
other request is rendered as a whole, and begins a branch.
"""

import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hybridrl.chat.turns import Turns
from hybridrl.errors import RolloutError
from hybridrl.models.chat import Message
from hybridrl.rollout.token_tree import TokenTree, Turn
from hybridrl.rollout.trace import training_trace
from hybridrl.serve.client_images import ClientImage, Prompt, pictures_in, placed, with_patches
from hybridrl.serve.conversation import MATCHERS, inner_messages, keys_of
from hybridrl.serve.conversation_history import ConversationNode, History
from hybridrl.serve.replies import ReplyChoice, calls_in
from hybridrl.serve.schema import TOO_LONG, ApiError, ChatRequest, SessionSettings

ID_PREFIX = "session-"
_MAX_STORED_ANSWERS = 16  # of a session, for clients that ask again because an answer has not arrived


@dataclass(frozen=True, slots=True)
class _CallRecord:
    """A call as the client sees it."""

    conversation: ConversationNode | None
    tools: list[dict[str, Any]]
    answer: Message
    finish_reason: str

    @property
    def messages(self) -> list[Message]:
        return [] if self.conversation is None else self.conversation.messages

    def as_trace(self) -> dict[str, Any]:
        return {
            "request": {"messages": self.messages, "tools": self.tools},
            "response": {"message": self.answer, "finish_reason": self.finish_reason},
        }


class ServerSession:
    """The calls of one agent.

    Args:
        id: unguessable: who has it may use the session.
        settings: what it was opened with.
    """

    def __init__(self, id: str, settings: SessionSettings) -> None:
        self.id = id
        self.settings = settings
        self.tree = TokenTree()
        self.pictures: dict[str, ClientImage] = {}  # of its conversations, by digest
        self.created = time.time()
        self.used = time.monotonic()
        self.in_flight = 0
        self.too_long = 0
        self.cut = False  # the last request did not fit
        self._matcher = MATCHERS[settings.match]
        self.history = History()
        self._records: dict[int, _CallRecord] = {}
        self._ends: dict[bytes, tuple[Turn, list[Any]]] = {}  # key of a conversation -> its last call, tool calls in it
        self._answers: OrderedDict[str, list[ReplyChoice]] = OrderedDict()
        self._stored: dict[str, ConversationNode | None] = {}  # conversations by the id of their last answer
        self._calls = 0

    def new_call_id(self) -> str:
        """The id of a tool call: nine letters and digits, which some templates insist on."""
        self._calls += 1
        return f"call{self._calls:05d}"

    def prompt(
        self,
        turns: Turns,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        pictures: Mapping[str, ClientImage],
    ) -> Prompt | None:
        """A conversation that continues an earlier call, as tokens and images; None if it continues none.

        Args:
            pictures: the images of the messages by digest.
        """
        keys = keys_of(messages, tools, self._matcher)
        for count in range(len(messages) - 1, 0, -1):
            end = self._ends.get(keys[count])
            rest = messages[count:]
            if end is None or rest[0]["role"] == "assistant" or rest[-1]["role"] == "assistant":
                continue
            turn, calls = end
            before = turn.token_ids
            try:
                more = turns.following(before[-1], with_patches(rest, pictures), tools or None, calls)
                return placed([*before, *more], pictures_in(messages, pictures), turns.image_config, turn)
            except RolloutError:  # the template cannot write these messages after that turn
                continue
        return None

    def add(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt: Prompt, reply: ReplyChoice
    ) -> None:
        """Note an answer of the model to a conversation."""
        turn = self.tree.add(prompt.ids, reply.completion, () if prompt.images is None else prompt.images.in_tokens())
        if prompt.images is not None:
            for picture in prompt.images.pictures:
                self.pictures.setdefault(picture.digest, picture)
        answer = inner_messages([reply.whole_message()])
        key = keys_of([*messages, *answer], tools, self._matcher)[-1]
        self._ends[key] = turn, calls_in(answer[0])
        self._records[turn.index] = _CallRecord(
            self.history.of(messages), self.history.tools(tools), reply.whole_message(), reply.finish_reason
        )

    @contextmanager
    def noting_length(self) -> Iterator[None]:
        """Context in which a request is answered or refused; records whether it was too long."""
        self.cut = False
        try:
            yield
        except ApiError as error:
            if error.code == TOO_LONG:
                self.cut = True
                self.too_long += 1
            raise

    def room(self, prompt: Prompt) -> int | None:
        """Most tokens that an answer may have by the session's own limit; None without one."""
        limit = self.settings.max_response_tokens
        images = () if prompt.images is None else prompt.images.in_tokens()
        return None if limit is None else limit - self.tree.generated_after(prompt.ids, images)

    def with_defaults(self, body: Any) -> Any:
        """A request with the session's sampling parameters."""
        settings = self.settings
        defaults = {
            name: value
            for name, value in settings.sampling.items()
            if settings.fixed or name not in body.model_fields_set
        }
        if defaults.get("stop"):  # the agent's own are a part of how it works
            defaults["stop"] = list(dict.fromkeys([*_listed(defaults["stop"]), *body.stops]))
        elif settings.fixed:
            defaults.pop("stop", None)
        return body.model_copy(update=defaults) if defaults else body

    # ------------------------------------------------------------------ requests that come again

    def remember(self, fingerprint: str, replies: list[ReplyChoice]) -> None:
        """Store the answer to a request, for a client that does not get it and retries."""
        self._answers[fingerprint] = replies
        self._answers.move_to_end(fingerprint)
        while len(self._answers) > _MAX_STORED_ANSWERS:
            self._answers.popitem(last=False)

    def remembered(self, fingerprint: str) -> list[ReplyChoice] | None:
        """The stored answer to an equal request; None if there is none."""
        return self._answers.get(fingerprint)

    def store(self, id: str, messages: list[Message]) -> None:
        """Keep a conversation under the id of its last answer."""
        self._stored[id] = self.history.of(messages)

    def stored(self, id: str) -> list[Message]:
        """The conversation that ends with an answer.

        Raises:
            ApiError: the session has no such answer.
        """
        if id not in self._stored:
            raise ApiError(404, f"previous_response_id: this session has no response {id!r}", "previous_response_id")
        conversation = self._stored[id]
        return [] if conversation is None else conversation.messages

    # ------------------------------------------------------------------ description

    def described(self) -> dict[str, Any]:
        """The answer to `GET /sessions/ID`."""
        turns = self.tree.turns
        return {
            "id": self.id,
            "object": "session",
            "created": int(self.created),
            "metadata": dict(self.settings.metadata),
            "turns": len(turns),
            "branches": sum(not turn.children for turn in turns),
            "generated_tokens": sum(len(turn.completion.token_ids) for turn in turns),
            "in_flight": self.in_flight,
            "too_long": self.too_long,
            "cut": self.cut,
        }

    def messages(self) -> list[Message]:
        """The conversation of the last call, with its answer."""
        if not self._records:
            return []
        last = self._records[max(self._records)]
        return [*last.messages, last.answer]

    def trace(self) -> dict[str, Any]:
        """The calls as OpenEnv's `TrainingTrace`."""
        return training_trace(self.tree, {index: record.as_trace() for index, record in self._records.items()})


class SessionTable:
    """The sessions of a server.

    Args:
        limit: sessions that are open at once.
        idle_s: seconds after which a session that nobody uses is closed.
    """

    def __init__(self, limit: int, idle_s: float) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._open: dict[str, ServerSession] = {}

    def open(self, settings: SessionSettings) -> ServerSession:
        """A new session.

        Raises:
            ApiError: there are too many.
        """
        if len(self._open) >= self._limit:
            self._close_idle()
        if len(self._open) >= self._limit:
            raise ApiError(
                429,
                f"{len(self._open)} sessions are open; this server keeps {self._limit} "
                "(actor_rollout_ref.rollout.server.max_sessions). Close some with DELETE /sessions/ID",
                code="rate_limit_exceeded",
            )
        session = ServerSession(ID_PREFIX + secrets.token_urlsafe(24), settings)
        self._open[session.id] = session
        return session

    def is_open(self, id: str) -> bool:
        """Whether a session is open."""
        return id in self._open

    def get(self, id: str) -> ServerSession:
        """A session that is open.

        Raises:
            ApiError: there is none of this id.
        """
        session = self._open.get(id)
        if session is None:
            raise ApiError(404, "there is no such session, or it was closed", code="session_not_found")
        session.used = time.monotonic()
        return session

    def close(self, id: str) -> ServerSession:
        """Forget a session.

        Raises:
            ApiError: there is none of this id.
        """
        session = self.get(id)
        del self._open[id]
        return session

    def _close_idle(self) -> None:
        before = time.monotonic() - self._idle_s
        for id in [id for id, session in self._open.items() if session.used < before and not session.in_flight]:
            del self._open[id]


def _listed(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop)


def fingerprint(dialect: str, body: ChatRequest) -> str:
    """Return a key that is the same for equal requests."""
    text = json.dumps(body.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(f"{dialect} {text}".encode("utf-8", "surrogatepass")).hexdigest()
