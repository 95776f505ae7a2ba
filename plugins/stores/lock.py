"""`FileLock`: keeps a second server off a file, and ends with the process however that ends."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import IO

from rwkv_lightning.core.errors import StartError


class FileLock:
    """A lock file, held from construction until `release`. The file stays: removing it could let two in.

    Raises:
        StartError: another server holds it.
        OSError: the file cannot be made or locked.
    """

    def __init__(self, path: Path, what: str, way_out: str) -> None:
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
        try:
            _lock(self._file)
        except BlockingIOError:
            holder = self._file.read(32).decode("ascii", "replace").strip() or "unknown"
            self._file.close()
            raise StartError(f"{what} is in use by another server (process {holder}): {way_out}") from None
        except OSError:
            self._file.close()
            raise
        with contextlib.suppress(OSError):  # the number is for people; a full disk must not matter here
            self._file.truncate()
            self._file.write(str(os.getpid()).encode())

    def release(self) -> None:
        """Let the next one in."""
        self._file.close()


if sys.platform == "win32":
    import msvcrt

    BEYOND = 1 << 30  # a locked byte cannot be read by others, the process number must be

    def _lock(file: IO[bytes]) -> None:
        file.seek(BEYOND)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError from error
        finally:
            file.seek(0)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
