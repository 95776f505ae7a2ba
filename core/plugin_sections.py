"""The plugins' own settings: `[plugins.<name>]` and `RWKV_LIGHTNING_<NAME>__<KEY>`, checked by each plugin's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rwkv_lightning.core.config_sources import PREFIX, section_name, suggestion
from rwkv_lightning.core.discovery import Found
from rwkv_lightning.core.errors import PluginError, SettingsError
from rwkv_lightning.core.registry import Origin


def validate_section(origin: Origin, model: object, sections: Mapping[str, Mapping[str, Any]]) -> BaseModel:
    """A plugin's settings. Raises SettingsError naming the key in both spellings."""
    plugin = origin.plugin
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginError(f"{origin}: plugin_settings must return a pydantic model class, not {model!r}")
    section = sections.get(section_name(plugin), {})
    values = {key.replace("-", "_"): value for key, value in section.items()}
    for key in values:
        if key not in model.model_fields:
            hint = suggestion(key, model.model_fields, otherwise=f"; known: {', '.join(model.model_fields)}")
            raise SettingsError(f"{_where(plugin, key)} is not a setting of plugin {plugin!r}{hint}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{_where(plugin, key)}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def check_sections(
    given: Iterable[str], found: Iterable[Found], loaded: Mapping[str, bool], disabled: set[str]
) -> None:
    """Refuse sections that nobody reads; a disabled plugin's section may stay.

    Args:
        given: names of the sections.
        found: the plugins installed.
        loaded: plugin name -> whether it has settings, for the loaded ones.
    """
    plugins = {section_name(plugin.name): plugin.name for plugin in found}
    for section in given:
        if section not in plugins:
            hint = suggestion(section, plugins, otherwise="; see rwkv-lightning plugins")
            raise SettingsError(f"[plugins.{section}] names no installed plugin{hint}")
        name = plugins[section]
        if name not in loaded and name not in disabled:
            raise SettingsError(f"[plugins.{section}] is for a plugin that is not loaded; add --plugin {name}")
        if not loaded.get(name, True):
            raise SettingsError(f"[plugins.{section}]: plugin {name!r} has no settings; remove the section")


def _where(plugin: str, key: str) -> str:
    section = section_name(plugin)
    return f"{key} in [plugins.{plugin}] ({PREFIX}{section.upper()}__{key.upper()})"
