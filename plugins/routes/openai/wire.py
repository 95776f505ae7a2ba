"""OpenAI's wire form: answers, chunks, usage and log-probabilities (openai_api.md sections 2.4 and 2.5)."""

from __future__ import annotations

import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rwkv_lightning.core.errors import InternalError, RequestError
from rwkv_lightning.core.rendering import openai_error
from rwkv_lightning.core.request import TokenLogprob, Usage
from rwkv_lightning.core.sse import data

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity
END_TAG = b"</think>"
Utf8Decoder = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer repeats."""

    object: str
    model: str
    fingerprint: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **members,
        }


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def usage(rows: Sequence[Usage], choices_per_prompt: int, reasoning_tokens: int) -> dict[str, Any]:
    """Real counts: each prompt once however many choices it has, completions summed."""
    prompts = rows[::choices_per_prompt]
    prompt = sum(row.prompt_tokens for row in prompts)
    completion = sum(row.completion_tokens for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(row.cached_tokens for row in prompts)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


class ThoughtEnd:
    """Watches the bytes of an answer that begins with a thought for its end tag."""

    def __init__(self) -> None:
        self._tail = b""
        self._fresh = True  # no content yet
        self.passed = False

    def push(self, data: bytes) -> bytes:
        """The part of these bytes that belongs to the content: newlines right after the tag belong to the tag."""
        if not self.passed:
            _, tag, rest = (self._tail + data).partition(END_TAG)
            self._tail = (self._tail + data)[-len(END_TAG) + 1 :]
            self.passed, data = bool(tag), rest
        if self._fresh:
            data = data.lstrip(b"\n")
            self._fresh = not data
        return data


def bytes_of(token: int, token_bytes: Sequence[bytes]) -> bytes:
    """A token's bytes; ids past the table have none: a model's head may be wider than its vocabulary."""
    return token_bytes[token] if token < len(token_bytes) else b""


def chat_logprobs(entries: Iterable[tuple[TokenLogprob, bytes]], token_bytes: Sequence[bytes]) -> dict[str, Any]:
    """`logprobs` of a chat choice, from entries and their bytes in the content; `token` may have replacements."""
    return {"content": [_chat_entry(entry, raw, token_bytes) for entry, raw in entries], "refusal": None}


def _chat_entry(entry: TokenLogprob, raw: bytes, token_bytes: Sequence[bytes]) -> dict[str, Any]:
    top = [_token_entry(bytes_of(token, token_bytes), logprob) for token, logprob in entry.top]
    return {**_token_entry(raw, entry.logprob), "top_logprobs": top}


def _token_entry(raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


class TextLogprobs:
    """`logprobs` of one text completion, part by part; `text_offset` counts characters of the choice's text."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = Utf8Decoder("replace")
        self._offset = 0

    def push(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            raw = bytes_of(entry.token, self._token_bytes)[: entry.shown]
            result["tokens"].append(raw.decode("utf-8", "replace"))
            result["token_logprobs"].append(finite(entry.logprob))
            result["top_logprobs"].append(None if entry.logprob is None else self._top(entry))
            result["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(raw))
        return result

    def _top(self, entry: TokenLogprob) -> dict[str, float | None]:
        """Likeliest first; of several tokens that read the same, the likeliest stays."""
        top: dict[str, float | None] = {}
        for token, logprob in entry.top:
            top.setdefault(bytes_of(token, self._token_bytes).decode("utf-8", "replace"), finite(logprob))
        return top


def finite(logprob: float | None) -> float | None:
    """A number that JSON can hold; NaN counts as impossible, too."""
    return logprob if logprob is None or logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def error_event(error: Exception, trace_id: str | None) -> bytes:
    """An error after the stream has begun: the form that the official client raises with its message and code."""
    known = error if isinstance(error, RequestError) else InternalError("the row failed unexpectedly")
    return data(openai_error(known, trace_id))
