"""One suite over SQLite and a dictionary, and what is particular to SQLite."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_memory import MemoryStore
from cache_states import prefix, state
from cache_suite import StoreSuite

from rwkv_lightning.core.config import load_settings
from rwkv_lightning.core.errors import PluginError, SettingsError, StartError, StoreError
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.interfaces import StateStore
from rwkv_lightning.core.listing import listings
from rwkv_lightning.core.testing.suite import failures
from rwkv_lightning.plugins.stores import schema, sqlite
from rwkv_lightning.plugins.stores.sqlite import SqliteStore, default_path


class TestSqliteStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def store(self) -> StateStore:
        return SqliteStore()

    def place(self) -> str:
        return str(Path(tempfile.mkdtemp(dir=self.folder)) / "states.db")


class TestMemoryStore(StoreSuite):
    def store(self) -> StateStore:
        return MemoryStore()

    def place(self) -> str:
        return f"place {len(MemoryStore.disks)}"


class Forgetful(MemoryStore):
    def reserve_branches(self, session: str, count: int = 1, at_least: int = 1) -> int:
        return at_least


class Mixed(MemoryStore):
    def get(self, key: str) -> bytes | None:
        return super().get(key[:1])


@pytest.mark.parametrize(
    ("kind", "test"),
    [(Forgetful, "test_branch_numbers_never_repeat"), (Mixed, "test_what_is_put_is_got_byte_for_byte")],
)
def test_the_suite_catches_a_store_that_breaks_the_rules(kind: type[MemoryStore], test: str) -> None:
    suite = type("Broken", (TestMemoryStore,), {"store": lambda self: kind()})
    assert test in failures(suite)


Opened = Callable[..., SqliteStore]


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    stores = []

    def make(path: str | Path = tmp_path / "states.db", **options: Any) -> SqliteStore:
        store = SqliteStore(**options)
        store.open(str(path))
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


# Where the file is


def test_the_default_place_is_the_users_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    store = SqliteStore()
    store.open()
    store.close()
    assert store.location == str(default_path())
    assert default_path().is_absolute()
    assert default_path().is_file()
    assert not [path for path in tmp_path.iterdir() if path.is_file()], "nothing in the current folder"


def test_others_cannot_read_the_states(opened: Opened, tmp_path: Path) -> None:
    opened(tmp_path / "new" / "states.db").put([state("a")])
    for path in [tmp_path / "new", *(tmp_path / "new").iterdir()]:
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path.name


def test_two_names_of_one_file_are_one_database(opened: Opened, tmp_path: Path) -> None:
    opened(tmp_path / "states.db")
    (tmp_path / "alias.db").symlink_to(tmp_path / "states.db")
    with pytest.raises(StartError, match=r"states\.db' is in use by another server"):
        opened(tmp_path / "alias.db")


def test_the_second_server_is_told_who_has_the_file(opened: Opened, tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "states.db")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StartError, match=rf"\(process {holder.pid}\): stop that one, or give .* --state-db"):
            opened()
    finally:
        holder.kill()
        holder.communicate()
    opened().put([state("a")])


HOLD = """
import sys, time
from rwkv_lightning.plugins.stores.sqlite import SqliteStore
store = SqliteStore()
store.open(sys.argv[1])
print("open", flush=True)
time.sleep(60)
"""


# What is read


def statements(store: SqliteStore, action: Callable[[], object]) -> list[str]:
    """The statements that an action runs, with their values, on either connection."""
    found: list[str] = []
    for link in store._links or ():
        link._connection.set_trace_callback(found.append)
    action()
    for link in store._links or ():
        link._connection.set_trace_callback(None)
    return found


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """10,000 sessions, some with branches, on disk."""
    store = SqliteStore()
    store.open(str(tmp_path_factory.mktemp("many") / "states.db"))
    store.put([state(f"s{i}", i % 3, created=float(i), data=bytes(2000)) for i in range(10_000)])
    store.put([prefix(f"p{i}", created=float(i)) for i in range(100)])
    yield store
    store.close()


LOOKS: dict[str, Callable[[SqliteStore], object]] = {
    "a page": lambda store: store.sessions(limit=100, offset=5000, exclude=["s1:1", "s2"]),
    "everything": lambda store: store.sessions(),
    "the count": lambda store: store.count(exclude=["s1:1", "s2"]),
    "usage": lambda store: store.usage(),
    "a family": lambda store: store.family("s77"),
    "an index line": lambda store: store.info("s0"),
    "prefixes": lambda store: store.prefixes("model", 10),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_10000_sessions_is_one_query_by_index_and_reads_no_record(many: SqliteStore, look: str) -> None:
    (query,) = statements(many, lambda: LOOKS[look](many))
    with many._reader().use() as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    text = "\n".join(plan)
    assert "records" not in query
    assert "TEMP B-TREE" not in text, "sorted by an index, not in memory"
    scans = [
        line for line in plan if line.startswith("SCAN") and not line.startswith(("SCAN json_each", "SCAN totals"))
    ]
    assert not scans, f"only what is asked for is visited: {text}"


def test_a_record_is_found_by_its_key(many: SqliteStore) -> None:
    (query,) = statements(many, lambda: many.get("s4:1"))
    with many._reader().use() as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert all("SEARCH" in line for line in plan), plan


def test_pages_cover_10000_sessions_once(many: SqliteStore) -> None:
    pages = [many.sessions(limit=999, offset=offset) for offset in range(0, 10_000, 999)]
    names = [info.key for page in pages for info in page]
    assert len(names) == len(set(names)) == many.count() == 10_000


def test_opening_reads_no_states(many: SqliteStore, tmp_path: Path) -> None:
    many_path = Path(many.location)
    with sqlite3.connect(many_path) as source, sqlite3.connect(tmp_path / "copy.db") as target:
        source.backup(target)
    seen: list[str] = []

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = sqlite3.connect(*args, **options)
        connection.set_trace_callback(seen.append)
        return connection

    store = SqliteStore(connect)
    store.open(str(tmp_path / "copy.db"))
    store.close()
    assert seen
    assert not [query for query in seen if "records" in query or "states" in query]


def test_a_put_of_many_is_one_transaction(opened: Opened) -> None:
    store = opened()
    queries = statements(store, lambda: store.put([state(f"s{i}") for i in range(50)]))
    assert [query for query in queries if query.split()[0] in ("BEGIN", "COMMIT")] == ["BEGIN IMMEDIATE", "COMMIT"]


def test_the_log_is_write_ahead_and_survives_a_killed_process(opened: Opened) -> None:
    store = opened()
    for link in store._links or ():
        with link.use() as connection:
            assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
            assert connection.execute("PRAGMA synchronous").fetchall() == [(1,)], "NORMAL"


# Files that are not what they should be


def test_a_database_of_another_program_is_left_alone(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE precious (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match=r"other\.db' is an SQLite database of another program: .*--state-db"
    ) as caught:
        opened(path)
    assert caught.value.reason == "other"
    assert path.read_bytes() == before


def test_a_database_of_a_later_version_is_left_alone(opened: Opened, tmp_path: Path) -> None:
    opened().close()
    with sqlite3.connect(tmp_path / "states.db") as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    connection.close()
    with pytest.raises(StoreError, match=f"has format {schema.VERSION + 1} and this server knows") as caught:
        opened()
    assert caught.value.reason == "version"


@pytest.mark.parametrize("content", [b"x" * 10, b"x" * 5000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused(opened: Opened, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "states.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"states\.db' failed \(.*\); it is damaged: move it away") as caught:
        opened()
    assert caught.value.reason == "corrupt"
    assert (tmp_path / "states.db").read_bytes() == content, "evidence is kept"


def test_an_empty_file_becomes_a_database(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "states.db").touch()
    opened().put([state("a")])


def damaged(path: Path, cut: int | None = None, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    if at is not None:
        content[at : at + 600] = bytes(byte ^ 0x5A for byte in content[at : at + 600])
    path.write_bytes(content[:cut])


@pytest.mark.parametrize("share", range(1, 20))
def test_a_truncated_database_never_gives_a_wrong_record(opened: Opened, tmp_path: Path, share: int) -> None:
    records = fill(opened)
    damaged(tmp_path / "states.db", cut=(tmp_path / "states.db").stat().st_size * share // 20)
    refusals: list[StoreError] = []
    assert read_all(opened, records, refusals) == {}
    assert [error.reason for error in refusals] == ["corrupt"]


@pytest.mark.parametrize("share", range(20))
def test_a_damaged_database_gives_what_was_stored_or_is_refused(opened: Opened, tmp_path: Path, share: int) -> None:
    """Damage within a record is the record's own checksum's business; here it may come back, but nowhere else."""
    records = fill(opened)
    damaged(tmp_path / "states.db", at=(tmp_path / "states.db").stat().st_size * share // 20)
    refusals: list[StoreError] = []
    wrong = read_all(opened, records, refusals)
    assert {error.reason for error in refusals} <= {"corrupt", "version", "other"}
    assert len(wrong) <= 2
    assert all(len(data) == len(records[key]) for key, data in wrong.items()), "only changed within"


def fill(opened: Opened) -> dict[str, bytes]:
    store = opened()
    records = {f"s{i}": bytes([i]) * 40_000 for i in range(20)}
    store.put([state(key, data=data) for key, data in records.items()])
    store.close()
    return records


def read_all(opened: Opened, records: dict[str, bytes], refusals: list[StoreError]) -> dict[str, bytes]:
    """The records that come back and differ from what was stored."""
    got: dict[str, bytes] = {}
    try:
        store = opened()
        for key in records:
            got[key] = store.get(key) or b""
    except StoreError as error:
        refusals.append(error)
    return {key: data for key, data in got.items() if data != records[key]}


def test_a_state_without_its_record_is_refused(opened: Opened) -> None:
    store = opened()
    store.put([state("a"), prefix("p"), state("b", 4)])
    with store._writer().use() as connection:
        connection.execute("DELETE FROM records WHERE id = 1")
        connection.execute("DELETE FROM prefix_tokens")
        connection.execute("INSERT INTO records VALUES (99, x'00')")
        connection.execute("DELETE FROM branches")
        connection.execute("UPDATE totals SET nbytes = 1 WHERE kind = 'session'")
    with pytest.raises(StoreError, match="lacks a record") as caught:
        store.get("a")
    assert caught.value.reason == "corrupt"
    assert sorted(store.check()) == sorted(f"{what}: 1" for what in schema.CHECKS)


def test_a_folder_is_no_database(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match=r"folder' failed \(.*Is a directory"):
        opened(tmp_path / "folder")


def test_values_that_cannot_be_stored_change_nothing(opened: Opened) -> None:
    store = opened()
    with pytest.raises(StoreError):
        store.put([state("a"), state("\ud800")])
    assert store.get("a") is None
    store.put([state("a")])


# The hook


def test_sqlite_is_built_in_and_made_by_name() -> None:
    host = PluginHost(load_settings())
    assert isinstance(host.create_store("SQLite"), SqliteStore)
    with pytest.raises(SettingsError, match=r"--state-store: there is no state store 'sqlit' .* did you mean sqlite\?"):
        host.create_store("sqlit")
    (line,) = [line for line in listings(host, "cpu") if line.kind == "state store"]
    assert (line.name, line.status, line.plugin) == ("sqlite", "ready", "sqlite")
    assert not [line for line in listings(host, "cpu") if line.kind == "hooks" and line.plugin == "sqlite"]


def test_a_plugin_brings_its_own_store(install_plugin: Any) -> None:
    source = """
        @hookimpl
        def register_state_stores(register):
            register("good", dict, "works")
            register("bad", lambda: 1 / 0, "does not")
    """
    install_plugin("stores", source)
    host = PluginHost(load_settings({"plugin": ["stores"]}))
    made: Any = host.create_store("good")
    assert made == {}
    with pytest.raises(PluginError, match=r"state store 'bad' of plugin 'stores' .* cannot be made: ZeroDivision"):
        host.create_store("bad")


def test_the_store_needs_no_torch() -> None:
    code = f"import sys, {sqlite.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0
