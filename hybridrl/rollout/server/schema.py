"""Request bodies of the two endpoints, and which parameters are used, ignored or refused."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridrl.rollout.sampling import SamplingParams

#: parameters that do not change the response
IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
#: unsupported parameters, accepted at the values that have no effect
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
}

TokenIds = Annotated[list[int], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]


class ApiError(Exception):
    """An error in OpenAI's format.

    Args:
        status: HTTP status.
        message: what is wrong and what to change.
        param: the parameter at fault.
        code: OpenAI's short name of the error.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class SamplingRequest(BaseModel):
    """Parameters of both endpoints; null means the default."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(1, ge=1, le=1024)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)  # as engines keep it
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] = []
    include_stop_str_in_output: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - 1024)  # with that of the last of `n` samples
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = {}
    return_token_ids: bool = True
    session_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text)

    def check_extras(self) -> None:
        """Refuse parameters that are not declared and would change the response.

        Raises:
            ApiError: names the parameter.
        """
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or any(value == neutral for neutral in NEUTRAL.get(name, ())):
                continue
            if name == "best_of" and value == self.n:
                continue
            raise ApiError(
                400,
                f"{name}={value!r} is not supported by this server and may change the response: remove it",
                param=name,
                code="unsupported_parameter",
            )

    def sampling(self, sample: int, max_new_tokens: int) -> SamplingParams:
        """The settings of one of the `n` samples; `temperature=0` is greedy, sample i draws with `seed + i`."""
        return SamplingParams(
            do_sample=self.temperature > 0,
            temperature=self.temperature if self.temperature > 0 else 1.0,
            top_p=self.top_p,
            top_k=-1 if self.top_k == 0 else self.top_k,
            max_new_tokens=max_new_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stops,
            seed=None if self.seed is None else self.seed + sample,
        )


class ChatRequest(SamplingRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingRequest):
    """Body of `/v1/completions`."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True

    @property
    def limit(self) -> int:
        return self.max_tokens or 16

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value]
