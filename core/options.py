"""The command line's options and the README's table, both made from `Settings`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from rwkv_lightning.core.config import GROUPS, Settings
from rwkv_lightning.core.config_sources import ALIASES, option_name, variable_name


@dataclass(frozen=True, slots=True)
class Option:
    """One setting as the user sees it."""

    name: str
    flags: tuple[str, ...]
    variable: str
    group: str
    description: str
    default: str
    is_flag: bool
    is_list: bool


def options(groups: Iterable[str] = GROUPS) -> Iterator[Option]:
    """The settings of these groups, group by group, each in the order in which `Settings` has them."""
    for group in groups:
        for name, field in Settings.model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra["group"] == group:
                yield _option(name, field, group, str(extra["shown"] or as_text(field.default)))


def _option(name: str, field: FieldInfo, group: str, default: str) -> Option:
    aliases = (option_name(alias) for alias, target in ALIASES.items() if target == name)
    is_list = isinstance(field.default, tuple)
    is_flag = field.annotation is bool
    flags = (option_name(name), *aliases)
    return Option(name, flags, variable_name(name), group, field.description or "", default, is_flag, is_list)


def as_text(value: Any) -> str:
    """A setting's value as help texts and tables show it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, ByteSize):
        return value.human_readable()
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def add_options(
    parser: argparse.ArgumentParser, groups: Iterable[str] = GROUPS, only: Collection[str] | None = None
) -> None:
    """One option per setting. Values stay texts: `Settings` is the only place that checks them.

    Args:
        only: names of the settings to show in --help; the others are taken all the same. None: all of them.
    """
    headings: dict[str, argparse._ArgumentGroup] = {}
    for option in options(groups):
        if option.group not in headings:
            headings[option.group] = parser.add_argument_group(option.group)
        help_text = f"{option.description} [default: {option.default}] [{option.variable}]".replace("%", "%%")
        if only is not None and option.name not in only:
            help_text = argparse.SUPPRESS
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": help_text}
        if option.is_flag:
            common["action"] = argparse.BooleanOptionalAction
        else:
            common["metavar"] = option.name.rpartition("_")[2].upper()
            common["action"] = "append" if option.is_list else "store"
        headings[option.group].add_argument(*option.flags, **common)


def markdown_table() -> str:
    """Every setting, for the README. In the file a setting is called as on the command line, without the dashes."""
    lines = ["| option | environment | default | what it does |", "|---|---|---|---|"]
    for option in options():
        flags = ", ".join(f"`{flag}`" for flag in option.flags)
        cells = (flags, f"`{option.variable}`", option.default, option.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
