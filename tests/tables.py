"""The README's tables, made from the code: `python tests/tables.py` writes them, a test compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.config_sources import option_name
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.http import read_call, require_password

README = Path(__file__).parents[1] / "README.md"


def endpoints() -> str:
    """Method, path, group, whether it is open, and the first line of the handler's docstring."""
    rows = []
    for group in PluginHost(Settings()).route_groups():
        for claim in group.claims:
            rows.append((claim.path, claim.method, group.name, "", claim.handle.__doc__))
        for route in group.router.routes:
            calls = {dependency.call for dependency in route.dependant.dependencies}
            is_open = "" if calls & {read_call, require_password} else "open"
            method = next(iter(route.methods))
            rows.append((route.path, method, group.name, is_open, route.endpoint.__doc__))
    lines = ["| method | path | group | | does |", "|---|---|---|---|---|"]
    for path, method, group, is_open, text in sorted(rows):
        lines.append(f"| {method} | `{path}` | {group} | {is_open} | {(text or '').strip().splitlines()[0]} |")
    return "\n".join(lines)


def options() -> str:
    """Option, default and meaning, by group."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or "group" not in extra:
            continue
        default = extra.get("shown") or field.default
        shown = "" if default is None or default == () else default
        shown = ", ".join(shown) if isinstance(shown, tuple) else str(shown).lower() if shown is False else shown
        lines.append(f"| `{option_name(name)}` | {shown} | {field.description} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    for name, table in (("endpoints", endpoints()), ("options", options())):
        marks = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        text = re.sub(marks, lambda m, table=table: f"{m[1]}{table}\n{m[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
    sys.exit(0)
