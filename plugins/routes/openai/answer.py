"""What chat and completions share: a request is submitted, and answered whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.http import (
    Call,
    EventStream,
    collect,
    heartbeat,
    open_stream,
    raise_if_any_failed,
    unless_client_leaves,
)
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import Event, GenerationRequest, Usage
from rwkv_lightning.core.sse import DONE, PING, data
from rwkv_lightning.core.stream import RequestStream
from rwkv_lightning.plugins.routes.openai import wire
from rwkv_lightning.plugins.routes.openai.bodies import CommonBody
from rwkv_lightning.plugins.routes.openai.wire import Envelope

STREAM_CHUNK = 1
WHOLE_CHUNK = 16

Entry = dict[str, Any]


class Choice(Protocol):
    """One choice: how its row's events become entries of `choices`."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens so far are the thought."""

    def opening(self) -> list[Entry]:
        """What a stream begins with."""

    def push(self, event: Event) -> list[Entry]:
        """What a stream goes on with."""

    def whole(self, event: Event) -> Entry:
        """The whole choice, from its only event."""


@dataclass(slots=True)
class Answer:
    """One call on its way: what was asked, and how it is answered."""

    body: CommonBody
    model: LoadedModel
    request: GenerationRequest
    envelope: Envelope
    choices: Sequence[Choice]
    trace_id: str | None

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The answer that is not streamed."""
        entries = [choice.whole(event) for choice, event in zip(self.choices, events, strict=True)]
        return self.envelope.wrap(entries, usage=self._usage([event.usage or Usage() for event in events]))

    async def sse(self, stream: RequestStream, heartbeat: float | None) -> AsyncIterator[bytes]:
        """The choices' entries as they come, the usage if asked for, `[DONE]`. An error ends the whole stream."""
        usages = [Usage() for _ in self.choices]
        yield self._chunks([entry for choice in self.choices for entry in choice.opening()])
        async for events in stream.batches(heartbeat):
            if not events:
                yield PING
            yield self._chunks([entry for event in events for entry in self.choices[event.row].push(event)])
            for event in events:
                usages[event.row] = event.usage or usages[event.row]
                if event.error is not None:
                    yield wire.error_event(event.error, self.trace_id) + DONE
                    return
        if self.body.include_usage:
            yield data(self.envelope.wrap([], usage=self._usage(usages)))
        yield DONE

    def _chunks(self, entries: list[Entry]) -> bytes:
        """A chunk for each entry; where the usage comes at the end, all others say that they have none."""
        members: dict[str, Any] = {"usage": None} if self.body.include_usage else {}
        return b"".join(data(self.envelope.wrap([entry], **members)) for entry in entries)

    def _usage(self, rows: list[Usage]) -> dict[str, Any]:
        return wire.usage(rows, self.body.n, sum(choice.reasoning_tokens for choice in self.choices))


async def respond(call: Call, answer: Answer, headers: dict[str, str]) -> Response:
    """Generate and answer, streamed or not."""
    engine = answer.model.engine
    if answer.body.stream:
        stream, closing = await open_stream(call, engine, answer.request)
        return EventStream(answer.sse(stream, heartbeat(call)), closing.close, headers)
    with engine.submit(answer.request) as stream:
        events = await unless_client_leaves(call.request, collect(stream))
    raise_if_any_failed(events)  # this form has no place for the error of one choice
    return JSONResponse(answer.whole(events), headers=headers)


def chunk_size(body: CommonBody) -> int:
    """Tokens gathered before text is handed on."""
    return body.chunk_size or (STREAM_CHUNK if body.stream else WHOLE_CHUNK)
