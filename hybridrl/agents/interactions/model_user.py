"""A user whom a language model plays, behind an OpenAI-compatible API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from hybridrl.agents.interactions.interaction import BaseInteraction, register_interaction
from hybridrl.config.convert import build
from hybridrl.errors import RolloutError
from hybridrl.scored import Reason, UnscoredError
from hybridrl.utils.chat_client import ChatClient
from hybridrl.utils.json_client import ServiceError

_SPEAKERS = {"user": "You", "assistant": "Assistant"}
TEMPLATE = """You play a person who wants help from an assistant, in a conversation by text messages.

What you want, which the assistant cannot see:
{{ task }}

The conversation so far:
{{ conversation }}

Write your next message to the assistant, and nothing else. Behave like a real person: write briefly and casually, tell
only a part of what you know at a time, and tell the rest where the assistant asks for it. Do not solve the task
yourself. If you have what you want, or if the assistant cannot help you, write {{ end }} alone."""


@dataclass
class ModelUserConfig:
    """The entry `config` of a simulated user with `class_name: model`.

    Attributes:
        url: of the API, such as `http://HOST:8000/v1`.
        model: its name there; None: the only one.
        token_env: environment variable with the API key, where it is set.
        template: file with the question, a Jinja template of `task`, `conversation`, `messages`, `end` and the other
            entries of the row's `interaction_kwargs`; None: `TEMPLATE`.
        end: the conversation is over when the user says this.
        remove: texts that are removed from what the user says.
        temperature, max_tokens: of the user's messages.
        extra_body: further fields of each request.
        attempts: how often a request that fails is sent.
        timeout_s: seconds that a message may take.
    """

    url: str
    model: str | None = None
    token_env: str | None = "OPENAI_API_KEY"
    template: str | None = None
    end: str = "[END]"
    remove: list[str] = field(default_factory=list)
    temperature: float = 1.0
    max_tokens: int = 512
    extra_body: dict[str, Any] = field(default_factory=dict)
    attempts: int = 4
    timeout_s: float = 60.0


@register_interaction("model")
class ModelUser(BaseInteraction):
    """Has a language model write what a user would say next.

    The row's `interaction_kwargs` has `task`, what the user wants. Each message is one request that holds the task and
    the conversation. A model that does not answer, or answers nothing, leaves the session without a score (`infra`,
    `timeout`). Messages have no scores.

    Raises:
        RolloutError: a setting is wrong, or the endpoint does not have the model.
    """

    config_names = tuple(ModelUserConfig.__dataclass_fields__)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        faults: dict[str, str] = {}
        settings = {name: value for name, value in config.items() if name != "name"}
        if "url" not in settings:
            raise RolloutError("config.url must be set: an address such as http://HOST:8000/v1")
        setting_names = set(ModelUserConfig.__dataclass_fields__)
        if unknown := sorted(set(settings) - setting_names):
            raise RolloutError(f"config.{unknown[0]}: unknown setting; choose from {', '.join(sorted(setting_names))}")
        self._own: ModelUserConfig = build(ModelUserConfig, settings, faults, {}, "config.")
        if faults:
            raise RolloutError("; ".join(faults.values()))
        own = self._own
        self._client = ChatClient.of(
            own.url, own.model, own.token_env, own.attempts, own.timeout_s, "config", RolloutError
        )
        self._template = _template(own.template)

    async def start_interaction(self, instance_id: str | None = None, task: str | None = None, **kwargs: Any) -> str:
        """Check that the row says what the user wants."""
        if not task:
            raise RolloutError("the row has no interaction_kwargs.task, which the interaction model needs")
        return await super().start_interaction(instance_id)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Write the user's next message."""
        own = self._own
        try:
            values = {**kwargs, "messages": messages, "conversation": conversation_of(messages), "end": own.end}
            question = self._template.render(**values)
        except jinja2.TemplateError as error:
            raise UnscoredError(Reason.GRADING, f"the template of {self.name} failed: {error}") from error
        try:  # the session has a thread of its own, so that waiting in it keeps no other session waiting
            reply = self._client.ask(
                [{"role": "user", "content": question}],
                own.timeout_s,
                **{"temperature": own.temperature, "max_tokens": own.max_tokens, **own.extra_body},
            ).text
        except ServiceError as error:
            raise UnscoredError(error.reason, f"{self.name} gave no answer: {error}") from error
        if own.end in reply:
            return True, "", None, {}
        for text in own.remove:
            reply = reply.replace(text, "")
        if not reply.strip():
            raise UnscoredError(Reason.INFRA, f"{self.name} said nothing")
        return False, reply.strip(), None, {}


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as text, from the user's side; instructions to the assistant and tools are left out."""
    lines = []
    for message in messages:
        if (speaker := _SPEAKERS.get(str(message["role"]))) is not None:
            content = message.get("content") or ""
            parts = [{"text": content}] if isinstance(content, str) else content
            lines.append(f"{speaker}: {''.join(str(part.get('text', '')) for part in parts).strip()}")
    return "\n".join(lines)


def _template(path: str | None) -> jinja2.Template:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    try:
        text = TEMPLATE if path is None else Path(path).expanduser().read_text(encoding="utf-8")
        return environment.from_string(text)
    except OSError as error:
        raise RolloutError(f"config.template={path}: {error.strerror}") from error
    except jinja2.TemplateError as error:
        raise RolloutError(f"config.template={path}: {error}") from error
