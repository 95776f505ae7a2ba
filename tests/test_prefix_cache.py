"""Cached beginnings of prompts: the same tokens with them as without, for every length; counted; within budgets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_thread import ServerThread
from state_calls import GREEDY, question, serve

from rwkv_lightning.core.cache import prefix_cache
from rwkv_lightning.core.text.chat import ChatMessage, chat_prompt, turn_ends

V1, CHAT, TEXT = "/v1/chat/completions", "/openai/v1/chat/completions", "/v1/completions"
CHUNK = 20  # at least `LEAST_CACHED`
Counts = tuple[float, float, float]
Start = Callable[..., ServerThread]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A server that keeps nothing."""
    with serve(tmp_path_factory.mktemp("plain"), state_store="none", l2_bytes=0) as server:
        yield server


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers that count the tokens they feed, `server.fed`."""
    servers: list[ServerThread] = []

    def begin(**settings: Any) -> ServerThread:
        options = {"prefill_chunk": CHUNK, "prefill_budget": CHUNK, **settings}
        server = serve(tmp_path, **options).__enter__()
        servers.append(server)
        model = server.context.models.default.model
        forward = model.forward
        server.fed = []
        monkeypatch.setattr(model, "forward", lambda b, s: server.fed.append(b.tokens.numel()) or forward(b, s))
        return server

    yield begin
    for server in servers:
        if server.thread.is_alive():
            server.__exit__()


def tokens_of(server: ServerThread, text: str) -> list[int]:
    return list(server.context.models.default.vocabulary.encode(text))


def complete(server: ServerThread, ids: list[int], **fields: Any) -> tuple[str, int]:
    """The text after token ids, and how many of them were cached."""
    answer = server.post(TEXT, {"prompt": ids, "max_tokens": 12, "stop": [], **GREEDY, **fields}).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def counts(server: ServerThread) -> Counts:
    names = ("queries", "hits", "tokens_saved")
    queries, hits, saved = (server.metric(f"prefix_cache_{name}_total") for name in names)
    return queries, hits, saved


LONG = question("Count from 1 to 12.") + "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12\n\n" + question("What is 7 + 8?") * 3


def test_greedy_tokens_are_the_same_at_every_length_around_a_chunk(start: Start, plain: ServerThread) -> None:
    """What is cached of one prompt serves others that go on differently, end earlier, or are the same."""
    server = start()
    ids = tokens_of(server, LONG)
    lengths = sorted({CHUNK * k + d for k in (1, 2, 3) for d in (-2, -1, 0, 1, 2)} | {15, 16, 17})
    assert len(ids) > max(lengths) + 3
    others = tokens_of(server, " and the")
    for length in [*lengths, *reversed(lengths)]:
        for prompt in (ids[:length], ids[:length] + others, ids[: length - 1] + others[:1]):
            text, _ = complete(server, prompt)
            assert text == complete(plain, prompt, use_prefix_cache=False)[0], (length, len(prompt))
    queries, hits, saved = counts(server)
    assert queries == 3 * 2 * len(lengths)
    assert hits > len(lengths)
    assert saved > 20 * hits


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7])
def test_an_identical_prompt_needs_no_forward(start: Start, length: int) -> None:
    server = start()
    ids = tokens_of(server, LONG)[:length]
    first = complete(server, ids)
    drawn = len(server.fed) - -(-length // CHUNK)  # steps that decoded
    server.fed.clear()
    again = complete(server, ids)
    assert (first[1], again[1], again[0]) == (0, length, first[0])
    assert server.fed == [1] * drawn, "nothing of the prompt was fed"


def test_identical_prompts_at_once_and_many_choices(start: Start) -> None:
    server = start()
    ids = tokens_of(server, LONG)[:50]
    text, _ = complete(server, ids)
    answer = server.post(TEXT, {"prompt": [ids] * 3, "n": 4, "max_tokens": 12, "stop": [], **GREEDY}).json()
    assert {choice["text"] for choice in answer["choices"]} == {text}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * 50


def test_common_beginnings_within_a_request_are_read_once(start: Start, plain: ServerThread) -> None:
    server = start(max_batch=16)
    stem = tokens_of(server, LONG)[:60]
    prompts = [stem + tokens_of(server, end) for end in (" one", " two", " three words more", " one", " 4")]
    answer = server.post(TEXT, {"prompt": prompts, "max_tokens": 1, "stop": [], **GREEDY}).json()
    ends = [len(prompt) - 60 for prompt in prompts]
    assert sum(server.fed) == 60 + sum(ends) - ends[3], "the stem once, each end once, the repeated prompt never"
    alone = [complete(plain, prompt, max_tokens=1, use_prefix_cache=False)[0] for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == alone


def test_a_beginning_that_another_request_is_reading_is_read_once(start: Start, plain: ServerThread) -> None:
    server = start(max_batch=32)
    stem = (tokens_of(server, LONG) * 20)[:800]
    prompts = [[*stem, *tokens_of(server, f" {number}")] for number in range(20)]

    async def all_at_once() -> list[tuple[str, int]]:
        return await asyncio.gather(*(asyncio.to_thread(complete, server, prompt, max_tokens=1) for prompt in prompts))

    answers = asyncio.run(all_at_once())
    assert sum(server.fed) < 2 * len(stem)
    assert sum(cached > 0 for _, cached in answers) >= 18
    assert answers[7][0] == complete(plain, prompts[7], max_tokens=1, use_prefix_cache=False)[0]


def test_it_can_be_left_out(start: Start) -> None:
    server = start()
    ids = tokens_of(server, LONG)[:50]
    for _ in range(2):
        assert complete(server, ids, use_prefix_cache=False)[1] == 0
    body = {"contents": ["one and one " * 20], "max_tokens": 2, **GREEDY, "use_prefix_cache": False}
    for path in (V1, "/v2/chat/completions"):
        for _ in range(2):
            assert server.post(path, body).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert counts(server) == (0, 0, 0)
    assert len(server.context.models.default.states.prefixes) == 0


def test_every_endpoint_shares_one_tree(start: Start) -> None:
    server = start()
    text = question("What is the capital of France?") * 3
    server.post(V1, {"contents": [text], "max_tokens": 2, **GREEDY})
    whole = len(tokens_of(server, text))
    usages = [
        server.post("/v2/chat/completions", {"contents": [text], "max_tokens": 2}).json()["usage"],
        server.post(TEXT, {"prompt": text, "max_tokens": 2}).json()["usage"],
        server.post("/state/chat/completions", {"session_id": "s", "contents": [text], "max_tokens": 2}).json()[
            "usage"
        ],
    ]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [whole] * 3


def test_the_next_turn_of_a_chat_finds_the_end_of_the_last_message(start: Start) -> None:
    server = start(prefill_chunk=256, prefill_budget=512)
    history = [
        {"role": "system", "content": "You are a helpful assistant who answers in few words."},
        {"role": "user", "content": "What is the capital of France, and what is it known for?"},
    ]
    first = server.post(CHAT, {"messages": history, "max_tokens": 9, **GREEDY}).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    history += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And of Spain?"},
    ]
    second = server.post(CHAT, {"messages": history, "max_tokens": 9, **GREEDY}).json()
    messages = [ChatMessage(message["role"], message["content"]) for message in history[:2]]
    shared = len(tokens_of(server, chat_prompt(messages).rpartition("Assistant:")[0]))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= shared - 1 > 20
    without = server.post(CHAT, {"messages": history, "max_tokens": 9, **GREEDY, "use_prefix_cache": False}).json()
    assert second["choices"] == without["choices"]


def test_turn_ends_are_positions_at_blank_lines() -> None:
    token_bytes = [b"", b"System: a", b"\n\n", b"User", b": b", b".\n\n", b"Assistant:", b"\n", b"\n\nUser"]
    assert turn_ends([1, 2, 3, 4, 2, 6], token_bytes) == (2, 5)
    assert turn_ends([3, 4, 5, 6], token_bytes) == (3,), "the token ends with the blank line"
    assert turn_ends([3, 4, 8, 4, 2, 6], token_bytes) == (2, 5), "the blank line begins a token: before it"
    assert turn_ends([3, 4, 7, 7, 6], token_bytes) == (4,)
    assert turn_ends([3, 7, 5, 6], token_bytes) == (3,)
    assert turn_ends([], token_bytes) == ()


def test_long_ones_are_found_again_after_a_restart(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "LEAST_STORED", 40)
    server = start()
    ids = tokens_of(server, LONG)[:66]
    text, _ = complete(server, ids)
    server.wait_for(lambda: server.metric("state_writes_waiting") == 0)
    server.__exit__()
    again = start()
    assert complete(again, ids) == (text, 66)
    assert again.fed == [1] * 11
    assert complete(again, ids[:-3])[1] == 60, "the last chunk boundary"
    assert again.post("/state/status", {}).json()["total_sessions"] == 0, "prefixes are no sessions"


def test_what_falls_out_of_memory_is_forgotten(start: Start) -> None:
    server = start(state_store="none", l2_bytes=2_000_000)
    states = server.context.models.default.states
    for number in range(30):
        complete(server, tokens_of(server, f"{number} is a number, and so are all the others. " * 4)[:45], max_tokens=1)
        assert states.cache.host.tier.nbytes <= 2_000_000
        assert len(states.prefixes) == states.cache.host.tier.counts()[1] > 0
    for number in range(12):  # sessions are worth more than prefixes
        server.post("/state/chat/completions", {"session_id": f"s{number}", "contents": ["A"], "max_tokens": 3})
    for number in range(12):
        server.client.get(f"/state/s{number}/export")
    assert len(states.prefixes) == states.cache.host.tier.counts()[1]
    assert states.cache.host.tier.nbytes <= 2_000_000


def test_a_long_prompt_keeps_a_bounded_number_of_states(start: Start) -> None:
    server = start()
    ids = (tokens_of(server, LONG) * 60)[: CHUNK * 200 + 7]
    complete(server, ids, max_tokens=1)
    states = server.context.models.default.states
    assert len(states.prefixes) <= prefix_cache.MOST_CHUNKS + 1
    assert complete(server, [*ids, 5], max_tokens=1)[1] == len(ids)
    assert complete(server, ids[:-5], max_tokens=1)[1] >= len(ids) * (1 - 2 / prefix_cache.MOST_CHUNKS)


class TestWaitingForAnotherPrompt:
    """A request whose prompt's beginning is being read at the moment waits for it, and for nothing else."""

    STEM = 30 * CHUNK

    @pytest.fixture
    def slow(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> ServerThread:
        server = start(max_batch=8)
        model = server.context.models.default.model
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda b, s: time.sleep(0.02) or forward(b, s))
        return server

    def prompts(self, server: ServerThread, number: int) -> list[list[int]]:
        stem = (tokens_of(server, LONG) * 20)[: self.STEM]
        return [[*stem, *tokens_of(server, f" {i} and {i}")] for i in range(number)]

    def test_it_goes_on_when_the_other_client_leaves(self, slow: ServerThread, plain: ServerThread) -> None:
        first, second = self.prompts(slow, 2)
        with ThreadPoolExecutor(2) as pool:
            leaving = pool.submit(slow.post, TEXT, {"prompt": first, "max_tokens": 1}, timeout=0.3)
            slow.wait_for(lambda: slow.metric("num_requests_running") == 1)
            staying = pool.submit(complete, slow, second, max_tokens=3)
            assert isinstance(leaving.exception(), httpx.TimeoutException)
            text, cached = staying.result()
        assert 0 < cached < self.STEM, "it has what was read till then"
        assert text == complete(plain, second, max_tokens=3, use_prefix_cache=False)[0]
        slow.wait_idle()

    def test_a_waiting_client_may_leave(self, slow: ServerThread) -> None:
        first, second = self.prompts(slow, 2)
        with ThreadPoolExecutor(2) as pool:
            staying = pool.submit(complete, slow, first, max_tokens=1)
            slow.wait_for(lambda: slow.metric("num_requests_running") == 1)
            with pytest.raises(httpx.TimeoutException):
                slow.post(TEXT, {"prompt": second, "max_tokens": 1}, timeout=0.1)
            slow.wait_for(lambda: slow.metric("num_requests_waiting") == 0)
            assert len(slow.context.models.default.states.coming) == 0
            assert staying.result()[0]
        slow.wait_idle()

    def test_it_does_not_wait_for_a_step_that_fails(self, slow: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = self.prompts(slow, 2)
        model = slow.context.models.default.model
        with ThreadPoolExecutor(2) as pool:
            failing = pool.submit(slow.post, TEXT, {"prompt": first, "max_tokens": 1})
            slow.wait_for(lambda: slow.metric("num_requests_running") == 1)
            going = pool.submit(complete, slow, second, max_tokens=3)
            slow.wait_for(lambda: len(slow.context.models.default.states.coming) == 1)
            forward, model.forward = model.forward, broken
            assert failing.result().status_code == 500
            monkeypatch.setattr(model, "forward", forward)
            assert isinstance(going.exception() or going.result(), tuple | KeyError)
        assert complete(slow, second, max_tokens=3)[0]
        slow.wait_idle()

    def test_prompts_that_share_little_do_not_wait(self, slow: ServerThread) -> None:
        first, second = self.prompts(slow, 2)
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(complete, slow, first, max_tokens=1)
            slow.wait_for(lambda: slow.metric("num_requests_running") == 1)
            assert complete(slow, first[:30] + second[-4:], max_tokens=1)[0]
            assert not running.done()
            running.result()


def broken(batch: object, states: object) -> object:
    raise RuntimeError("told to fail")
