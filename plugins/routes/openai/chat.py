"""POST /openai/v1/chat/completions, and bodies with `messages` on /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from starlette.responses import Response

from rwkv_lightning.core.errors import InvalidField, MissingField
from rwkv_lightning.core.generation import check_rows, new_request, validate
from rwkv_lightning.core.http import Call, body_in_openapi, read_call
from rwkv_lightning.core.interfaces import BodyClaim
from rwkv_lightning.core.request import Event
from rwkv_lightning.core.text.chat import ChatMessage, Kind, ThinkSplitter, chat_prompt, turn_ends
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.openai import fields, wire
from rwkv_lightning.plugins.routes.openai.answer import Answer, Entry, chunk_size, respond
from rwkv_lightning.plugins.routes.openai.bodies import ChatBody, OwnPathBody, SharedPathBody
from rwkv_lightning.plugins.routes.openai.wire import Envelope, ThoughtEnd

router = APIRouter(tags=["openai"])
PostCall = Annotated[Call, Depends(read_call)]

ReasoningField = Literal["both", "reasoning_content", "reasoning", "inline"]
REASONING_NAMES: Mapping[ReasoningField, tuple[str, ...]] = {
    "both": ("reasoning_content", "reasoning"),
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
}


async def v1_chat(call: Call) -> Response:
    """Chat in OpenAI's form; the path also serves native batches, which have `contents` for `messages`."""
    return await answer_chat(call, validate(SharedPathBody, call.body))


@router.post("/openai/v1/chat/completions", openapi_extra=body_in_openapi(OwnPathBody.model_json_schema()))
async def openai_chat(call: PostCall) -> Response:
    """Chat; without `messages`, the first of `contents` is the user's text."""
    return await answer_chat(call, validate(OwnPathBody, call.body))


CLAIM = BodyClaim(
    method="POST",
    path="/v1/chat/completions",
    key="messages",
    label="OpenAI",
    handle=v1_chat,
    body_schema=SharedPathBody.model_json_schema(),
    fallback=True,
)


async def answer_chat(call: Call, body: ChatBody) -> Response:
    """Generate `n` answers to the conversation, streamed or not."""
    fields.refuse_unsupported(call.body)
    check_rows(body.n, call.context.settings)
    model = fields.pick_model(call, body.model)
    params = fields.chat_params(call, body, model, defaults.OPENAI_CHAT)
    prompts = await model.encode([chat_prompt(conversation(body), think=body.think)])
    token_bytes, reasoning_field = model.vocabulary.token_bytes, call.context.settings.reasoning_field
    request = new_request(prompts * body.n, params, chunk_size(body))
    request.boundaries = turn_ends(prompts[0], token_bytes)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    answer = Answer(
        body=body,
        model=model,
        request=await model.prepare(request, state=body.state, use_prefix_cache=body.use_prefix_cache),
        envelope=Envelope(kind, model.name, model.fingerprint, wire.new_id("chatcmpl")),
        choices=[ChatChoice(row, body, token_bytes, reasoning_field) for row in range(body.n)],
        trace_id=getattr(call.request.state, "request_id", None),
    )
    return await respond(call, answer, fields.ignored(call.body, body, params))


def conversation(body: ChatBody) -> list[ChatMessage]:
    """What the prompt is made of. Raises MissingField and InvalidField when there is no text."""
    history = [ChatMessage("system", body.system)] if body.system is not None else []
    history += [ChatMessage(message.role, message.text) for message in body.messages]
    if isinstance(body, OwnPathBody) and body.contents and not body.messages:
        history.append(ChatMessage("user", body.contents[0]))
    if not history:
        raise MissingField("messages: a non-empty list of messages is required", param="messages")
    if not any(message.text.strip() for message in history):
        raise InvalidField("messages: at least one message must have text", param="messages")
    return history


class ChatChoice:
    """One choice of a chat; implements `answer.Choice`.

    The prompt of a thinking model ends inside the thought's opening tag; with `inline` its text stays as generated.
    """

    def __init__(self, row: int, body: ChatBody, token_bytes: Sequence[bytes], reasoning_field: ReasoningField) -> None:
        split = body.think and reasoning_field != "inline"
        self._row = row
        self._logprobs_wanted = body.logprobs
        self._token_bytes = token_bytes
        self._names = REASONING_NAMES.get(reasoning_field, ())
        self._splitter = ThinkSplitter() if split else None
        self._scored = ThoughtEnd() if split else None  # the tokens with log-probabilities come later than the text
        self._counted = ThoughtEnd() if body.think else None
        self.reasoning_tokens = 0

    def opening(self) -> list[Entry]:
        return [self._streamed({"role": "assistant", "content": ""})]

    def push(self, event: Event) -> list[Entry]:
        self._count(event)
        entries = [self._streamed(self._named(kind, text)) for kind, text in self._pieces(event)]
        if event.logprobs and (logprobs := self._logprobs(event))["content"]:
            if not entries or "content" not in entries[-1]["delta"]:
                entries.append(self._streamed({"content": ""}))
            entries[-1]["logprobs"] = logprobs
        if event.finish_reason is not None and event.error is None:
            entries.append({**self._streamed({}), "finish_reason": event.finish_reason})
        return entries

    def whole(self, event: Event) -> Entry:
        self._count(event)
        message = {"role": "assistant", "content": ""}
        for kind, text in self._pieces(event):
            for name, piece in self._named(kind, text).items():
                message[name] = message.get(name, "") + piece
        logprobs = self._logprobs(event) if self._logprobs_wanted else None
        return {"index": self._row, "message": message, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _streamed(self, delta: dict[str, str]) -> Entry:
        return {"index": self._row, "delta": delta, "logprobs": None, "finish_reason": None}

    def _named(self, kind: Kind, text: str) -> dict[str, str]:
        return {"content": text} if kind == "content" else dict.fromkeys(self._names, text)

    def _pieces(self, event: Event) -> list[tuple[Kind, str]]:
        if self._splitter is None:
            return [("content", event.text)] if event.text else []
        pieces = self._splitter.push(event.text)
        if event.finish_reason is not None:
            pieces += self._splitter.flush()
        return pieces

    def _count(self, event: Event) -> None:
        """The end tag's tokens count as thought."""
        if self._counted is None:
            return
        for token in event.tokens:
            if self._counted.passed:
                return
            self.reasoning_tokens += 1
            self._counted.push(wire.bytes_of(token, self._token_bytes))

    def _logprobs(self, event: Event) -> dict[str, Any]:
        """Of the tokens that make up the content: their bytes joined are its text."""
        entries = [(entry, wire.bytes_of(entry.token, self._token_bytes)[: entry.shown]) for entry in event.logprobs]
        if self._scored is not None:
            inside = [(entry, self._scored.push(raw)) for entry, raw in entries]
            entries = [(entry, raw) for entry, raw in inside if raw]
        return wire.chat_logprobs(entries, self._token_bytes)
