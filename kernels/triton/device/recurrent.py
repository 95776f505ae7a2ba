"""Token shift, the recurrence and norms. One program owns one row's state or one token, so rows cannot meet.

A slot below 0 marks a row that is only there to fill a batch: it reads and writes no state and no output.
Formulas and shapes: kernels/reference.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

NORM_EPS = tl.constexpr(1e-5)
HEAD_EPS = tl.constexpr(64e-5)
HALF_E = tl.constexpr(0.6065306597126334)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normed(x, inside, size: tl.constexpr, eps: tl.constexpr):
    """x of `size` elements, with mean 0 and variance 1; lanes outside are 0."""
    mean = tl.sum(tl.where(inside, x, 0.0), 0) / size
    centred = tl.where(inside, x - mean, 0.0)
    return centred / tl.sqrt(tl.sum(centred * centred, 0) / size + eps)


@triton.jit
def _layer_norm(x, weight, bias, at, inside, WIDTH: tl.constexpr):
    scale = tl.load(weight + at, mask=inside, other=0.0)
    return _normed(x, inside, WIDTH, NORM_EPS) * scale + tl.load(bias + at, mask=inside, other=0.0)


@triton.jit
def _add(x, delta, token, at, inside, WIDTH: tl.constexpr):
    """The residual stream of one token with `delta` added, which is also stored."""
    row = x + token * WIDTH + at
    now = tl.load(row, mask=inside, other=0.0)
    if delta is not None:
        now += tl.load(delta + token * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(row, now, mask=inside)
    return now


@triton.jit
def _interpolate(h, before, mix, out, token, tokens, at, inside, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """out[i, token] = h + (before - h) * mix[i]."""
    for i in tl.static_range(COUNT):
        share = tl.load(mix + i * WIDTH + at, mask=inside, other=0.0)
        place = out + (i * tokens + token) * WIDTH + at
        tl.store(place, (h + (before - h) * share).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])  # it changes from step to step, and compiling again would stop the server
def shift_mix_decode(
    x, delta, weight, bias, mix, shift, slots, out, tokens,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every row is one token: grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        at = tl.arange(0, BLOCK)
        inside = at < WIDTH
        h = _layer_norm(_add(x, delta, token, at, inside, WIDTH), weight, bias, at, inside, WIDTH)
        before = tl.load(shift + slot * WIDTH + at, mask=inside, other=0.0)
        _interpolate(h, before, mix, out, token, tokens, at, inside, COUNT, WIDTH)
        tl.debug_barrier()  # every lane has read the slot
        tl.store(shift + slot * WIDTH + at, h, mask=inside)


@triton.jit
def add_norm(x, delta, weight, bias, normed, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The first half of token shift for rows of any length: normed [T, C] float32; grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    h = _layer_norm(_add(x, delta, token, at, inside, WIDTH), weight, bias, at, inside, WIDTH)
    tl.store(normed + token * WIDTH + at, h, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def shift_mix_ragged(
    normed, mix, shift, offsets, slots, row_of, out, tokens,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The second half: grid (T,). The program of a row's first token alone reads its slot, and then writes it."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_of + token)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    h = tl.load(normed + token * WIDTH + at, mask=inside, other=0.0)
    if token == tl.load(offsets + row):
        before = tl.load(shift + slot * WIDTH + at, mask=inside, other=0.0)
        last = tl.load(offsets + row + 1).to(tl.int64) - 1
        tl.debug_barrier()  # every lane has read the slot
        tl.store(shift + slot * WIDTH + at, tl.load(normed + last * WIDTH + at, mask=inside), mask=inside)
    else:
        before = tl.load(normed + (token - 1) * WIDTH + at, mask=inside, other=0.0)
    _interpolate(h, before, mix, out, token, tokens, at, inside, COUNT, WIDTH)


@triton.jit
def norm_rows(x, positions, delta, weight, bias, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out = norm(x[positions] + delta); grid (S,)."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if positions is not None:
        source = tl.load(positions + row)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    chosen = tl.load(x + source * WIDTH + at, mask=inside, other=0.0)
    if delta is not None:
        chosen += tl.load(delta + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    normed = _layer_norm(chosen, weight, bias, at, inside, WIDTH)
    tl.store(out + row * WIDTH + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _read(source, at, inside):
    return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _values(v, v_mix, v_first, v0, at, channel, inside):
    """A token's values: the first layer hands its own on, the others mix those into theirs."""
    raw = tl.load(v + at, mask=inside, other=0.0)
    value = raw.to(tl.float32)
    if v_mix is None:
        tl.store(v_first + at, raw, mask=inside)
    else:
        share = _sigmoid(_read(v_mix, at, inside) + _read(v0, channel, inside))
        value += (_read(v_first, at, inside) - value) * share
    return value


@triton.jit
def _saturated(s, dtype: tl.constexpr):
    """What a state of this type can hold; comparisons let NaN through."""
    if dtype == tl.float16:
        s = tl.where(s > FP16_MAX, FP16_MAX, s)
        s = tl.where(s < -FP16_MAX, -FP16_MAX, s)
    return s.to(dtype)


@triton.jit
def wkv7(
    r, k, v, w, a, g, v_mix, v_first, w0, a0, v0, k_k, k_a, r_k, norm_weight, norm_bias, state, offsets, slots, out,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row, its state in registers over all tokens of the row: grid (R, H)."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        lane = tl.arange(0, BLOCK)
        inside = lane < SIZE
        channel = head * SIZE + lane
        square = lane[:, None] * SIZE + lane[None, :]  # key-major
        within = inside[:, None] & inside[None, :]
        own = state + (slot * HEADS + head) * SIZE * SIZE + square
        s = tl.load(own, mask=within, other=0.0).to(tl.float32)
        scale, offset = _read(norm_weight, channel, inside), _read(norm_bias, channel, inside)
        for token in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
            at = token * (HEADS * SIZE) + channel
            value = _values(v, v_mix, v_first, v0, at, channel, inside)
            decay = tl.exp(_sigmoid(_read(w, at, inside) + _read(w0, channel, inside)) * -HALF_E)
            rate = _sigmoid(_read(a, at, inside) + _read(a0, channel, inside))
            key, receptance = _read(k, at, inside), _read(r, at, inside)
            removal = key * _read(k_k, channel, inside)
            removal = removal / tl.maximum(tl.sqrt(tl.sum(removal * removal, 0)), 1e-12)
            key = key * (1.0 + (rate - 1.0) * _read(k_a, channel, inside))
            removed = tl.sum(s * -removal[:, None], 0)
            s = s * decay[:, None] + removed[None, :] * (removal * rate)[:, None] + value[None, :] * key[:, None]
            y = _normed(tl.sum(s * receptance[:, None], 0), inside, SIZE, HEAD_EPS) * scale + offset
            y += tl.sum(receptance * key * _read(r_k, channel, inside), 0) * value
            gated = y * _read(g, at, inside)
            tl.store(out + at, gated.to(out.dtype.element_ty), mask=inside)
        tl.store(own, _saturated(s, state.dtype.element_ty), mask=within)
