"""Weights in few bits: int8 with one scale per row, int4 with one per group of a row; symmetric both.

A number w is kept as q with w ~ q * scale. int4 is packed two to a byte, the even column in the low half,
8 added to each, so that a 32-bit little-endian word holds eight neighbours of a row from its low bits upwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT8_LEVELS = 127
INT4_LEVELS = 8  # -8 .. 7
# Candidates for an int4 scale: the group's largest number in size, with its sign, falls on one of these levels.
INT4_PEAKS = (-8.5, -8.0, -7.5, -7.0, -6.5, 7.0, 6.5)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A matrix [N, K] in few bits.

    Args:
        values: int8 [N, K], or uint8 [N, K / 2] with two int4 in a byte.
        scales: [N, K / group], float32 or float16.
        bits: 8 or 4.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """How many neighbours of a row share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def dequantise(self) -> torch.Tensor:
        """The matrix that is meant, float32 [N, K]."""
        n, k = self.shape
        q = self.values if self.bits == 8 else unpack_int4(self.values).char().sub(INT4_LEVELS)
        return (q.view(n, -1, self.group).float() * self.scales.float().unsqueeze(-1)).view(n, k)


def quantise_int8(weight: torch.Tensor) -> QuantisedWeight:
    """A float matrix [N, K] in int8, each row by its largest number in size."""
    w = weight.float()
    scales = w.abs().amax(1, keepdim=True) / INT8_LEVELS
    q = (w / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-INT8_LEVELS, INT8_LEVELS)
    return QuantisedWeight(q.to(torch.int8), scales, 8)


def quantise_int4(weight: torch.Tensor, group: int) -> QuantisedWeight:
    """A float matrix [N, K] in int4, each group of a row by the scale of a few that loses least in squares.

    Raises:
        ValueError: K is no multiple of the group, or a scale does not fit into float16.
    """
    n, k = weight.shape
    if k % group:
        raise ValueError(f"rows of {k} do not divide into groups of {group}")
    w = weight.float().view(-1, group)
    scales = _best_scales(w)
    if not bool(scales.isfinite().all()):
        raise ValueError("its numbers are too large for int4's float16 scales")
    q = _levels(w, scales.float())
    return QuantisedWeight(pack_int4((q + INT4_LEVELS).to(torch.uint8).view(n, k)), scales.view(n, -1), 4)


def _best_scales(w: torch.Tensor) -> torch.Tensor:
    """One float16 scale [G, 1] for each row of w [G, group]."""
    peak = w.gather(1, w.abs().argmax(1, keepdim=True))
    best = (peak / INT4_PEAKS[0]).half()
    least = torch.full_like(peak, float("inf"))
    for level in INT4_PEAKS:
        scales = _fitted(w, peak / level).half()
        loss = (w - _levels(w, scales.float()) * scales.float()).square_().sum(1, keepdim=True)
        better = loss < least
        best, least = torch.where(better, scales, best), torch.where(better, loss, least)
    return best


def _fitted(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scales that suit the levels best which these scales lead to (least squares)."""
    q = _levels(w, scales)
    squares = q.square().sum(1, keepdim=True)
    return torch.where(squares > 0, (w * q).sum(1, keepdim=True) / squares.clamp_min(1), scales)


def _levels(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scales == 0, scales, 1 / scales)
    return (w * inverse).round_().clamp_(-INT4_LEVELS, INT4_LEVELS - 1)


def pack_int4(levels: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of 0..15 -> uint8 [N, K / 2]."""
    return levels[:, 0::2] | levels[:, 1::2] << 4


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K / 2] -> uint8 [N, K] of 0..15."""
    return torch.stack((packed & 15, packed >> 4), -1).view(packed.shape[0], -1)
