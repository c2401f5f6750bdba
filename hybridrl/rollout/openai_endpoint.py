"""`rollout.name=openai`: responses from any endpoint with the OpenAI chat API. It takes no weights."""

import asyncio
import importlib.util
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hybridrl.config import OpenAIConfig
from hybridrl.errors import RolloutError
from hybridrl.rollout.inference_engine import register_inference_engine
from hybridrl.rollout.sampling import SamplingParams

_KEY = "actor_rollout_ref.rollout.openai"


@dataclass(frozen=True)
class EndpointResponse:
    """One response of an endpoint; values that it does not report are None.

    Attributes:
        text: the message's content.
        finish_reason: as the endpoint reports it; usually "stop" or "length".
        prompt_tokens, tokens: counted by the endpoint.
        log_probs: of each token, if they were requested.
        token_ids: where the endpoint adds them (hybridrl's own server, vLLM with `return_token_ids`).
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    tokens: int | None
    log_probs: list[float] | None = None
    token_ids: list[int] | None = None


@register_inference_engine(
    "openai", packages=("openai",), takes_weights=False, serves=False, install="bash scripts/install.sh auto openai"
)
class Endpoint:
    """A client with an event loop in its own thread; at most `max_concurrency` requests are in flight.

    Args:
        settings: `rollout.openai`.

    Raises:
        RolloutError: the package `openai` is missing, the key's variable is not set, or (where `model` is null) the
            endpoint cannot list its models or does not have exactly one.
    """

    def __init__(self, settings: OpenAIConfig) -> None:
        if importlib.util.find_spec("openai") is None:
            raise RolloutError(
                "actor_rollout_ref.rollout.name=openai needs the package openai, which is not installed: "
                "bash scripts/install.sh auto openai"
            )
        import openai

        self.settings = settings
        self._limit = asyncio.Semaphore(settings.max_concurrency)
        self._client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=_api_key(settings),
            timeout=settings.timeout_s,
            max_retries=settings.max_retries,
        )
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-endpoint", daemon=True)
        self._thread.start()
        try:
            self.model = settings.model or self._only_model()
        except BaseException:
            self.close()
            raise

    def chat(
        self, messages: Sequence[dict[str, Any]], sampling: SamplingParams, log_probs: bool = False
    ) -> "Future[EndpointResponse]":
        """Ask for one response.

        A 429, a 5xx, a timeout and a broken connection are retried up to `max_retries` times, with growing waits (or as
        long as `Retry-After` asks). The future raises `RolloutError` with the endpoint's message.
        """
        return asyncio.run_coroutine_threadsafe(self._chat(messages, sampling, log_probs), self._loop)

    async def _chat(
        self, messages: Sequence[dict[str, Any]], sampling: SamplingParams, log_probs: bool
    ) -> EndpointResponse:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._limit:
                return _reply(await self._ask(self._body(messages, sampling, log_probs)), log_probs)
        finally:
            self._tasks.discard(task)

    def _body(self, messages: Sequence[dict[str, Any]], sampling: SamplingParams, log_probs: bool) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": sampling.temperature if sampling.do_sample else 0,
            settings.max_tokens_name: sampling.max_new_tokens,
        }
        beyond: dict[str, Any] = {}  # parameters that OpenAI's own API lacks
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.do_sample and sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if log_probs:
            body["logprobs"] = True
        if sampling.top_k != -1:
            beyond["top_k"] = sampling.top_k
        if sampling.ignore_eos:
            beyond["ignore_eos"] = True
        return body | {"extra_body": beyond | dict(settings.extra_body)}

    async def _ask(self, body: dict[str, Any]) -> Any:
        import openai

        where, settings = f"{self.settings.base_url} (model {self.model})", self.settings
        try:
            return await self._client.chat.completions.create(**body)
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            source = settings.api_key_env or "none was sent; name its variable"
            raise RolloutError(f"{where} refuses the API key ({_KEY}.api_key_env: {source}): {error}") from error
        except openai.NotFoundError as error:
            raise RolloutError(f"{where}: {error}. Set {_KEY}.model and {_KEY}.base_url") from error
        except openai.APITimeoutError as error:
            raise RolloutError(
                f"{where}: no answer within {settings.timeout_s:g} s, {settings.max_retries + 1} times; raise "
                f"{_KEY}.timeout_s or lower {_KEY}.max_concurrency"
            ) from error
        except openai.APIConnectionError as error:
            raise RolloutError(
                f"{where}: cannot be reached, tried {settings.max_retries + 1} times: {error.__cause__ or error}"
            ) from error
        except openai.APIStatusError as error:
            again = f", tried {settings.max_retries + 1} times" if error.status_code in (408, 409, 429) else ""
            again = again or (f", tried {settings.max_retries + 1} times" if error.status_code >= 500 else "")
            raise RolloutError(f"{where} refuses a request{again}: {error}") from error

    def _only_model(self) -> str:
        import openai

        async def names() -> list[str]:
            return [model.id async for model in self._client.models.list()]

        try:
            model_ids = asyncio.run_coroutine_threadsafe(names(), self._loop).result()
        except openai.OpenAIError as error:
            raise RolloutError(
                f"{_KEY}.base_url={self.settings.base_url}: its models cannot be listed: {error.__cause__ or error}. "
                f"Is the address right, and the key? Where an endpoint has no such list, set {_KEY}.model"
            ) from error
        if len(model_ids) != 1:
            listed = ", ".join(model_ids[:20]) or "none"
            raise RolloutError(f"{_KEY}.model is not set, and {self.settings.base_url} has {len(model_ids)}: {listed}")
        return model_ids[0]

    def close(self) -> None:
        """Cancel requests in flight, and end the thread."""

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.close()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)


def _api_key(settings: OpenAIConfig) -> str:
    if settings.api_key_env is None:
        return "none"  # the client refuses an empty key
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise RolloutError(
            f"{_KEY}.api_key_env={settings.api_key_env}: the environment variable is not set; export the key there"
        )
    return key


def _reply(answer: Any, log_probs: bool) -> EndpointResponse:
    if not getattr(answer, "choices", None):
        raise RolloutError(f"the endpoint answered without a choice: {str(answer)[:500]}")
    choice, usage = answer.choices[0], answer.usage
    content = choice.logprobs.content if log_probs and choice.logprobs else None
    if log_probs and content is None:
        raise RolloutError("data.log_probs=True, and the endpoint returned no log-probabilities; set it to False")
    return EndpointResponse(
        text=choice.message.content or "",
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens if usage else None,
        tokens=usage.completion_tokens if usage else None,
        log_probs=None if content is None else [entry.logprob for entry in content],
        token_ids=getattr(choice, "token_ids", None),
    )
