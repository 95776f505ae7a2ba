"""Many clients: memory stays, clients that leave cost nothing, a slow reader holds up only itself."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from server_process import ServerProcess

STORY = {"contents": ["Once upon a time"], "stop_tokens": [], "temperature": 1, "top_p": 1, "top_k": 0, "stream": True}
# Nearly uniform draws: a row ends by chance after some 3,660 tokens.
LONG = {**STORY, "max_tokens": 100_000, "contents": ["Once upon a time"] * 16, "temperature": 1000}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-batch", "64") as running:
        yield running


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=30)


def send(connection: socket.socket, body: dict[str, object], path: str = "/v1/chat/completions") -> None:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


def reset(connection: socket.socket) -> None:
    """Close with RST, as a crashed client does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def short_streams(server: ServerProcess, count: int, at_once: int = 50) -> int:
    """Run `count` streams of a few tokens; returns how many ended with [DONE]."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=at_once)
    ) as client:

        async def one() -> bool:
            async with gate:
                answer = await client.post("/v1/chat/completions", json={**STORY, "max_tokens": 4})
                return answer.text.endswith("data: [DONE]\n\n")

        return sum(await asyncio.gather(*(one() for _ in range(count))))


def check_memory(server: ServerProcess, streams: int) -> None:
    process = psutil.Process(server.pid)
    assert asyncio.run(short_streams(server, streams // 2)) == streams // 2
    server.wait_idle()
    before = process.memory_info().rss
    assert asyncio.run(short_streams(server, streams // 2)) == streams // 2
    server.wait_idle()
    assert process.memory_info().rss - before < 5_000_000


def test_memory_stays_over_1_000_short_streams(server: ServerProcess) -> None:
    check_memory(server, 1_000)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_memory_stays_over_10_000_short_streams(server: ServerProcess) -> None:
    check_memory(server, 10_000)


def test_500_clients_that_reset_their_connection_leave_nothing_behind(server: ServerProcess) -> None:
    threads = psutil.Process(server.pid).num_threads()
    for _ in range(10):
        connections = [connect(server) for _ in range(50)]
        for connection in connections:
            send(connection, LONG)
        for connection in connections[:25]:
            connection.recv(200)  # some leave in the middle of their stream, some before it begins
        for connection in connections:
            reset(connection)
    server.wait_idle()
    answer = server.post("/v1/chat/completions", {**STORY, "max_tokens": 8, "seed": 1, "stream": False})
    assert answer.json()["usage"]["completion_tokens"] <= 8
    assert psutil.Process(server.pid).num_threads() <= threads + 2
    assert server.metric("requests_finished_total") > 0


def test_a_client_that_leaves_a_whole_answer_frees_its_rows(server: ServerProcess) -> None:
    connection = connect(server)
    send(connection, {**LONG, "stream": False})
    wait_until_running(server)
    reset(connection)
    server.wait_idle()
    assert '{reason="abort"}' in server.client.get("/metrics").text


def test_a_queued_client_that_leaves_is_never_run(server: ServerProcess) -> None:
    with server.client.stream("POST", "/big_batch/completions", json={**LONG, "contents": ["A"] * 320}) as busy:
        next(busy.iter_lines())
        waiting = connect(server)
        send(waiting, {**LONG, "contents": ["User: A prompt of its own"] * 40, "stream": False})
        reset(waiting)
    server.wait_idle()


def wait_until_running(server: ServerProcess) -> None:
    for _ in range(500):
        if server.metric("num_requests_running"):
            return
    raise AssertionError("the request never ran")


def test_a_reader_that_stops_reading_holds_up_only_itself(server: ServerProcess) -> None:
    stuck = connect(server)
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    send(stuck, {**LONG, "contents": ["A"] * 8, "chunk_size": 1})
    stuck.recv(1)
    assert asyncio.run(short_streams(server, 100)) == 100
    reset(stuck)
    server.wait_idle()


def until_refused(server: ServerProcess) -> httpx.Response:
    """The first answer that a draining server gives to a new request, on a connection of its own."""
    body = {"contents": ["A"], "max_tokens": 1, "stop_tokens": []}
    for _ in range(200):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return answer
    raise AssertionError("the server never drained")


def test_shutdown_with_live_streams_is_clean() -> None:
    with ServerProcess("--drain-timeout", "1") as server:
        connection = connect(server)
        send(connection, LONG)
        assert connection.recv(15).startswith(b"HTTP/1.1 200")
        stopper = threading.Thread(target=server.process.terminate)
        stopper.start()
        refused = until_refused(server)
        pieces = [connection.recv(65536)]
        while pieces[-1]:
            pieces.append(connection.recv(65536))
        stopper.join()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "shutting down" in refused.text
        assert b"shutting down" in b"".join(pieces)
        assert b"data: [DONE]" in b"".join(pieces)
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log()
