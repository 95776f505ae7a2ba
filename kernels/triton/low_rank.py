"""The low-rank pairs of time mixing on a GPU, for few rows: two launches in place of a product and more for each half.

A step of decoding at few rows spends its time on launches and on weights; these matrices are small, so that seven or
eight products of their own cost more than what they read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from rwkv_lightning.kernels.linear import Activation
from rwkv_lightning.kernels.triton.device import low_rank as device
from rwkv_lightning.kernels.triton.launch import launch
from rwkv_lightning.kernels.triton.linear import DeviceLinear
from rwkv_lightning.kernels.triton.recurrent import check

MOST_ROWS = 16  # the smallest block that a matrix unit takes
SPLITS = 8  # programs that share the depth of a first half
BLOCK_D, BLOCK_K, BLOCK_N = 32, 64, 64
CODES: dict[Activation, int] = {"none": 0, "tanh": 1, "sigmoid": 2}


class LowRankPairs:
    """Several pairs: out[i] = up[i](down[i](x[sources[i]], activations[i])), for up to 16 rows.

    The weights move into memory that the pairs share; the operators go on with views of it. Results are views of memory
    that stays in place, as captured steps need it.

    Args:
        down: [D_i, C] each.
        up: [C, D_i] each.
        sources: which of the inputs each pair takes.
    """

    most_rows = MOST_ROWS

    def __init__(
        self,
        down: Sequence[DeviceLinear],
        up: Sequence[DeviceLinear],
        activations: Sequence[Activation],
        sources: Sequence[int],
    ) -> None:
        first = down[0].weight
        self._width = down[0].in_features
        self._splits = min(SPLITS, triton.cdiv(self._width, BLOCK_K))
        self._per_split = triton.cdiv(triton.cdiv(self._width, self._splits), BLOCK_K) * BLOCK_K
        starts, blocks, places = [0], [], [0]  # of the pairs: first row of `down`, input by block, begin in `up`
        for linear, source in zip(down, sources, strict=True):
            count = triton.cdiv(linear.out_features, BLOCK_D)
            blocks += [source] * count
            starts.append(starts[-1] + count * BLOCK_D)
            places.append(places[-1] + linear.out_features * self._width)
        self._depth = starts[-1]
        self._down, self._up = first.new_zeros(self._depth, self._width), first.new_empty(places[-1])
        rows = []
        for one, two, begin, place, activation in zip(down, up, starts[:-1], places[:-1], activations, strict=True):
            size = one.out_features
            one.move_to(self._down[begin : begin + size])
            two.move_to(self._up[place : place + size * self._width].view(self._width, size))
            rows.append([begin, size, place, CODES[activation]])
        self._count = len(rows)
        self._sources = torch.tensor(blocks, dtype=torch.int32, device=first.device)
        self._pairs = torch.tensor(rows, dtype=torch.int64, device=first.device)
        self._partial = first.new_empty(self._splits, MOST_ROWS, self._depth, dtype=torch.float32)
        self._out = first.new_empty(self._count * MOST_ROWS * self._width)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [inputs, T, C] in the weights' type, contiguous -> [T, C] of each pair, which the next call overwrites.

        Raises ValueError for an input of another form; T is at most 16.
        """
        inputs, rows, width = x.shape
        check(x=(x, (inputs, min(rows, MOST_ROWS), self._width)))
        out = self._out[: self._count * rows * width].view(self._count, rows, width)
        sizes = {"WIDTH": width, "DEPTH": self._depth, "BLOCK_M": MOST_ROWS, "BLOCK_K": BLOCK_K}
        sizes |= {"num_warps": 4, "enable_fp_fusion": True}
        first = x, self._down, self._sources, self._partial, rows, self._per_split
        launch(device.down, (self._depth // BLOCK_D, self._splits), *first, BLOCK_D=BLOCK_D, **sizes)
        second = self._partial, self._up, self._pairs, out, rows
        grid = triton.cdiv(width, BLOCK_N), self._count
        launch(device.up, grid, *second, SPLITS=self._splits, BLOCK_N=BLOCK_N, **sizes)
        return out.unbind()


def pairs_of(
    down: Sequence[object], up: Sequence[object], activations: Sequence[Activation], sources: Sequence[int]
) -> LowRankPairs | None:
    """The pairs in one, where all their operators are the plain ones of a GPU and have one type; else None."""
    own = [linear for linear in (*down, *up) if type(linear) is DeviceLinear]
    if len(own) != len(down) + len(up) or len({linear.dtype for linear in own}) > 1:
        return None
    return LowRankPairs(own[: len(down)], own[len(down) :], activations, sources)
