"""The native batch endpoints: /v1, /v2 and /big_batch completions of `contents`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.generation import check_rows, new_request, option_names, sampling_params, validate
from rwkv_lightning.core.http import (
    Call,
    EventStream,
    body_in_openapi,
    collect,
    heartbeat,
    ignored_fields,
    open_stream,
    read_call,
    unless_client_leaves,
)
from rwkv_lightning.core.interfaces import BodyClaim
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import GenerationRequest
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.defaults import PathDefaults
from rwkv_lightning.plugins.routes.native import wire
from rwkv_lightning.plugins.routes.native.bodies import BatchBody, GenerationBody

router = APIRouter(tags=["native"])
PostCall = Annotated[Call, Depends(read_call)]


@dataclass(frozen=True, slots=True)
class Form:
    """What tells one batch endpoint from another."""

    answer_id: str
    object_name: str
    defaults: PathDefaults
    always_stream: bool = False
    without_effect: frozenset[str] = frozenset()  # fields of the body that this endpoint does not read


V1 = Form("rwkv7-batch", "chat.completion", defaults.V1_BATCH)
V2 = Form("rwkv7-batch-v2", "chat.completion", defaults.V2_BATCH)
BIG_BATCH = Form("rwkv7-batch", "chat.completion", defaults.BIG_BATCH, always_stream=True)


async def v1_completions(call: Call) -> Response:
    """Batch completion of `contents` with sampler V1; its path is shared with the OpenAI form."""
    return await complete_contents(call, V1)


@router.post("/v2/chat/completions", openapi_extra=body_in_openapi(BatchBody.model_json_schema()))
async def v2_completions(call: PostCall) -> Response:
    """Batch completion of `contents` with sampler V2."""
    return await complete_contents(call, V2)


@router.post("/big_batch/completions", openapi_extra=body_in_openapi(BatchBody.model_json_schema()))
async def big_batch_completions(call: PostCall) -> Response:
    """Very large batches with the temperature-only sampler; always streams."""
    return await complete_contents(call, BIG_BATCH)


CLAIM = BodyClaim(
    method="POST",
    path="/v1/chat/completions",
    key="contents",
    label="native batch",
    handle=v1_completions,
    body_schema=BatchBody.model_json_schema(),
)


async def complete_contents(call: Call, form: Form) -> Response:
    """Complete every text of `contents` as sent."""
    body = validate(BatchBody, call.body)
    check_rows(len(body.contents), call.context.settings)
    return await complete(call, body, body.contents, form)


async def complete(call: Call, body: GenerationBody, prompts: list[str], form: Form) -> Response:
    """Generate from the prompts and answer in the native form, streamed or not."""
    model = call.context.models.default
    request = await build_request(call, body, prompts, form.defaults, model)
    known = {*type(body).model_fields, *option_names(request.params)} - unused_sampling(request)
    known -= form.without_effect
    headers = ignored_fields(call.body, known)
    if body.stream or form.always_stream:
        stream, closing = await open_stream(call, model.engine, request)
        chunks = wire.sse(stream, heartbeat(call))
        return EventStream(chunks, closing.close, headers)
    with model.engine.submit(request) as stream:
        events = await unless_client_leaves(call.request, collect(stream))
    content = wire.answer(events, answer_id=form.answer_id, object_name=form.object_name, model=body.model)
    return JSONResponse(content, headers=headers)


async def build_request(
    call: Call, body: GenerationBody, prompts: list[str], path: PathDefaults, model: LoadedModel
) -> GenerationRequest:
    """The body's fields over the path's defaults. Raises InvalidField."""
    sent = {name: value for name, value in call.body.items() if value is not None}
    params = sampling_params(
        model.engine,
        call.context.settings,
        sampler=body.sampler or path.sampler,
        values={**path.sampling, **sent},
        max_tokens=body.max_tokens or min(path.max_tokens, call.context.settings.max_tokens_limit),
        stop=path.stop if body.stop_tokens is None else body.stop_tokens,
        seed=body.seed,
    )
    request = new_request(await model.encode(prompts), params, body.chunk_size)
    return await model.prepare(request, state=body.state, use_prefix_cache=body.use_prefix_cache)


SAMPLING_FIELDS = {"temperature", "top_k", "top_p", "alpha_presence", "alpha_frequency", "alpha_decay"}


def unused_sampling(request: GenerationRequest) -> set[str]:
    """Sampling fields that this request's sampler does not read."""
    return SAMPLING_FIELDS - option_names(request.params)
