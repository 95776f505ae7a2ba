"""A disk that gets full under a whole server: sessions go on from RAM, and are stored when there is room again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cache_disk import memory_disk
from conftest import InstallPlugin
from state_calls import MULTI, body, listed, question, text_of, turn

from server_process import ServerProcess

FRANCE, SUM, COUNT = (
    question("What is the capital of France?"),
    question("What is 7 + 8?"),
    question("Count from 1 to 5."),
)
OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-batch", "4", "--state-flush-interval", "0.05")

SMALL_STORE = """
    import os
    import sqlite3
    from rwkv_lightning.plugins.stores.sqlite import SqliteStore

    def connect(*args, **options):
        connection = sqlite3.connect(*args, **options)
        connection.execute("PRAGMA max_page_count = 250")
        return connection

    class Small(SqliteStore):
        def put(self, states):
            if os.path.exists(os.environ["ROOM"]):
                with self._writer().use() as connection:
                    connection.execute("PRAGMA max_page_count = 1000000")
            super().put(states)

    @hookimpl
    def register_state_stores(register):
        register("small", lambda: Small(connect), "SQLite in a file that may not grow")
"""


@dataclass(frozen=True)
class SmallDisk:
    """Where a server finds the small disk, and how there is more room on it."""

    options: tuple[str, ...]
    env: dict[str, str]
    make_room: Callable[[], object]

    def server(self) -> ServerProcess:
        return ServerProcess(*OPTIONS, *self.options, env=self.env)


@pytest.fixture(params=["file system", pytest.param("database", marks=pytest.mark.nightly)])
def disk(request: pytest.FixtureRequest, tmp_path: Path, install_plugin: InstallPlugin) -> Iterator[SmallDisk]:
    """A file system of 4 MB, where this user may mount one; and a database of 4 MB."""
    with memory_disk("4m") as mounted:
        if request.param == "file system" and mounted is not None:
            yield SmallDisk(("--state-db", str(mounted.folder / "states.db")), {}, lambda: mounted.resize("64m"))
            return
    plugin, room = install_plugin("small", SMALL_STORE), tmp_path / "room"
    options = "--plugin", "small", "--state-store", "small", "--state-db", str(tmp_path / "states.db")
    yield SmallDisk(options, {"PYTHONPATH": str(plugin), "ROOM": str(room)}, room.touch)


@contextmanager
def killed_at_the_end(server: ServerProcess) -> Iterator[ServerProcess]:
    """Nothing is written as it goes."""
    with server:
        try:
            yield server
        finally:
            os.kill(server.pid, signal.SIGKILL)


def health(server: ServerProcess) -> dict[str, str]:
    answer = server.client.get("/v1/health")
    assert answer.status_code == 200
    return dict(answer.json())


def test_a_full_disk_under_a_whole_server(disk: SmallDisk) -> None:
    with killed_at_the_end(disk.server()) as server:
        turns = [FRANCE, SUM, COUNT, FRANCE]
        expected = [turn(server, "twin", prompt, max_tokens=8) for prompt in turns]
        assert turn(server, "s", turns[0], max_tokens=8) == expected[0]
        server.wait_for(lambda: server.metric("state_writes_waiting") == 0)
        fillers = fill(server)
        assert health(server) | {"state_store": "degraded", "state_store_failure": "no space left"} == health(server)

        said = [turn(server, "s", prompt, max_tokens=8) for prompt in turns[1:3]]
        said += [turn(server, "new", prompt, max_tokens=8) for prompt in turns[:2]]
        assert said == [*expected[1:3], *expected[:2]], "old and new sessions go on from RAM"
        forked = server.post(MULTI, body("tree", FRANCE, dialogue_idx=0, max_tokens=8))
        assert text_of(forked) == expected[0]
        branch = f"tree:{forked.json()['dialogue_idx']}"
        assert listed(server).keys() == {"twin", "s", "new", branch, *fillers}
        assert health(server)["status"] == "degraded"
        assert server.log().count("the state store fails") == 1
        assert "no space left: free some, or lower --l3-bytes" in server.log()
        assert "works again" not in server.log()

        disk.make_room()
        server.wait_for(lambda: health(server)["status"] == "ok" and server.metric("state_writes_waiting") == 0, 30)
        assert health(server)["state_store"] == "ok"
        assert server.log().count("the state store works again") == 1
        assert server.metric("state_store_errors_total") > 0
    with disk.server() as server:
        assert listed(server) == dict.fromkeys(["twin", "s", "new", branch, *fillers], "Database (Disk)")
        assert turn(server, "s", turns[3], max_tokens=8) == expected[3]
        assert turn(server, "new", turns[2], max_tokens=8) == expected[2]
        assert server.log().count("the state store fails") == 0


def fill(server: ServerProcess) -> list[str]:
    """Keep sessions until one could not be stored; their names."""
    names: list[str] = []
    while health(server)["status"] == "ok":
        assert len(names) < 200, "the disk is not small"
        names.append(f"filler {len(names)}")
        turn(server, names[-1], FRANCE, max_tokens=1)
    return names
