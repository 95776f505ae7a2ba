"""A server under many streams: `python tests/gpu/streams.py SHAPE [--streams 960] [--seconds 60]`; SHAPE may be demo.

Every stream is a connection of its own that asks for one endless answer and reads it as it comes. Tokens are counted by
the server once all streams run. Prints a table row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from machine import DEVICE, DTYPE
from models import random_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from rwkv_lightning.core.demo import demo_model_path
from server_process import ServerProcess

ENDLESS = {"stream": True, "max_tokens": 100_000, "stop_tokens": [], "temperature": 1.0}


def request(row: int) -> bytes:
    """A POST as it goes over the wire."""
    body = json.dumps({**ENDLESS, "contents": [f"Row {row}"]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_stream(url: str, row: int) -> int:
    """Read until the server ends the answer; the number of bytes."""
    address, read = urlsplit(url), 0
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request(row))
        while part := await reader.read(1 << 16):
            read += len(part)
    finally:
        writer.close()
    return read


async def counted(server: ServerProcess) -> tuple[float, float]:
    """(now, tokens generated so far)."""
    return time.perf_counter(), await asyncio.to_thread(server.metric, "generation_tokens_total")


async def rate(server: ServerProcess, streams: int, seconds: float) -> float:
    """Tokens per second over all streams."""
    readers = [asyncio.create_task(read_stream(server.url, row)) for row in range(streams)]
    try:
        while await asyncio.to_thread(server.metric, "num_requests_running") < streams:
            if ended := [reader for reader in readers if reader.done()]:
                raise RuntimeError(f"a stream ended by itself: {ended[0].exception() or ended[0].result()}")
            await asyncio.sleep(0.2)
        begun, before = await counted(server)
        await asyncio.sleep(seconds)
        now, after = await counted(server)
    finally:
        for reader in readers:
            reader.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*readers, return_exceptions=True)
    return (after - before) / (now - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--streams", type=int, default=960)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{options.shape}.safetensors"
        path = demo_model_path() if options.shape == "demo" else random_file(options.shape, file, DEVICE, DTYPE)
        limits = ["--max-batch", str(options.streams), "--max-waiting", str(2 * options.streams)]
        with ServerProcess("--model-path", str(path), "--device", DEVICE, *limits) as server:
            found = asyncio.run(rate(server, options.streams, options.seconds))
    print(f"| {options.shape}, {options.streams} HTTP streams for {options.seconds:g} s | {found:,.0f} tokens/s |")


if __name__ == "__main__":
    main()
