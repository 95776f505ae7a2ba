"""The recurrence in plain PyTorch: what the fast kernels must equal, and what serves where they cannot be built.

Each class takes its weights once (flat float32 tensors) and is called once per step on a ragged batch: T tokens of
R rows, row i being tokens offsets[i]:offsets[i+1] that continue the state in slot slots[i]. C = H * N is the width,
H the heads, N the head size. No row's result depends on another row. Formulas: the RWKV-7 paper ("Goose").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

NORM_EPS = 1e-5  # of the layer norms
HEAD_EPS = 64e-5  # of the group norm over a head
HALF_E = 0.6065306597126334  # exp(-1/2), the strongest decay rate
FP16_MAX = 65504.0


@dataclass(slots=True)
class Rows:
    """The row structure of one step.

    Args:
        offsets: [R+1] int32 contiguous, rising from 0 to T.
        slots: [R] int32 contiguous, distinct.
        tokens: T.
        native: the kernels' own form of these, kept between their calls.
    """

    offsets: torch.Tensor
    slots: torch.Tensor
    tokens: int
    native: Any = None


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The float32 [C] weights of time mixing that belong to no matrix; v0 is None in the first layer."""

    w0: torch.Tensor
    a0: torch.Tensor
    v0: torch.Tensor | None
    k_k: torch.Tensor
    k_a: torch.Tensor
    r_k: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor


class Projections(NamedTuple):
    """What the linear operators of time mixing give, [T, C] contiguous, in the compute type.

    w, a and v_mix are the second low-rank products, before w0, a0 and v0 are added; v_mix is None in the first layer.
    """

    r: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    w: torch.Tensor
    a: torch.Tensor
    g: torch.Tensor
    v_mix: torch.Tensor | None


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))  # torch.sigmoid rounds the last elements of a tensor otherwise than the rest


class ShiftMix:
    """Residual add, layer norm and n interpolations with the token before.

    Args:
        norm_weight, norm_bias: [C].
        mix: [n, C], how much of the token before enters each output.
    """

    def __init__(self, norm_weight: torch.Tensor, norm_bias: torch.Tensor, mix: torch.Tensor) -> None:
        self.norm_weight = norm_weight
        self.norm_bias = norm_bias
        self.mix = mix

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, shift: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        """x += delta; h = norm(x); out[i] = h + (h before - h) * mix[i]; the last h of a row goes to its slot.

        Args:
            x: [T, C] float32, the residual stream, changed in place.
            delta: [T, C] in the compute type, or None.
            shift: [slots, C] float32, the last h of every slot, changed in place.
            out: [n, T, C] in the compute type, written.
        """
        if delta is not None:
            x += delta
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias, NORM_EPS)
        slots, offsets = rows.slots.long(), rows.offsets.long()
        before = torch.cat((h[:1], h[:-1]))
        before[offsets[:-1]] = shift[slots]
        shift[slots] = h[offsets[1:] - 1]
        out.copy_(torch.addcmul(h, before - h, self.mix.unsqueeze(1)))


class Wkv7:
    """Everything between the linear operators of time mixing.

    Args:
        weights: see `HeadWeights`.
        heads: H.
    """

    def __init__(self, weights: HeadWeights, heads: int) -> None:
        self.weights = weights
        self.heads = heads

    def __call__(
        self, given: Projections, v_first: torch.Tensor, state: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        """Advance the states of all rows and write the gated output.

        Args:
            v_first: [T, C] in the compute type; the first layer (v_mix None) writes its values there, the others mix
                them into their own.
            state: [slots, H, N, N] float32 or float16, key-major: state[slot, head, key, value]; changed in place.
                A float16 state holds at most +-65504: larger values saturate.
            out: [T, C] in the compute type, written.
        """
        p = self.weights
        heads = (-1, self.heads, p.k_k.numel() // self.heads)
        r, k, a = given.r.float(), given.k.float(), _sigmoid(given.a.float() + p.a0)
        decay = torch.exp(-HALF_E * _sigmoid(given.w.float() + p.w0))
        v = self._values(given, v_first)
        kk = F.normalize((k * p.k_k).view(heads), dim=-1, eps=1e-12)
        k = k * (1 + (a - 1) * p.k_a)
        r, k, v, a, decay = (t.view(heads) for t in (r, k, v, a, decay))
        y = _recur(r, decay, k, v, -kk, kk * a, state, rows)
        y = F.layer_norm(y, y.shape[-1:], eps=HEAD_EPS).flatten(1) * p.norm_weight + p.norm_bias
        bonus = (r * k * p.r_k.view(heads)).sum(-1, keepdim=True) * v
        out.copy_((y + bonus.flatten(1)) * given.g.float())

    def _values(self, given: Projections, v_first: torch.Tensor) -> torch.Tensor:
        v = given.v.float()
        if given.v_mix is None or self.weights.v0 is None:
            v_first.copy_(given.v)
            return v
        return v + (v_first.float() - v) * _sigmoid(given.v_mix.float() + self.weights.v0)


def _recur(
    r: torch.Tensor,
    decay: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    minus_kk: torch.Tensor,
    kk_a: torch.Tensor,
    state: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """S = S * decay + (S . -kk) kk_a + v k, y = S . r, token after token; all inputs [T, H, N], y too."""
    y = torch.empty_like(v)
    slots, starts = rows.slots.long(), rows.offsets[:-1].long()
    lengths = rows.offsets[1:].long() - starts
    now = state[slots].float()
    for i in range(int(lengths.max())):
        active = (lengths > i).nonzero().flatten()  # rows that have an i-th token
        t = starts[active] + i
        s = now[active]
        removed = (s * minus_kk[t].unsqueeze(-1)).sum(-2, keepdim=True)
        s = s * decay[t].unsqueeze(-1) + removed * kk_a[t].unsqueeze(-1) + v[t].unsqueeze(-2) * k[t].unsqueeze(-1)
        y[t] = (s * r[t].unsqueeze(-1)).sum(-2)
        now[active] = s
    state[slots] = now.clamp(-FP16_MAX, FP16_MAX).half() if state.dtype == torch.float16 else now
    return y


class NormRows:
    """Layer norm of chosen rows.

    Args:
        weight, bias: [C].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        delta: torch.Tensor | None,
        out: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> None:
        """out = norm(x[positions] * scales[positions] + delta); x is untouched.

        Args:
            x: [T, C] of any floating-point type, or int8.
            positions: [S] int64, which rows of x; None takes them all.
            delta: [S, C] in the compute type, added to the chosen rows, or None.
            out: [S, C] float32 or the compute type, written.
            scales: [T, 1] float32, of the rows of x; None for ones.
        """
        chosen = float_rows(x, positions, scales)
        if delta is not None:
            chosen = chosen + delta
        out.copy_(F.layer_norm(chosen, chosen.shape[-1:], self.weight, self.bias, NORM_EPS))


def float_rows(x: torch.Tensor, positions: torch.Tensor | None, scales: torch.Tensor | None) -> torch.Tensor:
    """Float32 x[positions] * scales[positions], see `NormRows`."""
    if positions is not None:
        x, scales = F.embedding(positions, x), None if scales is None else F.embedding(positions, scales)
    return x.float() if scales is None else x.float() * scales
