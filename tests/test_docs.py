"""The documents: their examples run as they stand, and no hook is without a section and a test."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
import pytest

from rwkv_lightning.core import hookspecs
from rwkv_lightning.core.plugin_checks import check_hooks
from rwkv_lightning.core.registry import Origin
from server_process import ServerProcess

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PLUGINS = ROOT / "docs" / "plugins.md"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:8000"
HOOKS = {
    name: function for name, function in vars(hookspecs).items() if hasattr(function, f"{hookspecs.NAMESPACE}_spec")
}


@dataclass(frozen=True)
class Block:
    """A fenced block: with a title it is a file of that name, else a script to run where the files are."""

    language: str
    title: str
    text: str


def blocks(document: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(document.read_text())]


class Desk:
    """A folder in which a document is worked through, with an installation target and a server of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.server: ServerProcess | None = None
        site = folder / "site"
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{site}:{folder}",
            "PIP_TARGET": str(site),
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def work(self, block: Block) -> None:
        if block.title:
            (self.folder / block.title).write_text(block.text)
        elif block.language == "sh" and block.text.startswith("rwkv-lightning serve"):
            self.serve(*block.text.split()[2:])
        elif block.language == "sh":
            self.shell(self.here(block.text))
        elif block.language == "python":
            exec(compile(self.here(block.text), "docs", "exec", dont_inherit=True), {"__name__": "documented"})

    def serve(self, *options: str) -> None:
        self.server = self.stack.enter_context(ServerProcess(*options, env=self.env))

    def here(self, text: str) -> str:
        """The text with the address of the desk's server."""
        if ADDRESS in text and self.server is None:
            self.serve()
        return text.replace(ADDRESS, self.server.url.removeprefix("http://")) if self.server else text

    def shell(self, text: str) -> None:
        command = ["bash", "-euo", "pipefail", "-c", text]
        environment = {**os.environ, **self.env}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_examples_run_as_they_stand(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        desk = Desk(tmp_path, stack)
        for block in blocks(document):
            desk.work(block)


def test_the_tutorial_takes_less_than_sixty_lines() -> None:
    files = [block for block in blocks(PLUGINS) if block.title][:3]
    assert [block.title for block in files] == ["pyproject.toml", "acme_top_a.py", "test_top_a.py"]
    assert sum(bool(line.strip()) for block in files for line in block.text.splitlines()) < 60


@pytest.mark.parametrize("block", [b for b in blocks(PLUGINS) if "@hookimpl" in b.text], ids=lambda b: b.text[-60:-40])
def test_code_in_the_hooks_sections_is_a_plugin(block: Block) -> None:
    manager = pluggy.PluginManager(hookspecs.NAMESPACE)
    manager.add_hookspecs(hookspecs)
    module: Any = ModuleType("documented")
    exec(compile(block.text, "docs", "exec", dont_inherit=True), module.__dict__)
    check_hooks(manager, module, Origin("documented", "docs", "0"))
    manager.register(module)
    manager.check_pending()


def sections() -> Iterator[tuple[str, str]]:
    """(heading, text) of every section of the third level."""
    for part in re.split(r"^### ", PLUGINS.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        yield heading.strip("`"), text.split("\n## ")[0]


def test_every_hook_has_a_section_with_its_arguments() -> None:
    documented = dict(sections())
    expected = {f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in HOOKS.items()}
    assert set(documented) == expected
    for heading, text in documented.items():
        assert re.match(r"\n(First of all|At start-up|Before the model|Once)", text), f"{heading}: when does it run?"
        assert len(text.split()) > 15, heading


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test(hook: str) -> None:
    implementation = re.compile(rf"@hookimpl(\\n|\s)+def {hook}\(")
    users = [path for path in (ROOT / "tests").glob("test_*.py") if implementation.search(path.read_text())]
    users += [path for path in (ROOT / "examples").glob("*/*.py") if implementation.search(path.read_text())]
    assert users, f"no test implements the hook {hook}"


def test_links_and_pictures_lead_to_files() -> None:
    for document in (*DOCS, ROOT / "README.md"):
        for target in re.findall(r"\]\((?!\w+:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} names {target}"


def test_links_within_a_document_lead_somewhere() -> None:
    for document in DOCS:
        text = document.read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors, document.name
