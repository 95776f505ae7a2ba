"""`RouteGroupSuite`: errors of every class in the group's form, paths that clash with nobody's, no body that breaks it."""

from __future__ import annotations

import asyncio
import json
import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from rwkv_lightning.core import discovery, errors
from rwkv_lightning.core.app import build_app
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.errors import InvalidField, RequestError
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.interfaces import RouteGroup, ServerContext
from rwkv_lightning.core.metrics import Metrics
from rwkv_lightning.core.models import ModelManager
from rwkv_lightning.core.plugin_checks import check_routes, routes_of
from rwkv_lightning.core.registry import Origin, Registry
from rwkv_lightning.core.testing.suite import Suite, check

ME = Origin("under-test", "under-test", "0")
BROKEN_BODIES = (b"", b"{", b"null", b"[]", b'"text"', b'{"a": "\xff"}', b"[" * 100_000)
MESSAGE = "field is 7 but must be at most 5"


class RouteGroupSuite(Suite):
    """Subclass it, and return the group from `group`."""

    @abstractmethod
    def group(self) -> RouteGroup:
        """The route group under test."""

    # Helpers, for further tests of your own too

    def render(self, error: RequestError) -> Response:
        """The group's answer to an error."""
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"", "state": {}}
        return self.group().render_error(Request(scope), error)

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request to a server without a model that has this group and the built-in ones."""
        return asyncio.run(_ask(build_app(self._context()), method, path, body))

    def paths(self) -> list[tuple[str, str]]:
        """The group's own (method, path) pairs and its claims', parameters filled in with 'x'."""
        group = self.group()
        own = [(method, path) for method, path in routes_of(group) if method != "ANY"]
        return [*own, *((claim.method, claim.path) for claim in group.claims)]

    def _context(self) -> ServerContext:
        settings, metrics = Settings.model_construct(**_defaults()), Metrics()
        host = PluginHost(settings, [plugin for plugin in discovery.discover() if plugin.own])
        host.routes = self._beside(host.routes)
        return ServerContext(settings, host, ModelManager(settings, host, metrics), metrics)

    def _beside(self, registry: Registry[RouteGroup]) -> Registry[RouteGroup]:
        """The built-in groups with this one; a built-in of the same name makes place for it."""
        mine, together = self.group(), Registry[RouteGroup](registry.kind)
        for item in registry:
            if item.name != mine.name.lower():
                together.add(item.name, item.value, item.description, item.origin)
        together.add(mine.name, mine, "", ME)
        return together
