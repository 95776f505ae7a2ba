"""OpenAI's form against the engine: `python -m benchmarks.http [--threads 2]`.

- tokens/s of 64 concurrent chat streams, as a share of the engine's own loop at 64 rows, in turns;
- the time of a chat beyond its engine steps, whole and streamed, on the demo model: what a client on this machine waits
  less what the server's steps took, so HTTP, JSON, prompt, text and the threads' hand-overs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

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
from rwkv_lightning.plugins.routes.defaults import OPENAI_CHAT

if TYPE_CHECKING or HAS_TEST_EXTRA:
    from tests.server_process import ServerProcess

PATH = "/v1/chat/completions"
ENDLESS = {"stream": True, "max_tokens": 100_000, "stop_tokens": [], "logit_bias": {"0": -100}}
CAPITAL = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def request(body: dict[str, object]) -> bytes:
    """A POST as it goes over the wire."""
    content = json.dumps({**body, "use_prefix_cache": False}).encode()
    return f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def read_stream(url: str, row: int) -> None:
    """A client that reads as fast as it can, and does nothing else, until it is cancelled."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request({**ENDLESS, "messages": [{"role": "user", "content": f"Row {row}"}]}))
        while await reader.read(1 << 16):
            continue
    finally:
        writer.close()


async def stream_rate(server: ServerProcess, rows: int, seconds: float) -> float:
    """Tokens per second of `rows` streams, counted by the server once all of them run."""
    readers = [asyncio.create_task(read_stream(server.url, row)) for row in range(rows)]
    while await asyncio.to_thread(server.metric, "num_requests_running") < rows:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    begun, before = time.perf_counter(), await asyncio.to_thread(server.metric, "generation_tokens_total")
    await asyncio.sleep(seconds)
    after, ended = await asyncio.to_thread(server.metric, "generation_tokens_total"), time.perf_counter()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return (after - before) / (ended - begun)


def streams_and_loop(server: ServerProcess, loop: EngineLoop, rounds: int, seconds: float) -> None:
    def streams() -> float:
        rate = asyncio.run(stream_rate(server, loop.rows, seconds))
        server.wait_idle(60)
        return rate

    own = partial(loop.rate_for, seconds / 2)
    share, rate, ours = share_of_the_loop(f"{loop.rows} streams", rounds, streams, own)
    print(f"| {loop.rows} chat streams: {rate:.0f}, loop {ours:.0f} tokens/s | {share:.2f} of the loop |")


def one_chat(connection: socket.socket, stream: bool) -> float:
    """Seconds from sending a chat to the last byte of its answer."""
    data = request({**CAPITAL, "stream": stream})
    answer, end = b"", b"[DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}}"
    begun = time.perf_counter()
    connection.sendall(data)
    while not answer.endswith(end):
        answer += connection.recv(1 << 16)
    return time.perf_counter() - begun


def beyond_the_steps(server: ServerProcess, chats: int, stream: bool) -> float:
    """Median milliseconds of a chat that the server's engine steps do not account for."""
    address = urlsplit(server.url)
    rest = []
    with socket.create_connection((address.hostname, address.port)) as connection:
        for number in range(chats):
            progress(f"chat {number + 1}/{chats}")
            before = server.metric("engine_step_seconds_sum")
            wall = one_chat(connection, stream)
            rest.append(wall - (server.metric("engine_step_seconds_sum") - before))
    progress("")
    return statistics.median(rest) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--rows", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--seconds", type=positive, default=6)
    parser.add_argument("--chats", type=count, default=100)
    parser.add_argument("--threads", type=count, default=2)
    options = parser.parse_args()
    require_test_extra()
    print("| what | figure |\n|---|---|")
    path = checkpoint(options.shape)
    loop = EngineLoop(
        load(path, threads=options.threads), options.rows, OPENAI_CHAT.sampler.lower(), **OPENAI_CHAT.sampling
    )
    threads = ("--threads", str(options.threads))
    with ServerProcess("--model-path", str(path), "--state-store", "none", *threads) as server:
        streams_and_loop(server, loop, options.rounds, options.seconds)
    with ServerProcess("--state-store", "none", *threads) as server:
        for kind, stream in (("whole", False), ("streamed", True)):
            extra = beyond_the_steps(server, options.chats, stream)
            print(f"| a chat, {kind}, beyond its engine steps, demo model | {extra:.2f} ms |")


if __name__ == "__main__":
    main()
