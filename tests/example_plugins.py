"""The distributions under examples/, built into wheels and installed into a folder of their own."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


@functools.cache
def installed_examples() -> Path:
    """The folder, for PYTHONPATH or sys.path; made once per test process and removed with it."""
    kept = tempfile.TemporaryDirectory(prefix="rwkv-lightning-examples-")
    _KEPT.append(kept)
    work = Path(kept.name)
    sources = [shutil.copytree(folder, work / folder.name) for folder in sorted(EXAMPLES.glob("plugin-*"))]
    wheel = (*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", work / "wheels")
    subprocess.run([*wheel, *sources], check=True)
    wheels = sorted((work / "wheels").glob("*.whl"))
    assert len(wheels) == len(sources)
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", work / "site", *wheels], check=True)
    return work / "site"


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
