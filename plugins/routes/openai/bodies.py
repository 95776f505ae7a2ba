"""The bodies of the OpenAI endpoints (openai_api.md sections 2 and 3), with the native names as aliases."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_BIAS = 100.0
ROLES = ("system", "developer", "user", "assistant")

# Accepted without effect and without a remark: they cannot change what this server answers.
WITHOUT_EFFECT = {
    "user",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "verbosity",
    "prediction",
    "moderation",
    "parallel_tool_calls",
}


def fault(message: str) -> PydanticCustomError:
    """A validation error whose text stands as written."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise fault("a number is wanted, not true or false")
    return value


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Positive = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Integer = Annotated[int, BeforeValidator(_no_bool)]
Text = Annotated[str, Field(min_length=1)]
Stops = Annotated[
    list[Text],
    BeforeValidator(_stops, json_schema_input_type=str | list[str]),
    Field(max_length=MAX_STOPS),
]


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class CommonBody(BaseModel):
    """What both endpoints take. The sampler checks `temperature`, `top_p`, `top_k` and the penalties."""

    model: str | None = Field(None, description="a label; with --strict-model-names it must be a loaded model")
    max_tokens: Positive | None = None
    temperature: Any = Field(None, description="0 to 1000; 0 is greedy")
    top_p: Any = Field(None, description="0 to 1; 0 is greedy")
    top_k: Any = Field(None, description="any integer; 0 or less: no bound")
    presence_penalty: Any = None
    frequency_penalty: Any = None
    penalty_decay: Any = None
    alpha_presence: Any = None
    alpha_frequency: Any = None
    alpha_decay: Any = None
    stop: Stops | None = Field(None, description="a text or up to 16; never part of the output")
    stop_tokens: Stops | None = Field(None, description="replaces the path's default stops")
    n: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Integer | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id (as text) -> -100 to 100")
    stream: bool = False
    stream_options: StreamOptions | None = None
    sampler: str | None = None
    chunk_size: Positive | None = None
    use_prefix_cache: bool = True

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not key.isascii() or not key.isdigit():
                raise fault(f"logit_bias: key {key[:20]!r} is not a token id")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise fault(f"logit_bias: {bias} for token {key} is outside -100 to 100")
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> CommonBody:
        if self.stream_options is not None and not self.stream:
            raise located("stream_options", "stream_options is only allowed with stream: true")
        return self


def located(field: str, message: str) -> PydanticCustomError:
    """A fault of the whole body that concerns one field; `explain` moves the name into the location."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message, "field": field})


class Message(BaseModel):
    """One message: `content` is a text, or text parts joined in order."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _check_role(cls, value: Any) -> Any:
        if value == "tool":
            raise fault("tool messages need tools, which this server does not offer; send them as user messages")
        if value not in ROLES:
            raise fault(f"unknown role {str(value)[:40]!r}; use one of {', '.join(ROLES)}")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        return value if isinstance(value, str) else join_parts(value)

    @property
    def text(self) -> str:
        assert self.content is None or isinstance(self.content, str)
        return self.content or ""


def join_parts(value: Any) -> str:
    """The text of a list of `{"type": "text", "text": ...}` parts."""
    if value is None:
        raise fault("content is null; send a text (assistant messages with tool calls are not supported)")
    if not isinstance(value, list):
        raise fault("content must be a text or a list of text parts")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise fault(f"unsupported content part type {str(kind)[:40]!r}; only 'text' parts are supported")
    if not isinstance(part.get("text"), str):
        raise fault("a text part needs a string 'text'")
    text: str = part["text"]
    return text


class ChatBody(CommonBody):
    messages: list[Message] | None = None
    system: str | None = Field(None, description="a system text before those of the messages")
    max_completion_tokens: Positive | None = Field(None, description="wins over max_tokens")
    logprobs: bool = False
    top_logprobs: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_think: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise located("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        return self

    @property
    def think(self) -> bool:
        """Whether the model thinks first: an explicit bool wins over the effort."""
        if self.enable_think is not None:
            return self.enable_think
        asked = (self.chat_template_kwargs or {}).get("enable_thinking")
        if isinstance(asked, bool):
            return asked
        return self.reasoning_effort not in (None, "none")


class CompletionBody(CommonBody):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="a text, token ids, or a list of either")
    suffix: str | None = Field(None, description="fill in the middle: the text after the gap")
    echo: bool = False
    logprobs: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=5)] | None = None
    best_of: Integer | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise fault("prompt must be a text, a list of texts, a list of token ids, or a list of those")
        return value

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise located("best_of", f"best_of must equal n ({self.n}); this server returns what it generates")
        return self
