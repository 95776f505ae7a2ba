"""Request bodies: read within the limit, decompressed, and parsed strictly as one JSON object."""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from rwkv_lightning.core.errors import BadRequest, BodyTooLarge, ClientClosedRequest, UnsupportedField

DISCARD_FACTOR = 64  # a body over the limit is read on, and dropped, up to this many times the limit


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object of at most `limit` bytes, after decompression too.

    Raises:
        BodyTooLarge, BadRequest, UnsupportedField, ClientClosedRequest
    """
    value = parse_json(await read_bytes(request, limit))
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def parse_json(data: bytes) -> Any:
    """Strict JSON in UTF-8: NaN and Infinity are refused, duplicate keys keep the last."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise BadRequest(f"the body is not valid JSON: {name} is not a JSON number")


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body as it is, of at most `limit` bytes, after decompression too. Raises as `read_object`."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise UnsupportedField(f"content-encoding {encoding!r} is not supported; send gzip or none")
    body = await _collect(request, limit)
    return body if encoding == "identity" else _decompress(body, limit)


async def _collect(request: Request, limit: int) -> bytes:
    declared = int(request.headers.get("content-length") or 0)
    if declared > limit and "expect" in request.headers:
        raise too_large(limit)  # the client asked first, and has sent nothing yet
    body = bytearray()
    total = 0
    async for chunk in _chunks(request):
        total += len(chunk)
        if total <= limit:
            body += chunk
        elif total > limit * DISCARD_FACTOR:
            break
    if total > limit:  # only now: a client that is still sending would see a reset instead of the answer
        raise too_large(limit)
    return bytes(body)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise ClientClosedRequest("the client left while sending its request") from None


def _decompress(body: bytes, limit: int) -> bytes:
    engine = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: gzip or zlib, by the header
    try:
        plain = engine.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the compressed body cannot be read: {error}") from None
    if len(plain) > limit:
        raise too_large(limit)
    if not engine.eof:
        raise BadRequest("the compressed body is incomplete")
    return plain


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (--max-body-bytes); send it in parts")
