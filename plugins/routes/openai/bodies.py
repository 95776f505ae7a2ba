"""The bodies of the OpenAI endpoints (openai_api.md sections 2 and 3), with the native names as aliases."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_BIAS = 100.0
MAX_ID_DIGITS = 9
ROLES = ("system", "developer", "user", "assistant")


def fault(message: str) -> PydanticCustomError:
    """A validation error whose text stands as written."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def located(field: str, message: str) -> PydanticCustomError:
    """A fault of the whole body that concerns one field; `validate` moves the name into the location."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message, "field": field})


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise fault("a number is wanted, not true or false")
    return value


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as texts or token ids, as a list of texts or of lists of ids."""
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if isinstance(prompts, list) and prompts:
        if all(isinstance(prompt, str) for prompt in prompts):
            return prompts
        if all(_are_ids(prompt) for prompt in prompts):
            return prompts
    raise fault("prompt must be a text, a list of texts, a list of token ids, or a list of those, none of them empty")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


Positive = Annotated[int, Field(ge=1), BeforeValidator(_no_bool)]
Integer = Annotated[int, BeforeValidator(_no_bool)]
Text = Annotated[str, Field(min_length=1)]
Stops = Annotated[
    list[Text],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stops, json_schema_input_type=Text | Annotated[list[Text], Field(max_length=MAX_STOPS)]),
]
Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


def _sampling(description: str | None = None, kind: str = "number", **bounds: float) -> Any:
    """A field that the sampler checks; the schema is for /openapi.json."""
    schema: dict[str, Any] = {"anyOf": [{"type": kind, **bounds}, {"type": "null"}]}
    return Field(None, description=description, json_schema_extra=schema)


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class CommonBody(BaseModel):
    """What both endpoints take. The sampler checks `temperature`, `top_p`, `top_k` and the penalties."""

    model: str | None = Field(None, description="a label; with --strict-model-names it must be a loaded model")
    max_tokens: Positive | None = None
    temperature: Any = _sampling("0 to 1000; 0 is greedy", minimum=0, maximum=1000)
    top_p: Any = _sampling("0 to 1; 0 is greedy", minimum=0, maximum=1)
    top_k: Any = _sampling("any integer; 0 or less: no bound", "integer")
    presence_penalty: Any = _sampling("wins over alpha_presence")
    frequency_penalty: Any = _sampling("wins over alpha_frequency")
    penalty_decay: Any = _sampling("wins over alpha_decay", minimum=0, maximum=1)
    alpha_presence: Any = _sampling()
    alpha_frequency: Any = _sampling()
    alpha_decay: Any = _sampling(minimum=0, maximum=1)
    stop: Stops | None = Field(None, description="a text or up to 16; never part of the output")
    stop_tokens: Stops | None = Field(None, description="replaces the path's default stops")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), BeforeValidator(_no_bool)] = 1
    seed: Integer | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id (as text) -> -100 to 100")
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="only with stream: true")
    sampler: str | None = Field(None, description="a registered sampler's name; the path has a default")
    chunk_size: Positive | None = Field(None, description="tokens gathered before text is handed on")
    use_prefix_cache: bool = Field(True, description="false: read the whole prompt, and keep nothing of it")
    state: Text | None = Field(None, description="a state-tuning file in --state-dir to begin from")

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
                raise fault(f"logit_bias: key {key[:20]!r} is not a token id")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise fault(f"logit_bias: {bias} for token {key} is outside -100 to 100")
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> CommonBody:
        if self.stream_options is not None and not self.stream:
            raise located("stream_options", "stream_options is only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Message(BaseModel):
    """One message: `content` is a text, or text parts joined in order."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    tool_calls: Any = None

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

    @field_validator("tool_calls")
    @classmethod
    def _check_tool_calls(cls, value: Any) -> Any:
        if value:
            raise fault("tool calls are not supported by this server; send what they gave as text")
        return value

    @property
    def text(self) -> str:
        assert isinstance(self.content, str)  # parts have been joined
        return self.content


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


class TemplateOptions(BaseModel):
    enable_thinking: bool | None = None


class ChatBody(CommonBody):
    """What both chat paths take."""

    messages: list[Message] = []
    system: str | None = Field(None, description="a system text before those of the messages")
    max_completion_tokens: Positive | None = Field(None, description="wins over max_tokens")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), BeforeValidator(_no_bool)] | None = Field(
        None, description="only with logprobs: true"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_think: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise located("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        return self

    def thinking(self) -> dict[str, bool]:
        """Whether the model thinks first, by each field that says so; the first one decides."""
        options, effort = self.chat_template_kwargs, self.reasoning_effort
        said = {
            "enable_think": self.enable_think,
            "chat_template_kwargs": options.enable_thinking if options else None,
            "reasoning_effort": None if effort is None else effort != "none",
        }
        return {field: think for field, think in said.items() if think is not None}

    @property
    def think(self) -> bool:
        return next(iter(self.thinking().values()), False)


class SharedPathBody(ChatBody):
    """A chat on the path that native batches share, which have no messages."""

    messages: list[Message] = Field(min_length=1)


class OwnPathBody(ChatBody):
    """A chat on /openai/v1, where `system` or `contents` may stand for the messages."""

    contents: list[Text] = Field([], description="without messages: the first one is the user's text")


class CompletionBody(CommonBody):
    prompt: Prompts = Field(description="a text, token ids, or a list of either")
    suffix: str | None = Field(None, description="fill in the middle: the text after the gap")
    echo: bool = Field(False, description="begin the text with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=5), BeforeValidator(_no_bool)] | None = None
    best_of: Integer | None = Field(None, description="only the value of n")

    @model_validator(mode="after")
    def _check_together(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise located("best_of", f"best_of must equal n ({self.n}); this server returns what it generates")
        if self.suffix is not None and self.echo and self.logprobs is not None:
            raise located("echo", "echo with logprobs is not offered together with suffix; leave one of them out")
        if self.suffix is not None and not isinstance(self.prompt[0], str):
            raise located("suffix", "suffix: fill in the middle needs prompts as text, not as token ids")
        return self
