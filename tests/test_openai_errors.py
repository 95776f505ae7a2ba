"""Errors of the OpenAI group: envelope, the client's exceptions, retries, errors inside streams (cases 12 to 14)."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from conftest import InstallPlugin
from openai_calls import CAPITAL, PARIS, PLAIN, chat, client_of

from server_process import ServerProcess, sse_events

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/openai/v1/chat/completions")
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-batch", "16", "--max-body-bytes", "200kB", "--max-tokens-limit", "1000") as running:
        yield running
        running.wait_idle()


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The envelope's content; it stands at the top level and is complete."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"trace_id"} == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(response.headers["x-request-id"]) >= 1
    error: dict[str, Any] = body["error"]
    return error


BAD: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "a"}),
    ("messages", {"messages": {"role": "user"}}),
    ("messages", {"messages": [{"role": "user", "content": ""}]}),
    ("messages", {"messages": [{"role": "user", "content": []}]}),
    ("messages", {"messages": [{"role": "user", "content": " \n "}]}),
    ("messages.0", {"messages": ["Hi"]}),
    ("messages.0", {"messages": [None]}),
    ("messages.0.role", {"messages": [{"content": "Hi"}]}),
    ("messages.1.role", {"messages": [USER, {"role": "admin", "content": "Hi"}]}),
    ("messages.1.role", {"messages": [USER, {"role": "tool", "content": "Hi", "tool_call_id": "x"}]}),
    ("messages.1.role", {"messages": [USER, {"role": None, "content": "Hi"}]}),
    ("messages.1.role", {"messages": [USER, {"role": ["user"], "content": "Hi"}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    ("messages.1.content", {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": {"type": "text", "text": "Hi"}}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": ["Hi"]}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("messages.0.content.0.text", {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}),
    ("messages.1.tool_calls", {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]}),
    ("system", {"system": 5}),
    ("system", {"system": "\ud800"}),
    ("model", {"model": "\ud800"}),
    ("stop.0", {"stop": ["\ud800"]}),
    ("reasoning_effort", {"reasoning_effort": "\ud800"}),
    ("model", {"model": 5}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 1001}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_tokens", {"max_tokens": True}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 1001, "max_tokens": 5}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": 2.5}),
    ("presence_penalty", {"presence_penalty": []}),
    ("frequency_penalty", {"frequency_penalty": "x"}),
    ("alpha_presence", {"alpha_presence": "x"}),
    ("penalty_decay", {"penalty_decay": 1.1}),
    ("stop", {"stop": 5}),
    ("stop.0", {"stop": ""}),
    ("stop.1", {"stop": ["a", 5]}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": ["x" * 70_000]}),
    ("stop_tokens", {"stop_tokens": ["x"] * 17}),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("n", {"n": True}),
    ("n", {"n": 1.5}),
    ("seed", {"seed": "x"}),
    ("seed", {"seed": True}),
    ("logit_bias", {"logit_bias": {"cat": 1}}),
    ("logit_bias", {"logit_bias": {"3660": 1}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias.5", {"logit_bias": {"5": "x"}}),
    ("logprobs", {"logprobs": "maybe"}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("stream", {"stream": "maybe"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": 5}),
    ("chunk_size", {"chunk_size": 0}),
    ("reasoning_effort", {"reasoning_effort": "extreme"}),
    ("enable_think", {"enable_think": "maybe"}),
    ("chat_template_kwargs.enable_thinking", {"chat_template_kwargs": {"enable_thinking": "maybe"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": 5}),
    ("sampler", {"sampler": "nobody"}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": 5}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("response_format", {"response_format": {"type": "yaml"}}),
    ("response_format", {"response_format": "text"}),
    ("functions", {"functions": []}),
    ("function_call", {"function_call": "auto"}),
    ("audio", {"audio": {}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("modalities", {"modalities": 5}),
    ("web_search_options", {"web_search_options": {}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD)
def test_12_fields_at_fault_are_named(server: ServerProcess, param: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": [USER], "max_tokens": 1, **fields})  # ASCII: lone surrogates as escapes
    for path in PATHS:
        response = server.client.post(path, content=body)
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert param.split(".")[0] in error["message"]


def test_12_codes(server: ServerProcess) -> None:
    for fields, code in (
        ({"messages": []}, "invalid_value"),
        ({}, "missing_required_parameter"),
        ({"messages": [{"content": "a"}]}, "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter"),
        ({"messages": [{"role": "x", "content": "a"}]}, "invalid_value"),
        ({"messages": [USER], "tools": [{}]}, "unsupported_parameter"),
        ({"messages": [USER], "audio": {}}, "unsupported_parameter"),
    ):
        assert error_of(server.post(CHAT, fields))["code"] == code, fields
    unsupported = server.post(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert "unsupported content part type 'image_url'" in unsupported.json()["error"]["message"]


def test_12_the_clients_exceptions(server: ServerProcess) -> None:
    client = client_of(server)
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, [{"role": "admin", "content": "a"}])
    assert (bad.value.code, bad.value.param, bad.value.type) == (
        "invalid_value",
        "messages.0.role",
        "invalid_request_error",
    )
    assert "admin" in bad.value.message
    assert len(bad.value.request_id or "") == 32
    with pytest.raises(openai.NotFoundError) as missing:
        client.get("/nowhere", cast_to=object)
    assert missing.value.type == "invalid_request_error"
    with pytest.raises(openai.APIStatusError) as method:
        client.get("/chat/completions", cast_to=object)
    assert method.value.status_code == 405
    with pytest.raises(openai.APIStatusError) as large:
        chat(client, [{"role": "user", "content": "x" * 300_000}])
    assert large.value.status_code == 413
    assert large.value.code == "body_too_large"


@pytest.mark.parametrize("path", [*PATHS, "/v1/completions"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": [\xff]}', b'{"n": NaN}', b"[" * 90_000])
def test_12_bodies_that_are_no_json_object(server: ServerProcess, path: str, body: bytes) -> None:
    response = server.client.post(path, content=body)
    assert response.status_code == 400
    assert error_of(response)["param"] is None


def test_unknown_paths_and_methods(server: ServerProcess) -> None:
    for path in ("/v1/nowhere", "/v1/chat/completions/", "/openai/v1/nowhere", "/nowhere"):
        answer = server.client.get(path)
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "not_found"
    for method, path, allowed in (
        ("GET", CHAT, "POST"),
        ("DELETE", "/openai/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/models", "GET"),
    ):
        answer = server.client.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == allowed
        assert allowed in error_of(answer)["message"]


def test_head_has_no_body(server: ServerProcess) -> None:
    for path in ("/v1/models", CHAT, "/v1/nowhere", "/v2/chat/completions", "/openai/v1/models"):
        answer = server.client.head(path)
        assert answer.status_code == server.client.get(path).status_code, path
        assert answer.content == b""
        assert answer.headers["x-request-id"]
    assert server.client.get("/v1/models").status_code == 200, "the connection lives on"


def test_compressed_and_chunked_bodies(server: ServerProcess) -> None:
    plain = json.dumps({"messages": CAPITAL, **PLAIN}).encode()
    packed = server.client.post(CHAT, content=gzip.compress(plain), headers={"content-encoding": "gzip"})
    assert packed.json()["choices"][0]["message"]["content"] == PARIS
    pieces = (plain[i : i + 7] for i in range(0, len(plain), 7))
    assert server.client.post(CHAT, content=pieces).json()["choices"][0]["message"]["content"] == PARIS
    broken = server.client.post(CHAT, content=plain, headers={"content-encoding": "gzip"})
    assert (broken.status_code, error_of(broken)["param"]) == (400, None)
    unknown = server.client.post(CHAT, content=plain, headers={"content-encoding": "br"})
    assert error_of(unknown)["code"] == "unsupported_parameter"


def test_http_1_0(server: ServerProcess) -> None:
    body = json.dumps({"messages": CAPITAL, **PLAIN})
    answer = exchange(server, f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0]
    assert json.loads(content)["choices"][0]["message"]["content"] == PARIS


def exchange(server: ServerProcess, request: bytes) -> bytes:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_12_wrong_passwords() -> None:
    with ServerProcess("--password", "s3cret") as server:
        for path in ("/v1", "/openai/v1"):
            with pytest.raises(openai.AuthenticationError) as refused:
                chat(client_of(server, path))
            assert (refused.value.code, refused.value.type) == ("invalid_api_key", "authentication_error")
            assert chat(client_of(server, path, api_key="s3cret")).choices[0].message.content == PARIS
        for path in (*PATHS, "/v1/completions"):
            body = {"messages": CAPITAL, "prompt": "a", "max_tokens": 1}
            refused_here = server.post(path, {**body, "password": "no"})
            assert refused_here.status_code == 401
            assert error_of(refused_here)["code"] == "invalid_api_key"
            passed = server.post(path, {**body, "password": "s3cret"})
            assert passed.status_code == 200
            assert "password" not in passed.headers.get("x-ignored-fields", "")
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/v1/models/rwkv7-demo").status_code == 200
        assert error_of(server.client.get("/openai/v1/models"))["code"] == "invalid_api_key"
        assert error_of(server.client.get("/openai/v1/models/rwkv7-demo"))["code"] == "invalid_api_key"
        assert client_of(server, "/openai/v1", api_key="s3cret").models.retrieve("rwkv7-demo").id == "rwkv7-demo"


# A plugin whose sampler fails on a row's fourth token, whose route has a bug, and which lets every second caller wait.
TROUBLE = '''
from fastapi import APIRouter
from rwkv_lightning.core.errors import RateLimited
from rwkv_lightning.core.interfaces import RouteGroup
from rwkv_lightning.core.rendering import render_openai

router = APIRouter()
callers = 0


@router.get("/v1/trouble")
def trouble():
    """Fails."""
    raise ValueError("a secret of the inside")


class Trouble:
    def __init__(self, kind):
        self.kind = kind

    def validate(self, values):
        return None

    def open(self, options, seed, row):
        return {"drawn": 0}

    def sample(self, logits, rows):
        tokens = []
        for row in rows:
            row["drawn"] += 1
            tokens.append(100 if row["drawn"] < 4 else self.fail())
        return tokens

    def fail(self):
        if self.kind == "nan":
            return -1
        raise MemoryError() if self.kind == "memory" else ValueError("a secret of the inside")


@hookimpl
def register_samplers(register):
    for kind in ("nan", "memory", "bug"):
        register("fails-" + kind, lambda context, kind=kind: Trouble(kind), "fails on the fourth token")


@hookimpl
def register_routes(register):
    register(RouteGroup(name="trouble", router=router, render_error=render_openai))


@hookimpl
def authenticate(request):
    global callers
    if request.headers.get("x-slow-down"):
        callers += 1
        if callers % 2:
            raise RateLimited("slow down", retry_after=1)
'''


@pytest.fixture
def troubled(install_plugin: InstallPlugin) -> Iterator[ServerProcess]:
    folder = install_plugin("trouble", TROUBLE)
    with ServerProcess("--plugin", "trouble", env={"PYTHONPATH": str(folder)}) as running:
        yield running


CODES = {"nan": (500, "row_failed"), "memory": (503, "out_of_memory"), "bug": (500, "internal_error")}


def test_14_errors_while_generating(troubled: ServerProcess) -> None:
    """Each failure in each group's form, whole and after three chunks of a stream; other requests are untouched."""
    for kind, (status, code) in CODES.items():
        for path in ("/v1", "/openai/v1"):
            check_with_client(client_of(troubled, path), kind, status, code)
        check_completions(troubled, kind, status, code)
        check_native(troubled, kind, status)
    check_one_row_of_many(troubled)
    assert chat(client_of(troubled)).choices[0].message.content == PARIS
    troubled.wait_idle()
    assert "a secret of the inside" in troubled.log()


def check_with_client(client: openai.OpenAI, kind: str, status: int, code: str) -> None:
    fields = {"extra_body": {"sampler": f"fails-{kind}"}}
    with pytest.raises(openai.InternalServerError) as whole:
        chat(client, **fields)
    assert (whole.value.status_code, whole.value.code, whole.value.type) == (status, code, "server_error")
    texts = []
    choices = (choice for chunk in chat(client, stream=True, **fields) for choice in chunk.choices)
    with pytest.raises(openai.APIError) as cut:
        texts.extend(choice.delta.content for choice in choices if choice.finish_reason is None)
    assert len("".join(filter(None, texts))) == 3, "what came before is kept"
    assert (cut.value.code, cut.value.type) == (code, "server_error")
    assert cut.value.message == whole.value.message.partition(" - ")[2]
    assert "secret" not in cut.value.message


def check_completions(server: ServerProcess, kind: str, status: int, code: str) -> None:
    body = {"prompt": ["a", "b"], "sampler": f"fails-{kind}", "n": 2}
    whole = server.post("/v1/completions", body)
    assert (whole.status_code, error_of(whole)["code"]) == (status, code)
    assert ("trace_id" in whole.json()["error"]) == (status == 500)
    events = sse_events(server.post("/v1/completions", {**body, "stream": True}))
    assert events[-1] == "[DONE]"
    assert [json.loads(event)["error"]["code"] for event in events[:-1] if '"error":' in event] == [code]
    assert "error" in json.loads(events[-2]), "an error is the last thing before [DONE]"


def check_native(server: ServerProcess, kind: str, status: int) -> None:
    for path in (CHAT, "/v2/chat/completions", "/FIM/v1/batch-FIM"):
        prompts = {"prefix": ["a"], "suffix": ["b"]} if "FIM" in path else {"contents": ["a"]}
        body = {**prompts, "sampler": f"fails-{kind}", "chunk_size": 1}
        whole = server.post(path, body)
        if kind == "nan":  # the row's own failure stands beside its text
            [choice] = whole.json()["choices"]
            assert (choice["finish_reason"], len(choice["message"]["content"])) == ("error", 3)
            assert isinstance(choice["error"], str)
        else:
            assert whole.status_code == status
            assert isinstance(whole.json()["error"], str)
        events = [json.loads(event) for event in sse_events(server.post(path, {**body, "stream": True}))[:-1]]
        texts = [choice["delta"]["content"] for event in events for choice in event.get("choices", [])]
        assert len("".join(texts)) == 3
        assert isinstance(events[-1]["error"], str)


def check_one_row_of_many(server: ServerProcess) -> None:
    """OpenAI's form has no place for the error of one choice: the whole answer fails."""
    body = {"prompt": "a", "n": 3, "sampler": "fails-nan"}
    assert server.post("/v1/completions", body).status_code == 500


def test_13_retries(troubled: ServerProcess) -> None:
    """429 with Retry-After is tried again after that time; what repeats is sent once."""
    begun = time.monotonic()
    patient = client_of(troubled, max_retries=1, default_headers={"x-slow-down": "1"})
    assert chat(patient).choices[0].message.content == PARIS
    assert time.monotonic() - begun >= 1
    with pytest.raises(openai.RateLimitError) as refused:
        chat(client_of(troubled, default_headers={"x-slow-down": "1"}))
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert refused.value.response.headers["retry-after"] == "1"

    sent: list[httpx.Request] = []
    http = httpx.Client(event_hooks={"request": [sent.append]})
    eager = client_of(troubled, max_retries=2, http_client=http)
    with pytest.raises(openai.InternalServerError) as full:
        chat(eager, extra_body={"sampler": "fails-memory"})
    assert full.value.response.headers["x-should-retry"] == "false"
    assert len(sent) == 1


def test_a_bug_in_a_route(troubled: ServerProcess) -> None:
    """500 with a trace id that the log has beside the traceback, and the connection lives on."""
    for _ in range(2):
        answer = troubled.client.get("/v1/trouble", headers={"x-request-id": "trace-me"})
        assert answer.status_code == 500
        error = error_of(answer)
        assert error["code"] == "internal_error"
        assert error["trace_id"] == answer.headers["x-request-id"] == "trace-me"
        assert "secret" not in answer.text
    log = troubled.log()
    assert "a secret of the inside" in log
    assert "[trace-me]" in log
