"""Our server in a process of its own, one stream per row over real sockets; the client runs on any core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers import Unable
from rwkv_lightning.core.bench import server_options
from rwkv_lightning.core.bench_http import serve, streaming_rate
from rwkv_lightning.core.config import Settings

MOST = 1024


def missing() -> str | None:
    """Nothing is ever missing."""
    return None


class Peer:
    """The server inherits this process's processors; afterwards this process, the client, may use all."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        self._stack = ExitStack()
        settings = Settings(threads=threads)
        self.server = self._stack.enter_context(serve(server_options(settings, str(checkpoint), MOST)))
        os.sched_setaffinity(0, range(os.cpu_count() or 1))

    def decode(self, rows: int, seconds: float) -> float:
        return streaming_rate(self.server, rows, max(2.0, 2 * seconds))

    def prefill(self, tokens: int) -> float:
        raise Unable("the loop's")

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        raise Unable("the loop's")

    def close(self) -> None:
        self._stack.close()
