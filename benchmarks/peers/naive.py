"""Batched PyTorch without kernels of our own (benchmarks/naive.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.naive import NaiveRwkv7
from benchmarks.peers import Unable


def missing(dtype: str) -> str | None:
    """Nothing is ever missing."""
    return None


class Peer:
    """Args: dtype: of the weights and activations."""

    def __init__(self, checkpoint: Path, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self.dtype: torch.dtype = getattr(torch, dtype)
        stored = torch.load(checkpoint, mmap=True, weights_only=True)
        self.weights = {name: tensor.to(self.dtype).squeeze() for name, tensor in stored.items()}

    def decode(self, rows: int, seconds: float) -> float:
        model = NaiveRwkv7(self.weights, rows, self.dtype)
        tokens = model.step(torch.arange(rows)).argmax(-1)
        begun, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() - begun < seconds:
            tokens, steps = model.step(tokens).argmax(-1), steps + 1
        return rows * steps / (time.perf_counter() - begun)

    def prefill(self, tokens: int) -> float:
        raise Unable("token by token")

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return [token for token, _ in self.with_margins(prompt, count)]

    def with_margins(self, prompt: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Greedy tokens, each with its logit's lead over the second one."""
        model = NaiveRwkv7(self.weights, 1, self.dtype)
        for token in prompt:
            logits = model.step(torch.tensor([token]))
        found: list[tuple[int, float]] = []
        while len(found) < count:
            best = logits[0].topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            logits = model.step(torch.tensor([found[-1][0]]))
        return found
