"""OpenAI's wire form: answers, chunks, usage and log-probabilities (openai_api.md section 2.4 and 2.5)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rwkv_lightning.core.errors import InternalError, RequestError
from rwkv_lightning.core.rendering import openai_error
from rwkv_lightning.core.request import Event, TokenLogprob, Usage
from rwkv_lightning.core.sse import data

ReasoningField = Literal["both", "reasoning_content", "reasoning", "inline"]
LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity
END_TAG = b"</think>"


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


class ReasoningCount:
    """Counts a row's tokens up to and including the end of its thought."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._tail = b""
        self._thinking = True
        self.count = 0

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens if self._thinking else ():
            self.count += 1
            self._tail = (self._tail + self._token_bytes[token])[-64:]
            if END_TAG in self._tail:
                self._thinking = False
                break


def message_fields(reasoning: str, content: str, form: ReasoningField) -> dict[str, str]:
    """The thought and the answer under the names that clients read."""
    if form == "inline":
        return {"content": f"<think>{reasoning}</think>{content}" if reasoning else content}
    fields = {"content": content}
    if reasoning and form in ("both", "reasoning_content"):
        fields["reasoning_content"] = reasoning
    if reasoning and form in ("both", "reasoning"):
        fields["reasoning"] = reasoning
    return fields


def chat_logprobs(entries: Sequence[TokenLogprob], token_bytes: Sequence[bytes]) -> dict[str, Any]:
    """`logprobs` of a chat choice; `bytes` is exact where `token` has replacement characters."""
    return {"content": [_chat_entry(entry, token_bytes) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprob, token_bytes: Sequence[bytes]) -> dict[str, Any]:
    top = [_token_entry(token, logprob, token_bytes) for token, logprob in entry.top]
    return {**_token_entry(entry.token, entry.logprob, token_bytes), "top_logprobs": top}


def _token_entry(token: int, logprob: float, token_bytes: Sequence[bytes]) -> dict[str, Any]:
    raw = token_bytes[token] if token < len(token_bytes) else b""
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def text_logprobs(entries: Sequence[TokenLogprob | None], token_bytes: Sequence[bytes], offset: int) -> dict[str, Any]:
    """`logprobs` of a text completion; None entries are the first prompt token, which has no probability."""
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    raw = b""
    for entry in entries:
        assert entry is not None
        result["tokens"].append(token_text(entry.token, token_bytes))
        result["token_logprobs"].append(finite(entry.logprob))
        result["top_logprobs"].append({token_text(t, token_bytes): finite(p) for t, p in entry.top})
        result["text_offset"].append(offset + len(raw.decode("utf-8", "replace")))
        raw += token_bytes[entry.token]
    return result


def token_text(token: int, token_bytes: Sequence[bytes]) -> str:
    return token_bytes[token].decode("utf-8", "replace") if token < len(token_bytes) else ""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def error_event(error: Exception, trace_id: str | None) -> bytes:
    """An error after the stream has begun: the form that the official client raises with its message and code."""
    known = error if isinstance(error, RequestError) else InternalError("the row failed unexpectedly")
    return data(openai_error(known, trace_id))


def last_usage(event: Event) -> Usage:
    return event.usage or Usage()
