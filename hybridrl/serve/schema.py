"""Request bodies of OpenAI's endpoints, and which parameters are used, ignored or refused."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

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
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
#: unsupported parameters, accepted at the values that have no effect
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
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

#: entries of vLLM's `sampling_params` that say how text is made of tokens
_WITHOUT_TEXT = frozenset(
    {"detokenize", "output_kind", "skip_clone", "skip_special_tokens", "spaces_between_special_tokens"}
)

TokenIds = Annotated[list[int], Field(min_length=1)]
Stop = Annotated[str, Field(max_length=256)]
Texts = Annotated[list[str], Field(min_length=1)]


#: the code of requests that do not fit the model's length or the session's
TOO_LONG = "context_length_exceeded"


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
        if self.status == 429:
            kind = "rate_limit_error"
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(str(self)), "type": kind, "param": param, "code": self.code}}


def _printable(text: str) -> str:
    """Text that UTF-8 can hold, whatever a client has sent."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def check_encodable(value: Any, name: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer takes.

    Raises:
        ApiError: names the parameter.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(
            400, f"{name}: the text cannot be encoded as UTF-8 ({error.reason}); send whole characters", param=name
        ) from error


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class SamplingRequest(BaseModel):
    """Parameters of both endpoints; null means the default."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(1, ge=1, le=1024)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)  # as engines keep it
    max_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=32)] = []
    include_stop_str_in_output: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - 1024)  # with that of the last of `n` samples
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = {}
    return_token_ids: bool = True
    session_id: str | None = Field(None, max_length=256)
    request_id: str | None = Field(None, max_length=256)

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
            check_encodable(value, name)
            if name in IGNORED or any(value == neutral for neutral in NEUTRAL.get(name, ())):
                continue
            if name == "best_of" and value == self.n:
                continue
            raise ApiError(
                400,
                f"{name}={short(value)} is not supported by this server and may change the response: remove it",
                param=name,
                code="unsupported_parameter",
            )

    @property
    def json_schema(self) -> str | None:
        """The JSON schema of the response, as JSON text; None: any text."""
        return None

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
            json_schema=self.json_schema,
        )


class ChatRequest(SamplingRequest):
    """Body of `/v1/chat/completions`, and the form that requests of the other dialects are translated into."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = {"type": "text"}
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    #: answer with thoughts apart from the text; not a parameter of clients
    _separates_thoughts: bool = PrivateAttr(False)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def forced_function(self) -> str | None:
        """The name of the function that `tool_choice` asks for."""
        choice = self.tool_choice
        if not isinstance(choice, Mapping) or choice.get("type") != "function":
            return None
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        return name if isinstance(name, str) else None

    @property
    def forces_call(self) -> bool:
        """Whether the turn has to be a tool call."""
        return self.tool_choice == "required" or self.forced_function is not None

    @property
    def json_schema(self) -> str | None:
        kind = self.response_format.get("type", "text")
        if kind == "text":
            return None
        described = self.response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        return json.dumps({"type": "object"} if kind == "json_object" else schema, ensure_ascii=False)

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def separates_thoughts(self) -> bool:
        """Whether thoughts are a part of the answer by themselves."""
        return self._separates_thoughts or self.reads_calls

    def with_thoughts_apart(self) -> "ChatRequest":
        """Answer with thoughts apart from the text, without tools too."""
        self._separates_thoughts = True
        return self

    def check_extras(self) -> None:
        super().check_extras()
        for number, tool in enumerate(self.tools):
            try:
                _check_tool(tool)
            except ValueError as error:
                raise ApiError(
                    400, f"tools: entry {number} is not supported: {error}", "tools", code="unsupported_parameter"
                ) from None
        check_encodable(self.tools, "tools")
        self._check_choice()
        self._check_format()
        last = self.messages[-1] if self.messages else {}
        if self.continue_final_message and (last.get("role") != "assistant" or last.get("tool_calls")):
            raise ApiError(
                400,
                "continue_final_message=True: the last message must be the assistant's, with text and no tool calls",
                "continue_final_message",
            )
        if not self.add_generation_prompt and not self.continue_final_message:
            raise _unsupported("add_generation_prompt=False is supported with continue_final_message=True only")
        if self.continue_final_message and self.forces_call:
            raise _unsupported(
                f"tool_choice={short(self.tool_choice)} with the beginning of an answer (continue_final_message) is "
                "not supported: leave out one of them"
            )

    def _check_choice(self) -> None:
        """Refuse a `tool_choice` that cannot be kept.

        Raises:
            ApiError: says which can.
        """
        if self.tool_choice in ("auto", "none"):
            return
        if not self.forces_call:
            raise _unsupported(
                f"tool_choice={short(self.tool_choice)} is not supported: take 'auto', 'none', 'required' or a "
                "function's name"
            )
        names = [tool["function"]["name"] for tool in self.tools]
        if not names or self.forced_function not in (None, *names):
            raise ApiError(
                400,
                f"tool_choice={short(self.tool_choice)}: tools has {', '.join(names) or 'no function'}",
                "tool_choice",
            )

    def _check_format(self) -> None:
        """Refuse a `response_format` that is none, or that cannot be kept to.

        Raises:
            ApiError: says why.
        """
        response_format = self.response_format
        if response_format.get("type", "text") == "text":
            return
        check_encodable(response_format, "response_format")
        described = response_format.get("json_schema")
        has_schema = isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping)
        if response_format.get("type") != "json_object" and not (
            response_format.get("type") == "json_schema" and has_schema
        ):
            raise _unsupported(
                f"response_format={short(response_format)} is not supported: take the type text, json_object, or "
                "json_schema with a schema"
            )
        if self.reads_calls or self.continue_final_message:
            raise _unsupported(
                "response_format with tools or continue_final_message is not supported: the whole answer would have to "
                "be of the schema. Leave out one of them, or set tool_choice='none'"
            )


def _unsupported(message: str) -> ApiError:
    """Return the error for a parameter that is refused; the message begins with its name."""
    return ApiError(400, message, param=re.split(r"\W", message, maxsplit=1)[0], code="unsupported_parameter")


def _check_tool(tool: Mapping[str, Any]) -> None:
    """Check that an entry of `tools` describes a function.

    Raises:
        ValueError: it does not; the text is a clause about the entry.
    """
    if tool.get("type", "function") != "function":
        raise ValueError(
            f"its type is {tool['type']!r}; the server runs no tools, only functions of the client are allowed"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError('it has no "function" with a "name"')
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError('"parameters" is not an object')
    if parameters and not isinstance(parameters.get("properties", {}), Mapping):
        raise ValueError('"properties" of its parameters is not an object')


class CompletionRequest(SamplingRequest):
    """Body of `/v1/completions`."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int:
        return self.max_tokens or 16

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value]


class GenerateRequest(SamplingRequest):
    """Body of `/inference/v1/generate`, as vLLM defines it: token ids, and `sampling_params` as an object.

    The entries of `sampling_params` are checked like those of the other endpoints.
    """

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = False
    output_mode: Literal["tokens"] = "tokens"
    stream: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _with_sampling(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("sampling_params"), dict):
            return data
        sampling = {name: value for name, value in data["sampling_params"].items() if value is not None}
        return data | {name: value for name, value in sampling.items() if name not in _WITHOUT_TEXT}

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class AbortRequest(BaseModel):
    """Body of `/inference/v1/abort_requests`."""

    request_ids: list[str]


class SessionSampling(BaseModel):
    """Sampling parameters of all requests of a session."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    ignore_eos: bool = False
    stop: Stop | Annotated[list[Stop], Field(max_length=32)] = []


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session.

    Attributes:
        metadata: of the client that opened it.
        sampling: parameters of requests that set none, see `SessionSampling`.
        fixed: those hold for requests that set others, too.
        max_response_tokens: most tokens after the first prompt of a conversation; None: as many as the model can have.
        match: which messages count as the same, see `conversation.MATCHERS`.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fixed: bool = False
    max_response_tokens: int | None = None
    match: str = "strict"


class OpenSession(BaseModel):
    """Body of `POST /sessions`."""

    model_config = ConfigDict(extra="forbid")

    metadata: dict[str, Any] = {}
    sampling_params: SessionSampling = Field(default_factory=lambda: SessionSampling.model_validate({}))
    fixed_sampling: bool = False
    max_response_tokens: int | None = Field(None, ge=1)
    match: Literal["strict", "loose"] = "strict"

    def settings(self) -> SessionSettings:
        """The settings of the session."""
        return SessionSettings(
            metadata=self.metadata,
            sampling=self.sampling_params.model_dump(exclude_unset=True),
            fixed=self.fixed_sampling,
            max_response_tokens=self.max_response_tokens,
            match=self.match,
        )
