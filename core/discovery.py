"""Which plugins there are, and which of them to load.

The project's own plugins are declared like anybody's, in the entry-point group `rwkv_lightning`, and are always
loaded. Those of other distributions are available: loaded when the user names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from rwkv_lightning.core.config_sources import suggestion
from rwkv_lightning.core.errors import PluginError, SettingsError
from rwkv_lightning.core.hookspecs import NAMESPACE
from rwkv_lightning.core.registry import Origin

DISTRIBUTION = "rwkv-lightning"


@dataclass(frozen=True, slots=True)
class Found:
    """A plugin that is installed: loaded or not."""

    entry: EntryPoint
    origin: Origin
    own: bool

    @property
    def name(self) -> str:
        return self.origin.plugin


def discover() -> list[Found]:
    """Every plugin installed, the project's own first. Imports none of them."""
    found = [_found(entry) for entry in entry_points(group=NAMESPACE)]
    return sorted(found, key=lambda plugin: not plugin.own)


def _found(entry: EntryPoint) -> Found:
    distribution = entry.dist.name if entry.dist else "unknown"
    version = entry.dist.version if entry.dist else "unknown"
    own = distribution.lower().replace("_", "-") == DISTRIBUTION
    return Found(entry, Origin(entry.name.lower(), distribution, version), own)


def select(found: Iterable[Found], named: Iterable[str], disabled: Iterable[str]) -> list[Found]:
    """The plugins to load: the project's own, then the named ones in that order, less the disabled ones.

    Raises:
        SettingsError: a name is unknown, or both named and disabled.
        PluginError: two distributions have a plugin of a name that is to be loaded.
    """
    found = list(found)
    wanted, unwanted = _names(found, named, "--plugin"), _names(found, disabled, "--disable-plugin")
    for name in wanted:
        if name in unwanted:
            raise SettingsError(f"--plugin {name} and --disable-plugin {name} contradict each other; drop one")
    chosen = [p for p in found if (p.own or p.name in wanted) and p.name not in unwanted]
    chosen.sort(key=lambda plugin: -1 if plugin.own else wanted.index(plugin.name))
    for i, plugin in enumerate(chosen):
        for other in chosen[:i]:
            if other.name == plugin.name:
                raise PluginError(f"{other.origin} and {plugin.origin} have the same name; uninstall or rename one")
    return chosen


def _names(found: list[Found], given: Iterable[str], option: str) -> list[str]:
    known = {plugin.name for plugin in found}
    names = [name.lower() for name in given]
    for name in names:
        if name not in known:
            hint = suggestion(name, known, otherwise=f"; installed: {', '.join(sorted(known)) or 'none'}")
            raise SettingsError(f"{option} {name}: no such plugin is installed{hint}")
    return names


def load(plugin: Found) -> object:
    """Import a plugin; a class is instantiated. Raises PluginError with the cause."""
    try:
        loaded: object = plugin.entry.load()
        return loaded() if inspect.isclass(loaded) else loaded
    except Exception as error:
        raise PluginError(f"{plugin.origin} cannot be loaded: {type(error).__name__}: {error}") from error
