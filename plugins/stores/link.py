"""`Link`: a connection to SQLite that one thread uses at a time, and whose failures leave as StoreError."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from rwkv_lightning.core.errors import StoreError, StoreFailure

Connect = Callable[..., sqlite3.Connection]

WAY_OUT: dict[StoreFailure, str] = {
    "full": "there is no space left: free some, or lower --l3-bytes",
    "readonly": "it cannot be written: check the permissions of the file and its folder, or give another --state-db",
    "locked": "another program keeps it locked: close that program",
    "corrupt": "it is damaged: move it away, or restore a copy; sessions in it are lost otherwise",
    "other": "check the disk, or give another file with --state-db",
}
BY_CODE: dict[int, StoreFailure] = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "readonly",
    sqlite3.SQLITE_PERM: "readonly",
    sqlite3.SQLITE_CANTOPEN: "readonly",
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
}
BY_ERRNO: dict[int, StoreFailure] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "readonly",
    errno.EACCES: "readonly",
    errno.EPERM: "readonly",
}
# What Python's module raises: SQLite's errors; and for values it cannot store, two of Python's own.
FAILURES = (sqlite3.Error, OSError, OverflowError, UnicodeError)


def store_error(error: Exception, path: str) -> StoreError:
    """The StoreError for what went wrong, naming the file and the way out."""
    reason: StoreFailure = "other"
    if isinstance(error, sqlite3.Error):
        reason = BY_CODE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "other")
    elif isinstance(error, OSError):
        reason = BY_ERRNO.get(error.errno or 0, "other")
    return StoreError(f"the state database '{path}' failed ({error}); {WAY_OUT[reason]}", reason)


class Link:
    """One connection in autocommit mode, for one thread at a time.

    Args:
        path: the database file.
        connect: `sqlite3.connect`, or what tests put in its place.
        timeout: seconds to wait for another program's lock.
    """

    def __init__(self, path: str, connect: Connect, timeout: float) -> None:
        self._path = path
        self._lock = Lock()
        with self._failures():
            self._connection = connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """The connection, for the length of the block. Raises StoreError."""
        with self._lock, self._failures():
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection within a write transaction: all of the block, or nothing. Raises StoreError."""
        with self.use() as connection:
            if connection.in_transaction:  # left over where even the roll-back failed
                connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(*FAILURES):  # the first error counts; SQLite may have rolled back itself
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the connection; what was committed is safe whatever happens here."""
        with self._lock, contextlib.suppress(*FAILURES):
            self._connection.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            raise store_error(error, self._path) from error
