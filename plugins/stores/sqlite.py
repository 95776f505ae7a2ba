"""The built-in state store: one SQLite file, by default in the user's data directory.

Durability: the file is in WAL mode with `synchronous=NORMAL`. A commit has then been written to the log, which a
killed process (`kill -9`) does not lose: the system's file cache outlives the process, and the next start reads the
log. Only a power cut or a crash of the system itself can lose the last commits, never the file's consistency;
`synchronous=FULL` would protect those too, for one `fsync` per commit.

One server owns the file: a lock beside it (`<file>.lock`) refuses a second one. There is one connection that writes
and one that reads, so resuming a session does not wait for a flush. Freed space is used again; the file does not
shrink.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from rwkv_lightning.core.errors import StoreError
from rwkv_lightning.core.hookspecs import RegisterStateStore, hookimpl
from rwkv_lightning.core.interfaces import StateInfo, StoredState, StoreUsage
from rwkv_lightning.plugins.stores import schema
from rwkv_lightning.plugins.stores.link import WAY_OUT, Connect, Link, store_error
from rwkv_lightning.plugins.stores.lock import FileLock
from rwkv_lightning.plugins.stores.schema import COLUMNS

ELSEWHERE = "stop that one, or give this one a file of its own with --state-db"
EVICTED_AT_ONCE = 256
# Pages of 16 KiB read and write megabyte records 2-3 times faster than the default 4 KiB; the log is moved into the
# file every 16 MiB and cut back to 64 MiB.
SETUP = (
    "PRAGMA page_size = 16384",
    "PRAGMA synchronous = NORMAL",
    "PRAGMA wal_autocheckpoint = 1024",
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA trusted_schema = OFF",
)
INFO = ", ".join(COLUMNS)
PUT = f"""INSERT INTO states ({INFO}, used) VALUES ({", ".join("?" * len(COLUMNS))}, ?)
    ON CONFLICT (key) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in (*COLUMNS, "used"))}"""
ID = "(SELECT id FROM states WHERE key = ?)"
SESSIONS = f"""SELECT {INFO} FROM states
    WHERE kind = 'session' AND key NOT IN (SELECT value FROM json_each(?))
    ORDER BY created DESC, key LIMIT ? OFFSET ?"""
COUNT = """SELECT states - (
    SELECT count(*) FROM states WHERE kind = 'session' AND key IN (SELECT value FROM json_each(?))
) FROM totals WHERE kind = 'session'"""
FAMILY = f"SELECT {INFO} FROM states WHERE kind = 'session' AND session = ? ORDER BY branch, key"
PREFIXES = f"""SELECT {", ".join(f"s.{name}" for name in COLUMNS)}, p.tokens
    FROM states s JOIN prefix_tokens p ON p.id = s.id
    WHERE s.kind = 'prefix' AND s.model = ? ORDER BY s.used DESC LIMIT ?"""
OLDEST = f"SELECT id, key, nbytes FROM states WHERE kind = ? ORDER BY used LIMIT {EVICTED_AT_ONCE}"
RESERVED = """INSERT INTO branches VALUES (?, ?)
    ON CONFLICT (session) DO UPDATE SET next = max(next, excluded.next)"""


def default_path() -> Path:
    """`states.db` in the user's data directory."""
    return Path(platformdirs.user_data_dir("rwkv-lightning")) / "states.db"


class SqliteStore:
    """Implements `interfaces.StateStore`. Thread-safe: one writer and one reader at a time, others wait.

    Args:
        connect: `sqlite3.connect`, or what tests put in its place.
        busy_timeout: seconds to wait while another program (not a server) locks the file.
    """

    def __init__(self, connect: Connect = sqlite3.connect, busy_timeout: float = 5.0) -> None:
        self.location = ""
        self._connect = connect
        self._busy_timeout = busy_timeout
        self._held = contextlib.ExitStack()
        self._links: tuple[Link, Link] | None = None

    # Opening and closing

    def open(self, location: str | None = None) -> None:
        """Open or make the database file. See `interfaces.StateStore.open`."""
        if self._links is not None:
            raise StoreError(f"the state database '{self.location}' is open already", "other")
        path = Path(location or default_path()).expanduser().resolve()
        self.location = str(path)
        with contextlib.ExitStack() as held:
            self._take(path, held)
            writer, reader = (self._link(held) for _ in range(2))
            self._prepare(writer)
            with reader.use() as connection:
                _setup(connection)
            self._held, self._links = held.pop_all(), (writer, reader)

    def close(self) -> None:
        """Release the file; never raises."""
        self._links = None
        self._held.close()

    def _take(self, path: Path, held: contextlib.ExitStack) -> None:
        """Make the folder and the file, for this user's eyes only, and lock it."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(path.with_name(path.name + ".lock"), f"the state database '{path}'", ELSEWHERE)
            held.callback(lock.release)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise store_error(error, self.location) from error

    def _link(self, held: contextlib.ExitStack) -> Link:
        link = Link(self.location, self._connect, self._busy_timeout)
        held.callback(link.close)
        return link

    def _prepare(self, writer: Link) -> None:
        with writer.use() as connection:
            new = schema.is_new(connection, self.location)
            _setup(connection)
            ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
        with writer.transaction() as connection:
            if new:
                schema.create(connection)
            # Written at every start: a file that is read-only, or a disk that is full, is found out here.
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('format', ?)", (str(schema.VERSION),))
        if mode != "wal":
            raise StoreError(
                f"the state database '{self.location}' cannot use a write-ahead log, as on some network drives: "
                "give a file on a local disk with --state-db",
                "other",
            )

    def _writer(self) -> Link:
        return self._open_links()[0]

    def _reader(self) -> Link:
        return self._open_links()[1]

    def _open_links(self) -> tuple[Link, Link]:
        if self._links is None:
            raise StoreError("the state database is not open", "other")
        return self._links

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reader().use() as connection:
            return connection.execute(query, values).fetchall()

    # States

    def put(self, states: Sequence[StoredState]) -> None:
        with self._writer().transaction() as connection:
            for state in states:
                info = state.info
                connection.execute(PUT, [*(getattr(info, name) for name in COLUMNS), info.created])
                connection.execute(f"INSERT OR REPLACE INTO records VALUES ({ID}, ?)", (info.key, state.data))
                if info.kind == "prefix":
                    connection.execute(
                        f"INSERT OR REPLACE INTO prefix_tokens VALUES ({ID}, ?)", (info.key, state.tokens)
                    )
                if info.branch:
                    connection.execute(RESERVED, (info.session, info.branch + 1))

    def get(self, key: str) -> bytes | None:
        rows = self._rows("SELECT data FROM states LEFT JOIN records USING (id) WHERE key = ?", key)
        if not rows:
            return None
        ((data,),) = rows
        if not isinstance(data, bytes):
            raise StoreError(f"the state database '{self.location}' lacks a record; {WAY_OUT['corrupt']}", "corrupt")
        return data

    def info(self, key: str) -> StateInfo | None:
        infos = _infos(self._rows(f"SELECT {INFO} FROM states WHERE key = ?", key))
        return infos[0] if infos else None

    def family(self, session: str) -> list[StateInfo]:
        return _infos(self._rows(FAMILY, session))

    def sessions(self, *, limit: int | None = None, offset: int = 0, exclude: Collection[str] = ()) -> list[StateInfo]:
        return _infos(self._rows(SESSIONS, json.dumps(list(exclude)), -1 if limit is None else limit, offset))

    def count(self, exclude: Collection[str] = ()) -> int:
        ((count,),) = self._rows(COUNT, json.dumps(list(exclude)))
        return int(count)

    def prefixes(self, model: str, limit: int | None = None) -> list[tuple[StateInfo, bytes]]:
        rows = self._rows(PREFIXES, model, -1 if limit is None else limit)
        return [(StateInfo(*row[:-1]), row[-1]) for row in rows]

    def touch(self, keys: Collection[str], now: float) -> None:
        with self._writer().transaction() as connection:
            connection.executemany("UPDATE states SET used = max(used, ?) WHERE key = ?", [(now, key) for key in keys])

    def delete(self, keys: Collection[str]) -> int:
        with self._writer().transaction() as connection:
            cursor = connection.executemany("DELETE FROM states WHERE key = ?", [(key,) for key in keys])
            return max(0, cursor.rowcount)

    def evict(self, budget: int) -> list[str]:
        with self._writer().transaction() as connection:
            ((excess,),) = connection.execute("SELECT sum(nbytes) - ? FROM totals", (budget,)).fetchall()
            gone: list[str] = []
            for identity, key, nbytes in _oldest(connection):
                if excess <= 0:
                    break
                connection.execute("DELETE FROM states WHERE id = ?", (identity,))
                gone.append(key)
                excess -= nbytes
            return gone

    # Numbers and texts

    def reserve_branches(self, session: str, count: int = 1, at_least: int = 1) -> int:
        with self._writer().transaction() as connection:
            rows = connection.execute("SELECT next FROM branches WHERE session = ?", (session,)).fetchall()
            first = max(at_least, rows[0][0] if rows else 1)
            connection.execute(RESERVED, (session, first + count))
            return int(first)

    def usage(self) -> StoreUsage:
        totals = {kind: (states, nbytes) for kind, states, nbytes in self._rows("SELECT * FROM totals")}
        (sessions, session_bytes), (prefixes, prefix_bytes) = totals["session"], totals["prefix"]
        return StoreUsage(sessions, prefixes, session_bytes + prefix_bytes)

    def get_meta(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE name = ?", name)
        return str(rows[0][0]) if rows else None

    def set_meta(self, name: str, value: str) -> None:
        with self._writer().transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def check(self) -> Sequence[str]:
        with self._reader().use() as connection:
            return schema.problems(connection)


def _setup(connection: sqlite3.Connection) -> None:
    for statement in SETUP:
        connection.execute(statement)


def _infos(rows: Iterable[Sequence[Any]]) -> list[StateInfo]:
    return [StateInfo(*row) for row in rows]


def _oldest(connection: sqlite3.Connection) -> Iterator[tuple[int, str, int]]:
    """Every state, prefixes first, the least recently used first; those already seen must be deleted on the way."""
    for kind in ("prefix", "session"):
        while rows := connection.execute(OLDEST, (kind,)).fetchall():
            yield from rows


@hookimpl
def register_state_stores(register: RegisterStateStore) -> None:
    register("sqlite", SqliteStore, "one SQLite file, --state-db; by default in the user's data directory")
