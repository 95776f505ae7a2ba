"""POST /openai/v1/chat/completions, and bodies with `messages` on /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.generation import new_request, validate
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
from rwkv_lightning.core.interfaces import BodyClaim
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import Event, GenerationRequest, Usage
from rwkv_lightning.core.sse import DONE, PING, data
from rwkv_lightning.core.stream import RequestStream
from rwkv_lightning.core.text.chat import ChatMessage, ThinkSplitter, chat_prompt
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.openai import fields, wire
from rwkv_lightning.plugins.routes.openai.bodies import ChatBody, Message
from rwkv_lightning.plugins.routes.openai.wire import Envelope, ReasoningCount

router = APIRouter(tags=["openai"])
PostCall = Annotated[Call, Depends(read_call)]
STREAM_CHUNK = 1
WHOLE_CHUNK = 16


@dataclass(slots=True)
class Chat:
    """One chat call on its way: what was asked, and how the answer is written."""

    body: ChatBody
    model: LoadedModel
    request: GenerationRequest
    envelope: Envelope
    reasoning_field: wire.ReasoningField
    trace_id: str | None

    @property
    def token_bytes(self) -> list[bytes]:
        return self.model.vocabulary.token_bytes


async def v1_chat(call: Call) -> Response:
    """The OpenAI form on the shared path: `messages` is compulsory there."""
    body = validate(ChatBody, call.body)
    return await answer_chat(call, body, fields.messages_of(body))


@router.post("/openai/v1/chat/completions", openapi_extra=body_in_openapi(ChatBody.model_json_schema()))
async def openai_chat(call: PostCall) -> Response:
    """Chat; without `messages`, the first of `contents` is the user's text."""
    body = validate(ChatBody, call.body)
    messages = [] if body.messages else fields.first_content(call.body)
    return await answer_chat(call, body, messages or fields.messages_of(body), extra_known={"contents"})


CLAIM = BodyClaim(
    method="POST",
    path="/v1/chat/completions",
    key="messages",
    label="OpenAI",
    handle=v1_chat,
    body_schema=ChatBody.model_json_schema(),
    fallback=True,
)


async def answer_chat(
    call: Call, body: ChatBody, messages: list[Message], extra_known: set[str] | None = None
) -> Response:
    """Generate `n` answers to the conversation, streamed or not."""
    chat = await prepare(call, body, messages)
    headers = fields.ignored(call.body, ChatBody, chat.request.params, extra_known)
    engine = chat.model.engine
    if chat.body.stream:
        stream, closing = await open_stream(call, engine, chat.request)
        return EventStream(sse(chat, stream, heartbeat(call)), closing.close, headers)
    with engine.submit(chat.request) as stream:
        events = await unless_client_leaves(call.request, collect(stream))
    return JSONResponse(whole(chat, events), headers=headers)


async def prepare(call: Call, body: ChatBody, messages: list[Message]) -> Chat:
    """The request to submit and how its answer is written. Raises InvalidField and UnsupportedField."""
    fields.refuse_unsupported(call.body)
    model = fields.pick_model(call, body)
    history = [ChatMessage("system", body.system)] if body.system else []
    history += [ChatMessage(message.role, message.text) for message in messages]
    if not any(message.text.strip() for message in history):
        raise InvalidField("messages: at least one message must have text", param="messages")
    prompts = await model.encode([chat_prompt(history, think=body.think)])
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = fields.chat_params(call, body, model, defaults.OPENAI_CHAT, logprobs)
    chunk = body.chunk_size or (STREAM_CHUNK if body.stream else WHOLE_CHUNK)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return Chat(
        body=body,
        model=model,
        request=new_request(prompts * body.n, params, chunk),
        envelope=Envelope(kind, model.name, model.fingerprint, wire.new_id("chatcmpl")),
        reasoning_field=call.context.settings.reasoning_field,
        trace_id=getattr(call.request.state, "request_id", None),
    )


def whole(chat: Chat, events: list[Event]) -> dict[str, Any]:
    """The answer that is not streamed."""
    counts = [ReasoningCount(chat.token_bytes) for _ in events]
    for count, event in zip(counts, events, strict=True):
        if chat.body.think:
            count.push(event.tokens)
    rows = [event.usage or Usage() for event in events]
    usage = wire.usage(rows, chat.body.n, sum(count.count for count in counts))
    return chat.envelope.wrap([_choice(chat, event) for event in events], usage=usage)


def _choice(chat: Chat, event: Event) -> dict[str, Any]:
    reasoning, content = split_whole(event.text) if chat.body.think else ("", event.text)
    message = {"role": "assistant", **wire.message_fields(reasoning, content, chat.reasoning_field)}
    logprobs = wire.chat_logprobs(event.logprobs, chat.token_bytes) if chat.body.logprobs else None
    return {"index": event.row, "message": message, "logprobs": logprobs, "finish_reason": event.finish_reason}


def split_whole(text: str) -> tuple[str, str]:
    """Reasoning and content of a whole answer."""
    splitter = ThinkSplitter()
    pieces = splitter.push(text) + splitter.flush()
    parts = {"reasoning": "", "content": ""}
    for kind, piece in pieces:
        parts[kind] += piece
    return parts["reasoning"], parts["content"]


async def sse(chat: Chat, stream: RequestStream, heartbeat: float | None) -> AsyncIterator[bytes]:
    """The role of each choice, its text as it comes, its finish reason, the usage if asked for, `[DONE]`."""
    choices = [StreamedChoice(chat, row) for row in range(stream.rows)]
    include_usage = chat.body.stream_options is not None and chat.body.stream_options.include_usage
    members: dict[str, Any] = {"usage": None} if include_usage else {}
    for choice in choices:
        yield data(chat.envelope.wrap([choice.entry({"role": "assistant", "content": ""})], **members))
    async for events in stream.batches(heartbeat):
        if not events:
            yield PING
        for event in events:
            for entry in choices[event.row].push(event):
                yield data(chat.envelope.wrap([entry], **members))
            if event.error is not None:
                yield wire.error_event(event.error, chat.trace_id)
    if include_usage:
        reasoning = sum(choice.reasoning.count for choice in choices)
        usage = wire.usage([choice.usage for choice in choices], chat.body.n, reasoning)
        yield data(chat.envelope.wrap([], usage=usage))
    yield DONE


class StreamedChoice:
    """One choice of a streamed chat: turns events into the entries of chunks."""

    def __init__(self, chat: Chat, row: int) -> None:
        self._chat = chat
        self._row = row
        self._splitter = ThinkSplitter() if chat.body.think and chat.reasoning_field != "inline" else None
        self.reasoning = ReasoningCount(chat.token_bytes)
        self.usage = Usage()

    def entry(self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": self._row, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def push(self, event: Event) -> list[dict[str, Any]]:
        if self._chat.body.think:
            self.reasoning.push(event.tokens)
        entries = [self.entry(delta) for delta in self._deltas(event)]
        if event.logprobs and self._chat.body.logprobs:
            entries = entries or [self.entry({"content": ""})]
            entries[0]["logprobs"] = wire.chat_logprobs(event.logprobs, self._chat.token_bytes)
        if event.finish_reason is not None:
            self.usage = event.usage or Usage()
            entries.append(self.entry({}, event.finish_reason))
        return entries

    def _deltas(self, event: Event) -> list[dict[str, str]]:
        if self._splitter is None:
            return [{"content": event.text}] if event.text else []
        pieces = self._splitter.push(event.text) if event.text else []
        if event.finish_reason is not None:
            pieces += self._splitter.flush()
        return [self._piece(kind, text) for kind, text in pieces]

    def _piece(self, kind: str, text: str) -> dict[str, str]:
        if kind == "content":
            return {"content": text}
        names = ["reasoning_content", "reasoning"]
        if self._chat.reasoning_field != "both":
            names = [self._chat.reasoning_field]
        return dict.fromkeys(names, text)
