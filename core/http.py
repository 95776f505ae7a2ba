"""What route groups share: reading a call, authentication, streams of server-sent events, clients that leave."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rwkv_lightning.core.body import read_object
from rwkv_lightning.core.errors import ClientClosedRequest, RowFailed, Unauthorized
from rwkv_lightning.core.request import Event, GenerationRequest
from rwkv_lightning.core.stream import RequestStream, merge

if TYPE_CHECKING:
    from rwkv_lightning.core.engine import Engine
    from rwkv_lightning.core.interfaces import ServerContext

T = TypeVar("T")

LONGEST_HOLD = 5.0  # seconds without an event after which a stream's 200 is sent all the same
IGNORED_HEADER = "X-Ignored-Fields"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True)
class Call:
    """One POST: its JSON object without `password`, read and authenticated."""

    request: Request
    body: dict[str, Any]
    identity: Any = None

    @property
    def context(self) -> ServerContext:
        return context_of(self.request)


def context_of(request: Request) -> ServerContext:
    """The server's parts, for a handler."""
    context: ServerContext = request.app.state.context
    return context


async def read_call(request: Request) -> Call:
    """FastAPI dependency: the body of a protected POST."""
    return await _read(request, protected=True)


async def read_open_call(request: Request) -> Call:
    """FastAPI dependency: the body of a POST that needs no password unless --protect-all is set."""
    return await _read(request, protected=context_of(request).settings.protect_all)


async def _read(request: Request, protected: bool) -> Call:
    body = await read_object(request, context_of(request).settings.max_body_bytes)
    password = body.pop("password", None)
    return Call(request, body, authenticate(request, password, protected))


def require_password(request: Request) -> None:
    """FastAPI dependency for protected routes without a body."""
    authenticate(request, None, protected=True)


def require_password_if_protect_all(request: Request) -> None:
    """FastAPI dependency for routes without a body that are open unless --protect-all is set."""
    authenticate(request, None, protected=context_of(request).settings.protect_all)


def authenticate(request: Request, password: Any, protected: bool) -> Any:
    """Who calls: what a plugin's `authenticate` says, else None. Raises Unauthorized.

    A request with the server's password, as a Bearer token or in the body field `password`, always passes.
    """
    context = context_of(request)
    secret = context.settings.password
    identity = context.host.authenticate(request)
    if identity is not None or not protected or secret is None:
        return identity
    for offered in (password, bearer_token(request)):
        if isinstance(offered, str) and _equal(offered, secret.get_secret_value()):
            return None
    raise Unauthorized(
        "wrong or missing password: send it as 'Authorization: Bearer <password>' or in the body field 'password'"
    )


def bearer_token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _equal(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode("utf-8", "surrogatepass"), b.encode("utf-8", "surrogatepass"))


def body_in_openapi(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its own body; the schema's definitions are written out, none recursive."""
    content = {"application/json": {"schema": _without_refs(schema, {})}}
    return {"requestBody": {"required": True, "content": content}}


def _without_refs(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema that stands by itself anywhere in a document: `$ref` to its `$defs` replaced by what they name."""
    if isinstance(schema, list):
        return [_without_refs(item, definitions) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    definitions = {**definitions, **schema.get("$defs", {})}
    if "$ref" in schema:
        return _without_refs(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _without_refs(value, definitions) for key, value in schema.items() if key != "$defs"}


def ignored_fields(body: dict[str, Any], known: Iterable[str]) -> dict[str, str]:
    """The header that names the fields of a body that had no effect, or nothing."""
    unknown = sorted(name for name in body if name not in set(known))
    if not unknown:
        return {}
    text = ", ".join(unknown).encode("ascii", "backslashreplace").decode()
    return {IGNORED_HEADER: "".join(c if c.isprintable() else "?" for c in text)[:1000]}


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but end it and raise ClientClosedRequest when the client disconnects first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientClosedRequest("the client left before its answer was ready")
    finally:
        task.cancel()
        watcher.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def collect(stream: RequestStream) -> list[Event]:
    """The whole of a request: one merged event per row, by row. Raises the error when every row failed."""
    rows: dict[int, Event] = {}
    async for events in stream.batches():
        for event in events:
            rows[event.row] = merge(rows[event.row], event) if event.row in rows else event
    ordered = [rows[i] for i in sorted(rows)]
    raise_if_all_failed(ordered, len(ordered))
    return ordered


def raise_if_all_failed(events: list[Event], rows: int) -> None:
    """Raise the first error when all `rows` of a request have failed.

    A row that failed by itself does not count when it has text: its form may say so beside the text.
    """
    failed = [e.error for e in events if e.error and not (e.text and isinstance(e.error, RowFailed))]
    if rows and len(failed) == rows:
        raise failed[0]


def raise_if_any_failed(events: list[Event]) -> None:
    """Raise the first row's error, if any row failed."""
    for event in events:
        if event.error is not None:
            raise event.error


async def open_stream(call: Call, engine: Engine, request: GenerationRequest) -> tuple[RequestStream, ExitStack]:
    """Submit a request whose answer is streamed, and hold the 200 until it begins or takes long.

    Returns the stream and a stack to close when the response has ended. Failures before the first event raise.
    """
    stack = ExitStack()
    try:
        stream = stack.enter_context(engine.submit(request))
        first = await unless_client_leaves(call.request, stream.wait(LONGEST_HOLD))
        if not any(event.text for event in first):
            raise_if_all_failed(first, stream.rows)
    except BaseException:
        stack.close()
        raise
    return stream, stack


def heartbeat(call: Call) -> float | None:
    """Seconds of silence after which a stream gets a ping; None for never (--keepalive-ping 0)."""
    return call.context.settings.keepalive_ping or None


class EventStream(StreamingResponse):
    """Server-sent events. `on_close` runs whatever happens, also when not one chunk was sent."""

    def __init__(
        self, chunks: AsyncIterator[bytes], on_close: Callable[[], Awaitable[None] | None], headers: dict[str, str]
    ) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={**STREAM_HEADERS, **headers})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            closing = self._on_close()
            if closing is not None:
                await closing
