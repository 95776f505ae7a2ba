"""The README and docs/api.md: their tables come from the code, their examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tables

from server_process import ServerProcess

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/api.md")
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, containing: str = "") -> list[tuple[str, str]]:
    """Page and text of each example in a language."""
    found = [(page, match) for page in PAGES for match in BLOCK.findall((ROOT / page).read_text())]
    return [(page, text) for page, (kind, text) in found if kind == language and containing in text]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


def test_the_tables_are_those_of_the_code() -> None:
    text = tables.README.read_text()
    assert tables.with_tables(text) == text, "run `python tests/tables.py`"
    assert "| POST | `/v1/completions` | openai |" in text
    assert "| `--port` | `RWKV_LIGHTNING_PORT` | 8000 |" in text


@pytest.mark.parametrize(("page", "example"), blocks("python"))
def test_python_examples_run(server: ServerProcess, page: str, example: str) -> None:
    assert ADDRESS in example, f"an example of {page} that talks to no server"
    code = example.replace(ADDRESS, server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{page}:\n{example}\n{done.stderr}"


@pytest.mark.parametrize(("page", "example"), blocks("sh", "curl "))
def test_curl_examples_run(server: ServerProcess, page: str, example: str) -> None:
    command = example.replace(ADDRESS, server.url).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{page}:\n{example}\n{done.stdout}{done.stderr}"
    assert "Paris" in done.stdout


def test_the_readme_says_what_its_examples_need() -> None:
    text = (ROOT / "README.md").read_text()
    before = text[: text.index("```python")]
    installed = {name for line in re.findall(r"pip install ([\w ]+)`", before) for name in line.split()}
    examples = [code for page, code in blocks("python") if page == "README.md"]
    assert {name for code in examples for name in re.findall(r"^(?:import|from) (\w+)", code, re.M)} <= installed


def test_there_are_examples() -> None:
    assert len(blocks("python")) >= 5
    assert blocks("sh", "curl ")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:core|plugins|tests|kernels|docs|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_the_smoke_script_passes(server: ServerProcess) -> None:
    done = subprocess.run(["bash", ROOT / "tests" / "test_curl.sh", server.url], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "FAIL" not in done.stdout
    assert done.stdout.count("ok ") >= 15
