"""The example distributions, built into wheels, installed beside the project and used over HTTP."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from example_plugins import EXAMPLES, installed_examples
from server_thread import ServerThread

from rwkv_lightning.core import cli
from server_process import ServerProcess

FRANCE = "User: What is the capital of France?\n\nAssistant: <think>\n</think>\n"
V1 = "/v1/chat/completions"
MINP = "/minp/completions"


def environment(**variables: str) -> dict[str, str]:
    return {"PYTHONPATH": str(installed_examples()), **variables}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    env = environment(RWKV_LIGHTNING_MINP__MIN_P="1", RWKV_LIGHTNING_TRACE_PLUGINS="1")
    with ServerProcess("--plugin", "minp", env=env) as running:
        yield running


def batch(**fields: Any) -> dict[str, Any]:
    return {"contents": [FRANCE, FRANCE], "sampler": "min-p", "max_tokens": 12, **fields}


def texts(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["message"]["content"] for choice in response.json()["choices"]]


# The min-p sampler in native bodies


@pytest.mark.parametrize("path", [V1, "/v2/chat/completions"])
def test_native_bodies_take_the_sampler(server: ServerProcess, path: str) -> None:
    greedy = server.post(path, batch(temperature=0))
    assert texts(greedy) == ["The capital of France is Paris."] * 2
    assert "min_p" not in server.post(path, batch(min_p=0.5)).headers.get("x-ignored-fields", "")
    seeded = batch(min_p=0.0, temperature=3, seed=7)
    first = texts(server.post(path, seeded))
    assert first[0] != first[1], "each row has a stream of its own"
    assert texts(server.post(path, seeded)) == first
    assert texts(server.post(path, {**seeded, "seed": 8})) != first


def test_the_plugins_own_setting_is_the_default(server: ServerProcess) -> None:
    """min_p = 1 in the environment leaves the likeliest token only, whatever the seed and the temperature."""
    for seed in (1, 2):
        assert texts(server.post(V1, batch(temperature=5, seed=seed))) == ["The capital of France is Paris."] * 2
    assert texts(server.post(V1, batch(temperature=5, seed=1, min_p=0))) != texts(server.post(V1, batch(temperature=0)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", -0.1), ("min_p", 1.1), ("min_p", "x"), ("min_p", True), ("temperature", -1), ("temperature", [])],
)
def test_wrong_values_are_named_in_each_groups_form(server: ServerProcess, field: str, value: Any) -> None:
    native = server.post(V1, batch(**{field: value}))
    assert native.status_code == 422
    assert field in native.json()["detail"][0]["loc"]
    own = server.post(MINP, {"prompt": FRANCE, field: value})
    assert (own.status_code, own.json()["error"]["param"]) == (400, field)


# Its own endpoint


def test_the_plugins_endpoint_completes_a_prompt(server: ServerProcess) -> None:
    answer = server.post(MINP, {"prompt": FRANCE, "temperature": 0})
    assert answer.json() == {"text": "The capital of France is Paris.", "finish_reason": "stop"}
    body = {"prompt": "Once upon a time", "min_p": 0, "temperature": 2, "max_tokens": 9, "seed": 3}
    first = server.post(MINP, body).json()
    assert first["finish_reason"] == "length"
    assert server.post(MINP, body).json() == first
    assert MINP in server.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "a", "seed": "s"}, "seed"),
    ],
)
def test_wrong_bodies_are_refused_by_name(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    response = server.post(MINP, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_broken_bodies_and_unknown_paths(server: ServerProcess) -> None:
    for content in (b"", b"{", b"[]", b"\xff"):
        assert server.client.post(MINP, content=content).status_code == 400
    assert server.client.get("/minp/nowhere").json()["error"]["code"] == "not_found"
    assert server.client.get(MINP).status_code == 405
    server.wait_idle()


def test_the_password_protects_the_plugins_endpoint_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed_examples()))
    with ServerThread(plugin=["minp"], password="s3cret") as server:
        body = {"prompt": "a", "max_tokens": 1}
        assert server.post(MINP, body).status_code == 401
        assert server.post(MINP, {**body, "password": "s3cret"}).status_code == 200


# What the command line says about them


def test_tracing_names_the_hooks_and_who_implements_them(server: ServerProcess) -> None:
    log = server.log()
    for line in ("hook plugin_settings() -> minp", "hook plugin_settings gave [ModelMetaclass]"):
        assert line in log
    assert "hook register_samplers(register, section) -> minp" in log
    assert "hook register_routes(register, section) -> minp" in log


def test_the_listing_tells_what_is_loaded_available_and_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(installed_examples()))

    def listed(*arguments: str) -> dict[tuple[str, str], dict[str, str]]:
        assert cli.main(["plugins", "--json", *arguments]) == 0
        return {(line["kind"], line["name"]): line for line in json.loads(capsys.readouterr().out)}

    lines = listed("--plugin", "minp,echo", "--device", "cuda")
    sampler = lines["sampler", "min-p"]
    assert (sampler["status"], sampler["plugin"]) == ("ready", "minp")
    assert (sampler["distribution"], sampler["version"]) == ("rwkv-lightning-minp", "1.0")
    assert lines["route group", "minp"]["description"] == MINP
    assert lines["backend", "echo"]["status"] == "unusable"
    assert "--device cpu" in lines["backend", "echo"]["reason"]
    lines = listed()
    assert lines["plugin", "minp"]["status"] == lines["plugin", "echo"]["status"] == "available"
    assert lines["plugin", "echo"]["reason"] == "--plugin echo loads it"


# The echo backend as a process of its own


def test_the_echo_engine_serves_and_stops() -> None:
    env = environment(RWKV_LIGHTNING_ECHO__DELAY="3")
    options = ("--plugin", "echo", "--inference-engine", "echo", "--device", "cpu", "--served-model-name", "echo")
    with ServerProcess(*options, env=env) as server:
        answer = server.post(V1, {"contents": ["say abc"], "max_tokens": 6, "stop_tokens": [], "temperature": 0})
        assert texts(answer) == [" abc abc"], "' abc' is three tokens of this vocabulary"
        assert server.client.get("/v1/models").json()["data"][0]["id"] == "echo"
        server.process.terminate()
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("folder", sorted(path.name for path in EXAMPLES.glob("plugin-*")))
def test_an_example_is_one_file_and_its_pyproject(folder: str) -> None:
    project = tomllib.loads((EXAMPLES / folder / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["py-modules"]
    files = {path.name for path in (EXAMPLES / folder).iterdir() if path.is_file()}
    assert files == {f"{module}.py", "pyproject.toml", "README.md"}
    assert list(project["project"]["entry-points"]["rwkv_lightning"].values()) == [module]
