"""`rwkv-lightning config`: what every setting is and where it came from, the plugins' own ones included."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from rwkv_lightning.core.config import Settings, origin
from rwkv_lightning.core.config_sources import section_name, variable_name
from rwkv_lightning.core.options import as_text, options

if TYPE_CHECKING:
    from rwkv_lightning.core.host import Plugin, PluginHost

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting: `group` is its heading in --help, or `plugins.<name>`; `shown` is its value as text."""

    group: str
    name: str
    value: Any
    shown: str
    source: str


def effective(settings: Settings, given: Mapping[str, Any], host: PluginHost) -> list[Effective]:
    """All settings in the order of --help, then the sections of the loaded plugins. Secrets are masked."""
    sections = (line for plugin in host.plugins if plugin.section for line in _section(plugin, settings))
    return [*_settings(settings, given), *sections]


def _settings(settings: Settings, given: Mapping[str, Any]) -> Iterator[Effective]:
    for option in options():
        value = getattr(settings, option.name)
        known = option.name in settings.model_fields_set
        source = origin(option.name, given, settings.config) if known else DEFAULT
        shown = option.default if value is None else as_text(_masked(value))
        yield Effective(option.group, option.name, _plain(value), shown, source)


def _section(plugin: Plugin, settings: Settings) -> Iterator[Effective]:
    name = section_name(plugin.origin.plugin)
    for key, value in plugin.section or ():
        source = _section_source(name, key, plugin, settings)
        yield Effective(f"plugins.{plugin.origin.plugin}", key, _plain(value), as_text(_masked(value)), source)


def _section_source(section: str, key: str, plugin: Plugin, settings: Settings) -> str:
    variable = f"{variable_name(section)}__{key.upper()}"
    if variable in os.environ:
        return variable
    keys = {name.replace("-", "_") for name in settings.plugins.get(section, {})}
    return f"[plugins.{plugin.origin.plugin}] in {settings.config}" if key in keys else DEFAULT


def _masked(value: Any) -> Any:
    return str(value) if isinstance(value, SecretStr) else value


def _plain(value: Any) -> Any:
    """The value for JSON."""
    if isinstance(value, SecretStr | Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def as_table(lines: list[Effective]) -> str:
    """One block per group: name, value, source."""
    widths = [max(len(_spelt(line)) for line in lines), max(len(line.shown) for line in lines if len(line.shown) < 40)]
    rows: list[str] = []
    for i, line in enumerate(lines):
        if not i or lines[i - 1].group != line.group:
            rows += ["", f"{line.group}:"] if rows else [f"{line.group}:"]
        rows.append(f"  {_spelt(line):{widths[0]}}  {line.shown:{widths[1]}}  {line.source}")
    return "\n".join(rows)


def as_json(lines: list[Effective]) -> list[dict[str, Any]]:
    """What --json prints."""
    return [{"group": line.group, "name": line.name, "value": line.value, "source": line.source} for line in lines]


def _spelt(line: Effective) -> str:
    return line.name.replace("_", "-")
