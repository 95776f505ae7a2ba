"""Which recurrence kernels serve on a device, and the C++ ones, called through ctypes: `select(device)`.

They have the signatures of kernels/reference.py. Callers must not pass slots, offsets or positions out of range.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from dataclasses import dataclass

import torch

from rwkv_lightning.kernels import reference, triton
from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.cpu.program import Argument, Kernel
from rwkv_lightning.kernels.reference import HeadWeights, Projections, Rows

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type of recurrent.cpp
_ROW_TYPES = {**_TYPES, torch.int8: 3}
ROW_TYPES = frozenset(_ROW_TYPES)  # of the rows that norm_rows takes
_STATE_TYPES = {torch.float32: 0, torch.float16: 2}
_POINTER, _BYTES, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32


@dataclass(frozen=True, slots=True)
class Kernels:
    """The three kernels of a device, as classes that take their weights, and why these.

    Args:
        recordable: their calls can become part of a program (cpu/program.py).
    """

    shift_mix: type[reference.ShiftMix]
    wkv7: type[reference.Wkv7]
    norm_rows: type[reference.NormRows]
    why: str
    recordable: bool = False


def select(device: torch.device | str) -> Kernels:
    """The fastest kernels there are for a device."""
    kind = torch.device(device).type
    if kind == "cuda":
        return _triton()
    if kind != "cpu":
        return _reference(f"PyTorch reference on {kind}")
    built = library()
    if built.lib is None:
        return _reference(f"PyTorch reference: {built.why}")
    instructions = _functions(built.lib).instructions().decode()
    return Kernels(CppShiftMix, CppWkv7, CppNormRows, f"C++ kernels ({instructions})", recordable=True)


def _triton() -> Kernels:
    if why := triton.missing():
        return _reference(f"PyTorch reference: {why}")
    from rwkv_lightning.kernels.triton.recurrent import TritonNormRows, TritonShiftMix, TritonWkv7

    return Kernels(TritonShiftMix, TritonWkv7, TritonNormRows, "Triton kernels")


def _reference(why: str) -> Kernels:
    return Kernels(reference.ShiftMix, reference.Wkv7, reference.NormRows, why)


class _Rows(ctypes.Structure):
    """RecurrentRows of recurrent.cpp."""

    address: int

    _fields_ = [
        *((name, _INT64) for name in ("tokens", "rows", "threads")),
        *((name, _POINTER) for name in ("offsets", "slots")),
    ]


class _Norm(ctypes.Structure):
    """RecurrentNorm of recurrent.cpp."""

    _fields_ = [("width", _INT64), ("weight", _POINTER), ("bias", _POINTER)]


class _Heads(ctypes.Structure):
    """RecurrentHeads of recurrent.cpp."""

    _fields_ = [
        *((name, _INT64) for name in ("heads", "size")),
        *((name, _POINTER) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k", "norm_weight", "norm_bias")),
    ]


class _Given(ctypes.Structure):
    """RecurrentGiven of recurrent.cpp."""

    _fields_ = [(name, _POINTER) for name in ("r", "k", "v", "w", "a", "g", "v_mix")]


class _Functions:
    """The functions of recurrent.cpp in a loaded library."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.instructions = lib.recurrent_instructions
        self.instructions.restype = ctypes.c_char_p
        self.shift_mix = Kernel(lib, "recurrent_shift_mix", [*[_POINTER] * 3, _INT64, *[_POINTER] * 4, _INT32])
        self.wkv7 = Kernel(lib, "recurrent_wkv7", [*[_POINTER] * 2, _BYTES, *[_POINTER] * 3, _INT32, _INT32])
        norm_rows = [_POINTER, _INT64, _POINTER, _INT32, *[_POINTER] * 3, _INT32, _POINTER, _INT32, _INT64]
        self.norm_rows = Kernel(lib, "recurrent_norm_rows", norm_rows)


_functions = functools.cache(_Functions)


def _cpp() -> _Functions:
    built = library()
    if built.lib is None:
        raise RuntimeError(f"the C++ kernels are not there ({built.why}): use those that select() names")
    return _functions(built.lib)


def _pointer(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int) -> int:
    """The address of a tensor that the C++ code may read `size` elements of."""
    if tensor.dtype != dtype or tensor.numel() != size or not tensor.is_contiguous() or tensor.is_cuda:
        raise ValueError(
            f"{name} must be {size} contiguous {dtype} numbers on the CPU, not {tensor.dtype} {list(tensor.shape)} "
            f"with strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


def _weight(tensor: torch.Tensor | None, size: int) -> int | None:
    return None if tensor is None else _pointer("weight", tensor, torch.float32, size)


def _address(rows: Rows) -> int:
    """Where the C++ form of the row structure lies; it is made once per step."""
    if rows.native is None:
        count = rows.slots.numel()
        offsets = _pointer("offsets", rows.offsets, torch.int32, count + 1)
        slots = _pointer("slots", rows.slots, torch.int32, count)
        rows.native = _Rows(rows.tokens, count, torch.get_num_threads(), offsets, slots)
        rows.native.address = ctypes.addressof(rows.native)
    address: int = rows.native.address
    return address


class _Bound:
    """The arguments made from some tensors, kept while the very same tensors come again.

    Decoding calls every kernel with the same buffers step after step, and checking them costs more than comparing.
    """

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor | None, ...] = ()
        self._tokens = -1
        self.arguments: tuple[Argument, ...] = ()

    def fits(self, tokens: int, tensors: tuple[torch.Tensor | None, ...]) -> bool:
        """Whether `arguments` were made from these."""
        if tokens != self._tokens:
            return False
        return all(map(operator.is_, tensors, self._tensors))

    def keep(self, tokens: int, tensors: tuple[torch.Tensor | None, ...], arguments: tuple[Argument, ...]) -> None:
        """Remember the arguments, and the tensors so that their memory stays theirs."""
        self._tokens, self._tensors, self.arguments = tokens, tensors, arguments


class CppShiftMix(reference.ShiftMix):
    """`reference.ShiftMix` in C++."""

    def __init__(self, norm_weight: torch.Tensor, norm_bias: torch.Tensor, mix: torch.Tensor) -> None:
        super().__init__(norm_weight, norm_bias, mix)
        self._run = _cpp().shift_mix
        self._count, self._width = mix.shape
        self._norm = _Norm(self._width, _weight(norm_weight, self._width), _weight(norm_bias, self._width))
        self._norm_address = ctypes.addressof(self._norm)
        self._mix = _weight(mix, mix.numel())
        self._bound = _Bound()

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, shift: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        bound, tensors = self._bound, (x, delta, shift, out)
        if not bound.fits(rows.tokens, tensors):
            bound.keep(rows.tokens, tensors, self._arguments(x, delta, shift, rows, out))
        self._run(self._norm_address, _address(rows), *bound.arguments)

    def _arguments(
        self, x: torch.Tensor, delta: torch.Tensor | None, shift: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> tuple[Argument, ...]:
        size, dtype = rows.tokens * self._width, out.dtype
        return (
            self._mix,
            self._count,
            _pointer("x", x, torch.float32, size),
            None if delta is None else _pointer("delta", delta, dtype, size),
            _pointer("shift", shift, torch.float32, shift.shape[0] * self._width),
            _pointer("out", out, dtype, self._count * size),
            _TYPES[dtype],
        )


class CppWkv7(reference.Wkv7):
    """`reference.Wkv7` in C++."""

    def __init__(self, weights: HeadWeights, heads: int) -> None:
        super().__init__(weights, heads)
        self._run = _cpp().wkv7
        self._width = weights.k_k.numel()
        self._state_size = self._width * (self._width // heads)
        small = (weights.w0, weights.a0, weights.v0, weights.k_k, weights.k_a, weights.r_k)
        pointers = [_weight(one, self._width) for one in (*small, weights.norm_weight, weights.norm_bias)]
        self._heads = _Heads(heads, self._width // heads, *pointers)
        self._heads_address = ctypes.addressof(self._heads)
        self._bound = _Bound()

    def __call__(
        self, given: Projections, v_first: torch.Tensor, state: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        bound, tensors = self._bound, (*given, v_first, state, out)
        if not bound.fits(rows.tokens, tensors):
            bound.keep(rows.tokens, tensors, self._arguments(given, v_first, state, rows, out))
        self._run(self._heads_address, _address(rows), *bound.arguments)

    def _arguments(
        self, given: Projections, v_first: torch.Tensor, state: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> tuple[Argument, ...]:
        size, dtype = rows.tokens * self._width, out.dtype
        if (given.v_mix is None) != (self.weights.v0 is None):
            raise ValueError("v_mix is None in the first layer, which has no v0, and only there")
        each = given._asdict().items()
        pointers = [None if tensor is None else _pointer(name, tensor, dtype, size) for name, tensor in each]
        return (
            bytes(_Given(*pointers)),
            _pointer("v_first", v_first, dtype, size),
            _pointer("state", state, state.dtype, state.shape[0] * self._state_size),
            _pointer("out", out, dtype, size),
            _TYPES[dtype],
            _STATE_TYPES[state.dtype],
        )


class CppNormRows(reference.NormRows):
    """`reference.NormRows` in C++."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__(weight, bias)
        self._run = _cpp().norm_rows
        self._width = weight.numel()
        self._norm = _Norm(self._width, _weight(weight, self._width), _weight(bias, self._width))

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        delta: torch.Tensor | None,
        out: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> None:
        count = out.shape[0]
        size = count * self._width
        self._run(
            ctypes.addressof(self._norm),
            count,
            _pointer("x", x, x.dtype, x.numel() if positions is not None else size),
            _ROW_TYPES[x.dtype],
            None if scales is None else _pointer("scales", scales, torch.float32, x.shape[0]),
            None if positions is None else _pointer("positions", positions, torch.int64, count),
            None if delta is None else _pointer("delta", delta, delta.dtype, size),
            0 if delta is None else _TYPES[delta.dtype],
            _pointer("out", out, out.dtype, size),
            _TYPES[out.dtype],
            torch.get_num_threads(),
        )
