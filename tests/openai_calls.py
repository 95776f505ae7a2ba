"""What the OpenAI tests share: the official client, a few conversations, and the parts of streams."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import openai

from server_process import ServerProcess, sse_events

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
COUNT = [{"role": "user", "content": "Count from 1 to 12."}]
STORY = [{"role": "user", "content": "Tell me a story."}]
PLAIN: dict[str, Any] = {"temperature": 0, "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 64}


def client_of(server: ServerProcess, path: str = "/v1", **options: Any) -> openai.OpenAI:
    """The official client on this server; it does not retry unless told to."""
    return openai.OpenAI(base_url=server.url + path, **{"api_key": "none", "max_retries": 0, **options})


def chat(client: openai.OpenAI, messages: list[dict[str, Any]] = CAPITAL, **fields: Any) -> Any:
    """A chat completion with greedy defaults."""
    return client.chat.completions.create(model="any", messages=messages, **{**PLAIN, **fields})  # type: ignore[call-overload]


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    """A text completion with greedy defaults."""
    return client.completions.create(model="any", prompt=prompt, **{**PLAIN, **fields})


def streamed(chunks: Iterable[Any]) -> tuple[dict[int, str], dict[int, str]]:
    """Text and finish reason of each choice; checks that a choice ends once and last."""
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after a choice's finish reason"
            texts[choice.index] += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return dict(texts), reasons


def raw_stream(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream as they are on the wire; checks the last line."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = sse_events(response)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def joined(entries: Iterable[Any]) -> bytes:
    """The bytes of log-probability entries."""
    return b"".join(bytes(entry.bytes) for entry in entries)
