"""POST /translate/v1/batch-translate: Immersive Translate's custom API."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import AfterValidator, BaseModel, Field
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.generation import check_rows, new_request, sampling_params, validate
from rwkv_lightning.core.http import (
    Call,
    body_in_openapi,
    collect,
    ignored_fields,
    raise_if_any_failed,
    read_open_call,
    unless_client_leaves,
)
from rwkv_lightning.core.text.chat import clean
from rwkv_lightning.core.text.language import detect_language
from rwkv_lightning.plugins.routes import defaults

router = APIRouter(tags=["native"])

NAMES = {
    "zh": "Chinese",
    "zh-cn": "Chinese",
    "zh-tw": "Chinese",
    "en": "English",
    "ja": "Japanese",
    "fr": "French",
    "de": "German",
    "es": "Spanish",
    "ru": "Russian",
}
DETECTED = {"zh": "zh-CN"}  # the codes that this API uses, where they differ


def _code(value: str) -> str:
    """A language code on one line: it stands in the prompt. Raises ValueError for a blank one."""
    code = " ".join(value.split())
    if not code:
        raise ValueError("a language code is wanted, this one is blank")
    return code


Code = Annotated[str, AfterValidator(_code)]


class TranslateBody(BaseModel):
    source_lang: Code = Field("auto", description="a language code, or 'auto' to detect it per text")
    target_lang: Code = Field(description="a language code; an unknown one stands for itself")
    text_list: list[str] = Field(min_length=1, description="the texts; translations come back by position")
    placeholders: list[str] = Field([], description="texts that a translation must keep as they are")
    seed: int | None = None


@router.post("/translate/v1/batch-translate", openapi_extra=body_in_openapi(TranslateBody.model_json_schema()))
async def batch_translate(call: Annotated[Call, Depends(read_open_call)]) -> Response:
    """Translate each text greedily; a blank text is its own translation."""
    body = validate(TranslateBody, call.body)
    check_rows(len(body.text_list), call.context.settings)
    sources = await source_languages(body)
    texts = [clean(text) for text in body.text_list]
    translated = await translate(call, body, [i for i, text in enumerate(texts) if text], texts, sources)
    answers = [
        {
            "detected_source_lang": source,
            "text": keep_placeholders(text, translated[i], body.placeholders) if i in translated else body.text_list[i],
        }
        for i, (text, source) in enumerate(zip(texts, sources, strict=True))
    ]
    return JSONResponse({"translations": answers}, headers=ignored_fields(call.body, TranslateBody.model_fields))


async def source_languages(body: TranslateBody) -> list[str]:
    if body.source_lang.lower() != "auto":
        return [body.source_lang] * len(body.text_list)
    detected = await asyncio.to_thread(lambda: [detect_language(text) for text in body.text_list])
    return [DETECTED.get(language, language) for language in detected]


async def translate(
    call: Call, body: TranslateBody, rows: Sequence[int], texts: Sequence[str], sources: Sequence[str]
) -> dict[int, str]:
    """The translations of these rows, by row."""
    if not rows:
        return {}
    model = call.context.models.default
    path = defaults.TRANSLATE
    settings = call.context.settings
    params = sampling_params(
        model.engine,
        settings,
        sampler=path.sampler,
        values=path.sampling,
        max_tokens=min(path.max_tokens, settings.max_tokens_limit),
        stop=path.stop,
        seed=body.seed,
    )
    prompts = await model.encode([prompt(texts[row], sources[row], body.target_lang) for row in rows])
    request = await model.prepare(new_request(prompts, params, chunk_size=16))
    with model.engine.submit(request) as stream:
        events = await unless_client_leaves(call.request, collect(stream))
    raise_if_any_failed(events)  # this form has no place for the error of one text
    return {row: event.text.strip() for row, event in zip(rows, events, strict=True)}


def prompt(text: str, source: str, target: str) -> str:
    return f"{language_name(source)}: {text}\n\n{language_name(target)}:"


def language_name(code: str) -> str:
    """What the model calls a language; an unknown code stands for itself."""
    return NAMES.get(code.lower(), code)


def keep_placeholders(source: str, translation: str, placeholders: Sequence[str]) -> str:
    """The translation with every placeholder of the source as often as there; lost ones are put back."""
    for placeholder in filter(None, placeholders):
        for _ in range(source.count(placeholder) - translation.count(placeholder)):
            translation = _put_back(source, translation, placeholder, placeholders)
    return translation


def _put_back(source: str, translation: str, placeholder: str, placeholders: Sequence[str]) -> str:
    """Insert at about the same place as in the source, between words and outside other placeholders."""
    share = source.index(placeholder) / max(1, len(source) - len(placeholder))
    at = round(share * len(translation))
    taken = [
        match.span() for other in filter(None, placeholders) for match in re.finditer(re.escape(other), translation)
    ]
    while at < len(translation) and not _is_gap(translation, at, taken):
        at += 1
    return f"{translation[:at].rstrip()} {placeholder} {translation[at:].lstrip()}".strip()


def _is_gap(text: str, at: int, taken: Sequence[tuple[int, int]]) -> bool:
    return (at == 0 or text[at].isspace()) and not any(start < at < end for start, end in taken)
