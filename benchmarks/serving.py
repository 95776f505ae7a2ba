"""The server against its own engine loop: `python -m benchmarks.serving [--rows 960] [--threads 2]`.

- tokens/s of one big batch over HTTP, as a share of the engine's loop at the same number of rows, in turns;
- the first token of a chat beside that batch, in engine steps;
- what one reader at 1 byte/s does to 50 normal streams beside it;
- the time of an answer before and after 500 clients reset their connections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.common import (
    HAS_TEST_EXTRA,
    EngineLoop,
    checkpoint,
    count,
    load,
    positive,
    progress,
    require_test_extra,
    share_of_the_loop,
)
from rwkv_lightning.core.random_checkpoint import SHAPES

if TYPE_CHECKING or HAS_TEST_EXTRA:
    import httpx

    sys.path.insert(0, "tests")  # the server process and the clients that misbehave are the tests'
    from test_http_load import LONG, connect, reset, send

    from server_process import ServerProcess

CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True, "max_tokens": 2}


@contextmanager
def big_batch(server: ServerProcess, rows: int) -> Iterator[None]:
    """A batch of `rows` rows that runs, and is read, until the block ends."""
    prompts = [f"Row {row}" for row in range(rows)]
    body = {"contents": prompts, "max_tokens": 100_000, "stop_tokens": [], "temperature": 1.0, "chunk_size": 1}
    left = threading.Event()

    def read() -> None:
        with server.client.stream("POST", "/big_batch/completions", json=body, timeout=None) as answer:
            for _ in answer.iter_raw():
                if left.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    while server.metric("num_requests_running") < rows or server.metric("time_to_first_token_seconds_count") < 1:
        if not reader.is_alive():
            raise SystemExit(f"the batch of {rows} rows ended before it could be measured: choose a larger --shape")
        time.sleep(0.2)
    time.sleep(1)  # every prompt is read by now
    yield
    left.set()
    reader.join()
    server.wait_idle(60)


def http_rate(server: ServerProcess, rows: int, seconds: float) -> float:
    """Tokens per second of a big batch, counted by the server, read by a client."""
    with big_batch(server, rows):
        begun, before = time.perf_counter(), server.metric("generation_tokens_total")
        time.sleep(seconds)
        after, ended = server.metric("generation_tokens_total"), time.perf_counter()
    return (after - before) / (ended - begun)


def batch_and_loop(server: ServerProcess, loop: EngineLoop, rounds: int, seconds: float) -> None:
    batch = partial(http_rate, server, loop.rows, seconds)
    share, http, ours = share_of_the_loop("big batch", rounds, batch, partial(loop.rate, 4))
    print(f"| big batch, {loop.rows} rows: HTTP {http:.0f}, loop {ours:.0f} tokens/s | {share:.2f} of the loop |")


def first_token_seconds(server: ServerProcess) -> float:
    begun = time.perf_counter()
    with server.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                break
    return time.perf_counter() - begun


def chat_beside_a_batch(server: ServerProcess, rows: int, chats: int) -> None:
    with big_batch(server, rows):
        names = ("engine_step_seconds_sum", "engine_step_seconds_count")
        before = [server.metric(name) for name in names]
        times = []
        for number in range(chats):
            progress(f"chat {number + 1}/{chats} beside {rows} rows")
            times.append(first_token_seconds(server))
        took, steps = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    step = took / steps
    median = statistics.median(times)
    print(
        f"| first token of a chat beside {rows} rows: {median:.2f} s, step {step:.2f} s | {median / step:.2f} steps |"
    )


async def fifty_streams(url: str) -> float:
    """Seconds that 50 streams of 40 tokens take."""
    body = {"contents": ["Once upon a time"], "stop_tokens": [], "max_tokens": 40, "stream": True, "temperature": 1000}
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=60)) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(50)))
        return time.perf_counter() - begun


def slow_reader(server: ServerProcess, rounds: int) -> None:
    ratios = []
    for number in range(rounds):
        progress(f"slow reader, round {number + 1}/{rounds}")
        alone = asyncio.run(fifty_streams(server.url))
        slow = connect(server)
        send(slow, {**LONG, "contents": ["A"], "chunk_size": 1})
        stop = threading.Event()
        reader = threading.Thread(target=read_slowly, args=(slow, stop))
        reader.start()
        ratios.append(asyncio.run(fifty_streams(server.url)) / alone)
        stop.set()
        reader.join()
        reset(slow)
        server.wait_idle(60)
    print(f"| 50 streams beside a reader at 1 byte/s | {statistics.median(ratios):.2f} x the time alone |")


def read_slowly(connection: object, stop: threading.Event) -> None:
    while not stop.wait(1):
        connection.recv(1)  # type: ignore[attr-defined]


def answers_after_resets(server: ServerProcess) -> None:
    def answer() -> float:
        begun = time.perf_counter()
        server.post("/v1/chat/completions", {"contents": ["Once upon a time"], "max_tokens": 20, "temperature": 1000})
        return time.perf_counter() - begun

    before = statistics.median(answer() for _ in range(9))
    for _ in range(10):
        connections = [connect(server) for _ in range(50)]
        for connection in connections:
            send(connection, {**LONG, "contents": ["A"]})
        connections[0].recv(100)
        for connection in connections:
            reset(connection)
    server.wait_idle(60)
    after = statistics.median(answer() for _ in range(9))
    print(f"| an answer after 500 resets | {after / before:.2f} x the time before |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--rows", type=count, default=960)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--seconds", type=positive, default=10)
    parser.add_argument("--chats", type=count, default=20)
    parser.add_argument("--threads", type=count, default=2)
    options = parser.parse_args()
    require_test_extra()
    path = checkpoint(options.shape)
    loop = EngineLoop(load(path, threads=options.threads), options.rows)
    with ServerProcess("--model-path", str(path), "--threads", str(options.threads)) as server:
        print("| what | figure |\n|---|---|")
        batch_and_loop(server, loop, options.rounds, options.seconds)
        chat_beside_a_batch(server, options.rows, options.chats)
        slow_reader(server, options.rounds)
        answers_after_resets(server)


if __name__ == "__main__":
    main()
