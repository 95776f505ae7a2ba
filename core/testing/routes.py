"""`RouteGroupSuite`: every class of error in the group's form, paths of its own, no body that breaks it."""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message

from rwkv_lightning.core import discovery
from rwkv_lightning.core.app import build_app
from rwkv_lightning.core.config import load_settings
from rwkv_lightning.core.errors import InvalidField, NotFound, PluginError, RequestError
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.interfaces import RouteGroup, ServerContext
from rwkv_lightning.core.metrics import Metrics
from rwkv_lightning.core.models import ModelManager
from rwkv_lightning.core.plugin_checks import check_routes, routes_of
from rwkv_lightning.core.registry import Origin, Registry
from rwkv_lightning.core.testing.suite import Suite, check

UNDER_TEST = Origin("under-test", "under-test", "0")
MESSAGE = 'field "größe" is 7 but must be at most 5\n'
BROKEN_BODIES = (b"", b"{", b"null", b"[]", b'"text"', b'{"a": "\xff"}', b"[" * 100_000, b'{"a": NaN}')


class RouteGroupSuite(Suite, ABC):
    """Subclass it, and return the group from `group`.

    Requests go to an application with this group beside the built-in ones and the demo model. Its engine does not run,
    so valid requests are answered 503.
    """

    @abstractmethod
    def group(self) -> RouteGroup:
        """The route group under test."""

    # Helpers, for further tests of your own too

    def render(self, error: RequestError) -> Response:
        """The group's answer to an error."""
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"", "state": {}}
        return self.group().render_error(Request(scope), error)

    def app(self) -> FastAPI:
        """The application with this group and the built-in ones."""
        return build_app(ServerContext(load_settings(PLAIN), self._host(), _models(), Metrics()))

    def paths(self) -> list[tuple[str, str]]:
        """(method, path) of the group's routes and claims."""
        group = self.group()
        return [*((method, path) for method, path in routes_of(group)), *((c.method, c.path) for c in group.claims)]

    def _host(self) -> PluginHost:
        """The built-in plugins; a built-in group of this one's name makes place for it."""
        host = _built_in_host()
        mine, together = self.group(), Registry[RouteGroup](host.routes.kind)
        for item in host.routes:
            if item.name != mine.name.lower():
                together.add(item.name, item.value, item.description, item.origin)
        together.add(mine.name, mine, "", UNDER_TEST)
        host.routes = together
        return host

    # Errors

    def test_every_error_keeps_its_status_and_message(self) -> None:
        status_of_fields = self.group().validation_status
        check(status_of_fields in (400, 422), f"validation_status is {status_of_fields}, not 400 or 422")
        for kind in error_classes():
            response = self.render(kind(MESSAGE))
            expected = status_of_fields if issubclass(kind, InvalidField) else kind.status
            check(response.status_code == expected, f"{kind.__name__}: {response.status_code} instead of {expected}")
            texts = list(_texts(_object(bytes(response.body), kind.__name__)))
            check(any(MESSAGE in text for text in texts), f"{kind.__name__}: the message is not in the answer")

    def test_errors_name_the_field(self) -> None:
        for kind in (kind for kind in error_classes() if issubclass(kind, InvalidField)):
            body = _object(bytes(self.render(kind(MESSAGE, param="top_x")).body), kind.__name__)
            check("top_x" in " ".join(_texts(body)), f"{kind.__name__}: the field's name is not in the answer")

    def test_errors_tell_clients_whether_to_try_again(self) -> None:
        for kind in error_classes():
            headers = self.render(kind(MESSAGE, retry_after=1.2)).headers
            check(headers.get("retry-after") == "2", f"{kind.__name__}: Retry-After is not retry_after, rounded up")
            expected = None if kind.should_retry is None else str(kind.should_retry).lower()
            check(headers.get("x-should-retry") == expected, f"{kind.__name__}: x-should-retry is not {expected}")
            if kind.status == 401:
                check("www-authenticate" in headers, f"{kind.__name__}: no WWW-Authenticate")

    def test_errors_may_carry_extra_members(self) -> None:
        for kind in error_classes():
            _object(bytes(self.render(kind(MESSAGE, extra={"limit": 5})).body), kind.__name__)

    # Paths

    def test_paths_clash_with_nobodys(self) -> None:
        try:
            check_routes(self._host().routes)
        except PluginError as error:
            raise AssertionError(str(error)) from error

    def test_openapi_describes_every_path(self) -> None:
        described = self.app().openapi()["paths"]
        for method, path in self.paths():
            fits = [operations for other, operations in described.items() if _filled(other) == _filled(path)]
            check(fits and method.lower() in fits[0], f"{method} {path} is not in /openapi.json")

    def test_unknown_paths_are_answered_in_the_groups_form(self) -> None:
        form = _object(bytes(self.render(NotFound(MESSAGE)).body), "NotFound").keys()
        for prefix in self.group().prefixes:
            check(re.fullmatch(r"(/[^/]+)+", prefix), f"prefix {prefix!r} does not look like /a or /a/b")
            status, body = ask(self.app(), "GET", f"{prefix}/no/such/path")
            check(status == 404, f"GET {prefix}/no/such/path gives {status}, not 404")
            check(_object(body, prefix).keys() == form, f"GET {prefix}/no/such/path: not the group's form")

    def test_other_methods_are_refused(self) -> None:
        for path in sorted({path for _, path in self.paths()}):
            status, body = ask(self.app(), "PROPFIND", _filled(path))
            check(status == 405, f"PROPFIND {path} gives {status}, not 405")
            _object(body, f"PROPFIND {path}")

    def test_broken_bodies_are_the_clients_fault(self) -> None:
        app = self.app()
        for method, path in self.paths():
            for sent in BROKEN_BODIES if method in ("POST", "PUT", "PATCH") else ():
                status, body = ask(app, method, _filled(path), sent)
                what = f"{method} {path} with the body {sent[:20]!r}"
                check(400 <= status < 500, f"{what} gives {status}")
                _object(body, what)


PLAIN: dict[str, Any] = {
    "plugin": (),
    "disable_plugin": (),
    "password": None,
    "protect_all": False,
    "model_path": None,
    "inference_engine": "fp16",
    "device": "cpu",
    "max_batch": 1,
    "state_store": "none",
}


def _built_in_host() -> PluginHost:
    return PluginHost(load_settings(PLAIN), [plugin for plugin in discovery.discover() if plugin.own])


@lru_cache(maxsize=1)
def _models() -> ModelManager:
    models = ModelManager(load_settings(PLAIN), _built_in_host(), Metrics())
    models.load(lambda summary: None)
    return models


def error_classes(root: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    """RequestError and all its subclasses, those of plugins too."""
    yield root
    for kind in root.__subclasses__():
        yield from error_classes(kind)


def ask(app: FastAPI, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one request, made without a socket; 500 when the application raises instead."""
    return asyncio.run(_ask(app, method, path, body))


async def _ask(app: FastAPI, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }
    sent: list[Message] = []
    answered = asyncio.Event()
    coming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not coming:
            await answered.wait()
        return coming.pop() if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    try:
        await app(scope, receive, send)
    except Exception:
        return 500, b'{"error": "the application raised"}'
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def _object(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    check(isinstance(value, dict) and value, f"{what}: the answer {body[:60]!r} is not a JSON object with members")
    return value  # type: ignore[no-any-return]


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _filled(path: str) -> str:
    """A path with 'x' for its parameters."""
    return re.sub(r"\{[^}]*\}", "x", path)
