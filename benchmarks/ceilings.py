"""What this machine can do at most: matrix products and memory, `python -m benchmarks.ceilings [--threads N]`.

- memory: reading 512 MB of real data from huge pages (zero-filled buffers share one page and would lie);
- bf16, fp32 and int8 products: the best of what oneDNN and our own kernels reach at the model's shapes and 960 rows;
- instruction: bf16 multiply-adds on registers only, which no product can pass.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common import count
from rwkv_lightning.kernels.cpu.build import cache_dir, compiler
from rwkv_lightning.kernels.cpu.memory import slabs
from rwkv_lightning.kernels.linear import make_linear

SOURCE = Path(__file__).with_name("ceilings.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
READ_BYTES = 512 << 20  # more than any cache
ROWS = 960
SHAPES = ((3072, 768), (768, 3072), (65536, 768))  # [N, K]: feed-forward and head of the 0.1B model
REGISTER_ROUNDS = 2_000_000


class Ceilings:
    """Measures one after the other; each method returns one sample.

    Args:
        quick: less data and no matrix as large as the head: some tens of milliseconds, and less trustworthy.
    """

    def __init__(self, threads: int, quick: bool = False) -> None:
        torch.set_num_threads(threads)
        self.threads = threads
        self._data = slabs.take(READ_BYTES // 16 if quick else READ_BYTES)
        self._data.random_(0, 256)
        self._rounds = REGISTER_ROUNDS // 100 if quick else REGISTER_ROUNDS
        shapes = SHAPES[:2] if quick else SHAPES
        self._products = {name: products(name, shapes) for name in ("bf16", "int8")}

    def sample(self) -> dict[str, float]:
        """GB/s of memory; GFLOP/s (int8: GOP/s) of products and of the bf16 instruction, 0 for what there is not."""
        return {
            "memory": self.memory(),
            "bf16": max(map(speed, self._products["bf16"])),
            "int8": max(map(speed, self._products["int8"]), default=0.0),
            "instruction": self.instruction(),
        }

    def memory(self) -> float:
        self._read()  # memory that nobody has touched for a while comes slower the first time
        begun = time.perf_counter()
        self._read()
        return self._data.nbytes / (time.perf_counter() - begun) / 1e9

    def _read(self) -> None:
        library = native()
        if library is None:
            self._data.view(torch.int64).sum()
        else:
            library.rl_read_all(self._data.data_ptr(), self._data.nbytes, self.threads)

    def instruction(self) -> float:
        library = native()
        if library is None:
            return 0.0
        sink = (ctypes.c_float * self.threads)()
        begun = time.perf_counter()
        operations: float = library.rl_bf16_operations(self._rounds, self.threads, sink)
        return operations / (time.perf_counter() - begun) / 1e9


class Product:
    """A way to multiply, ready for each of the shapes [N, K]: the operations of each call, and the calls."""

    def __init__(self, make: Callable[[int, int], Callable[[], object]], shapes: Sequence[tuple[int, int]]) -> None:
        self.calls = [(2.0 * ROWS * n * k, make(n, k)) for n, k in shapes]


def speed(product: Product) -> float:
    """Operations per second, in 1e9, of the best shape."""
    best = 0.0
    for operations, call in product.calls:
        call()
        begun = time.perf_counter()
        call()
        best = max(best, operations / (time.perf_counter() - begun) / 1e9)
    return best


def products(kind: str, shapes: Sequence[tuple[int, int]]) -> list[Product]:
    """The ways to multiply in this type."""
    ways = (_int8,) if kind == "int8" else (_onednn, _packed, _own)
    return [Product(way, shapes) for way in ways]


def _onednn(n: int, k: int) -> Callable[[], object]:
    x, weight = torch.randn(ROWS, k).bfloat16(), torch.randn(n, k).bfloat16()
    return lambda: F.linear(x, weight)


def _packed(n: int, k: int) -> Callable[[], object]:
    x, weight = torch.randn(ROWS, k).bfloat16(), torch.randn(n, k).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _own(n: int, k: int) -> Callable[[], object]:
    x, out = torch.randn(ROWS, k).bfloat16(), torch.empty(ROWS, n, dtype=torch.bfloat16)
    linear = make_linear(torch.randn(n, k), torch.bfloat16)
    return lambda: linear(x, out=out)


def _int8(n: int, k: int) -> Callable[[], object]:
    x = torch.randint(-128, 128, (ROWS, k), dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8).T
    out = torch.empty(ROWS, n, dtype=torch.int32)
    return lambda: torch._int_mm(x, weight, out=out)


@cache
def native() -> ctypes.CDLL | None:
    """The compiled measurements; None without a compiler."""
    cxx = compiler()
    if cxx is None:
        return None
    target = cache_dir() / "benchmarks" / f"ceilings-{int(SOURCE.stat().st_mtime)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([cxx, *FLAGS, str(SOURCE), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.rl_read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.rl_read_all.restype = ctypes.c_uint64
    library.rl_bf16_operations.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    library.rl_bf16_operations.restype = ctypes.c_double
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--rounds", type=count, default=5)
    options = parser.parse_args()
    ceilings = Ceilings(options.threads)
    for _ in range(options.rounds):
        print("   ".join(f"{name} {value:7.1f}" for name, value in ceilings.sample().items()), flush=True)


if __name__ == "__main__":
    main()
