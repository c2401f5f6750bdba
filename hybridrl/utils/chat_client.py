"""Questions to a language model behind an OpenAI-compatible API. Light: for the processes of reward functions."""

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import UserError
from hybridrl.utils.json_client import JsonClient, is_address

_CHECK_S = 30.0


@dataclass(frozen=True)
class ChatAnswer:
    """The answer of a model.

    Attributes:
        text: "" where it says nothing.
        is_cut: it ended because it may not be longer, and not by itself.
    """

    text: str
    is_cut: bool


@dataclass(frozen=True)
class ChatClient:
    """Asks one model.

    Attributes:
        client: sends the requests.
        model: its name at the endpoint.
    """

    client: JsonClient
    model: str

    @classmethod
    def of(
        cls,
        url: str,
        model: str | None,
        token_env: str | None,
        attempts: int,
        patience_s: float,
        where: str,
        error: type[UserError],
    ) -> "ChatClient":
        """The client of an endpoint, which has to have the model.

        Args:
            url: such as `http://HOST:8000/v1`.
            model: its name there; None: the only one.
            token_env: environment variable with the API key, where it is set; None: no key.
            attempts: see `JsonClient`.
            patience_s: see `JsonClient`.
            where: the group of the settings `url` and `model`, for messages.
            error: of what is wrong with them.
        """
        if not is_address(url):
            raise error(f"{where}.url={url}: give an address such as http://HOST:8000/v1")
        token, base = os.environ.get(token_env) if token_env else None, url.rstrip("/")
        name = _model_of(base, token, model, where, error)
        return cls(JsonClient(f"{base}/chat/completions", token, attempts, patience_s=patience_s), name)

    def ask(self, messages: Sequence[Mapping[str, Any]], timeout_s: float, **fields: Any) -> ChatAnswer:
        """Ask the model.

        Args:
            messages: the conversation.
            timeout_s: seconds that an answer may take.
            fields: further fields of the request.

        Raises:
            ServiceError: there is no answer.
        """
        body = {"model": self.model, "messages": list(messages), **fields}
        answer = self.client.post(body, timeout_s, _fault)
        return ChatAnswer(_text(answer) or "", answer["choices"][0].get("finish_reason") == "length")


def _fault(answer: Mapping[str, Any]) -> str | None:
    return None if _text(answer) is not None else f"an answer without choices: {str(answer)[:200]}"


def _text(answer: Mapping[str, Any]) -> str | None:
    """The text of an answer, "" where it has none; None where the answer is none of this API."""
    try:
        return str(answer["choices"][0]["message"].get("content") or "")
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def _model_of(base: str, token: str | None, model: str | None, where: str, error: type[UserError]) -> str:
    """The name of the model at the endpoint, which has to have it."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{base}/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_CHECK_S) as reply:
            models = [str(entry["id"]) for entry in json.load(reply)["data"]]
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise error(f"{where}.url={base}: the endpoint does not list its models: {failure}") from None
    if (model is None and len(models) != 1) or (model is not None and model not in models):
        raise error(f"{where}.model={model}: the endpoint {base} has {', '.join(models) or 'no models'}; set it to one")
    return model or models[0]
