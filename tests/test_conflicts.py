"""Paths that two groups share, and all groups in one batch: the cases of path_conflicts.md section 7."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai_calls import CAPITAL, PARIS, PLAIN, chat, client_of, raw_stream

from server_process import ServerProcess, sse_events

CHAT = "/v1/chat/completions"
OWN = "/openai/v1/chat/completions"
SHORT = {"temperature": 0, "max_tokens": 4}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--deterministic", "--max-batch", "24") as running:
        yield running
        running.wait_idle()


def test_1_a_native_body_on_the_shared_path(server: ServerProcess) -> None:
    body = {"contents": ["User: Hi", "The cat"], **SHORT}
    answer = server.post(CHAT, body).json()
    assert answer["id"] == "rwkv7-batch"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    events = sse_events(server.post(CHAT, {**body, "stream": True}))
    assert events[-1] == "[DONE]"
    assert "id" not in json.loads(events[0])


def test_2_the_client_gets_equal_text_on_both_paths(server: ServerProcess) -> None:
    answers = [chat(client_of(server, path)) for path in ("/v1", "/openai/v1")]
    assert all(answer.id.startswith("chatcmpl-") and answer.usage.total_tokens for answer in answers)
    assert [answer.choices[0].message.content for answer in answers] == [PARIS, PARIS]
    seeded = {"temperature": 1.0, "seed": 5, "max_tokens": 30}
    texts = {
        chat(client_of(server, path), MESSAGES, **seeded).choices[0].message.content for path in ("/v1", "/openai/v1")
    }
    assert len(texts) == 1


def test_3_contents_mean_a_batch_or_a_turn(server: ServerProcess) -> None:
    turn = server.post(OWN, {"contents": ["What is the capital of France?"], **PLAIN}).json()
    assert turn["choices"][0]["message"]["content"] == PARIS
    assert turn["id"].startswith("chatcmpl-")
    batch = server.post(CHAT, {"contents": ["a"], **SHORT}).json()
    assert (batch["id"], len(batch["choices"])) == ("rwkv7-batch", 1)


OPENAI, NATIVE = (400, "error"), (422, "detail")
DISPATCH: list[tuple[dict[str, Any], tuple[int, str]]] = [
    ({"messages": MESSAGES}, (200, "chatcmpl-")),
    ({"messages": MESSAGES, "contents": None}, (200, "chatcmpl-")),
    ({"messages": MESSAGES, "contents": []}, (200, "chatcmpl-")),
    ({"contents": ["a"]}, (200, "rwkv7-batch")),
    ({"contents": ["a"], "messages": None}, (200, "rwkv7-batch")),
    ({"contents": ["a"], "messages": []}, (200, "rwkv7-batch")),
    ({"messages": MESSAGES, "contents": ["a"]}, OPENAI),
    ({"messages": "a", "contents": ["a"]}, OPENAI),
    ({}, OPENAI),
    ({"messages": None}, OPENAI),
    ({"messages": [], "contents": []}, OPENAI),
    ({"contents": []}, OPENAI),
    ({"contents": None}, OPENAI),
    ({"system": "Be brief."}, OPENAI),
    ({"messages": "a"}, OPENAI),
    ({"messages": {}}, OPENAI),
    ({"messages": 0}, OPENAI),
    ({"contents": "a"}, NATIVE),
    ({"contents": {}}, NATIVE),
    ({"contents": 0}, NATIVE),
    ({"contents": [""]}, NATIVE),
]


@pytest.mark.parametrize(("body", "expected"), DISPATCH)
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_4_the_body_alone_decides(
    server: ServerProcess, body: dict[str, Any], expected: tuple[int, str], accept: str
) -> None:
    status, sign = expected
    answer = server.post(CHAT, {**body, **SHORT}, headers={"accept": accept, "user-agent": "OpenAI/Python"})
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json()["id"].startswith(sign)
    else:
        assert set(answer.json()) == {sign}
    if status == 400:
        both = bool(body.get("messages")) and bool(body.get("contents"))
        assert answer.json()["error"]["param"] == (None if both else "messages")
        assert "messages" in answer.text
        assert ("contents" in answer.text) == both


def test_4_either_group_alone_owns_the_path() -> None:
    with ServerProcess("--disable-plugin", "openai") as native:
        assert native.post(CHAT, {"contents": ["a"], **SHORT}).status_code == 200
        refused = native.post(CHAT, {"messages": MESSAGES, **SHORT})
        assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["body", "contents"])
    with ServerProcess("--disable-plugin", "native") as openai:
        assert openai.post(CHAT, {"messages": MESSAGES, **SHORT}).status_code == 200
        refused = openai.post(CHAT, {"contents": ["a"], **SHORT})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_5_bodies_of_the_runner_guide(server: ServerProcess) -> None:
    for fields in (
        {},
        {"max_tokens": 1000, "temperature": 1.2, "top_p": 0.3, "presence_penalty": 0.4, "frequency_penalty": 0.4},
        {"max_tokens": 1000, "top_k": 25, "penalty_decay": 0.99, "stop": ["\n\nUser"], "model": "a.pth"},
    ):
        answer = server.post(CHAT, {"messages": CAPITAL, "max_tokens": 30, **fields})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
        assert server.post("/v1/completions", {"prompt": "The", **fields, "max_tokens": 8}).status_code == 200


def test_6_the_body_of_the_seqgpt_page(server: ServerProcess) -> None:
    for limit in (128, 257):
        body = {"messages": CAPITAL, "max_tokens": limit, "temperature": 0.7, "top_p": 0.9}
        assert server.post(CHAT, body).json()["choices"][0]["message"]["content"]


def test_8_a_wrong_password_in_each_groups_form() -> None:
    with ServerProcess("--password", "s3cret") as server:
        body = {"contents": ["a"], "prompt": "a", "prefix": ["a"], "suffix": ["b"]}
        for path, only in (
            (CHAT, {"contents": ["a"]}),
            ("/v2/chat/completions", {"contents": ["a"]}),
            ("/big_batch/completions", {"contents": ["a"]}),
            ("/FIM/v1/batch-FIM", {"prefix": ["a"], "suffix": ["b"]}),
        ):
            answer = server.post(path, only)
            assert answer.status_code == 401
            assert isinstance(answer.json()["error"], str)
            assert answer.headers["www-authenticate"] == "Bearer"
        for path, only in ((CHAT, {"messages": MESSAGES}), (OWN, {"messages": MESSAGES}), ("/v1/completions", body)):
            answer = server.post(path, only)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/openai/v1/models").status_code == 401
        assert server.post("/translate/v1/batch-translate", {"target_lang": "en", "text_list": [""]}).status_code == 200


# 12: fifty requests of all groups at once

RANDOM = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 24}


def one_of(number: int) -> tuple[str, dict[str, Any]]:
    """The number-th request: every group, path and form in turn, each with a seed of its own."""
    word = random.Random(number).choice(["cat", "dog", "tree", "river", "house"])
    story = f"Once upon a time there was a {word}"
    messages = [{"role": "user", "content": f"Tell me a story about a {word}."}]
    common = {**RANDOM, "seed": number}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": messages, **common}),
        (CHAT, {"messages": messages, "n": 3, "stream": True, **common}),
        (OWN, {"messages": messages, "enable_think": True, **common}),
        (OWN, {"contents": [story], "stream": True, **common}),
        ("/v1/completions", {"prompt": [story, "The"], "n": 2, "logprobs": 2, "echo": True, **common}),
        (CHAT, {"contents": [story, "The", story], **common}),
        ("/v2/chat/completions", {"contents": [story], "stream": True, **common}),
        ("/big_batch/completions", {"contents": [story] * 8, "seed": number, "max_tokens": 16}),
        ("/FIM/v1/batch-FIM", {"prefix": [story], "suffix": [" in a wood."], **common}),
        ("/translate/v1/batch-translate", {"target_lang": "zh-CN", "text_list": [f"The {word} is small."]}),
    ]
    return kinds[number % len(kinds)]


def essence(response: httpx.Response) -> Any:
    """What an answer says, without ids and times; a stream as the texts of its rows."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer = {key: value for key, value in response.json().items() if key not in ("id", "created")}
        answer.get("usage", {}).pop("prompt_tokens_details", None)  # what is cached depends on what came before
        return answer
    rows: Counter[tuple[int, str]] = Counter()
    texts: dict[tuple[int, str], str] = {}
    for event in sse_events(response)[:-1]:
        for choice in json.loads(event)["choices"]:
            for name, piece in choice["delta"].items():
                key = choice["index"], name
                texts[key] = texts.get(key, "") + piece if name != "role" else piece
            rows[choice["index"], str(choice.get("finish_reason"))] += bool(choice.get("finish_reason"))
    return texts, +rows


def test_12_every_answer_equals_the_one_it_gets_alone(server: ServerProcess) -> None:
    requests = [one_of(number) for number in range(50)]

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))

    crowd = asyncio.run(together())
    for (path, body), response in zip(requests, crowd, strict=True):
        assert essence(response) == essence(server.post(path, body)), (path, body)
    server.wait_idle()


def test_13_unknown_paths_in_each_groups_form(server: ServerProcess) -> None:
    for path in ("/v2/x", "/state/x", "/multi_state/x", "/FIM/x", "/translate/x", "/big_batch/x"):
        answer = server.client.get(path)
        assert answer.status_code == 404
        assert isinstance(answer.json()["error"], str)
    for path in ("/v1/x", "/openai/x", "/x"):
        answer = server.client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
    for path, form in (("/FIM/v1/batch-FIM", str), ("/translate/v1/batch-translate", str), (CHAT, dict), (OWN, dict)):
        answer = server.client.get(path)
        assert answer.status_code == 405
        assert isinstance(answer.json()["error"], form)


LISTED = {
    ("get", "/v1/models"),
    ("post", CHAT),
    ("post", "/v2/chat/completions"),
    ("post", "/translate/v1/batch-translate"),
    ("post", "/FIM/v1/batch-FIM"),
    ("post", "/big_batch/completions"),
    ("get", "/openai/v1/models"),
    ("post", OWN),
    ("post", "/v1/completions"),
    ("get", "/v1/models/{model_id}"),
    ("get", "/v1/health"),
}


def test_14_every_path_is_in_the_schema_once(server: ServerProcess) -> None:
    schema = server.client.get("/openapi.json").json()
    listed = [(method, path) for path, methods in schema["paths"].items() for method in methods]
    assert set(listed) >= LISTED
    assert len(listed) == len(set(listed))
    shared = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
    assert {tuple(body["required"]) for body in shared} == {("contents",), ("messages",)}
    assert "$defs" not in json.dumps(schema)
    assert raw_stream(server, CHAT, {"messages": MESSAGES, **SHORT})
