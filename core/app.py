"""The FastAPI application: lifespan, request ids, error rendering, CORS and the routes of every group."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rwkv_lightning.core.dispatch import mount_claims
from rwkv_lightning.core.errors import (
    BadRequest,
    ClientError,
    InternalError,
    InvalidField,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from rwkv_lightning.core.rendering import render_openai

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import RouteGroup, ServerContext
    from rwkv_lightning.core.metrics import Metrics

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def build_app(context: ServerContext) -> FastAPI:
    """Wire the route groups of the host into one application."""
    app = FastAPI(title="rwkv-lightning", lifespan=_lifespan, redirect_slashes=False)
    app.state.context = context
    groups = context.host.route_groups()
    for group in groups:
        app.include_router(group.router, dependencies=[Depends(_mark(group))])
    mount_claims(app, groups)
    _add_error_handlers(app, groups)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=context.settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["*"],
    )
    app.add_middleware(RequestIdMiddleware, metrics=context.metrics)
    context.host.register_metrics(context.metrics.registry)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: ServerContext = app.state.context
    for model in context.models.all():
        model.engine.start()
    context.host.startup(context)
    try:
        yield
    finally:
        for model in context.models.all():
            await model.engine.stop()
            if model.engine.states is not None:
                await asyncio.to_thread(model.engine.states.shut_down)
        context.host.shutdown(context)


def _mark(group: RouteGroup) -> Callable[[Request], None]:
    def mark(request: Request) -> None:
        request.state.group = group

    return mark


def _add_error_handlers(app: FastAPI, groups: list[RouteGroup]) -> None:
    def render(request: Request, error: RequestError) -> Response:
        _log(request, error)
        group = getattr(request.state, "group", None) or _group_by_path(groups, request.url.path)
        return group.render_error(request, error) if group else render_openai(request, error)

    async def on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return render(request, error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = render(request, _from_http(request, error))
        response.headers.update(error.headers or {})
        return response

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return render(request, InvalidField(str(first["msg"]), param=".".join(map(str, first["loc"][1:]))))

    async def on_exception(request: Request, error: Exception) -> Response:
        trace_id = getattr(request.state, "request_id", "-")
        log.error("%s %s failed [%s]", request.method, request.url.path, trace_id, exc_info=error)
        return render(request, InternalError("something unexpected went wrong; the log has the trace id"))

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.state.on_exception = on_exception


def _group_by_path(groups: list[RouteGroup], path: str) -> RouteGroup | None:
    """The group whose prefix is the longest that the path starts with, for paths that match no route."""
    fits = [(len(p), group) for group in groups for p in group.prefixes if path == p or path.startswith(p + "/")]
    return max(fits, key=lambda fit: fit[0])[1] if fits else None


def _from_http(request: Request, error: HTTPException) -> RequestError:
    if error.status_code == 404:
        return NotFound(f"there is no {request.url.path} here; GET /openapi.json lists the paths")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}; use {allowed}")
    return BadRequest(str(error.detail)) if error.status_code < 500 else InternalError(str(error.detail))


def _log(request: Request, error: RequestError) -> None:
    level = logging.DEBUG if isinstance(error, ClientError) else logging.WARNING
    trace_id = getattr(request.state, "request_id", "-")
    log.log(level, "%s %s: %s %s [%s]", request.method, request.url.path, error.code, error.message, trace_id)


class RequestIdMiddleware:
    """Gives every request an id (a valid incoming one is kept), answers it in `x-request-id`, notes the outcome."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = incoming_id(scope) or uuid.uuid4().hex
        send = self._sender(send, state)
        if scope["method"] == "HEAD":  # a GET of which the server sends the headers only
            scope = {**scope, "method": "GET"}
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # a bug; the connection lives on unless the answer has begun
            if state.get("answer_begun"):
                raise
            response = await scope["app"].state.on_exception(Request(scope), error)
            await response(scope, receive, send)

    def _sender(self, send: Send, state: dict[str, Any]) -> Send:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["answer_begun"] = True
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
                if message["status"] >= 500 or message["status"] < 300:
                    self.metrics.outcomes.add(message["status"] < 300)
            await send(message)

        return send_with_id


def incoming_id(scope: Scope) -> str | None:
    """The trace id of a valid `traceparent`, else a valid `x-request-id`, else None."""
    headers = dict(scope["headers"])
    parent = TRACEPARENT.fullmatch(headers.get(b"traceparent", b"").decode("latin-1"))
    if parent:
        return parent.group(1)
    offered = headers.get(b"x-request-id", b"").decode("latin-1")
    return offered if REQUEST_ID.fullmatch(offered) else None
