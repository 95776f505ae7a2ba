"""The package: every folder is listed, typed, and depends on lower ones only."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("core", "plugins", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DECLARED = PROJECT["project"]["entry-points"]["rwkv_lightning"]


def sources(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


def test_every_folder_with_python_files_is_packaged() -> None:
    folders = {file.parent.relative_to(ROOT) for part in PARTS for file in sources(part)}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {".".join(("rwkv_lightning", *folder.parts)) for folder in folders}


def test_every_folder_is_a_package_with_a_docstring() -> None:
    for folder in {file.parent for part in PARTS for file in sources(part)}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_typed(part: str) -> None:
    assert (ROOT / part / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][f"rwkv_lightning.{part}"]


def test_the_root_is_a_namespace() -> None:
    assert not (ROOT / "__init__.py").exists()


def imports(file: Path) -> Iterator[str]:
    """Modules that a file imports at run time, wherever in it; not those under `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending += ast.iter_child_nodes(node)


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [("core", ["plugins"]), ("kernels", ["core", "plugins"])],
)
def test_dependencies_point_downwards(part: str, forbidden: list[str]) -> None:
    names = tuple(f"rwkv_lightning.{name}" for name in forbidden)
    for file in sources(part):
        up = [name for name in imports(file) if name.startswith(names)]
        assert not up, f"{file.relative_to(ROOT)} imports {up}"


@pytest.mark.parametrize("name", ["scheduler", "ledger", "sequence", "request"])
def test_the_scheduler_needs_no_torch_clock_or_threads(name: str) -> None:
    roots = {module.partition(".")[0] for module in imports(ROOT / "core" / f"{name}.py")}
    assert not roots & {"torch", "time", "datetime", "threading", "asyncio"}


def test_relative_imports_are_not_used() -> None:
    for file in (file for part in PARTS for file in sources(part)):
        relative = [node for node in ast.walk(ast.parse(file.read_text())) if getattr(node, "level", 0)]
        assert not relative, file


def test_the_built_in_plugins_are_declared_and_importable() -> None:
    installed = {entry.name: entry.value for entry in entry_points(group="rwkv_lightning") if _is_ours(entry.dist)}
    assert installed == DECLARED, "pyproject.toml has changed since the installation: pip install -e ."
    for module in DECLARED.values():
        import_module(module)


def _is_ours(distribution: object) -> bool:
    return getattr(distribution, "name", "") == "rwkv-lightning"
