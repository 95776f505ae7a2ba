"""From an OpenAI body to sampling parameters, and the fields this server refuses rather than ignores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rwkv_lightning.core.errors import InvalidField, MissingField, UnsupportedField
from rwkv_lightning.core.generation import option_names, sampling_params
from rwkv_lightning.core.http import Call, ignored_fields
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import SamplingParams
from rwkv_lightning.plugins.routes.defaults import PathDefaults
from rwkv_lightning.plugins.routes.openai.bodies import WITHOUT_EFFECT, ChatBody, CommonBody, CompletionBody, Message

# The native sampling fields by the names that OpenAI's clients use, the winning name first.
ALIASES = {
    "alpha_presence": ("presence_penalty", "alpha_presence"),
    "alpha_frequency": ("frequency_penalty", "alpha_frequency"),
    "alpha_decay": ("penalty_decay", "alpha_decay"),
}
UNSUPPORTED = ("functions", "function_call", "audio", "web_search_options")
HANDLED = {"response_format", "tools", "tool_choice", "modalities", *UNSUPPORTED}


def messages_of(body: ChatBody) -> list[Message]:
    """The messages. Raises MissingField when there are none and no system text stands in for them."""
    if not body.messages:
        raise MissingField("messages: a non-empty list of messages is required", param="messages")
    return body.messages


def first_content(body: Mapping[str, Any]) -> list[Message]:
    """`contents[0]` as the user's message, none when there are no contents."""
    contents = body.get("contents")
    if contents in (None, []):
        return []
    if not isinstance(contents, list) or not isinstance(contents[0], str):
        raise InvalidField("contents: a list of texts is wanted", param="contents")
    return [Message(role="user", content=contents[0])]


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedField for what would change the answer and is not built; never ignores it."""
    for name in UNSUPPORTED:
        if body.get(name) is not None:
            raise UnsupportedField(f"{name} is not supported by this server; leave it out", param=name)
    if "audio" in (body.get("modalities") or ()):
        raise UnsupportedField("modalities: this server answers with text only", param="modalities")
    _refuse_tools(body)
    _refuse_formats(body.get("response_format"))


def _refuse_tools(body: Mapping[str, Any]) -> None:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if tools and choice != "none":
        raise UnsupportedField("tools are not supported by this server; leave them out", param="tools")
    if choice not in (None, "none", "auto"):
        raise UnsupportedField("tool_choice asks for a tool, and this server supports none", param="tool_choice")


def _refuse_formats(response_format: Any) -> None:
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind in ("json_object", "json_schema"):
        raise UnsupportedField(
            f"response_format {kind} is not supported by this server; only text is", param="response_format"
        )
    if kind != "text":
        raise InvalidField("response_format: an object with type 'text' is wanted", param="response_format")


def pick_model(call: Call, body: CommonBody) -> LoadedModel:
    """The model that answers: with --strict-model-names only one of that name. Raises ModelNotFound."""
    models = call.context.models
    if body.model is not None and call.context.settings.strict_model_names:
        return models.get(body.model)
    return models.default


def chat_params(
    call: Call, body: ChatBody, model: LoadedModel, path: PathDefaults, top_logprobs: int | None
) -> SamplingParams:
    """A chat's `stop` is added to the stops that end a turn."""
    turn_ends = path.stop if body.stop_tokens is None else body.stop_tokens
    stop = (*turn_ends, *(body.stop or ()))
    name, limit = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        name, limit = "max_completion_tokens", body.max_completion_tokens
    return _params(call, body, model, path, stop, limit, name, top_logprobs)


def completion_params(call: Call, body: CompletionBody, model: LoadedModel, path: PathDefaults) -> SamplingParams:
    """A completion's `stop` replaces the default; an explicit null or [] means none."""
    stop = path.stop
    for name in ("stop_tokens", "stop"):
        if name in call.body:
            stop = tuple((call.body[name] and getattr(body, name)) or ())
    return _params(call, body, model, path, stop, body.max_tokens, "max_tokens", body.logprobs)


def _params(
    call: Call,
    body: CommonBody,
    model: LoadedModel,
    path: PathDefaults,
    stop: tuple[str, ...],
    max_tokens: int | None,
    max_tokens_name: str,
    top_logprobs: int | None,
) -> SamplingParams:
    settings = call.context.settings
    try:
        return sampling_params(
            model.engine,
            settings,
            sampler=body.sampler or path.sampler,
            values={**path.sampling, **sampling_values(call.body)},
            max_tokens=max_tokens or min(path.max_tokens, settings.max_tokens_limit),
            max_tokens_param=max_tokens_name,
            stop=stop,
            seed=body.seed,
            logit_bias=token_bias(body.logit_bias or {}, model.model.config.vocab_size),
            top_logprobs=top_logprobs,
        )
    except InvalidField as error:
        raise _by_sent_name(error, call.body) from None


def _by_sent_name(error: InvalidField, body: Mapping[str, Any]) -> InvalidField:
    """A sampler's complaint under the name that the client used for the field."""
    native = error.param or ""
    for name in ALIASES.get(native, ()):
        if body.get(name) is not None:
            return InvalidField(error.message.replace(native, name), param=name)
    return error


def sampling_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body's sampling fields under the samplers' names; null counts as absent."""
    values = {name: value for name, value in body.items() if value is not None}
    for native, names in ALIASES.items():
        for name in names:
            if name in values:
                values[native] = values[name]
                break
    return values


def token_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """Token ids and what is added to their logits. Raises InvalidField for an id outside the vocabulary."""
    for key in bias:
        if int(key) >= vocab_size:
            raise InvalidField(
                f"logit_bias: token id {key} is outside the vocabulary (0 to {vocab_size - 1})", param="logit_bias"
            )
    return {int(key): value for key, value in bias.items()}


def ignored(
    body: dict[str, Any], model: type[BaseModel], params: SamplingParams, extra_known: set[str] | None = None
) -> dict[str, str]:
    """The header naming the fields that had no effect."""
    read = option_names(params)
    aliases = {name for native, names in ALIASES.items() if native in read for name in names}
    unread = {"temperature", "top_p", "top_k", *(n for names in ALIASES.values() for n in names)} - read - aliases
    known = {*model.model_fields, *WITHOUT_EFFECT, *HANDLED, *read, *(extra_known or ())} - unread
    return ignored_fields(body, known)
