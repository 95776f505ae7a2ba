"""A state store that fails, over HTTP: a typed error or the right answer, never a wrong state; the service goes on."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from cache_memory import MemoryStore
from server_thread import ServerThread
from state_calls import MULTI, STATE, Oracle, body, export, listed, question, serve, text_of, turn
from state_stores import FlakyStore

from rwkv_lightning.core.cache import assemble, writer
from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.interfaces import StateStore
from rwkv_lightning.plugins.stores.sqlite import SqliteStore

SHORT = {"max_tokens": 3}
TYPED = {404, 409, 500, 503}
FRANCE, SUM = question("What is the capital of France?"), question("What is 7 + 8?")


def with_store(monkeypatch: pytest.MonkeyPatch, store: StateStore) -> None:
    """The next server uses this store."""
    monkeypatch.setattr(assemble, "make_store", lambda settings, host: store)
    monkeypatch.setattr(MemoryStore, "disks", {})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)


class TestEveryOperationInTurn:
    """One conversation after the other, in each another call of the store fails."""

    @pytest.fixture
    def oracle(self) -> Iterator[Oracle]:
        alone = Oracle()
        yield alone
        alone.close()

    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> Iterator[ServerThread]:
        """Every state is in the store alone as soon as it can be: one slot, no memory."""
        self.store = FlakyStore()
        with_store(monkeypatch, self.store)
        with serve(tmp_path, max_batch=1, l1_slots=0, l2_bytes=0, state_flush_interval=0) as running:
            yield running

    @pytest.mark.parametrize("lasting", [False, True])
    def test_a_typed_error_or_the_right_answer(self, server: ServerThread, oracle: Oracle, lasting: bool) -> None:
        @cache
        def expected(turns: tuple[str, ...]) -> str:
            return oracle.conversation(turns, **SHORT)[-1]

        calls, nth = 1, 0
        while nth < calls:
            nth += 1
            story = Story(server, f"s{lasting}{nth}")
            self.store.fail(nth, lasting=lasting)
            story.run()
            calls = self.store.calls
            self.store.work()
            server.wait_for(lambda: server.metric("state_writes_waiting") == 0)
            story.end()
            for turns, text in story.answers:
                assert text == expected(turns), f"call {nth}"
            if nth > 40:
                break
        assert calls > 10
        assert story.failures < len(story.answers)
        turn(server, "well", FRANCE)
        server.wait_for(lambda: server.client.get("/v1/health").json()["status"] == "ok")


class Story:
    """What a few turns, forks and deletions were answered with, beside the conversation that each belongs to."""

    def __init__(self, server: ServerThread, name: str) -> None:
        self.server = server
        self.name = name
        self.turns: dict[str, tuple[str, ...]] = {}
        self.answers: list[tuple[tuple[str, ...], str]] = []
        self.failures = 0

    def run(self) -> None:
        self.turn("a", FRANCE)
        self.turn("b", SUM)
        self.turn("a", SUM)
        self.fork()
        self.look()
        self.turn("b", FRANCE)
        self.delete("b")
        self.turn("b", FRANCE)

    def end(self) -> None:
        """With a store that works again."""
        self.turn("a", FRANCE)
        self.turn("b", SUM)

    def turn(self, session: str, prompt: str) -> None:
        answer = self.server.post(STATE, body(f"{self.name} {session}", prompt, **SHORT))
        if self.well(answer):
            self.turns[session] = (*self.turns.get(session, ()), prompt)
            self.answers.append((self.turns[session], text_of(answer)))

    def fork(self) -> None:
        root = self.server.post(MULTI, body(f"{self.name} f", FRANCE, dialogue_idx=0, **SHORT))
        if self.well(root):
            branch = root.json()["dialogue_idx"]
            leaf = self.server.post(MULTI, body(f"{self.name} f", SUM, dialogue_idx=branch, **SHORT))
            if self.well(leaf):
                self.answers.append(((FRANCE, SUM), text_of(leaf)))
                assert leaf.json()["dialogue_idx"] > branch

    def look(self) -> None:
        client = self.server.client
        self.well(self.server.post("/state/status", {}))
        self.well(client.get(f"/state/tree/{self.name} a"))
        exported = client.get(f"/state/{self.name} a/export")
        if self.well(exported):
            self.well(client.post(f"/state/import?session_id={self.name} copy", content=exported.content))

    def delete(self, session: str) -> None:
        if self.well(self.server.post("/state/delete", {"session_id": f"{self.name} {session}"})):
            self.turns.pop(session, None)

    def well(self, answer: httpx.Response) -> bool:
        assert answer.status_code == 200 or answer.status_code in TYPED, answer.text
        self.failures += answer.status_code != 200
        if answer.status_code == 503:
            assert float(answer.headers["retry-after"]) > 0
        return answer.status_code == 200


class TestDegraded:
    def test_a_database_locked_by_another_program(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with_store(monkeypatch, SqliteStore(busy_timeout=0.05))
        with serve(tmp_path) as server:
            assert server.client.get("/v1/health").json()["state_store"] == "ok"
            first = turn(server, "s", FRANCE)
            server.wait_for(lambda: server.metric("state_writes_waiting") == 0)
            with contextlib.closing(sqlite3.connect(tmp_path / "states.db", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                turn(server, "s", SUM)
                server.wait_for(lambda: server.client.get("/v1/health").json()["status"] == "degraded")
                health = server.client.get("/v1/health")
                assert (health.status_code, health.json()["state_store"]) == (200, "degraded")
                assert health.json()["state_store_failure"] == "locked by another program"
                assert turn(server, "new", FRANCE) == first, "reading works, so there may be new sessions"
                number = server.post(MULTI, body("f", FRANCE, dialogue_idx=0)).json()["dialogue_idx"]
                assert number > 1_000_000_000, "larger than any that the store may give"
                assert server.post("/state/delete", {"session_id": "new"}).status_code == 503
                turn(server, "s", FRANCE)
                assert server.metric("state_store_errors_total") >= 3
                other.execute("ROLLBACK")
            server.wait_for(lambda: server.client.get("/v1/health").json()["status"] == "ok")
        told = [r.message for r in caplog.records if "the state store fails" in r.message]
        assert len(told) == 1
        assert "close that program" in told[0]
        with serve(tmp_path) as server:
            assert {"s", "new", f"f:{number}"} == listed(server).keys()

    @pytest.mark.parametrize(
        ("content", "reason"), [(b"this is no database at all" * 100, "damaged"), (None, "cannot be written")]
    )
    def test_a_store_that_cannot_be_opened(
        self, tmp_path: Path, content: bytes | None, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = tmp_path / "file"
        place.write_bytes(content or b"")
        database = place if content else place / "states.db"
        with caplog.at_level(logging.ERROR), serve(tmp_path, state_db=str(database)) as server:
            health = server.client.get("/v1/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            told = [r.message for r in caplog.records if "cannot be used" in r.message]
            assert len(told) == 1
            assert "RAM only" in told[0]
            answers = [turn(server, "s", FRANCE), turn(server, "s", SUM)]
            assert answers[0].startswith("The capital of France")
            assert server.post(MULTI, body("s", FRANCE, dialogue_idx=0)).status_code == 200
            assert len(listed(server)) == 2
            assert reason in health.json()["state_store_failure"] or health.json()["state_store_failure"] == "failing"
        assert place.read_bytes() == (content or b""), "what is no database of ours is left alone"

    def test_without_a_store_all_is_well(self, tmp_path: Path) -> None:
        with serve(tmp_path, state_store="none") as server:
            health = server.client.get("/v1/health").json()
            assert (health["status"], health["state_store"]) == ("ok", "none")
            turn(server, "s", FRANCE)
            assert list(listed(server)) == ["s"]

    def test_an_unknown_store_stops_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(StartError, match=r"^--state-store: .*'redis' \(known: sqlite\).*'none' goes without one"):
            serve(tmp_path, state_store="redis").__enter__()

    @pytest.mark.parametrize("size", ["-5", "much", "5 apples"])
    def test_a_size_that_is_none_stops_the_start(self, tmp_path: Path, size: str) -> None:
        with pytest.raises(StartError, match=rf"^--l2-bytes '{size}': not a number of bytes; give it like .*512MiB"):
            serve(tmp_path, l2_bytes=size)

    def test_a_second_server_on_the_same_database_does_not_start(self, tmp_path: Path) -> None:
        with serve(tmp_path):
            second = serve(tmp_path)
            with pytest.raises(StartError, match=r"in use by another server .* --state-db"):
                second.__enter__()
        with serve(tmp_path) as third:
            assert turn(third, "s", FRANCE)


class TestDamage:
    """Records that were changed on disk between two runs."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        with serve(tmp_path) as server:
            for session in ("flipped", "cut", "empty", "swapped", "foreign", "later", "well"):
                turn(server, session, FRANCE if session != "swapped" else SUM, **SHORT)
        return tmp_path

    def test_it_is_refused_named_and_counted_and_never_a_beginning(self, folder: Path) -> None:
        change(folder, "flipped", lambda data: data[:-500] + bytes([data[-500] ^ 4]) + data[-499:])
        change(folder, "cut", lambda data: data[: len(data) // 2])
        change(folder, "empty", lambda data: b"")
        change(folder, "foreign", lambda data: with_header(data, model="f" * 32))
        change(folder, "swapped", lambda data: record_in(folder, "well"))
        change(folder, "later", lambda data: data.replace(b'"version":"1"', b'"version":"9"'))
        with serve(folder) as server:
            codes = {"flipped": 500, "cut": 500, "empty": 500, "swapped": 500, "foreign": 409, "later": 409}
            for session, status in codes.items():
                answer = server.post(STATE, body(session, SUM, **SHORT))
                assert answer.status_code == status, session
                assert f"'{session}'" in answer.json()["error"]
                assert "/state/delete" in answer.json()["error"]
                assert server.client.get(f"/state/{session}/export").status_code == status
            assert "another model" in server.post(STATE, body("foreign", SUM)).json()["error"]
            assert "format version '9'" in server.post(STATE, body("later", SUM)).json()["error"]
            refused = {code: server.metric(f'states_refused_total{{code="{code}"}}') for code in
                       ("state_corrupt", "state_foreign", "state_version")}  # fmt: skip
            assert refused == {"state_corrupt": 8, "state_foreign": 3, "state_version": 3}
            assert export(server, "well").header.tokens > 20
            assert server.client.get("/v1/health").json()["status"] == "ok", "the store itself is well"
            for session in codes:
                assert server.post("/state/delete", {"session_id": session}).status_code == 200
                assert turn(server, session, FRANCE, **SHORT) == "The capital of"

    def test_a_database_of_another_model_keeps_what_it_has(self, folder: Path) -> None:
        with serve(folder, state_dtype="float16", dtype="float32") as server:
            answer = server.post(STATE, body("well", SUM))
            assert (answer.status_code, "--state-dtype float32" in answer.text) == (409, True)
            assert turn(server, "another", FRANCE, **SHORT)
        with serve(folder) as server:
            assert turn(server, "well", SUM)
            assert server.post(STATE, body("another", SUM)).status_code == 409


def connect(folder: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(folder / "states.db", isolation_level=None))


RECORD = "SELECT data FROM states JOIN records USING (id) WHERE key = ?"
CHANGE = "UPDATE records SET data = ? WHERE id = (SELECT id FROM states WHERE key = ?)"


def record_in(folder: Path, session: str) -> bytes:
    with connect(folder) as database:
        ((data,),) = database.execute(RECORD, (session,)).fetchall()
    return bytes(data)


def change(folder: Path, session: str, to: Any) -> None:
    with connect(folder) as database:
        database.execute(CHANGE, (to(record_in(folder, session)), session))


def with_header(data: bytes, **changes: str) -> bytes:
    """A record whose header says something else, with a checksum that fits."""
    from dataclasses import replace

    from state_calls import demo_fingerprint

    from rwkv_lightning.core.cache.record import Expected, StateRecord

    record = StateRecord.from_bytes(data, Expected(demo_fingerprint()))
    return replace(record, header=replace(record.header, **changes)).to_bytes()
