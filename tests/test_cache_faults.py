"""Everything that can go wrong with a disk: each operation fails in turn, full, read-only, locked, killed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_disk import memory_disk
from cache_states import prefix, record_of, state

from rwkv_lightning.core.errors import StoreError, StoreFailure
from rwkv_lightning.plugins.stores.sqlite import SqliteStore

CODES: dict[int, StoreFailure] = {
    sqlite3.SQLITE_IOERR: "other",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "readonly",
    sqlite3.SQLITE_CANTOPEN: "readonly",
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_IOERR_WRITE: "other",
    sqlite3.SQLITE_BUSY_SNAPSHOT: "locked",
}


class Faults:
    """Makes the n-th operation on the database fail, or with `lasting` every one from the n-th on.

    An operation is opening a connection, running a statement, or fetching its rows.
    """

    def __init__(self, nth: int = 0, code: int = sqlite3.SQLITE_IOERR, *, lasting: bool = False) -> None:
        self.nth = nth
        self.code = code
        self.lasting = lasting
        self.count = 0

    def operation(self) -> None:
        self.count += 1
        if self.nth and (self.count == self.nth or (self.lasting and self.count > self.nth)):
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = self.code
            raise error

    def connect(self, *args: Any, **options: Any) -> sqlite3.Connection:
        self.operation()
        connection = sqlite3.connect(*args, **options, factory=FaultyConnection)
        connection.faults = self
        return connection


class FaultyCursor(sqlite3.Cursor):
    def fetchall(self) -> list[Any]:
        assert isinstance(self.connection, FaultyConnection)
        try:
            self.connection.faults.operation()
        except sqlite3.Error:
            self.close()  # a statement that fails is over
            raise
        return super().fetchall()


class FaultyConnection(sqlite3.Connection):
    faults: Faults

    def execute(self, *args: Any) -> sqlite3.Cursor:
        self.faults.operation()
        return self.cursor(FaultyCursor).execute(*args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        self.faults.operation()
        return self.cursor(FaultyCursor).executemany(*args)


class Script:
    """A run of store operations, and what must be true after each, whether it worked or failed."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.held: dict[str, bytes] = {}
        self.numbers: list[int] = []
        self.failures: list[StoreError] = []

    def run(self) -> None:
        for turn in range(2):
            self.put({"a": b"a%d" % turn, f"b:{turn + 1}": b"b" * turn, ":p": b"p%d" % turn})
            self.reserve()
        self.look()
        self.delete("b:1")
        self.evict()
        self.attempt(lambda: self.store.touch(["a"], 99.0))
        self.attempt(lambda: self.store.set_meta("x", "1"))
        self.attempt(lambda: self.store.check())

    def attempt(self, action: Callable[[], Any]) -> Any:
        """The action's result, or None when it failed."""
        try:
            return action()
        except StoreError as error:
            self.failures.append(error)
            return None

    def put(self, new: dict[str, bytes]) -> None:
        states = [
            prefix(key[1:], data=data) if key[0] == ":" else state(*name_of(key), data=data)
            for key, data in new.items()
        ]
        before = len(self.failures)
        self.attempt(lambda: self.store.put(states))
        if len(self.failures) == before:
            self.held |= new

    def reserve(self) -> None:
        number = self.attempt(lambda: self.store.reserve_branches("c"))
        self.numbers += [] if number is None else [number]

    def delete(self, key: str) -> None:
        if self.attempt(lambda: self.store.delete([key])) is not None:
            self.held.pop(key, None)

    def evict(self) -> None:
        gone = self.attempt(lambda: self.store.evict(8))
        for key in gone or []:
            del self.held[key]

    def look(self) -> None:
        for key in ("a", "b:2", ":p", "never"):
            before = len(self.failures)
            data = self.attempt(lambda key=key: self.store.get(key))  # type: ignore[misc]
            assert len(self.failures) > before or data == self.held.get(key), "a wrong record"
        listed = self.attempt(lambda: self.store.sessions())
        assert listed is None or {info.key for info in listed} == {key for key in self.held if key[0] != ":"}
        count = self.attempt(lambda: self.store.count())
        assert count in (None, len([key for key in self.held if key[0] != ":"]))
        for read in (lambda: self.store.usage(), lambda: self.store.family("b"), lambda: self.store.info("a")):
            self.attempt(read)
        self.attempt(lambda: self.store.prefixes("model"))
        self.attempt(lambda: self.store.get_meta("x"))

    def verify(self) -> None:
        """With the disk well again: exactly what was acknowledged is there, and numbers go on."""
        keys = {"a", "b:1", "b:2", "b:3", ":p"}
        assert {key: self.store.get(key) for key in keys} == {key: self.held.get(key) for key in keys}
        assert self.store.check() == []
        assert self.store.reserve_branches("c") > max(self.numbers, default=0)
        assert len(set(self.numbers)) == len(self.numbers)


def name_of(key: str) -> tuple[str, int]:
    name, _, branch = key.partition(":")
    return name, int(branch or 0)


def operations(path: Path) -> int:
    """How many operations a script takes when nothing fails."""
    faults = Faults()
    store = SqliteStore(faults.connect)
    store.open(str(path))
    script = Script(store)
    script.run()
    count = faults.count
    script.verify()
    store.close()
    assert script.failures == []
    return count


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_every_operation_fails_in_turn(tmp_path: Path, lasting: bool) -> None:
    codes = list(CODES.items())
    for nth in range(1, operations(tmp_path / "states.db") + 1):
        code, reason = codes[nth % len(codes)]
        check_one_fault(tmp_path / f"{nth}.db", Faults(nth, code, lasting=lasting), reason)


def check_one_fault(path: Path, faults: Faults, reason: str) -> None:
    store = SqliteStore(faults.connect)
    script = Script(store)
    script.attempt(lambda: store.open(str(path)))
    if script.failures:
        faults.nth = 0
        store.open(str(path))
    script.run()
    assert {error.reason for error in script.failures} == {reason}
    assert all(str(path) in str(error) for error in script.failures)
    faults.nth = 0
    script.verify()
    store.close()
    again = SqliteStore()
    again.open(str(path))
    script.store = again
    script.verify()
    again.close()


# Full


@contextlib.contextmanager
def small_disk() -> Iterator[tuple[Path, Callable[[], object], dict[str, Any]]]:
    """A folder with room for about 2 MB, how to make more room, and options for the store.

    A file system in memory where this user may mount one; else a database that may not grow.
    """
    with memory_disk("2m") as disk:
        if disk is not None:
            yield disk.folder, lambda: disk.resize("9m"), {}
            return
    connections: list[sqlite3.Connection] = []

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        connections.append(sqlite3.connect(*args, **options))
        connections[-1].execute("PRAGMA max_page_count = 100")
        return connections[-1]

    def grow() -> None:
        connections[0].execute("PRAGMA max_page_count = 100000")

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), grow, {"connect": connect}


def test_a_full_disk_keeps_what_it_has_and_goes_on_when_there_is_room() -> None:
    with small_disk() as (folder, make_room, options):
        store = SqliteStore(**options)
        store.open(str(folder / "states.db"))
        held: dict[str, bytes] = {}
        with pytest.raises(StoreError, match="no space left: free some, or lower --l3-bytes") as caught:
            fill(store, held)
        assert caught.value.reason == "full"
        assert len(held) > 2
        assert {key: store.get(key) for key in held} == held
        assert store.count() == len(held)
        make_room()
        store.put([state("more", data=bytes(100_000))])
        assert store.check() == []
        store.close()


def fill(store: SqliteStore, held: dict[str, bytes]) -> None:
    for i in range(100):
        data = random.Random(i).randbytes(100_000)
        store.put([state(f"s{i}", data=data)])
        held[f"s{i}"] = data


# Read-only


@contextlib.contextmanager
def unprivileged() -> Iterator[Path]:
    """A folder of an ordinary user, as that user: permissions mean nothing to root."""
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    if root:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)
        shutil.rmtree(folder)


def test_a_read_only_folder_is_refused() -> None:
    with unprivileged() as folder:
        folder.chmod(0o500)
        for path in (folder / "states.db", folder / "new" / "states.db"):
            with pytest.raises(StoreError, match=r"Permission denied.*it cannot be written: check the perm") as caught:
                SqliteStore().open(str(path))
            assert caught.value.reason == "readonly"


def test_a_read_only_file_is_refused() -> None:
    with unprivileged() as folder:
        store = SqliteStore()
        store.open(str(folder / "states.db"))
        store.close()
        (folder / "states.db").chmod(0o400)
        with pytest.raises(StoreError, match="it cannot be written") as caught:
            store.open(str(folder / "states.db"))
        assert caught.value.reason == "readonly"
        (folder / "states.db").chmod(0o600)
        store.open(str(folder / "states.db"))
        store.close()


def test_a_file_that_sqlite_finds_read_only_is_refused_at_the_start(tmp_path: Path) -> None:
    def connect(path: str, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, **options)
        return connection

    store = SqliteStore()
    store.open(str(tmp_path / "states.db"))
    store.close()
    with pytest.raises(StoreError) as caught:
        SqliteStore(connect).open(str(tmp_path / "states.db"))
    assert caught.value.reason == "readonly"


# Locked


def test_a_lock_of_another_program_is_waited_for_then_named(tmp_path: Path) -> None:
    store = SqliteStore(busy_timeout=0.05)
    store.open(str(tmp_path / "states.db"))
    store.put([state("a", data=b"1")])
    other = sqlite3.connect(tmp_path / "states.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another program keeps it locked: close that program") as caught:
        store.put([state("a", data=b"2")])
    assert caught.value.reason == "locked"
    assert store.get("a") == b"1", "reading goes on"
    other.execute("ROLLBACK")
    store.put([state("a", data=b"3")])
    assert store.get("a") == b"3"
    other.close()
    store.close()


# Killed

WRITER = """
import sys
from cache_states import record_of, state
from rwkv_lightning.plugins.stores.sqlite import SqliteStore

store = SqliteStore()
store.open(sys.argv[1])
turns = {name: int.from_bytes((store.get(name) or b"")[:8], "big") for name in "abcdefgh"}
print("ready", flush=True)
while True:
    for group in ("a", "bcd", "efgh"):
        for name in group:
            turns[name] += 1
        store.put([state(name, data=record_of(name, turns[name])) for name in group])
        for name in group:
            print("put", name, turns[name], flush=True)
        number = store.reserve_branches("a")
        print("number a", number, flush=True)
        store.put([state("a", number)])
        print("branch a", number, flush=True)
        if number % 3 == 0:
            store.delete([f"a:{number}"])
            print("deleted a", number, flush=True)
"""


def killed(path: Path, after: float) -> list[tuple[str, str, int]]:
    """Start a writer, kill it `after` seconds from its first word, and give what it has acknowledged."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=environment)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    time.sleep(after)
    writer.kill()
    output, _ = writer.communicate()
    whole_lines = output.decode().split("\n")[:-1]
    return [(what, name, int(number)) for what, name, number in map(str.split, whole_lines)]


def kill_and_look(tmp_path: Path, rounds: int) -> int:
    """Check the database after each kill; how many branch numbers were given in all."""
    numbers: list[int] = []
    newest: dict[str, int] = {}
    branches: set[int] = set()
    for round_ in range(rounds):
        said = killed(tmp_path / "states.db", random.Random(round_).uniform(0.002, 0.08))
        numbers += [number for what, _, number in said if what == "number"]
        newest |= {name: number for what, name, number in said if what == "put"}
        branches |= {number for what, _, number in said if what == "branch"}
        branches -= {number for what, _, number in said if what == "deleted"}
        if said and said[-1][0] == "branch":  # its deletion may have been under way
            branches.discard(said[-1][2])
        store = SqliteStore()
        store.open(str(tmp_path / "states.db"))
        assert store.check() == []
        assert len(numbers) == len(set(numbers)), "a branch number was given twice"
        for name, turn in newest.items():
            data = store.get(name)
            assert data in (record_of(name, turn), record_of(name, turn + 1)), "lost, mixed, or an older one"
        there = {info.branch for info in store.family("a")}
        assert branches <= there, "an acknowledged branch is lost"
        store.close()
    return len(numbers)


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    assert kill_and_look(tmp_path, 15) > 15


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_kill_9_a_thousand_times(tmp_path: Path) -> None:
    assert kill_and_look(tmp_path, 1000) > 1000
