"""The native session endpoints that generate: one session (/state), and one that forks (/multi_state)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.cache.initial import InitialState
from rwkv_lightning.core.cache.kept import Kept, KeptSource, SessionTarget
from rwkv_lightning.core.cache.keys import SessionKey, check_session_id
from rwkv_lightning.core.cache.sessions import Turn as SessionTurn
from rwkv_lightning.core.cache.states import ModelStates
from rwkv_lightning.core.errors import BadRequest, InvalidField, NotFound
from rwkv_lightning.core.generation import option_names, validate
from rwkv_lightning.core.http import (
    LONGEST_HOLD,
    Call,
    EventStream,
    body_in_openapi,
    collect,
    heartbeat,
    ignored_fields,
    raise_if_all_failed,
    read_call,
    unless_client_leaves,
)
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import GenerationRequest
from rwkv_lightning.core.sse import data
from rwkv_lightning.core.stream import RequestStream
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.native import wire
from rwkv_lightning.plugins.routes.native.batch import build_request, unused_sampling
from rwkv_lightning.plugins.routes.native.bodies import BatchBody, Integer

router = APIRouter(tags=["native"])
PostCall = Annotated[Call, Depends(read_call)]
REQUIRED = {
    "session_id": "send the name of a session",
    "dialogue_idx": "send the number of the branch to go on from, 0 for the root",
}
TURN = "\n\n"  # stands between the turns of a conversation


class StateBody(BatchBody):
    """One turn of a session; `contents` holds exactly one prompt."""

    session_id: str = Field(min_length=1, description="the session; no ':' in it")


class MultiStateBody(StateBody):
    dialogue_idx: Annotated[Integer, Field(ge=0)] = Field(description="the branch to go on from; 0 is the root")


@router.post("/state/chat/completions", openapi_extra=body_in_openapi(StateBody.model_json_schema()))
async def state_completions(call: PostCall) -> Response:
    """One turn of a session, whose state is kept under `session_id`."""
    require(call, "session_id")
    body = validate(StateBody, call.body)
    turn = Turn(call, body, await session_key(call, body))
    return await turn.answer("rwkv7-state")


@router.post("/multi_state/chat/completions", openapi_extra=body_in_openapi(MultiStateBody.model_json_schema()))
async def multi_state_completions(call: PostCall) -> Response:
    """One turn from any branch of a session; every success makes a new branch."""
    require(call, "session_id", "dialogue_idx")
    body = validate(MultiStateBody, call.body)
    turn = Fork(call, body, await session_key(call, body), body.dialogue_idx)
    return await turn.answer("rwkv7-multi-state")


def require(call: Call, *names: str) -> None:
    """Raises BadRequest where one of these fields is missing, null or an empty text (native_api.md, "Status codes")."""
    for name in names:
        value = call.body.get(name)
        if value is None or (value == "" and name == "session_id"):
            raise BadRequest(f"{name} is missing: {REQUIRED[name]}", param=name)


async def session_key(call: Call, body: StateBody) -> SessionKey:
    """The session's key. Raises InvalidField for an id with ':', other than one prompt, an unknown state file."""
    if len(body.contents) != 1:
        raise InvalidField(f"contents: exactly one prompt is wanted, not {len(body.contents)}", param="contents")
    initial = await find_initial(call.context.models.default.states, body.state)
    return SessionKey(check_session_id(body.session_id), 0, initial.name)


async def find_initial(states: ModelStates, name: str | None) -> InitialState:
    """The initial state that a request names, by default the server's. Raises InvalidField."""
    return states.initial.default if name is None else await states.initial.find(name)


class Turn:
    """One turn of a session on its way: from its kept state, or a beginning, to the next one.

    Everything it takes is on `stack`, which is closed when the answer has been given or the client has left.
    """

    def __init__(self, call: Call, body: StateBody, session: SessionKey) -> None:
        self.call = call
        self.body = body
        self.session = session
        self.stack = AsyncExitStack()
        self.stream: RequestStream | None = None
        self.model: LoadedModel = call.context.models.default
        self.sessions = self.model.states.sessions
        self.turn = SessionTurn(session.session, forks=isinstance(self, Fork))

    async def prepare(self) -> tuple[Kept | None, SessionKey]:
        """Take what the turn needs: the state to go on from, and the key of the one to come."""
        await self.stack.enter_async_context(self.sessions.leases.hold(str(self.session)))
        self._begin()
        return await self._open(self.session), self.session

    def members(self, target: SessionKey) -> Mapping[str, Any]:
        """What the answer has besides that of a batch."""
        return {}

    def last_event(self, target: SessionKey) -> bytes:
        """What comes before the end of a stream."""
        return b""

    async def answer(self, answer_id: str) -> Response:
        """Generate, keep the state, and answer in the native form, streamed or not."""
        async with self.stack:
            base, target = await self.prepare()
            self.stack.push_async_callback(self._until_ended)
            request = await self._request(base, target)
            known = {*type(self.body).model_fields, *option_names(request.params)} - unused_sampling(request)
            headers = ignored_fields(self.call.body, known)
            self.stream = self.stack.enter_context(self.model.engine.submit(request))
            if self.body.stream:
                return await self._stream(target, headers)
            events = await unless_client_leaves(self.call.request, collect(self.stream))
            await self.sessions.durable(self.turn)
            content = wire.answer(events, answer_id=answer_id, object_name="chat.completion", model=self.body.model)
            return JSONResponse({**content, **self.members(target)}, headers=headers)

    async def _stream(self, target: SessionKey, headers: dict[str, str]) -> Response:
        """The 200 is held until the answer begins or takes long: failures before that raise."""
        assert self.stream is not None
        first = await unless_client_leaves(self.call.request, self.stream.wait(LONGEST_HOLD))
        if not any(event.text for event in first):
            raise_if_all_failed(first, self.stream.rows)
        chunks = wire.sse(
            self.stream,
            heartbeat(self.call),
            before_end=lambda: self.sessions.durable(self.turn),
            last=self.last_event(target),
        )
        return EventStream(chunks, self.stack.pop_all().aclose, headers)  # the response outlives this block

    async def _request(self, base: Kept | None, target: SessionKey) -> GenerationRequest:
        text = self.body.contents[0]
        if base is not None and not text.startswith(TURN):
            text = TURN + text
        request = await build_request(self.call, self.body, [text], defaults.V1_BATCH, self.model)
        if base is not None:
            request.prompts = [(*base.tail, *request.prompts[0])]
            request.source = KeptSource(base)
        request.target = SessionTarget(target, self.turn, base)
        return request

    def _begin(self) -> None:
        """From here on a deletion of the session concerns this turn."""
        self.sessions.turns.begin(self.turn)
        self.stack.callback(self.sessions.turns.end, self.turn)

    async def _open(self, key: SessionKey) -> Kept | None:
        base = await self.sessions.open(key)
        self.stack.callback(self.sessions.close, base)
        return base

    async def _until_ended(self) -> None:
        """After an abort the engine may still be at it for a step: until then the session is not free."""
        if self.stream is not None:
            await self.stream.ended()


class Fork(Turn):
    """One turn of a session that forks: from a branch, or the root, to a new branch. Reading takes no lease."""

    def __init__(self, call: Call, body: StateBody, session: SessionKey, branch: int) -> None:
        super().__init__(call, body, session)
        self.branch = branch

    async def prepare(self) -> tuple[Kept | None, SessionKey]:
        self._begin()
        base = await self._open_branch() if self.branch else None
        number = await self.sessions.new_branch(self.session.session)
        return base, SessionKey(self.session.session, number, self.session.initial)

    def members(self, target: SessionKey) -> Mapping[str, Any]:
        return {"dialogue_idx": target.branch}

    def last_event(self, target: SessionKey) -> bytes:
        event = {"object": "multi_state.dialogue_idx", "session_id": target.shown, "dialogue_idx": target.branch}
        return data(event)

    async def _open_branch(self) -> Kept:
        """Raises NotFound."""
        session = self.session.session
        base = await self._open(SessionKey(session, self.branch, self.session.initial))
        if base is None:
            raise NotFound(
                f"session {session!r} has no dialogue_idx {self.branch}; GET /state/tree/{session} lists what there is",
                param="dialogue_idx",
            )
        return base
