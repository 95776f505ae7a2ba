"""A small disk in memory, where this user may mount one."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryDisk:
    """A file system of a fixed size."""

    folder: Path

    def resize(self, size: str) -> None:
        """Make it larger, e.g. '9m'."""
        assert _mount(self.folder, f"remount,size={size}")


@contextmanager
def memory_disk(size: str) -> Iterator[MemoryDisk | None]:
    """A file system of that size, gone after the block; None where none can be mounted."""
    folder = Path(tempfile.mkdtemp())
    mounted = _mount(folder, f"size={size}")
    try:
        yield MemoryDisk(folder) if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def _mount(folder: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    return bool(shutil.which("mount")) and subprocess.run(command, capture_output=True, check=False).returncode == 0
