"""Many sessions over few slots, little memory and a store; clients that leave at every point of a turn."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from state_calls import STATE, Oracle, body, listed, question, serve, turn

from rwkv_lightning.core.app import build_app
from rwkv_lightning.core.config import load_settings
from rwkv_lightning.core.server import build_context


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    alone = Oracle()
    yield alone
    alone.close()


def prompts_of(session: int, turns: int) -> list[str]:
    return [question(f"Count from {session} to {session + 3 * number}.") for number in range(1, turns + 1)]


def play(folder: Path, oracle: Oracle, sessions: int, turns: int, used: set[str]) -> None:
    """All sessions at once, their turns in any order; every answer is the one that the conversation gets alone."""
    todo = [number for number in range(sessions) for _ in range(turns)]
    random.Random(sessions).shuffle(todo)
    said: dict[int, list[str]] = {number: [] for number in range(sessions)}

    def play_turn(number: int) -> None:
        """One more turn of a session; its order against others of that session is that of the queue."""
        prompt = prompts_of(number, turns)[len(said[number])]
        said[number].append(turn(server, f"s{number}", prompt, max_tokens=6))

    with serve(folder, max_batch=8, l1_slots=5, l2_bytes=4_000_000) as server, ThreadPoolExecutor(12) as pool:
        lanes: dict[int, list[int]] = {}
        for number in todo:
            lanes.setdefault(number % 12, []).append(number)
        list(pool.map(lambda lane: [play_turn(number) for number in lane], lanes.values()))
        for number in range(sessions):
            assert said[number] == oracle.conversation(prompts_of(number, turns), 6), number
        levels = listed(server)
        assert len(levels) == sessions
        resumed = {tier: server.metric(f'sessions_resumed_total{{tier="{tier}"}}') for tier in ("l1", "l2", "l3")}
        assert sum(resumed.values()) == sessions * (turns - 1)
        assert used <= {tier for tier, count in resumed.items() if count}, "the levels that turns went on from"
        cache = server.context.models.default.states.cache
        assert cache.host.nbytes <= 4_000_000
        assert all(kept.users == 0 for kept in cache.current())
        server.wait_idle()


def test_200_sessions_over_8_slots_answer_as_each_does_alone(tmp_path: Path, oracle: Oracle) -> None:
    play(tmp_path, oracle, sessions=200, turns=2, used={"l2", "l3"})


def test_a_few_sessions_of_many_turns(tmp_path: Path, oracle: Oracle) -> None:
    play(tmp_path, oracle, sessions=14, turns=7, used={"l1", "l2"})


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_1000_sessions(tmp_path: Path, oracle: Oracle) -> None:
    play(tmp_path, oracle, sessions=1000, turns=5, used={"l2", "l3"})


class Client:
    """One request to the application itself, which may be left at any point."""

    def __init__(self, app: Any, sent: dict[str, Any]) -> None:
        self.app = app
        self.received: list[dict[str, Any]] = []
        self._sent = json.dumps(sent).encode()
        self._left = asyncio.Event()
        self._asked = 0

    async def receive(self) -> dict[str, Any]:
        self._asked += 1
        if self._asked == 1:
            return {"type": "http.request", "body": self._sent}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self._left.is_set():
            raise OSError("the client has left")
        self.received.append(message)

    async def run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": STATE,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "app": self.app,
        }
        await self.app(scope, self.receive, self.send)

    def leave(self) -> None:
        self._left.set()

    @property
    def text(self) -> str:
        """The whole text of an answer that was streamed."""
        data = b"".join(message.get("body", b"") for message in self.received).decode()
        events = [json.loads(part[6:]) for part in data.split("\n\n") if part.startswith("data: {")]
        return "".join(choice["delta"]["content"] for event in events for choice in event.get("choices", ()))

    @property
    def acknowledged(self) -> bool:
        """The client knows that its turn has taken place."""
        data = b"".join(message.get("body", b"") for message in self.received)
        return b"finish_reason" in data


@asynccontextmanager
async def application(folder: Path) -> AsyncIterator[Any]:
    settings = {"dtype": "float32", "threads": 1, "max_batch": 2, "state_db": str(folder / "states.db")}
    context = build_context(load_settings({**settings, "state_flush_interval": 0.02, "session_queue": 3}))
    app = build_app(context)
    async with app.router.lifespan_context(app):
        yield app


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def moment(count: int) -> None:
    """A few turns of the loop, then time: the engine and worker threads go on meanwhile."""
    await ticks(count % 12)
    await asyncio.sleep(0.0004 * (count // 2))


class TestLeavingAtEveryPoint:
    FIRST, SECOND, THIRD = question("What is the capital of France?"), question("What is 7 + 8?"), question("Count.")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("how", ["disconnect", "cancel"])
    @pytest.mark.parametrize("pause", [ticks, moment])
    async def test_the_next_turn_goes_on_from_the_last_one_that_was_acknowledged(
        self, tmp_path: Path, oracle: Oracle, stream: bool, how: str, pause: Callable[[int], Any]
    ) -> None:
        """The lease ends, nothing stays in use, and the state is the one before the turn or the one after it."""
        without, with_it = await asyncio.to_thread(self.expected, oracle)
        went_on = set()
        async with application(tmp_path) as app:
            states = app.state.context.models.default.states
            for count in range(0, 60, 2 if pause is ticks else 3):
                session = f"{how} {stream} {count}"
                await self.whole_turn(app, session, self.FIRST)
                client = Client(app, body(session, self.SECOND, max_tokens=6, stream=stream))
                task = asyncio.create_task(client.run())
                await pause(count)
                client.leave()
                if how == "cancel":
                    task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await asyncio.wait_for(task, 5)
                text = await self.whole_turn(app, session, self.THIRD)
                assert text in (without, with_it), count
                assert text == with_it or not client.acknowledged, "an acknowledged turn is not undone"
                went_on.add(text)
                assert len(states.sessions.leases) == 0
                assert len(states.sessions.turns) == 0
                assert all(kept.users == 0 for kept in states.cache.current())
                assert len(states.cache.loads) == 0
            scheduler = app.state.context.models.default.engine.scheduler
            assert scheduler.idle
        assert without in went_on

    async def test_leaving_the_queue_of_a_session(self, tmp_path: Path, oracle: Oracle) -> None:
        without, _ = await asyncio.to_thread(self.expected, oracle)
        async with application(tmp_path) as app:
            states = app.state.context.models.default.states
            for count in range(0, 12):
                session = f"queue {count}"
                await self.whole_turn(app, session, self.FIRST)
                async with states.sessions.leases.hold(session):
                    clients = [Client(app, body(session, self.SECOND, stream=bool(i % 2))) for i in range(3)]
                    tasks = [asyncio.create_task(client.run()) for client in clients]
                    await ticks(8 + count)
                    for client in clients:
                        client.leave()
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks, timeout=5)
                assert await self.whole_turn(app, session, self.THIRD) == without
                assert len(states.sessions.leases) == 0

    def expected(self, oracle: Oracle) -> tuple[str, str]:
        texts = [oracle.conversation(turns, 6)[-1] for turns in (
            [self.FIRST, self.THIRD], [self.FIRST, self.SECOND, self.THIRD])]  # fmt: skip
        assert texts[0] != texts[1]
        return texts[0], texts[1]

    async def whole_turn(self, app: Any, session: str, prompt: str) -> str:
        client = Client(app, body(session, prompt, max_tokens=6, stream=True))
        await asyncio.wait_for(client.run(), 10)
        assert client.acknowledged
        return client.text
