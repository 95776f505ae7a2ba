"""`kill -9` while sessions are written: what was answered before the flush interval is there, and nothing is older."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from state_calls import STATE, body, demo_fingerprint

from rwkv_lightning.core.cache.record import Expected, StateRecord
from rwkv_lightning.plugins.stores.sqlite import SqliteStore

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
SESSIONS = 8
FLUSH = 0.05  # seconds
SLACK = 0.7  # seconds that a busy machine may be late with a write; far less than what is lost when one is missing


@dataclass
class Session:
    """What a client knows of its session: how many tokens each turn has left behind, and when it was told."""

    name: str
    told: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens seen)
    tail: int = 0  # of those tokens, how many the next turn's prompt counts again
    sent: bool = False  # a turn was sent, and its answer has not come

    def turn(self, client: httpx.Client) -> None:
        before = self.told[-1][1] if self.told else 0
        self.sent = True
        answer = client.post(STATE, json=body(self.name, f"{len(self.told)} and more", max_tokens=1, stop_tokens=[]))
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        (choice,) = answer.json()["choices"]
        left = 1 if choice["finish_reason"] == "length" and choice["message"]["content"] else 0  # else an end of text
        self.told.append((time.monotonic(), before - self.tail + usage["prompt_tokens"] + left))
        self.tail = left
        self.sent = False

    def check(self, record: StateRecord | None, killed: float) -> None:
        """What the database has after the kill; the session goes on from there."""
        found = 0 if record is None else record.header.tokens
        counts = [0, *(tokens for _, tokens in self.told)]
        certain = max((tokens for at, tokens in self.told if at < killed - FLUSH - SLACK), default=0)
        assert found >= certain, f"{self.name}: a turn that was answered long before the kill is missing"
        assert found in counts or (self.sent and found > counts[-1]), f"{self.name} has a state that no turn has left"
        self.told = [(0.0, found)] if found else []
        self.tail = 0 if record is None else len(record.tail)
        self.sent = False


FORKS = """
import os, sys
import torch
from rwkv_lightning.core import cli, server
for line in sys.stdin:
    child = os.fork()
    if not child:
        cli.main(sys.argv[1:])
        os._exit(1)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


class Servers:
    """Servers one after the other, forked from a process that has imported everything: a start takes no time."""

    def __init__(self, log: Path, *options: str) -> None:
        self._log = log
        self._file = log.open("wb")
        command = [
            sys.executable,
            "-c",
            FORKS,
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--threads",
            "1",
            *options,
        ]
        self._parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._file, text=True, env=ONE_THREAD
        )

    def start(self) -> tuple[int, str]:
        """Process id and address of a new server."""
        begun = self._log.stat().st_size
        pid = int(self._ask("go"))
        deadline = time.monotonic() + 60
        while not (found := re.search(r"serves at (http://\S+)", self._log.read_text(errors="replace")[begun:])):
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.01)
        with httpx.Client(base_url=found.group(1)) as client:
            while True:
                with suppress(httpx.TransportError):
                    assert client.get("/v1/health").status_code == 200
                    return pid, found.group(1)

    def wait(self) -> None:
        """Until the server is gone."""
        assert self._ask() == "gone"

    def close(self) -> None:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(10)
        self._parent.stdout.close()
        self._file.close()

    def _ask(self, line: str = "") -> str:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        if line:
            self._parent.stdin.write(f"{line}\n")
            self._parent.stdin.flush()
        return self._parent.stdout.readline().strip()


def play_and_kill(servers: Servers, sessions: list[Session], rng: random.Random) -> float:
    """A server that is killed at a random moment while every session sends one turn after the other."""
    pid, url = servers.start()

    def client(session: Session) -> None:
        with httpx.Client(base_url=url, timeout=20) as own, suppress(httpx.TransportError):
            while True:
                session.turn(own)

    with ThreadPoolExecutor(len(sessions)) as pool:
        playing = [pool.submit(client, session) for session in sessions]
        time.sleep(rng.uniform(0.05, 1.1))
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        servers.wait()
        for future in playing:
            future.result()
    return killed


def kill_again_and_again(folder: Path, rounds: int) -> None:
    rng = random.Random(rounds)
    database = folder / "states.db"
    sessions = [Session(f"s{number}") for number in range(SESSIONS)]
    servers = Servers(folder / "log", "--state-db", str(database), "--state-flush-interval", str(FLUSH))
    turns = 0
    for _ in range(rounds):
        before = {session.name: session.told[-1][1] if session.told else 0 for session in sessions}
        killed = play_and_kill(servers, sessions, rng)
        turns += sum(len(session.told) for session in sessions)
        with closing(sqlite3.connect(database)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        store = SqliteStore()
        store.open(str(database))
        try:
            assert store.check() == []
            for session in sessions:
                data, info = store.get(session.name), store.info(session.name)
                expected = Expected(demo_fingerprint(), key=session.name)
                record = None if data is None else StateRecord.from_bytes(data, expected)
                assert (info and info.tokens) == (record and record.header.tokens)
                session.check(record, killed)
                assert (session.told[-1][1] if session.told else 0) >= before[session.name], "it went back in time"
        finally:
            store.close()
    servers.close()
    assert turns > 10 * rounds, "there was something to lose"


def test_sessions_survive_kill_9(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 15)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_sessions_survive_a_thousand_kills(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 1000)
