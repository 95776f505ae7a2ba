"""The product with a mostly zero input: only the rows of the weight that meet something else are read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def gathered_product(
    x, weight, partial, rows, depth, columns, per_split, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """partial[split, row] = x[row, part of K] @ weight[part of K]: grid (N / BLOCK_N, splits, T); weight is [K, N]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split, row = tl.program_id(1), tl.program_id(2)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        factor = tl.load(x + row * depth + k, mask=k < depth, other=0.0).to(tl.float32)
        wanted = (factor != 0)[:, None] & (n < columns)[None, :]
        cells = weight + k.to(tl.int64)[:, None] * columns + n[None, :]
        total += tl.sum(tl.load(cells, mask=wanted, other=0.0).to(tl.float32) * factor[:, None], 0)
    tl.store(partial + (split * rows + row) * columns + n, total, mask=n < columns)


@triton.jit(do_not_specialize=["rows"])
def sum_splits(partial, out, rows, columns, stride, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[row] = the sum of its partial products, always in the same order: grid (N / BLOCK_N, T)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1)
    total = tl.zeros([BLOCK_N], tl.float32)
    for split in range(SPLITS):
        total += tl.load(partial + (split * rows + row) * columns + n, mask=n < columns, other=0.0)
    tl.store(out + row * stride + n, total.to(out.dtype.element_ty), mask=n < columns)
