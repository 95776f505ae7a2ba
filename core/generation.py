"""From validated fields to a `GenerationRequest`: the same few checks for every route group."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from rwkv_lightning.core.errors import BadRequest, InvalidField, MissingField
from rwkv_lightning.core.request import GenerationRequest, SamplingParams, Tokens
from rwkv_lightning.core.text.output import MAX_STOP_BYTES
from rwkv_lightning.core.text.vocabulary import utf8

if TYPE_CHECKING:
    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.engine import Engine
    from rwkv_lightning.core.interfaces import Sampler

M = TypeVar("M", bound=BaseModel)

SEED_BITS = 64


def validate(model: type[M], body: Mapping[str, Any]) -> M:
    """The body as `model`; null counts as absent.

    Raises InvalidField (MissingField where one is missing) naming the first field at fault. `extra["errors"]` of the
    exception lists every fault as pydantic does, without the input.
    """
    sent = {name: value for name, value in body.items() if value is not None}
    for name in model.model_fields.keys() & sent.keys():
        try:
            _check_unicode(sent[name], name)
        except RecursionError:
            raise InvalidField(f"{name} is nested too deeply", param=name) from None
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        faults = [_located(dict(fault)) for fault in error.errors(include_url=False, include_input=False)]
        param = ".".join(map(str, faults[0]["loc"]))
        message = faults[0]["msg"]
        if param and not message.startswith(faults[0]["loc"][0]):
            message = f"{param}: {message}"
        kind = MissingField if faults[0]["type"] == "missing" else InvalidField
        raise kind(message, param=param or None, extra={"errors": faults}) from None


def _check_unicode(value: Any, path: str) -> None:
    """Raises InvalidField for a lone surrogate in any text of a JSON value: JSON can hold one, UTF-8 cannot."""
    if isinstance(value, str):
        try:
            utf8(value)
        except ValueError as error:
            raise InvalidField(f"{path}: {error}", param=path) from None
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_unicode(item, f"{path}.{index}")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_unicode(item, f"{path}.{key}")


def _located(fault: dict[str, Any]) -> dict[str, Any]:
    """A fault whose context names the field (a rule over several fields) gets that location; the context goes."""
    field = fault.pop("ctx", {}).get("field")
    return {**fault, "loc": (field,)} if isinstance(field, str) else fault


def check_rows(rows: int, settings: Settings) -> None:
    """Raises BadRequest when a request has more rows than --max-rows."""
    if rows > settings.max_rows:
        raise BadRequest(
            f"{rows} rows are more than this server takes at once ({settings.max_rows}, --max-rows); send parts",
            extra={"request_bsz": rows, "max_bsz": settings.max_rows},
        )


def find_sampler(engine: Engine, name: str, param: str = "sampler") -> tuple[str, Sampler]:
    """A registered sampler by name, in any case. Raises InvalidField listing what there is."""
    for known, sampler in engine.samplers.items():
        if known.lower() == name.lower():
            return known, sampler
    raise InvalidField(f"{param}: no sampler {name!r}; there are {', '.join(engine.samplers)}", param=param)


def sampling_params(
    engine: Engine,
    settings: Settings,
    *,
    sampler: str,
    values: Mapping[str, Any],
    max_tokens: int,
    max_tokens_param: str = "max_tokens",
    stop: Sequence[str] = (),
    stop_param: str = "stop_tokens",
    seed: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    top_logprobs: int | None = None,
    prompt_logprobs: bool = False,
) -> SamplingParams:
    """Check a request's sampling fields against its sampler and the server's limits.

    The `_param` arguments are what the client calls a field. Raises InvalidField.
    """
    if max_tokens > settings.max_tokens_limit:
        raise InvalidField(
            f"{max_tokens_param}: {max_tokens} is more than this server allows "
            f"({settings.max_tokens_limit}, --max-tokens-limit)",
            param=max_tokens_param,
        )
    if sum(len(text.encode()) for text in stop) > MAX_STOP_BYTES:
        raise InvalidField(
            f"{stop_param}: the stop texts have more than {MAX_STOP_BYTES} bytes in all; send fewer or shorter ones",
            param=stop_param,
        )
    name, chosen = find_sampler(engine, sampler)
    return SamplingParams(
        sampler=name,
        options=chosen.validate(values),
        max_tokens=max_tokens,
        stop=tuple(stop),
        seed=secrets.randbits(SEED_BITS) if seed is None else seed % 2**SEED_BITS,
        logit_bias=logit_bias or {},
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def option_names(params: SamplingParams) -> set[str]:
    """The names of the fields that a sampler reads."""
    options = params.options
    return {f.name for f in dataclasses.fields(options)} if dataclasses.is_dataclass(options) else set()


def new_request(prompts: list[Tokens], params: SamplingParams, chunk_size: int = 1) -> GenerationRequest:
    return GenerationRequest(id=uuid.uuid4().hex, prompts=prompts, params=params, chunk_size=chunk_size)
