"""The README's tables, made from the code: `python tests/tables.py` writes them, a test compares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastapi.routing

from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.http import read_call, require_password
from rwkv_lightning.core.options import markdown_table

README = Path(__file__).parents[1] / "README.md"
PROTECTED = {read_call, require_password}


def endpoints() -> str:
    """Method, path, group, whether it is open, and the first line of the handler's docstring."""
    rows = [row for group in PluginHost(Settings()).route_groups() for row in (*_claims(group), *_routes(group))]
    lines = ["| method | path | group | | does |", "|---|---|---|---|---|"]
    for path, method, name, is_open, text in sorted(rows):
        lines.append(f"| {method} | `{path}` | {name} | {is_open} | {(text or '').strip().splitlines()[0]} |")
    return "\n".join(lines) + "\n"


def _claims(group: Any) -> Iterator[tuple[str, ...]]:
    for claim in group.claims:
        yield claim.path, claim.method, group.name, "", claim.handle.__doc__


def _routes(group: Any) -> Iterator[tuple[str, ...]]:
    flatten = getattr(fastapi.routing, "iter_route_contexts", iter)  # older FastAPI keeps routers flat
    for route in flatten(group.router.routes):
        calls = {dependency.call for dependency in route.dependant.dependencies}
        is_open = "" if calls & PROTECTED else "open"
        for method in route.methods:
            yield re.sub(r":\w+}", "}", route.path), method, group.name, is_open, route.endpoint.__doc__


def with_tables(text: str) -> str:
    """The README's text with both tables as they should be."""
    for name, table in (("endpoints", endpoints()), ("options", markdown_table())):
        marks = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        text, count = re.subn(marks, lambda mark, table=table: f"{mark[1]}{table}{mark[2]}", text, flags=re.DOTALL)
        assert count == 1, f"README.md needs the marks of the table of {name} once"
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
