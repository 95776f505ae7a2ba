"""The low-rank pairs of time mixing for few rows: all first halves in one kernel, all second halves in another."""

from __future__ import annotations

import triton
import triton.language as tl

NONE, TANH, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _tanh(x):
    """Near 0 by its series: there the quotient would lose digits."""
    square = x * x
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    near = x * (1.0 - square * (0.3333333333 - square * 0.1333333333))
    return tl.where(square < 0.01, near, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=["rows"])
def down(
    x, weight, sources, partial, rows, per_split,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial[split, row, d] = x[sources[d's block], row, part of C] @ weight[d, part of C].

    Grid (D / BLOCK_D, splits). x [inputs, T, C]; weight [D, C], the rows of all pairs; T is at most BLOCK_M.
    """
    block, split = tl.program_id(0), tl.program_id(1)
    d, m = block * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    given = x + tl.load(sources + block).to(tl.int64) * rows * WIDTH
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        within = (k < WIDTH)[None, :]
        left = tl.load(given + m[:, None] * WIDTH + k[None, :], mask=(m < rows)[:, None] & within, other=0.0)
        right = tl.load(weight + d[:, None] * WIDTH + k[None, :], mask=within, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    tl.store(partial + (split * BLOCK_M + m)[:, None] * DEPTH + d[None, :], total, mask=(m < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def up(
    partial, weight, pairs, out, rows,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[pair, row] = activation(the sum of its partial products) @ the pair's second matrix.

    Grid (C / BLOCK_N, pairs).
    pairs [P, 4] int64: first d of a pair, how many, where its [C, how many] begins in `weight`, its activation.
    Between the halves stands what the operators would hand on, rounded before and after the activation.
    """
    pair = tl.program_id(1)
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    begin, size = tl.load(pairs + pair * 4), tl.load(pairs + pair * 4 + 1)
    second, activation = weight + tl.load(pairs + pair * 4 + 2), tl.load(pairs + pair * 4 + 3)
    dtype = weight.dtype.element_ty
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        within = (m < rows)[:, None] & (k < size)[None, :]
        low = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for split in range(SPLITS):
            part = partial + (split * BLOCK_M + m)[:, None] * DEPTH + (begin + k)[None, :]
            low += tl.load(part, mask=within, other=0.0)
        low = low.to(dtype).to(tl.float32)
        if activation == TANH:
            low = _tanh(low)
        elif activation == SIGMOID:
            low = 1.0 / (1.0 + tl.exp(-low))
        there = (n < WIDTH)[:, None] & (k < size)[None, :]
        right = tl.load(second + n[:, None] * size + k[None, :], mask=there, other=0.0)
        total = tl.dot(low.to(dtype), tl.trans(right), total, input_precision="ieee")
    place = out + (pair * rows + m)[:, None] * WIDTH + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < WIDTH)[None, :])
