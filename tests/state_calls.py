"""What tests of sessions share: a server with a store of its own, turns, and the model alone as the oracle."""

from __future__ import annotations

import asyncio
import itertools
import json
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
from server_thread import ServerThread

from rwkv_lightning.core.cache.record import Expected, StateRecord
from rwkv_lightning.core.checkpoint import fingerprint
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.generation import new_request, sampling_params
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.http import collect
from rwkv_lightning.core.metrics import Metrics
from rwkv_lightning.core.models import ModelManager
from rwkv_lightning.core.request import Event, FinishReason
from rwkv_lightning.core.tensor_file import open_tensors
from server_process import ServerProcess, sse_events

STATE, MULTI = "/state/chat/completions", "/multi_state/chat/completions"
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0}
ANSWER = "\n\nAssistant: <think>\n</think>\n"


def serve(folder: Path, **settings: Any) -> ServerThread:
    """A server of the demo model in float32, whose answers the oracle can give too."""
    own = {"dtype": "float32", "threads": 1, "max_batch": 4, "state_store": "sqlite"}
    return ServerThread(**{**own, "state_db": str(folder / "states.db"), "state_flush_interval": 0.02, **settings})


def question(text: str) -> str:
    return f"User: {text}{ANSWER}"


def body(session: str, prompt: str, **fields: Any) -> dict[str, Any]:
    return {"session_id": session, "contents": [prompt], "max_tokens": 24, **GREEDY, **fields}


def turn(server: ServerProcess, session: str, prompt: str, **fields: Any) -> str:
    """The answer to one turn of a session."""
    return text_of(server.post(STATE, body(session, prompt, **fields)))


def fork(server: ServerProcess, session: str, branch: int, prompt: str, **fields: Any) -> tuple[str, int]:
    """The answer to a turn from a branch, and the number of the new one."""
    answer = server.post(MULTI, body(session, prompt, dialogue_idx=branch, **fields))
    return text_of(answer), answer.json()["dialogue_idx"]


def text_of(answer: httpx.Response) -> str:
    """The text of an answer, streamed or not."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        (choice,) = answer.json()["choices"]
        assert "error" not in choice, choice
        return str(choice["message"]["content"])
    events = [json.loads(event) for event in sse_events(answer) if event != "[DONE]"]
    assert not any("error" in event for event in events), events
    return "".join(choice["delta"]["content"] for event in events for choice in event.get("choices", ()))


def export(server: ServerProcess, name: str, **query: Any) -> StateRecord:
    """A session's or branch's record."""
    answer = server.client.get(f"/state/{name}/export", params=query)
    assert answer.status_code == 200, answer.text
    return StateRecord.from_bytes(answer.content, Expected(demo_fingerprint()))


def demo_fingerprint() -> str:
    return fingerprint(open_tensors(demo_model_path()).tensors)


def listed(server: ServerProcess, **page: Any) -> dict[str, str]:
    """The level of each session and branch as /state/status lists them."""
    answer = server.post("/state/status", page).json()
    return {entry["session_id"]: entry["cache_level"] for entry in answer["sessions"]}


class Oracle:
    """The demo model by itself, without any cache: what a row of token ids is answered with, alone in one slot."""

    def __init__(self) -> None:
        settings = Settings(threads=1, state_store="none", dtype="float32", max_batch=1)
        self.model = ModelManager(settings, PluginHost(settings), Metrics()).load(lambda summary: None)
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        self.model.engine.start()

    def close(self) -> None:
        self._runner.run(self.model.engine.stop())
        self._runner.close()

    def encode(self, text: str) -> list[int]:
        return list(self.model.vocabulary.encode(text))

    def answer(
        self, ids: Iterable[int], max_tokens: int = 24, stop: Sequence[str] = ("\nUser:",), seed: int = 0, **values: Any
    ) -> Event:
        return self._runner.run(self._answer(tuple(ids), max_tokens, stop, seed, {**GREEDY, **values}))

    async def _answer(
        self, ids: tuple[int, ...], max_tokens: int, stop: Sequence[str], seed: int, values: dict[str, Any]
    ) -> Event:
        params = sampling_params(
            self.model.engine, Settings(), sampler="V1", values=values, max_tokens=max_tokens, stop=stop, seed=seed
        )
        request = new_request([ids], params)
        request.use_prefix_cache = False
        with self.model.engine.submit(request) as stream:
            (event,) = await collect(stream)
        return event

    def covered(self, event: Event) -> list[int]:
        """The generated tokens whose bytes all lie in the returned text (native_api.md, "Stored states")."""
        tokens = [token for token in event.tokens if token != 0]
        said = [self.model.vocabulary.token_bytes[token] for token in tokens]
        ended = event.finish_reason is FinishReason.LENGTH or event.tokens[-1] == 0
        room = utf_8_decode(b"".join(said), "replace", False)[1] if ended else len(event.text.encode())
        ends = itertools.accumulate(map(len, said))
        return [token for token, end in zip(tokens, ends, strict=True) if 0 < end <= room]

    def conversation(
        self,
        turns: Sequence[str],
        max_tokens: int | Sequence[int] = 24,
        stop: Sequence[str] = ("\nUser:",),
        **values: Any,
    ) -> list[str]:
        """The answers of a whole conversation, each turn read from its very beginning; `max_tokens` of all or each."""
        limits = [max_tokens] * len(turns) if isinstance(max_tokens, int) else max_tokens
        seen: list[int] = []
        answers = []
        for number, (prompt, limit) in enumerate(zip(turns, limits, strict=True)):
            separator = "\n\n" if number and not prompt.startswith("\n\n") else ""
            seen += self.encode(separator + prompt)
            event = self.answer(seen, limit, stop, **values)
            seen += self.covered(event)
            answers.append(event.text)
        return answers
