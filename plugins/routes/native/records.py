"""Kept sessions and branches: listing, tree, deletion, export and import."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.body import read_bytes
from rwkv_lightning.core.cache.keys import SessionKey, check_session_id, parse_name
from rwkv_lightning.core.cache.record import StateHeader
from rwkv_lightning.core.cache.sessions import Deletion
from rwkv_lightning.core.errors import BadRequest, NotFound, StateCorrupt
from rwkv_lightning.core.generation import validate
from rwkv_lightning.core.http import Call, body_in_openapi, context_of, ignored_fields, read_call, require_password
from rwkv_lightning.core.interfaces import StateInfo
from rwkv_lightning.plugins.routes.native.bodies import Integer
from rwkv_lightning.plugins.routes.native.state import find_initial, require

router = APIRouter(tags=["native"])
PostCall = Annotated[Call, Depends(read_call)]
STATE_OVERHEAD = 1 << 20  # bytes that an exported state may have besides its numbers
SENT_AS_TREE = b"/state/tree/"  # "/" in a session's name may be sent as such or as %2F, which this tells apart


class DeleteBody(BaseModel):
    session_id: str = Field(min_length=1, description="a session, or a branch as <session>:<number>")
    delete_prefix: bool = Field(False, description="delete all branches of it too")


class StatusBody(BaseModel):
    limit: Annotated[Integer, Field(ge=1)] | None = Field(None, description="the most sessions to list")
    offset: Annotated[Integer, Field(ge=0)] = Field(0, description="sessions to pass over")


@router.post("/state/status", openapi_extra=body_in_openapi(StatusBody.model_json_schema()))
async def state_status(call: PostCall) -> Response:
    """What the three cache levels hold."""
    body = validate(StatusBody, call.body)
    found = await call.context.models.default.states.sessions.status(body.limit, body.offset)
    sessions = [
        {
            "session_id": place.key.shown,
            "cache_level": place.level,
            "last_updated": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(place.updated)),
            "timestamp": place.updated,
        }
        for place in found.places
    ]
    counts = {"total_sessions": found.total, "l1_cache_count": found.l1, "l2_cache_count": found.l2}
    content = {"status": "success", **counts, "database_count": found.l3, "sessions": sessions}
    return JSONResponse(content, headers=ignored_fields(call.body, StatusBody.model_fields))


@router.post("/state/delete", openapi_extra=body_in_openapi(DeleteBody.model_json_schema()))
async def state_delete(call: PostCall) -> Response:
    """Delete a session, with `delete_prefix` its branches too."""
    require(call, "session_id")
    body = validate(DeleteBody, call.body)
    headers = ignored_fields(call.body, DeleteBody.model_fields)
    sessions = call.context.models.default.states.sessions
    if not await sessions.delete(Deletion(body.session_id, body.delete_prefix)):
        content = {"status": "not_found", "message": f"there is no session {body.session_id!r}"}
        return JSONResponse(content, 404, headers=headers)
    what = f"session {body.session_id!r}" + (" and its branches" if body.delete_prefix else "")
    return JSONResponse({"status": "success", "message": f"deleted {what}"}, headers=headers)


@router.get("/state/tree/{session_id:path}", dependencies=[Depends(require_password)], response_model=dict[str, Any])
async def state_tree(request: Request, session_id: str) -> dict[str, Any] | Response:
    """A session and its branches: parent, tokens, last words, time."""
    if SENT_AS_TREE not in request.scope.get("raw_path", SENT_AS_TREE):  # the export of a session "tree/..."
        name = f"tree/{session_id}".removesuffix("/export")
        return await export_state(request, name, request.query_params.get("state"))
    states = context_of(request).models.default.states
    headers = await states.sessions.family(check_session_id(session_id))
    if not headers:
        raise NotFound(f"there is no session {session_id!r}", param="session_id")
    initials = {header.initial for header in headers}
    files = await asyncio.to_thread(lambda: {name: states.initial.file_name(name) or name or None for name in initials})
    branches = [
        {
            "session_id": key.shown,
            "dialogue_idx": key.branch,
            "parent": _parent(header),
            "state": files[header.initial],
            "tokens": header.tokens,
            "last_text": header.last_text,
            "timestamp": header.created,
        }
        for key, header in sorted(((SessionKey.parse(h.key), h) for h in headers), key=_by_branch)
    ]
    return {"session_id": session_id, "branches": branches}


def _by_branch(entry: tuple[SessionKey, StateInfo | StateHeader]) -> tuple[int, str]:
    return entry[0].branch, entry[0].initial


def _parent(header: StateInfo | StateHeader) -> str | None:
    """The state that another went on from, as clients name it; None for a root."""
    if header.parent in ("", header.key):  # a session of an older version names itself
        return None
    return SessionKey.parse(header.parent).shown


@router.get("/state/{session_id:path}/export", dependencies=[Depends(require_password)])
async def export_state(
    request: Request,
    session_id: str,
    state: Annotated[str | None, Query(description="the state file that the session began from")] = None,
) -> Response:
    """A session's or branch's state as a safetensors file."""
    states = context_of(request).models.default.states
    initial = await find_initial(states, state)
    record = await states.sessions.export_bytes(parse_name(session_id, initial.name))
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in session_id)[:80]
    headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
    return Response(record, media_type="application/octet-stream", headers=headers)


@router.post(
    "/state/import",
    dependencies=[Depends(require_password)],
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
)
async def import_state(
    request: Request,
    session_id: Annotated[str | None, Query(description="the name to keep it under, by default its own")] = None,
    replace: Annotated[bool, Query(description="replace a state of that name")] = False,
) -> dict[str, Any]:
    """Keep a state that GET /state/{session_id}/export gave, on this server or another."""
    model = context_of(request).models.default
    key = parse_name(session_id) if session_id else None
    body = await read_bytes(request, 2 * model.model.state_nbytes() + STATE_OVERHEAD)
    try:
        kept = await model.states.sessions.import_bytes(body, key, replace=replace)
    except StateCorrupt:
        raise BadRequest("the body is not a whole exported state; export it again and send it unchanged") from None
    return {"status": "success", "session_id": kept.owner.shown, "tokens": kept.header.tokens}
