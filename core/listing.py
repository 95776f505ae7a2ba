"""`rwkv-lightning plugins`: everything that is registered or installed, and whether it can be used here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.host import Plugin, PluginHost
from rwkv_lightning.core.interfaces import RouteGroup
from rwkv_lightning.core.plugin_checks import routes_of
from rwkv_lightning.core.registry import Origin

REGISTERING = (
    "register_backends",
    "register_samplers",
    "register_state_stores",
    "register_routes",
    "plugin_settings",
)


@dataclass(frozen=True, slots=True)
class Listing:
    """One line. `status` is 'ready', 'unusable' (see `reason`), 'available' or 'disabled'."""

    kind: str
    name: str
    status: str
    plugin: str
    distribution: str
    version: str
    description: str = ""
    reason: str = ""


def listings(host: PluginHost, device: str) -> list[Listing]:
    """What the host has, backends probed for `device`, then plugins that act by other hooks, then those not loaded."""
    lines = [*_backends(host, device)]
    for registry in (host.samplers, host.stores):
        lines += [_line(registry.kind, item.name, item.origin, item.description) for item in registry]
    lines += [_line(host.routes.kind, item.name, item.origin, _paths(item.value)) for item in host.routes]
    lines += [_other_hooks(plugin) for plugin in host.plugins if set(plugin.hooks) - set(REGISTERING)]
    return [*lines, *_not_loaded(host)]


def _line(
    kind: str, name: str, origin: Origin, description: str = "", reason: str = "", status: str = "ready"
) -> Listing:
    return Listing(kind, name, status, origin.plugin, origin.distribution, origin.version, description, reason)


def _backends(host: PluginHost, device: str) -> Iterator[Listing]:
    for item in host.backends:
        try:
            reason = host.create_backend(item.name).probe(device)
        except StartError as error:
            reason = str(error)
        status = "unusable" if reason else "ready"
        yield _line("backend", item.name, item.origin, item.description, reason or "", status)


def _paths(group: RouteGroup) -> str:
    """The first paths of a route group and how many more there are; parameters by their names: {model_id}."""
    given = [*(path for _, path in routes_of(group)), *(claim.path for claim in group.claims)]
    paths = list(dict.fromkeys(re.sub(r":\w+\}", "}", path) for path in given))
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return ", ".join(paths[:2]) + more


def _other_hooks(plugin: Plugin) -> Listing:
    hooks = ", ".join(sorted(set(plugin.hooks) - set(REGISTERING)))
    return _line("hooks", plugin.origin.plugin, plugin.origin, hooks)


def _not_loaded(host: PluginHost) -> Iterator[Listing]:
    loaded = {plugin.origin for plugin in host.plugins}
    for found in host.found:
        if found.origin not in loaded:
            status = "disabled" if found.own else "available"
            reason = "" if found.own else f"--plugin {found.name} loads it"
            yield _line("plugin", found.name, found.origin, reason=reason, status=status)


def as_table(lines: list[Listing]) -> str:
    """Columns padded with spaces, a heading first."""
    heading = [field.name for field in fields(Listing)]
    rows = [heading, *([str(value) for value in asdict(line).values()] for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heading))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)
