"""The hook specifications: the one page a plugin author reads.

A plugin is a module (or a class without arguments, or an instance) whose functions are marked with `hookimpl` and
named as below. A distribution declares it in its pyproject.toml:

    [project.entry-points.rwkv_lightning]
    min-p = "acme_minp"

and the user loads it with `--plugin min-p`. A whole sampler plugin:

    from rwkv_lightning.core.hookspecs import hookimpl

    class MinP: ...  # see interfaces.Sampler

    @hookimpl
    def register_samplers(register):
        register("min-p", MinP, "keeps tokens at least min_p times as likely as the best one")

An implementation may leave out arguments it does not need. Hooks are plain functions, never `async def`; they run at
start-up, at shutdown or once per request, never per token. A marked function that is no hook, and an unmarked one
that looks like a hook, stop the start. `RWKV_LIGHTNING_TRACE_PLUGINS=1` prints every call. What the registered
objects must do is in interfaces.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from prometheus_client import CollectorRegistry
    from pydantic import BaseModel
    from starlette.requests import Request

    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.engine import RequestSummary
    from rwkv_lightning.core.interfaces import (
        Backend,
        RouteGroup,
        Sampler,
        SamplerContext,
        ServerContext,
        StateStore,
    )

NAMESPACE = "rwkv_lightning"

hookspec = pluggy.HookspecMarker(NAMESPACE)
hookimpl = pluggy.HookimplMarker(NAMESPACE)


class RegisterBackend(Protocol):
    """`register(name, factory, description)`: the name is what `--inference-engine` takes, whatever its case."""

    def __call__(self, name: str, factory: Callable[[], Backend], description: str) -> None: ...


class RegisterSampler(Protocol):
    """`register(name, factory, description)`: the name is what `"sampler"` in a native body takes."""

    def __call__(self, name: str, factory: Callable[[SamplerContext], Sampler], description: str) -> None: ...


class RegisterStateStore(Protocol):
    """`register(name, factory, description)`: the name is what `--state-store` takes."""

    def __call__(self, name: str, factory: Callable[[], StateStore], description: str) -> None: ...


class RegisterRoutes(Protocol):
    """`register(group)`: the group carries its name, its router and how its errors look."""

    def __call__(self, group: RouteGroup) -> None: ...


@hookspec
def plugin_settings() -> type[BaseModel] | None:
    """First of all, at start-up: the pydantic model of the plugin's own settings.

    They are read from `[plugins.<plugin name>]` in the settings file and from `RWKV_LIGHTNING_<PLUGIN NAME>__<FIELD>`
    (which wins), checked, and handed to this plugin's other hooks as `section`. An unknown key stops the start.
    """
    return None


@hookspec
def register_backends(register: RegisterBackend, section: BaseModel | None) -> None:
    """At start-up: offer weight loaders.

    `factory()` makes the `Backend` and runs only when the user chose it or lists the plugins: put heavy imports
    there. A name that is taken stops the start. `section` is the plugin's validated settings, here and below.
    """


@hookspec
def register_samplers(register: RegisterSampler, section: BaseModel | None) -> None:
    """At start-up: offer samplers.

    `factory(context)` makes the `Sampler` of one model, once the model and its vocabulary are loaded.
    """


@hookspec
def register_state_stores(register: RegisterStateStore, section: BaseModel | None) -> None:
    """At start-up: offer places where states are kept below RAM.

    `factory()` makes a closed `StateStore` and runs only for the one that the user chose; the server opens it.
    """


@hookspec
def register_routes(register: RegisterRoutes, section: BaseModel | None) -> None:
    """At start-up: offer route groups.

    A method and path that another group has stops the start; paths that groups share by design are `claims`.
    Handlers reach the server's parts through `core.http.context_of(request)`.
    """


@hookspec(firstresult=True)
def choose_backend(settings: Settings, checkpoint: Path) -> str | None:
    """Before the model is loaded, with `--inference-engine auto` only: the name of the backend for this file.

    None passes the question on; the plugin loaded last is asked first. Without any answer it is fp16.
    """
    return None


@hookspec(firstresult=True)
def authenticate(request: Request) -> Any:
    """Once per request that is protected or could be, in the event loop: who calls.

    Return an identity (any object but None) to let the request pass, None to leave the decision to the next plugin
    and at last to the server's password, or raise `errors.Unauthorized` or `errors.RateLimited` to refuse it. Only
    the request's headers and address are at hand, not its body. Must not block.
    """
    return None


@hookspec
def register_metrics(registry: CollectorRegistry) -> None:
    """Once, when the application is built: add the plugin's own collectors to what /metrics shows."""


@hookspec
def startup(context: ServerContext, section: BaseModel | None) -> None:
    """Once, in the event loop, when the models are loaded and the first request is yet to come.

    An exception stops the start; what was already started is shut down.
    """


@hookspec
def shutdown(context: ServerContext) -> None:
    """Once, in the event loop, after the last request: release what `startup` took.

    Plugins are called in the reverse order of their start; one that fails is logged and the others go on.
    """


@hookspec
def readiness_checks(context: ServerContext) -> Iterable[str] | None:
    """Once per GET /v1/health, in the event loop: what keeps the server from being ready, a sentence each.

    With any sentence health is 503 and shows them, so that a balancer sends requests elsewhere; those that come all
    the same are served. None or an empty list means ready. Must not block; an exception is logged and means not ready.
    """
    return None


@hookspec
def request_finished(summary: RequestSummary) -> None:
    """Once per request, in the event loop, when its last row has ended, whatever the reason.

    Must not block; an exception is logged and changes nothing for the client.
    """
