"""Our engine's loop against the obvious batched PyTorch form: `python -m benchmarks.decode [--shape 0.1b]`."""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.common import EngineLoop, checkpoint, count, interleaved, load
from benchmarks.naive import NaiveRwkv7
from rwkv_lightning.core.random_checkpoint import SHAPES


def naive_rate(model: NaiveRwkv7, rows: int, steps: int) -> float:
    tokens = torch.arange(rows)
    begun = time.perf_counter()
    for _ in range(steps):
        tokens = model.step(tokens).argmax(-1)
    return rows * steps / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--threads", type=count, default=1)
    options = parser.parse_args()
    path = checkpoint(options.shape)
    weights = torch.load(path, mmap=True, weights_only=True)
    model = load(path, threads=options.threads)
    print("| rows | engine loop, tokens/s | naive PyTorch bf16 | ratio |\n|---|---|---|---|")
    for rows in options.rows:
        steps = max(2, 48 // rows)
        loop, naive = EngineLoop(model, rows, temperature=0), NaiveRwkv7(weights, rows)
        rates = interleaved(
            {"ours": lambda: loop.rate(steps), "naive": lambda: naive_rate(naive, rows, steps)},  # noqa: B023
            options.rounds,
        )
        print(
            f"| {rows} | {rates['ours']:.0f} | {rates['naive']:.0f} | {rates['ours'] / rates['naive']:.2f} |",
            flush=True,
        )
        loop.close()


if __name__ == "__main__":
    main()
