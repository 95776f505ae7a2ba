"""What is wrong with a plugin, found before it runs: misspelt hooks, routes that clash."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import fastapi.routing
import pluggy

from rwkv_lightning.core.errors import PluginError
from rwkv_lightning.core.interfaces import RouteGroup
from rwkv_lightning.core.registry import Origin, Registered

NEAR = 0.85  # likeness from which an unmarked function counts as a misspelt hook


def check_hooks(manager: pluggy.PluginManager, plugin: object, origin: Origin) -> None:
    """Raises PluginError for a hook that does not exist, is not marked, or is a coroutine; and when there is none."""
    hooks = {name for name in vars(manager.hook) if not name.startswith("_")}
    marked = [name for name in dir(plugin) if manager.parse_hookimpl_opts(plugin, name) is not None]
    for name in marked:
        if name not in hooks:
            raise PluginError(f"{origin} implements a hook {name!r}, which does not exist{_hint(name, hooks)}")
        if inspect.iscoroutinefunction(getattr(plugin, name)):
            raise PluginError(f"{origin}: hook {name!r} is 'async def'; hooks are plain functions")
    for name in set(_own_functions(plugin)) - set(marked):
        if near := difflib.get_close_matches(name, hooks, n=1, cutoff=NEAR):
            raise PluginError(
                f"{origin} has a function {name!r} that is not marked but looks like the hook {near[0]!r}; "
                "mark it with @hookimpl under that name, or begin its name with an underscore"
            )
    if not marked:
        raise PluginError(f"{origin} implements no hook; see rwkv_lightning/core/hookspecs.py")


def _hint(name: str, hooks: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(hooks), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(hooks))}"


def _own_functions(plugin: object) -> Iterator[str]:
    """Public functions that the plugin itself defines, not those it imports."""
    for name in dir(plugin):
        member = getattr(plugin, name, None)
        imported = isinstance(plugin, ModuleType) and getattr(member, "__module__", None) != plugin.__name__
        if inspect.isroutine(member) and not name.startswith("_") and not imported:
            yield name


def check_routes(groups: Iterable[Registered[RouteGroup]]) -> None:
    """Raises PluginError when a method and path is taken twice, naming both plugins."""
    routes: dict[tuple[str, ...], Origin] = {}
    claims: dict[tuple[str, ...], Origin] = {}
    for group in groups:
        for method, path in routes_of(group.value):
            _take(routes, (method, _unnamed(path)), group.origin)
        for place in _claims(group.value):
            _take(claims, place, group.origin)
    for place, origin in claims.items():
        _take(dict(routes), place[:2], origin)


def _take(taken: dict[tuple[str, ...], Origin], place: tuple[str, ...], origin: Origin) -> None:
    if place in taken:
        key = f" for bodies with {place[2]!r}" if place[2:] and place[2] else " as fallback" if place[2:] else ""
        raise PluginError(
            f"{place[0]} {place[1]}{key} is registered twice: by {taken[place]} and by {origin}; "
            "change one, or leave one out with --disable-plugin"
        )
    taken[place] = origin


def routes_of(group: RouteGroup) -> Iterator[tuple[str, str]]:
    """(method, path as it was given) of every route of a group, its claims not among them."""
    flatten: Callable[[Any], Iterable[Any]] = getattr(
        fastapi.routing, "iter_route_contexts", iter
    )  # older FastAPI keeps routers flat
    for route in flatten(group.router.routes):
        for method in sorted(getattr(route, "methods", None) or {"ANY"}):
            yield method, route.path or ""


def _claims(group: RouteGroup) -> Iterator[tuple[str, ...]]:
    for claim in group.claims:
        place = (claim.method.upper(), _unnamed(claim.path))
        yield (*place, claim.key)
        if claim.fallback:
            yield (*place, "")


def _unnamed(path: str) -> str:
    """/state/{id} and /state/{name} are one path."""
    return re.sub(r"\{[^}:]*", "{", path)
