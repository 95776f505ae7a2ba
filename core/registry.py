"""What plugins registered, by name, and where each thing came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from rwkv_lightning.core.config_sources import suggestion
from rwkv_lightning.core.errors import PluginError

T = TypeVar("T")

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Origin:
    """The plugin, and the distribution and version that brought it."""

    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Registered(Generic[T]):
    """One registered thing."""

    name: str
    value: T
    description: str
    origin: Origin


class UnknownName(LookupError):
    """No such name; the message lists the known ones."""


class Registry(Generic[T]):
    """Things of one kind. Names are looked up whatever their case."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, Registered[T]] = {}

    def add(self, name: str, value: T, description: str, origin: Origin) -> None:
        """Raises PluginError when the name is malformed or taken, naming both plugins."""
        key = name.lower() if isinstance(name, str) else ""
        if not NAME.fullmatch(key):
            raise PluginError(f"{origin} registers a {self.kind} named {name!r}; use letters, digits, '.', '_' and '-'")
        if key in self._items:
            raise PluginError(
                f"{self.kind} {key!r} is registered twice: by {self._items[key].origin} and by {origin}; "
                "rename one, or leave one out with --disable-plugin"
            )
        self._items[key] = Registered(key, value, description, origin)

    def get(self, name: str) -> Registered[T]:
        """Raises UnknownName."""
        if name.lower() in self._items:
            return self._items[name.lower()]
        known = ", ".join(self._items) or "none"
        near = suggestion(name, self._items, otherwise="")
        raise UnknownName(f"there is no {self.kind} {name!r} (known: {known}){near}")

    def __iter__(self) -> Iterator[Registered[T]]:
        return iter(self._items.values())
