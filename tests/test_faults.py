"""Steps that go wrong, over HTTP: the echo example says when, and every row still ends once, with the right text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from example_plugins import installed_examples
from server_thread import ServerThread

from rwkv_lightning.core.demo import demo_vocab_path
from rwkv_lightning.core.text.vocabulary import Vocabulary
from server_process import sse_events

V1 = "/v1/chat/completions"
ROWS = ["the quick brown fox jumps", "over the lazy dog and on", "12345678901234567890", "Lorem ipsum dolor sit amet"]
DELAY = 8  # the echo's default
Start = Callable[..., ServerThread]
vocabulary = Vocabulary.load(demo_vocab_path())


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a server of the echo engine with faults by step number."""
    monkeypatch.syspath_prepend(str(installed_examples()))
    with ExitStack() as stack:

        def begin(faults: dict[int, str] | None = None, **settings: Any) -> ServerThread:
            sections = {"echo": {"faults": faults or {}}}
            options = {"plugin": ["echo"], "inference_engine": "echo", "device": "cpu", "plugins": sections}
            return stack.enter_context(ServerThread(**options, **settings))

        yield begin


def echo(prompt: str, tokens: int) -> str:
    """What the engine says after a prompt: its last tokens over and over."""
    sound = vocabulary.encode(prompt)[-DELAY:]
    assert len(sound) == DELAY
    return vocabulary.decode_bytes([sound[i % DELAY] for i in range(tokens)]).decode()


def body(rows: list[str], tokens: int = 6, **fields: Any) -> dict[str, Any]:
    return {"contents": rows, "max_tokens": tokens, "temperature": 0, "stop_tokens": [], **fields}


def choices(response: Any) -> list[tuple[str, str]]:
    """(text, finish reason) of each row."""
    assert response.status_code == 200, response.text
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in response.json()["choices"]]


def served(rows: list[str], tokens: int = 6) -> list[tuple[str, str]]:
    return [(echo(row, tokens), "length") for row in rows]


def is_well(server: ServerThread) -> None:
    """The server serves, and no slot was lost."""
    assert choices(server.post(V1, body(ROWS, 20))) == served(ROWS, 20)
    assert server.client.get("/v1/health").json()["status"] == "ok"
    server.wait_idle()


@pytest.mark.parametrize("settings", [{}, {"max_batch": 1}, {"prefill_budget": 4, "prefill_chunk": 2}])
def test_the_echo_repeats_the_end_of_the_prompt(start: Start, settings: dict[str, int]) -> None:
    server = start(**settings)
    assert choices(server.post(V1, body(ROWS, 30))) == served(ROWS, 30)
    assert choices(server.post(V1, body(["short"]))) == [("", "stop")], "the zero state ends the text"
    server.wait_idle()


def test_a_step_that_raises_costs_its_rows_only(start: Start) -> None:
    server = start({3: "raise"}, max_batch=2)
    response = server.post(V1, body(ROWS))
    expected = [(echo(row, 2), "error") for row in ROWS[:2]] + served(ROWS[2:])
    assert choices(response) == expected, "rows 0 and 1 had the two slots, rows 2 and 3 were waiting"
    assert [bool(choice.get("error")) for choice in response.json()["choices"]] == [True, True, False, False]
    assert "told to fail" not in response.text, "what the model raised is for the log"
    is_well(server)


def test_a_step_that_raises_in_a_stream(start: Start) -> None:
    server = start({3: "raise"}, max_batch=2)
    events = sse_events(server.post(V1, body(ROWS, stream=True, chunk_size=1)))
    assert events.pop() == "[DONE]"
    texts, reasons, errors = [""] * 4, {}, []
    for event in map(json.loads, events):
        if "error" in event:
            errors.append(event["index"])
        for choice in event.get("choices", ()):
            texts[choice["index"]] += choice["delta"]["content"]
            if "finish_reason" in choice:
                assert reasons.setdefault(choice["index"], choice["finish_reason"]) == choice["finish_reason"]
    assert sorted(errors) == [0, 1]
    assert reasons == {0: "error", 1: "error", 2: "length", 3: "length"}
    assert texts == [echo(row, 2) for row in ROWS[:2]] + [echo(row, 6) for row in ROWS[2:]]
    is_well(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_rows_all_fail_at_once_is_an_error(start: Start, stream: bool) -> None:
    server = start({1: "raise", 2: "raise"})
    native = server.post(V1, body(ROWS, stream=stream))
    assert (native.status_code, list(native.json())) == (500, ["error"])
    messages = [{"role": "user", "content": ROWS[0]}]
    chat = server.post(V1, {"messages": messages, "max_tokens": 5, "stream": stream})
    assert (chat.status_code, chat.json()["error"]["code"]) == (500, "internal_error")
    assert "told to fail" not in native.text + chat.text
    is_well(server)


def test_a_row_of_nan_fails_alone(start: Start) -> None:
    server = start({4: "nan"})
    response = server.post(V1, body(ROWS))
    assert choices(response) == [(echo(ROWS[0], 3), "error"), *served(ROWS[1:])]
    assert "no finite number" in response.json()["choices"][0]["error"]
    is_well(server)


@pytest.mark.parametrize("stream", [False, True])
def test_running_out_of_memory_is_503_and_not_to_be_tried_again(start: Start, stream: bool) -> None:
    server = start({1: "out-of-memory", 2: "out-of-memory"})
    refused = server.post(V1, body(ROWS, stream=stream))
    assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "false")
    assert "smaller max_tokens" in refused.json()["error"]
    messages = [{"role": "user", "content": ROWS[0]}]
    chat = server.post(V1, {"messages": messages, "max_tokens": 5, "stream": stream})
    assert (chat.status_code, chat.headers["x-should-retry"]) == (503, "false")
    assert chat.json()["error"]["code"] == "out_of_memory"
    is_well(server)


def test_an_engine_that_dies_says_so(start: Start) -> None:
    server = start({3: "die"}, max_batch=2)
    assert server.client.get("/v1/health").status_code == 200
    events = sse_events(server.post(V1, body(ROWS, stream=True, chunk_size=1)))
    assert events.pop() == "[DONE]"
    ended = [c["index"] for e in map(json.loads, events) for c in e.get("choices", ()) if c.get("finish_reason")]
    assert sorted(ended) == [0, 1, 2, 3], "each row ends exactly once, the waiting ones too"
    health = server.client.get("/v1/health")
    assert (health.status_code, health.json()["model_loaded"]) == (503, False)
    assert health.json()["status"] == "engine stopped"
    for path in (V1, "/v2/chat/completions", "/big_batch/completions"):
        refused = server.post(path, body(ROWS))
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "false")
        assert "restart" in refused.json()["error"]
    assert server.client.get("/metrics").status_code == 200


def test_every_third_step_fails_and_everybody_is_answered(start: Start) -> None:
    faults = {step: ("raise", "nan", "out-of-memory")[step // 3 % 3] for step in range(3, 300, 3)}
    server = start(faults, max_batch=3)

    def ask(number: int) -> list[tuple[str, str]]:
        rows = [ROWS[(number + i) % 4] for i in range(1 + number % 5)]
        response = server.post(V1, body(rows, 4 + number % 7))
        if response.status_code != 200:
            assert response.status_code in (500, 503)
            return []
        answers = choices(response)
        for row, (text, reason) in zip(rows, answers, strict=True):
            whole = echo(row, 4 + number % 7)
            assert text == whole if reason == "length" else (reason == "error" and whole.startswith(text))
        return answers

    with ThreadPoolExecutor(4) as pool:
        reasons = [reason for answers in pool.map(ask, range(24)) for _, reason in answers]
    assert {"length", "error"} == set(reasons), "some went through, some did not"
    server.wait_idle()
    assert server.client.get("/v1/health").json()["status"] == "ok"
