"""POST /v1/completions: continues texts or token ids as sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.generation import check_rows, new_request, validate
from rwkv_lightning.core.http import (
    Call,
    EventStream,
    body_in_openapi,
    collect,
    heartbeat,
    open_stream,
    read_call,
    unless_client_leaves,
)
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import Event, GenerationRequest, Tokens, Usage
from rwkv_lightning.core.sse import DONE, PING, data
from rwkv_lightning.core.stream import RequestStream
from rwkv_lightning.core.text.fim import fim_prompt
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.openai import fields, wire
from rwkv_lightning.plugins.routes.openai.bodies import CompletionBody
from rwkv_lightning.plugins.routes.openai.wire import Envelope

router = APIRouter(tags=["openai"])
PostCall = Annotated[Call, Depends(read_call)]


@dataclass(slots=True)
class Completion:
    """One call on its way; `echoes` is what each choice's text begins with."""

    body: CompletionBody
    model: LoadedModel
    request: GenerationRequest
    envelope: Envelope
    echoes: list[str]
    trace_id: str | None


@router.post("/v1/completions", openapi_extra=body_in_openapi(CompletionBody.model_json_schema()))
async def completions(call: PostCall) -> Response:
    """`n` continuations of each prompt; choice `row * n + k` is the k-th of prompt `row`."""
    work = await prepare(call, validate(CompletionBody, call.body))
    headers = fields.ignored(call.body, CompletionBody, work.request.params)
    engine = work.model.engine
    if work.body.stream:
        stream, closing = await open_stream(call, engine, work.request)
        return EventStream(sse(work, stream, heartbeat(call)), closing.close, headers)
    with engine.submit(work.request) as stream:
        events = await unless_client_leaves(call.request, collect(stream))
    usage = wire.usage([event.usage or Usage() for event in events], work.body.n, 0)
    choices = [entry(work, event, work.echoes[event.row] + event.text) for event in events]
    return JSONResponse(work.envelope.wrap(choices, usage=usage), headers=headers)


async def prepare(call: Call, body: CompletionBody) -> Completion:
    """Raises InvalidField, UnsupportedField and BadRequest."""
    fields.refuse_unsupported(call.body)
    model = fields.pick_model(call, body)
    prompts = await encode_prompts(body, model)
    check_rows(len(prompts) * body.n, call.context.settings)
    params = fields.completion_params(call, body, model, defaults.COMPLETIONS)
    rows = [prompt for prompt in prompts for _ in range(body.n)]
    return Completion(
        body=body,
        model=model,
        request=new_request(rows, params, body.chunk_size or (1 if body.stream else 16)),
        envelope=Envelope("text_completion", model.name, model.fingerprint, wire.new_id("cmpl")),
        echoes=echoes(body, rows, model),
        trace_id=getattr(call.request.state, "request_id", None),
    )


async def encode_prompts(body: CompletionBody, model: LoadedModel) -> list[Tokens]:
    """One tuple of token ids per prompt. Raises InvalidField."""
    prompts = prompt_list(body)
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if body.suffix is not None and ids:
        raise InvalidField("suffix: fill in the middle needs prompts as text, not as token ids", param="suffix")
    for prompt in ids:
        check_ids(prompt, model.model.config.vocab_size)
    if ids:
        return [tuple(prompt) for prompt in ids]
    texts = [str(prompt) for prompt in prompts]
    if body.suffix is not None:
        texts = [fim_prompt(text, body.suffix) for text in texts]
    if not all(texts):
        raise InvalidField("prompt: an empty text has nothing to continue", param="prompt")
    return await model.encode(texts)


def prompt_list(body: CompletionBody) -> Sequence[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidField for an empty list or an id outside the vocabulary."""
    if not prompt:
        raise InvalidField("prompt: an empty list of token ids has nothing to continue", param="prompt")
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise InvalidField(
                f"prompt: token id {token} is outside the vocabulary (0 to {vocab_size - 1})", param="prompt"
            )


def echoes(body: CompletionBody, rows: Sequence[Tokens], model: LoadedModel) -> list[str]:
    if not body.echo:
        return [""] * len(rows)
    return [model.vocabulary.decode_bytes(row).decode("utf-8", "replace") for row in rows]


def entry(work: Completion, event: Event, text: str, offset: int = 0) -> dict[str, Any]:
    """One choice; `offset` is the length of the text that its log-probabilities follow."""
    logprobs = None
    if work.body.logprobs is not None:
        logprobs = wire.text_logprobs(event.logprobs, work.model.vocabulary.token_bytes, offset)
    return {"index": event.row, "text": text, "logprobs": logprobs, "finish_reason": event.finish_reason}


async def sse(work: Completion, stream: RequestStream, heartbeat: float | None) -> AsyncIterator[bytes]:
    """Pieces of text, the finish reasons, the usage if asked for, `[DONE]`."""
    include_usage = work.body.stream_options is not None and work.body.stream_options.include_usage
    members: dict[str, Any] = {"usage": None} if include_usage else {}
    usages = [Usage() for _ in range(stream.rows)]
    lengths = [len(echo) for echo in work.echoes]
    for row, echo in enumerate(work.echoes):
        if echo:
            first = {"index": row, "text": echo, "logprobs": None, "finish_reason": None}
            yield data(work.envelope.wrap([first], **members))
    async for events in stream.batches(heartbeat):
        if not events:
            yield PING
        for event in events:
            if event.text or event.finish_reason:
                yield data(work.envelope.wrap([entry(work, event, event.text, lengths[event.row])], **members))
            lengths[event.row] += len(event.text)
            usages[event.row] = event.usage or usages[event.row]
            if event.error is not None:
                yield wire.error_event(event.error, work.trace_id)
    if include_usage:
        yield data(work.envelope.wrap([], usage=wire.usage(usages, work.body.n, 0)))
    yield DONE
