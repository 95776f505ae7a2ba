"""A server under many streams: `python tests/gpu/streams.py SHAPE [--streams 960] [--seconds 60]`; SHAPE may be demo.

Every stream is a connection of its own that asks for an endless answer and reads it as it comes; one that ends is
followed by another. Tokens are counted by the server once all have begun. Prints a table row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
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
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def read_streams(url: str, row: int) -> None:
    """One stream after the other, until cancelled: a random model may end an answer at any token."""
    address = urlsplit(url)
    while True:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(request(row))
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"a stream was refused: {status.decode()}")
            while await reader.read(1 << 16):
                continue
        finally:
            writer.close()


async def metric(server: ServerProcess, name: str) -> float:
    return await asyncio.to_thread(server.metric, name)


async def rate(server: ServerProcess, streams: int, seconds: float) -> float:
    """Tokens per second over all streams, once as many have begun."""
    readers = [asyncio.create_task(read_streams(server.url, row)) for row in range(streams)]
    try:
        while await metric(server, "time_to_first_token_seconds_count") < streams:
            for reader in readers:
                if reader.done():
                    reader.result()  # raises
            await asyncio.sleep(0.1)
        begun, before = time.perf_counter(), await metric(server, "generation_tokens_total")
        await asyncio.sleep(seconds)
        now, after = time.perf_counter(), await metric(server, "generation_tokens_total")
    finally:
        for reader in readers:
            reader.cancel()
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
