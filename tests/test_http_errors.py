"""Bad input over HTTP: the documented status, a message that names the field, and a server as healthy as before."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from server_process import ServerProcess, sse_events

V1 = "/v1/chat/completions"
NATIVE_PATHS = (V1, "/v2/chat/completions", "/big_batch/completions")
SHORT = {"max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-batch", "16", "--max-body-bytes", "2MB") as running:
        yield running


@pytest.fixture(autouse=True)
def _as_healthy_as_before(server: ServerProcess) -> Iterator[None]:
    yield
    assert server.post(V1, {"contents": ["User: Hi"], **SHORT}).status_code == 200
    server.wait_idle()


def fault(body: Any) -> dict[str, Any]:
    """The first entry of FastAPI's validation detail."""
    assert isinstance(body["detail"], list)
    return body["detail"][0]


@pytest.mark.parametrize("path", NATIVE_PATHS[1:])
@pytest.mark.parametrize("contents", ["absent", None, [], "a", 5, {}, [""], ["a", ""], [1], [None], ["a", ["b"]]])
def test_contents_at_fault(server: ServerProcess, path: str, contents: Any) -> None:
    body = SHORT if contents == "absent" else {"contents": contents, **SHORT}
    response = server.post(path, body)
    assert response.status_code == 422
    assert "contents" in fault(response.json())["loc"]


@pytest.mark.parametrize("contents", ["a", [""], ["a", ""], [1], {"0": "a"}])
def test_contents_at_fault_on_the_shared_path(server: ServerProcess, contents: Any) -> None:
    response = server.post(V1, {"contents": contents, **SHORT})
    assert response.status_code == 422
    assert "contents" in fault(response.json())["loc"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 10**9),
        ("max_tokens", "many"),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -1),
        ("temperature", 1001),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", 2.5),
        ("top_k", "all"),
        ("alpha_presence", "x"),
        ("alpha_frequency", []),
        ("alpha_decay", 1.5),
        ("alpha_decay", -0.1),
        ("chunk_size", 0),
        ("chunk_size", "x"),
        ("stop_tokens", "abc"),
        ("stop_tokens", [""]),
        ("stop_tokens", [3]),
        ("stop_tokens", ["x"] * 65),
        ("seed", "s"),
        ("stream", "maybe"),
        ("sampler", "nobody"),
        ("sampler", 5),
        ("model", 5),
    ],
)
@pytest.mark.parametrize("path", NATIVE_PATHS[:2])
def test_fields_at_fault_are_named(server: ServerProcess, path: str, field: str, value: Any) -> None:
    response = server.post(path, {"contents": ["a"], **SHORT, field: value})
    assert response.status_code == 422
    assert field in fault(response.json())["loc"]
    assert fault(response.json())["msg"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json(server: ServerProcess, literal: str) -> None:
    response = server.client.post(V1, content=f'{{"contents": ["a"], "temperature": {literal}}}')
    assert response.status_code == 400
    assert literal in response.text or literal.lstrip("-") in response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"contents=a",
        b'{"contents": ["a"]',
        b'{"contents": ["\xff"]}',
        b"\x00",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"contents": ["a"]}',
    ],
)
@pytest.mark.parametrize("path", NATIVE_PATHS)
def test_bodies_that_are_no_json_object(server: ServerProcess, path: str, body: bytes) -> None:
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "error" in response.json()


def test_lone_surrogates(server: ServerProcess) -> None:
    for body in (rb'{"contents": ["\ud800"]}', rb'{"contents": ["a"], "stop_tokens": ["\udfff"]}'):
        response = server.client.post(V1, content=body)
        assert response.status_code == 422
        assert "detail" in response.json()


def test_odd_field_names_reach_the_header_harmlessly(server: ServerProcess) -> None:
    body = rb'{"contents": ["a"], "max_tokens": 1, "x\r\nSet-Cookie: a=b": 1, "\ud800": 2, "\u00e9": 3}'
    response = server.client.post(V1, content=body)
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert "Set-Cookie" in response.headers["x-ignored-fields"]


def test_more_rows_than_allowed(server: ServerProcess) -> None:
    for path in NATIVE_PATHS:
        response = server.post(path, {"contents": ["a"] * 5000, **SHORT})
        assert response.status_code == 400
        assert response.json()["request_bsz"] == 5000
        assert response.json()["max_bsz"] == 4096
        assert "--max-rows" in response.json()["error"]


def test_a_prompt_of_200_000_characters_is_served(server: ServerProcess) -> None:
    response = server.post(V1, {"contents": ["The cat is small. " * 11_112], **SHORT}, timeout=120)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] > 50_000


def test_huge_max_tokens_within_the_limit(server: ServerProcess) -> None:
    body = {"contents": ["User: Hello!\n\nAssistant: <think>\n</think>\n"], "max_tokens": 102_400, "temperature": 0}
    response = server.post(V1, {**body, "alpha_presence": 0, "alpha_frequency": 0})
    assert response.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_80_megabytes(server: ServerProcess, chunked: bool) -> None:
    body = json.dumps({"contents": ["x" * 1000] * 80_000}).encode()
    content: Any = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunked else body
    response = server.client.post(V1, content=content)
    assert response.status_code == 413
    assert "--max-body-bytes" in response.text


def test_a_body_just_over_the_limit_and_one_within(server: ServerProcess) -> None:
    over = server.client.post(V1, content=b'{"contents": ["' + b"x" * 2_000_000 + b'"]}')
    assert over.status_code == 413
    within = server.post(V1, {"contents": ["a"], "max_tokens": 1, "note": "x" * 1_900_000})
    assert within.status_code == 200


def test_compressed_bodies(server: ServerProcess) -> None:
    plain = json.dumps({"contents": ["User: Hi"], **SHORT}).encode()
    headers = {"content-encoding": "gzip"}
    assert server.client.post(V1, content=gzip.compress(plain), headers=headers).status_code == 200
    assert server.client.post(V1, content=plain, headers=headers).status_code == 400
    assert server.client.post(V1, content=gzip.compress(plain)[:-9], headers=headers).status_code == 400
    bomb = gzip.compress(b" " * 50_000_000)
    assert server.client.post(V1, content=bomb, headers=headers).status_code == 413
    assert server.client.post(V1, content=plain, headers={"content-encoding": "br"}).status_code == 400


def test_content_type_is_not_required(server: ServerProcess) -> None:
    body = json.dumps({"contents": ["User: Hi"], **SHORT})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert server.client.post(V1, content=body, headers={"content-type": kind}).status_code == 200


def test_unknown_paths_and_methods(server: ServerProcess) -> None:
    assert server.client.get("/v2/nowhere").status_code == 404
    assert isinstance(server.client.get("/v2/nowhere").json()["error"], str)
    assert server.client.get("/v1/nowhere").json()["error"]["code"] == "not_found"
    refused = server.client.get("/v2/chat/completions")
    assert refused.status_code == 405
    assert "POST" in refused.json()["error"]
    assert server.client.request("DELETE", V1).status_code == 405


@pytest.mark.parametrize("path", ["/v1/health", "/metrics", "/v1/models"])
def test_a_head_is_a_get_without_its_body(server: ServerProcess, path: str) -> None:
    answer, whole = server.client.head(path), server.client.get(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == whole.headers["content-type"]
    assert int(answer.headers["content-length"]) > 0
    assert server.client.head(V1).status_code == 405
    assert server.client.head("/nowhere").status_code == 404


def test_every_answer_has_a_request_id(server: ServerProcess) -> None:
    kept = server.post(V1, {"contents": [1]}, headers={"x-request-id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced = server.client.get("/v1/models", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    assert traced.headers["x-request-id"] == trace
    for odd in ("a b", "x" * 200, "ü".encode("latin-1").decode("latin-1")):
        answer = server.client.get("/nowhere", headers={"x-request-id": odd.encode("latin-1")})
        assert len(answer.headers["x-request-id"]) == 32


def test_http_1_0_and_raw_garbage(server: ServerProcess) -> None:
    body = json.dumps({"contents": ["User: Hi"], **SHORT})
    head = f"POST {V1} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = exchange(server, (head + body).encode())
    assert b" 200 " in answer.split(b"\r\n")[0]
    assert b" 400 " in exchange(server, b"\x16\x03\x01 nonsense\r\n\r\n").split(b"\r\n")[0]
    bad_length = exchange(server, b"POST /v2/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n")
    assert b" 400 " in bad_length.split(b"\r\n")[0]


def exchange(server: ServerProcess, request: bytes) -> bytes:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_cors_preflight(server: ServerProcess) -> None:
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    answer = server.client.options(V1, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in ("*", "https://example.org")


def test_passwords() -> None:
    with ServerProcess("--password", "s3cret") as server:
        body = {"contents": ["a"], "max_tokens": 1}
        for path in (V1, "/v2/chat/completions"):
            for wrong in ({}, {"password": "no"}, {"password": None}, {"password": 5}, {"password": ["s3cret"]}):
                refused = server.post(path, {**body, **wrong})
                assert refused.status_code == 401
                assert "password" in refused.text
                assert refused.headers["www-authenticate"] == "Bearer"
            assert server.post(path, {**body, "password": "s3cret"}).status_code == 200
            assert server.post(path, body, headers={"Authorization": "Bearer s3cret"}).status_code == 200
            assert server.post(path, body, headers={"Authorization": "Basic s3cret"}).status_code == 401
        ignored = server.post(V1, {**body, "password": "s3cret"}).headers
        assert "x-ignored-fields" not in ignored
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        assert "s3cret" not in server.log()


def test_protect_all() -> None:
    with ServerProcess("--password", "s3cret", "--protect-all") as server:
        for path in ("/v1/models", "/metrics"):
            assert server.client.get(path).status_code == 401
            assert server.client.get(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert server.client.get("/v1/health").status_code == 200


def test_a_full_queue_answers_503_and_loses_nothing() -> None:
    with ServerProcess("--max-batch", "2", "--max-waiting", "4") as server:
        big = {"contents": ["Once upon a time"] * 2000, "max_tokens": 200, "stop_tokens": [], "temperature": 5}
        with server.client.stream("POST", "/big_batch/completions", json=big) as running:
            next(running.iter_lines())
            refused = server.post("/v2/chat/completions", {"contents": ["a"], "max_tokens": 1})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "waiting" in refused.json()["error"]
        server.wait_idle()
        served = server.post("/big_batch/completions", {**big, "contents": ["A"] * 9, "max_tokens": 3})
        assert sse_events(served)[-1] == "[DONE]"
