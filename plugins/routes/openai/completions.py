"""POST /v1/completions: continues texts or token ids as sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.generation import check_rows, new_request, validate
from rwkv_lightning.core.http import Call, body_in_openapi, read_call
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.request import Event, Tokens
from rwkv_lightning.core.text.fim import fim_prompt
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.openai import fields, wire
from rwkv_lightning.plugins.routes.openai.answer import Answer, Entry, chunk_size, respond
from rwkv_lightning.plugins.routes.openai.bodies import CompletionBody
from rwkv_lightning.plugins.routes.openai.wire import Envelope, TextLogprobs

router = APIRouter(tags=["openai"])
PostCall = Annotated[Call, Depends(read_call)]


@router.post("/v1/completions", openapi_extra=body_in_openapi(CompletionBody.model_json_schema()))
async def completions(call: PostCall) -> Response:
    """`n` continuations of each prompt; choice `row * n + k` is the k-th of prompt `row`."""
    body = validate(CompletionBody, call.body)
    fields.refuse_unsupported(call.body)
    check_rows(len(body.prompt) * body.n, call.context.settings)
    model = fields.pick_model(call, body.model)
    params = fields.completion_params(call, body, model, defaults.COMPLETIONS)
    prompts = await encode_prompts(body, model)
    rows = [row for row in range(len(prompts)) for _ in range(body.n)]
    echoes = [echo(body.prompt[row], model) if body.echo else "" for row in rows]
    request = new_request([prompts[row] for row in rows], params, chunk_size(body))
    answer = Answer(
        body=body,
        model=model,
        request=await model.prepare(request, state=body.state, use_prefix_cache=body.use_prefix_cache),
        envelope=Envelope("text_completion", model.name, model.fingerprint, wire.new_id("cmpl")),
        choices=[TextChoice(i, body, model.vocabulary.token_bytes, text) for i, text in enumerate(echoes)],
        trace_id=getattr(call.request.state, "request_id", None),
    )
    return await respond(call, answer, fields.ignored(call.body, body, params))


async def encode_prompts(body: CompletionBody, model: LoadedModel) -> list[Tokens]:
    """One tuple of token ids per prompt. Raises InvalidField."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if not texts:
        return [check_ids(prompt, model.model.config.vocab_size) for prompt in body.prompt]
    if body.suffix is not None:
        texts = [fim_prompt(text, body.suffix) for text in texts]
    if not all(texts):
        raise InvalidField("prompt: an empty text has nothing to continue", param="prompt")
    return await model.encode(texts)


def check_ids(prompt: Sequence[Any], vocab_size: int) -> Tokens:
    """A prompt's token ids. Raises InvalidField for one outside the vocabulary."""
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise InvalidField(
                f"prompt: token id {token} is outside the vocabulary (0 to {vocab_size - 1})", param="prompt"
            )
    return tuple(prompt)


def echo(prompt: str | list[int], model: LoadedModel) -> str:
    """A prompt as the text that its completion follows."""
    return prompt if isinstance(prompt, str) else model.vocabulary.decode_bytes(prompt).decode("utf-8", "replace")


class TextChoice:
    """One choice of a text completion, whose text begins with `echo`; implements `answer.Choice`."""

    reasoning_tokens = 0

    def __init__(self, row: int, body: CompletionBody, token_bytes: Sequence[bytes], echo: str) -> None:
        self._row = row
        self._echo = echo
        self._logprobs = None if body.logprobs is None else TextLogprobs(token_bytes)

    def opening(self) -> list[Entry]:
        return [self._entry(self._echo)] if self._echo else []

    def push(self, event: Event) -> list[Entry]:
        reason = None if event.error is not None else event.finish_reason
        if not (event.text or event.logprobs or reason):
            return []
        logprobs = self._logprobs.push(event.logprobs) if self._logprobs and event.logprobs else None
        return [self._entry(event.text, logprobs, reason)]

    def whole(self, event: Event) -> Entry:
        logprobs = self._logprobs.push(event.logprobs) if self._logprobs else None
        return self._entry(self._echo + event.text, logprobs, event.finish_reason)

    def _entry(self, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None) -> Entry:
        return {"index": self._row, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
