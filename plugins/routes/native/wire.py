"""The native wire form: answers, server-sent chunks and errors (native_api.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.errors import InvalidField, RequestError
from rwkv_lightning.core.rendering import error_headers
from rwkv_lightning.core.request import Event
from rwkv_lightning.core.sse import DONE, PING, data
from rwkv_lightning.core.stream import RequestStream

VALIDATION_STATUS = 422


def render_error(request: Request, error: RequestError) -> Response:
    """`{"detail": [...]}` with 422 for a field at fault, `{"error": "text"}` for everything else."""
    headers = error_headers(error)
    if isinstance(error, InvalidField):
        return JSONResponse({"detail": validation_detail(request, error)}, VALIDATION_STATUS, headers=headers)
    return JSONResponse({"error": error.message, **error.extra}, error.status, headers=headers)


def validation_detail(request: Request, error: InvalidField) -> list[dict[str, Any]]:
    """FastAPI's list of faults, each with `type`, `loc` and `msg`."""
    faults = error.extra.get("errors")
    if faults:
        return [{**fault, "loc": ["body", *fault["loc"]]} for fault in faults]
    fields = error.param.split(".") if error.param else []
    return [{"type": error.code, "loc": [_place_of(request, fields), *fields], "msg": error.message}]


def _place_of(request: Request, fields: list[str]) -> str:
    """Where a field at fault came: "path", "query" (as the route declares them) or "body"."""
    if fields and fields[0] in request.path_params:
        return "path"
    dependant = getattr(request.scope.get("route"), "dependant", None)
    query = {parameter.alias for parameter in dependant.query_params} if dependant else set()
    return "query" if fields and fields[0] in query else "body"


def answer(events: list[Event], *, answer_id: str, object_name: str, model: str) -> dict[str, Any]:
    """The answer that is not streamed: one choice per row, in order."""
    return {
        "id": answer_id,
        "object": object_name,
        "model": model,
        "choices": [choice(event) for event in events],
        "usage": usage(events),
    }


def choice(event: Event) -> dict[str, Any]:
    message = {"role": "assistant", "content": event.text}
    entry: dict[str, Any] = {"index": event.row, "message": message, "finish_reason": event.finish_reason}
    if event.error is not None:
        entry["error"] = error_text(event.error)
    return entry


def usage(events: list[Event]) -> dict[str, Any]:
    """Real token counts over all rows, in OpenAI's form."""
    rows = [event.usage for event in events if event.usage is not None]
    prompt = sum(row.prompt_tokens for row in rows)
    completion = sum(row.completion_tokens for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(row.cached_tokens for row in rows)},
    }


async def _nothing() -> None:
    return


async def sse(
    stream: RequestStream,
    heartbeat: float | None,
    *,
    before_end: Callable[[], Awaitable[None]] = _nothing,
    last: bytes = b"",
) -> AsyncIterator[bytes]:
    """Chunks of the rows that have news, then `[DONE]`.

    Args:
        heartbeat: seconds of silence after which a comment is sent; None for never.
        before_end: awaited before the last rows' ends are told; a RequestError becomes an error event.
        last: an event to send before `[DONE]` when no row failed.
    """
    failed = False
    try:
        async for events in stream.batches(heartbeat):
            failed = failed or any(event.error is not None for event in events)
            yield PING if not events else _texts(events)
            if stream.finished and not failed:
                await before_end()
            yield _ends(events)
    except RequestError as error:
        failed = True
        yield data({"error": error.message})
    yield DONE if failed else last + DONE


def _texts(events: list[Event]) -> bytes:
    choices = [_delta(event, event.text, None) for event in events if event.text]
    return _chunk(choices) if choices else b""


def _ends(events: list[Event]) -> bytes:
    choices = [_delta(event, "", event.finish_reason) for event in events if event.finish_reason]
    errors = [data({"error": error_text(e.error), "index": e.row}) for e in events if e.error is not None]
    return b"".join([_chunk(choices) if choices else b"", *errors])


def _delta(event: Event, text: str, finish_reason: str | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": event.row, "delta": {"content": text}}
    if finish_reason:
        entry["finish_reason"] = finish_reason
    return entry


def _chunk(choices: list[dict[str, Any]]) -> bytes:
    return data({"object": "chat.completion.chunk", "choices": choices})


def error_text(error: Exception) -> str:
    return error.message if isinstance(error, RequestError) else "the row failed"
