"""The `--nightly` flag, and throwaway plugin distributions."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("cache_suite")  # so that what differs is shown

# Test files run side by side: threads that spin while they wait would take the cores from each other.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run the long tests, marked nightly")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: long; runs with --nightly only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    long = [item for item in items if item.get_closest_marker("nightly")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)


InstallPlugin = Callable[..., Path]


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallPlugin]:
    """Put a distribution with one plugin module on `sys.path`; the result is its folder, for PYTHONPATH."""
    modules = []

    def install(name: str, source: str, distribution: str = "acme-plugin", version: str = "1.2") -> Path:
        folder = tmp_path / distribution
        module = f"{distribution}_{name}".replace("-", "_")
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[rwkv_lightning]\n{name} = {module}\n")
        header = "from rwkv_lightning.core.hookspecs import hookimpl\n"
        (folder / f"{module}.py").write_text(header + textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(folder))
        modules.append(module)
        return folder

    yield install
    for module in modules:
        sys.modules.pop(module, None)
