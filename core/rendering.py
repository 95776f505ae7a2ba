"""Errors in OpenAI's form: the fallback for paths that no route group owns, and the OpenAI group's own form."""

from __future__ import annotations

import math
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.errors import InvalidField, RequestError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_type(status: int, code: str) -> str:
    """OpenAI's `type` for a status (openai_api.md section 4)."""
    if status in TYPES:
        return TYPES[status]
    if code == "server_overloaded":
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def openai_error(error: RequestError, trace_id: str | None = None) -> dict[str, Any]:
    """The body `{"error": {...}}`."""
    status = openai_status(error)
    body = {
        "message": error.message,
        "type": error_type(status, error.code),
        "param": error.param,
        "code": error.code,
    }
    if status == 500 and trace_id:
        body["trace_id"] = trace_id
    return {"error": body}


def openai_status(error: RequestError) -> int:
    """Validation is 400 in this form (never 422)."""
    return 400 if isinstance(error, InvalidField) else error.status


def render_openai(request: Request, error: RequestError) -> Response:
    trace_id = getattr(request.state, "request_id", None)
    return JSONResponse(openai_error(error, trace_id), openai_status(error), headers=error_headers(error))


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers that go with an error in every form."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
