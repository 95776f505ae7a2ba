"""The linear operator against torch and oneDNN, on one core: ``python -m benchmarks.linear [--quick]``.

Weights come from memory, not from the caches: each shape has copies enough to outlast them. Runs are interleaved and
medians of the thread's processor time reported, in microseconds, with the weights' GB/s or the GFLOP/s of our kernel.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from rwkv_lightning.kernels.linear import make_linear

SHAPES = [(768, 768), (3072, 768), (768, 3072), (65536, 768)]  # [N, K]: an RWKV-7 of 0.1B
ROWS = [1, 8, 64, 256, 960]
COLD_BYTES = 128 << 20  # of weights, more than the caches hold
SECONDS = 1.5  # for each line of the table, at least
ROUNDS = 3  # at least

Product = Callable[[int], torch.Tensor]  # of copy i


def products(weights: list[torch.Tensor], rows: int) -> dict[str, Product]:
    """The ways to multiply [rows, K] by each of the weights, by name; ours reuses its output, as the model does."""
    n, k = weights[0].shape
    x, out = torch.randn(rows, k).to(weights[0].dtype), torch.empty(rows, n, dtype=weights[0].dtype)
    ours = [make_linear(weight, weight.dtype) for weight in weights]
    mkldnn = torch.ops.mkldnn
    packed = [mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    return {
        "ours": lambda i: ours[i](x, out=out),
        "oneDNN packed": lambda i: mkldnn._linear_pointwise(x, packed[i], None, "none", [], ""),
        "F.linear": lambda i: F.linear(x, weights[i]),
    }


def medians(ways: dict[str, Product], copies: int, seconds: float) -> dict[str, float]:
    """Seconds of one product, each way in turn over the copies."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    start, turn = time.perf_counter(), 0
    while turn < ROUNDS or time.perf_counter() - start < seconds:
        for name, product in ways.items():
            before = time.thread_time()
            product(turn % copies)
            times[name].append(time.thread_time() - before)
        turn += 1
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def line(n: int, k: int, rows: int, dtype: torch.dtype, seconds: float) -> str:
    copies = max(2, COLD_BYTES // (n * k * dtype.itemsize))
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
    result = medians(products(weights, rows), copies, seconds)
    ours = result["ours"]
    gigabytes, gigaflops = n * k * dtype.itemsize / ours / 1e9, 2 * rows * n * k / ours / 1e9
    cells = "".join(f" {value * 1e6:14.1f}" for value in result.values())
    return f"{f'{k} -> {n}':>14} {rows:5}{cells} {gigabytes:8.1f} {gigaflops:9.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and no matrix as large as the head")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    print(f"{make_linear(torch.zeros(1, 1), dtype).why}; torch {torch.__version__}; {dtype}, one thread")
    print(f"{'':>14} {'rows':>5} {'ours us':>14} {'oneDNN us':>14} {'F.linear us':>14} {'GB/s':>8} {'GFLOP/s':>9}")
    for n, k in SHAPES[: 3 if arguments.quick else 4]:
        for rows in ROWS:
            print(f"\r{k} -> {n}, {rows} rows ... ", end="", file=sys.stderr, flush=True)
            text = line(n, k, rows, dtype, 0.2 if arguments.quick else SECONDS)
            print("\r", end="", file=sys.stderr, flush=True)
            print(text, flush=True)


if __name__ == "__main__":
    main()
