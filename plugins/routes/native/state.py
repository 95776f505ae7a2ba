"""The native session endpoints: one session (/state), a session that forks (/multi_state), listing, tree, deletion."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.body import read_bytes
from rwkv_lightning.core.cache.kept import Kept, KeptSource, SessionTarget
from rwkv_lightning.core.cache.keys import SessionKey, check_session_id
from rwkv_lightning.core.cache.sessions import Deletion
from rwkv_lightning.core.errors import BadRequest, InvalidField, NotFound, StateCorrupt
from rwkv_lightning.core.generation import option_names, validate
from rwkv_lightning.core.http import (
    Call,
    EventStream,
    body_in_openapi,
    collect,
    context_of,
    heartbeat,
    ignored_fields,
    open_stream,
    read_call,
    require_password,
    unless_client_leaves,
)
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import GenerationRequest, StateSource
from rwkv_lightning.core.sse import data
from rwkv_lightning.core.stream import RequestStream
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.native import wire
from rwkv_lightning.plugins.routes.native.batch import build_request, unused_sampling
from rwkv_lightning.plugins.routes.native.bodies import BatchBody, Integer

router = APIRouter(tags=["native"])
PostCall = Annotated[Call, Depends(read_call)]
STATE_OVERHEAD = 1 << 20  # bytes that an exported state may have besides its numbers
TURN = "\n\n"  # stands between the turns of a conversation


class StateBody(BatchBody):
    """One turn of a session; `contents` holds exactly one prompt."""

    session_id: str = Field(min_length=1, description="the session; no ':' in it")


class MultiStateBody(StateBody):
    dialogue_idx: Annotated[Integer, Field(ge=0)] = Field(description="the branch to go on from; 0 is the root")


class DeleteBody(BaseModel):
    session_id: str = Field(min_length=1, description="a session, or a branch as <session>:<number>")
    delete_prefix: bool = Field(False, description="delete all branches of it too")


class StatusBody(BaseModel):
    limit: Annotated[Integer, Field(ge=1)] | None = Field(None, description="the most sessions to list")
    offset: Annotated[Integer, Field(ge=0)] = Field(0, description="sessions to pass over")


@router.post("/state/chat/completions", openapi_extra=body_in_openapi(StateBody.model_json_schema()))
async def state_completions(call: PostCall) -> Response:
    """One turn of a session, whose state is kept under `session_id`."""
    body = validate(StateBody, call.body)
    key = session_key(call, body)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(call.context.models.default.states.sessions.leases.hold(str(key)))
        turn = Turn(call, body, key, key, stack)
        return await turn.answer("rwkv7-state", {})


@router.post("/multi_state/chat/completions", openapi_extra=body_in_openapi(MultiStateBody.model_json_schema()))
async def multi_state_completions(call: PostCall) -> Response:
    """One turn from any branch of a session; every success makes a new branch."""
    body = validate(MultiStateBody, call.body)
    root = session_key(call, body)
    cache = call.context.models.default.states.sessions
    source = SessionKey(root.session, body.dialogue_idx, root.initial) if body.dialogue_idx else None
    async with AsyncExitStack() as stack:
        number = await asyncio.to_thread(cache.branches.take, root.session)
        turn = Turn(call, body, source, SessionKey(root.session, number, root.initial), stack)
        return await turn.answer("rwkv7-multi-state", {"dialogue_idx": number})


def session_key(call: Call, body: StateBody) -> SessionKey:
    """The session's key. Raises InvalidField for an id with ':' or for other than one prompt."""
    if len(body.contents) != 1:
        raise InvalidField(f"contents: exactly one prompt is wanted, not {len(body.contents)}", param="contents")
    return SessionKey(check_session_id(body.session_id), 0, call.context.models.default.states.initial.default.name)


class Turn:
    """One turn on its way: from a kept state, or a beginning, to another one.

    Args:
        source: the key of the state to go on from; None for the root of a session that forks.
        target: the key under which the final state is kept.
        stack: closed when the answer has been given or the client has left.
    """

    def __init__(
        self, call: Call, body: StateBody, source: SessionKey | None, target: SessionKey, stack: AsyncExitStack
    ) -> None:
        self.call = call
        self.body = body
        self.source = source
        self.target = target
        self.stack = stack
        self.stream: RequestStream | None = None
        self.model: LoadedModel = call.context.models.default
        self.cache = self.model.states.sessions

    async def answer(self, answer_id: str, members: dict[str, Any]) -> Response:
        """Generate, keep the state, and answer in the native form, streamed or not."""
        request = await self._request()
        known = {*type(self.body).model_fields, *option_names(request.params)} - unused_sampling(request)
        headers = ignored_fields(self.call.body, known)
        if self.body.stream:
            return await self._stream(request, members, headers)
        self.stream = self.stack.enter_context(self.model.engine.submit(request))
        events = await unless_client_leaves(self.call.request, collect(self.stream))
        await self.cache.durable(self.target)
        content = wire.answer(events, answer_id=answer_id, object_name="chat.completion", model=self.body.model)
        return JSONResponse({**content, **members}, headers=headers)

    async def _stream(self, request: GenerationRequest, members: dict[str, Any], headers: dict[str, str]) -> Response:
        self.stream, closing = await open_stream(self.call, self.model.engine, request)
        self.stack.push(closing)
        stack = self.stack.pop_all()  # the response outlives the caller's block
        chunks = wire.sse(
            self.stream,
            heartbeat(self.call),
            before_end=lambda: self.cache.durable(self.target),
            last=self._last_event(members),
        )
        return EventStream(chunks, stack.aclose, headers)

    def _last_event(self, members: dict[str, Any]) -> bytes:
        if not members:
            return b""
        key = f"{self.target.session}:{self.target.branch}"
        return data({"object": "multi_state.dialogue_idx", "session_id": key, **members})

    async def _request(self) -> GenerationRequest:
        turns = self.cache.turns
        turn = turns.begin(self.target.session, forks=self.target.branch > 0)
        self.stack.callback(turns.end, turn)
        base = await self._open()
        self.stack.push_async_callback(self._until_ended)
        text = self.body.contents[0]
        if base is not None and not text.startswith(TURN):
            text = TURN + text
        request = await build_request(self.call, self.body, [text], defaults.V1_BATCH, self.model)
        request.prompts = [(*(base.tail if base else ()), *request.prompts[0])]
        request.source = KeptSource(base) if base else StateSource()
        request.target = SessionTarget(self.target, turn, base)
        return request

    async def _until_ended(self) -> None:
        """After an abort the engine may still be at it for a step: until then the session is not free."""
        if self.stream is not None:
            await self.stream.ended()

    async def _open(self) -> Kept | None:
        """The state to go on from. Raises NotFound for a branch that does not exist."""
        if self.source is None:
            return None
        base = await self.cache.open(self.source)
        self.stack.callback(self.cache.close, base)
        if base is None and self.source.branch:
            raise NotFound(
                f"session {self.source.session!r} has no dialogue_idx {self.source.branch}; "
                f"GET /state/tree/{self.source.session} lists what there is",
                param="dialogue_idx",
            )
        return base


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
    body = validate(DeleteBody, call.body)
    headers = ignored_fields(call.body, DeleteBody.model_fields)
    cache = call.context.models.default.states.sessions
    if not await cache.delete(Deletion(body.session_id, body.delete_prefix)):
        content = {"status": "not_found", "message": f"there is no session {body.session_id!r}"}
        return JSONResponse(content, 404, headers=headers)
    what = f"session {body.session_id!r}" + (" and its branches" if body.delete_prefix else "")
    return JSONResponse({"status": "success", "message": f"deleted {what}"}, headers=headers)


@router.get("/state/tree/{session_id}", dependencies=[Depends(require_password)])
async def state_tree(request: Request, session_id: str) -> dict[str, Any]:
    """A session and its branches: parent, tokens, last words, time."""
    cache = context_of(request).models.default.states.sessions
    headers = await cache.family(check_session_id(session_id))
    if not headers:
        raise NotFound(f"there is no session {session_id!r}", param="session_id")
    branches = [
        {
            "session_id": key.shown,
            "dialogue_idx": key.branch,
            "parent": SessionKey.parse(header.parent).shown if header.parent else None,
            "tokens": header.tokens,
            "last_text": header.last_text,
            "timestamp": header.created,
        }
        for key, header in sorted(((SessionKey.parse(h.key), h) for h in headers), key=lambda pair: pair[0].branch)
    ]
    return {"session_id": session_id, "branches": branches}


@router.get("/state/{session_id}/export", dependencies=[Depends(require_password)])
async def export_state(request: Request, session_id: str) -> Response:
    """A session's or branch's state as a safetensors file."""
    model = context_of(request).models.default
    record = await model.states.sessions.export_bytes(parse_name(session_id, model.states.initial.default.name))
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
    key = parse_name(session_id, model.states.initial.default.name) if session_id else None
    body = await read_bytes(request, 2 * model.model.state_nbytes() + STATE_OVERHEAD)
    try:
        kept = await model.states.sessions.import_bytes(body, key, replace=replace)
    except StateCorrupt:
        raise BadRequest("the body is not a whole exported state; export it again and send it unchanged") from None
    return {"status": "success", "session_id": kept.key.shown, "tokens": kept.header.tokens}


def parse_name(name: str, initial: str) -> SessionKey:
    """`<session>` or `<session>:<number>` as clients see it. Raises InvalidField."""
    session, _, number = name.partition(":")
    if number and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise InvalidField(f"session_id: {name[:60]!r} is neither a session nor a branch", param="session_id")
    return SessionKey(check_session_id(session), int(number or 0), initial)
