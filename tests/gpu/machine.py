"""What is here and what it can do at most: `python tests/gpu/machine.py CEILINGS.json [--tiny]`.

Builds the C++ kernels, names the device, and measures reading memory and the matrix product in the compute type.
Prints table rows, and writes {"bytes": bytes per second, "flops": operations per second}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rwkv_lightning.kernels import recurrent, sampling
from rwkv_lightning.kernels.cpu.build import library

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.bfloat16


def synchronise() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The median time of a call, device work included, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        synchronise()
        begun = time.perf_counter()
        call()
        synchronise()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def memory(nbytes: int) -> float:
    """Bytes read per second: a sum over random data, which is read once."""
    data = torch.rand(nbytes // 4, device=DEVICE)
    return data.nbytes / seconds(data.sum)


def product(size: int) -> float:
    """Operations per second of a square product."""
    a, b = (torch.rand(size, size, device=DEVICE).to(DTYPE) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ceilings", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"| device | {name}, torch {torch.__version__} |")
    print(f"| C++ kernels | {library().why} |")
    print(f"| recurrence, sampling | {recurrent.select(DEVICE).why}; {sampling.select(DEVICE)[1]} |")
    found = {"bytes": memory(1 << 24 if options.tiny else 1 << 32), "flops": product(256 if options.tiny else 8192)}
    options.ceilings.write_text(json.dumps(found))
    print(f"| memory, read | {found['bytes'] / 1e9:,.0f} GB/s |")
    print(f"| matrix product, {str(DTYPE).removeprefix('torch.')} | {found['flops'] / 1e12:,.2f} TFLOP/s |", flush=True)


if __name__ == "__main__":
    main()
