"""Measuring a server in a process of its own, over real sockets, with a client that costs little."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rwkv_lightning.core.errors import StartError

START_SECONDS = 300.0  # a first start builds the kernels
STEPS = 8  # of the engine, that a rate is measured over, at least
SETTLE_SECONDS = 600.0  # until every stream of a crowd has its first token
END = b"0\r\n\r\n"  # the last chunk of an answer
TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning)": ?"[^"]')  # some text that is not empty


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: where it is, and the password that its settings ask for."""

    host: str
    port: int
    password: str | None = None

    def get(self, path: str) -> str:
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", headers=self.headers())
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.password}"} if self.password else {}

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def request(self, path: str, body: Mapping[str, Any]) -> bytes:
        """A POST as it goes over the wire."""
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", f"Host: {self.host}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers().items()]
        return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


@contextmanager
def serve(options: Sequence[str], password: str | None = None) -> Iterator[Server]:
    """`rwkv-lightning serve` with these options on a free port, for the length of a block.

    Raises StartError with what the server said when it does not start.
    """
    raise_file_limit(4096)
    command = [sys.executable, "-m", "rwkv_lightning.core.cli", "serve", "--host", "127.0.0.1", "--port", "0"]
    with tempfile.NamedTemporaryFile("w+b", suffix=".log") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        try:
            yield Server("127.0.0.1", _wait_for_port(process, Path(log.name)), password)
        finally:
            _stop(process)


def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"serves at http://\S+?:(\d+)", log.read_text(errors="replace"))
        if found:
            return int(found[1])
        time.sleep(0.05)
    raise StartError(f"the server to be measured did not start: {log.read_text(errors='replace')[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def raise_file_limit(wanted: int) -> None:
    """Room for this many open files, as far as the system lets us; inherited by the server."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))


class Stream(asyncio.Protocol):
    """One connection that always has a request running, and reads all that comes.

    Attributes:
        first: `time.perf_counter()` when the first text of the first answer came; None before.
        failure: the head of an answer that was no stream.
    """

    def __init__(self, request: bytes, started: asyncio.Event | None = None) -> None:
        self._request = request
        self._started = started
        self.first: float | None = None
        self.failure = ""
        self.closed = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first is None:
            self._look(data)
        self._tail = (self._tail + data[-len(END) :])[-len(END) :]
        if self._tail == END:
            self._transport.write(self._request)

    def _look(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.failure = data.decode(errors="replace")[:500]
        elif not TEXT.search(data):
            return
        self.first = time.perf_counter()
        if self._started is not None:
            self._started.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True


@asynccontextmanager
async def crowd(server: Server, path: str, bodies: Sequence[Mapping[str, Any]]) -> AsyncIterator[list[Stream]]:
    """One stream per body, each of which has had its first text when the block begins; cut at its end.

    Raises StartError when the server refuses one or does not answer.
    """
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda body=body: Stream(server.request(path, body)), server.host, server.port)  # type: ignore[misc]
        for body in bodies
    ]
    streams = [stream for _, stream in made]
    try:
        await _all_started(streams)
        yield streams
    finally:
        for transport, _ in made:
            transport.abort()


async def _all_started(streams: list[Stream]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while waiting := [stream for stream in streams if stream.first is None]:
        if time.monotonic() > deadline or any(stream.closed for stream in waiting):
            raise StartError(f"{len(waiting)} of {len(streams)} streams got no token from the server")
        await asyncio.sleep(0.02)
    for stream in streams:
        if stream.failure:
            raise StartError(f"the server refused a stream: {stream.failure}")


def row(number: int, **fields: object) -> dict[str, Any]:
    """The body of a stream of one row that goes on for as long as the server lets it."""
    return {
        "contents": [f"Row {number}"],
        "stream": True,
        "chunk_size": 1,
        "max_tokens": 100_000,
        "stop_tokens": [],
        "sampler": "temperature",
        **{"temperature": 0, **fields},
    }


def streaming_rate(server: Server, connections: int, seconds: float) -> float:
    """Tokens per second that the server hands to so many connections of one row each."""
    return asyncio.run(_streaming_rate(server, connections, seconds))


async def _streaming_rate(server: Server, connections: int, seconds: float) -> float:
    async with crowd(server, "/v1/chat/completions", [row(number) for number in range(connections)]):
        rate = await _delivered(server, seconds)
    await wait_idle(server)
    return rate


async def _delivered(server: Server, seconds: float) -> float:
    """Tokens per second between two deliveries: with many rows a step is long, and a part of one would be an error."""
    took, steps = [await _read(server, f"engine_step_seconds_{name}") for name in ("sum", "count")]
    step = took / max(1.0, steps)
    begun, before = await _next_delivery(server, step)
    await asyncio.sleep(max(seconds, STEPS * step))
    ended, after = await _next_delivery(server, step)
    return (after - before) / (ended - begun)


async def _next_delivery(server: Server, step: float) -> tuple[float, float]:
    """(time, tokens so far) when the tokens of the step at hand are handed out."""
    before = await _read(server, "generation_tokens_total")
    while True:
        await asyncio.sleep(min(0.05, max(0.002, step / 20)))
        tokens = await _read(server, "generation_tokens_total")
        if tokens != before:
            return time.perf_counter(), tokens


async def _read(server: Server, metric: str) -> float:
    return await asyncio.to_thread(server.metric, metric)


async def wait_idle(server: Server, seconds: float = 60.0) -> None:
    """Until no row runs; the next measurement begins with an idle server. Raises StartError when rows stay."""
    deadline = time.monotonic() + seconds
    while await _read(server, "num_requests_running"):
        if time.monotonic() > deadline:
            raise StartError(f"the server still runs rows {seconds:g} s after their clients left")
        await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds from each chat's request to its first text, and their median in engine steps."""

    seconds: list[float]
    steps: float


def first_token_beside(server: Server, rows: int, chats: int) -> FirstToken:
    """The first token of a chat while one big batch of `rows` rows runs."""
    return asyncio.run(_first_token_beside(server, rows, chats))


async def _first_token_beside(server: Server, rows: int, chats: int) -> FirstToken:
    batch = row(0) | {"contents": [f"Row {number}" for number in range(rows)]}
    async with crowd(server, "/v1/chat/completions", [batch]):
        await _full(server, rows)
        names = ("engine_step_seconds_sum", "engine_step_seconds_count")
        before = [await _read(server, name) for name in names]
        times = [await _chat(server) for _ in range(chats)]
        after = [await _read(server, name) for name in names]
    await wait_idle(server)
    took, steps = (new - old for new, old in zip(after, before, strict=True))
    return FirstToken(times, statistics.median(times) / (took / steps))


async def _full(server: Server, rows: int) -> None:
    """Until all rows of the batch run and have been read for a moment."""
    while await _read(server, "num_requests_running") < rows:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)


async def _chat(server: Server) -> float:
    """Seconds to the first text of a short chat."""
    body = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True, "max_tokens": 64}
    started = asyncio.Event()
    request = server.request("/v1/chat/completions", body)
    begun = time.perf_counter()
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(lambda: Stream(request, started), server.host, server.port)
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            await started.wait()
    finally:
        transport.abort()
    assert stream.first is not None
    return stream.first - begun
