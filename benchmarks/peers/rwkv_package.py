"""The `rwkv` package: one sequence at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import WARM_UP, Unable


def missing(strategy: str) -> str | None:
    """Nothing: the package is a dependency, for its vocabulary."""
    return None


class Peer:
    """Args: strategy: as the package takes it, e.g. 'cpu fp32'."""

    def __init__(self, checkpoint: Path, threads: int, strategy: str) -> None:
        torch.set_num_threads(threads)
        os.environ.update({"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"})  # read when it is imported
        from rwkv.model import RWKV

        self.model: Any = RWKV(str(checkpoint.with_suffix("")), strategy)

    def decode(self, rows: int, seconds: float) -> float:
        if rows > 1:
            raise Unable("one sequence")
        logits, state = self.model.forward([1, 2, 3], None)
        begun, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() - begun < seconds:
            logits, state = self.model.forward([int(logits.argmax())], state)
            steps += 1
        return steps / (time.perf_counter() - begun)

    def prefill(self, tokens: int) -> float:
        prompt = [1 + 97 * i % 60000 for i in range(tokens)]
        self.model.forward(prompt[:WARM_UP], None)
        begun = time.perf_counter()
        self.model.forward(prompt, None)
        return tokens / (time.perf_counter() - begun)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        logits, state = self.model.forward(list(prompt), None)
        found: list[int] = []
        while len(found) < count:
            found.append(int(logits.argmax()))
            logits, state = self.model.forward(found[-1:], state)
        return found
