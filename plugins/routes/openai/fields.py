"""From an OpenAI body to sampling parameters, and the fields this server refuses rather than ignores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rwkv_lightning.core.errors import InvalidField, ModelNotFound, UnsupportedField
from rwkv_lightning.core.generation import option_names, sampling_params
from rwkv_lightning.core.http import Call, ignored_fields
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import SamplingParams
from rwkv_lightning.plugins.routes.defaults import PathDefaults
from rwkv_lightning.plugins.routes.openai.bodies import ChatBody, CommonBody, CompletionBody, OwnPathBody

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
# The native sampling fields by the names that OpenAI's clients use, the winning name first.
ALIASES = {
    "alpha_presence": ("presence_penalty", "alpha_presence"),
    "alpha_frequency": ("frequency_penalty", "alpha_frequency"),
    "alpha_decay": ("penalty_decay", "alpha_decay"),
}
SAMPLING = {"temperature", "top_p", "top_k", *(name for names in ALIASES.values() for name in names)}
UNSUPPORTED = ("functions", "function_call", "audio", "web_search_options")
HANDLED = {"response_format", "tools", "tool_choice", "modalities", *UNSUPPORTED}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedField or InvalidField for what would change the answer and is not built; never ignores it."""
    for name in UNSUPPORTED:
        if body.get(name) is not None:
            raise UnsupportedField(f"{name} is not supported by this server; leave it out", param=name)
    if body.get("modalities") not in (None, [], ["text"]):
        raise UnsupportedField("modalities: this server answers with text only", param="modalities")
    _refuse_tools(body.get("tools"), body.get("tool_choice"))
    _refuse_formats(body.get("response_format"))


def _refuse_tools(tools: Any, choice: Any) -> None:
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


def pick_model(call: Call, name: str | None) -> LoadedModel:
    """The model of that name. An unknown one means the only loaded model, unless --strict-model-names is set.

    Raises:
        ModelNotFound
    """
    models = call.context.models
    if name is None:
        return models.default
    try:
        return models.get(name)
    except ModelNotFound:
        if call.context.settings.strict_model_names or len(models.all()) > 1:
            raise
        return models.default


def chat_params(call: Call, body: ChatBody, model: LoadedModel, path: PathDefaults) -> SamplingParams:
    """A chat's `stop` is added to the stops that end a turn."""
    turn_ends = path.stop if body.stop_tokens is None else body.stop_tokens
    stop = (*turn_ends, *(body.stop or ()))
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limits = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    return _params(call, body, model, path, stop=stop, top_logprobs=top_logprobs, limits=limits)


def completion_params(call: Call, body: CompletionBody, model: LoadedModel, path: PathDefaults) -> SamplingParams:
    """A completion's `stop` replaces the default; an explicit null or [] means none."""
    stop = path.stop if body.stop_tokens is None else tuple(body.stop_tokens)
    if "stop" in call.body:
        stop = tuple(body.stop or ())
    scored = body.echo and body.logprobs is not None
    limits = {"max_tokens": body.max_tokens}
    return _params(
        call, body, model, path, stop=stop, top_logprobs=body.logprobs, limits=limits, prompt_logprobs=scored
    )


def _params(
    call: Call,
    body: CommonBody,
    model: LoadedModel,
    path: PathDefaults,
    *,
    stop: tuple[str, ...],
    top_logprobs: int | None,
    limits: Mapping[str, int | None],
    prompt_logprobs: bool = False,
) -> SamplingParams:
    """`limits` are the fields that bound the generated tokens, the winning one first."""
    settings = call.context.settings
    name, limit = next((item for item in limits.items() if item[1] is not None), ("max_tokens", None))
    try:
        return sampling_params(
            model.engine,
            settings,
            sampler=body.sampler or path.sampler,
            values={**path.sampling, **sampling_values(call.body)},
            max_tokens=limit or min(path.max_tokens, settings.max_tokens_limit),
            max_tokens_param=name,
            stop=stop,
            stop_param="stop",
            seed=body.seed,
            logit_bias=token_bias(body.logit_bias or {}, model.model.config.vocab_size),
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
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


def ignored(body: Mapping[str, Any], model: CommonBody, params: SamplingParams) -> dict[str, str]:
    """The header naming the fields that had no effect."""
    read = option_names(params)
    read |= {name for native, names in ALIASES.items() if native in read for name in names}
    known = {*type(model).model_fields, *WITHOUT_EFFECT, *HANDLED}
    sent = {name: value for name, value in body.items() if value is not None}
    return ignored_fields(sent, (known - SAMPLING | read) - set(overridden(sent, model)))


def overridden(sent: Mapping[str, Any], model: CommonBody) -> Iterator[str]:
    """The fields that another field of the body wins over."""
    for winner, loser in ALIASES.values():
        if winner in sent:
            yield loser
    if isinstance(model, ChatBody):
        if model.max_completion_tokens is not None:
            yield "max_tokens"
        decides = next(iter(model.thinking()), None)
        yield from {"enable_think", "chat_template_kwargs", "reasoning_effort"} - {decides}
    if isinstance(model, OwnPathBody) and model.messages:
        yield "contents"
