"""The linear operator y = activation(x @ W.T): a C++ kernel over packed weights on the CPU, else plain PyTorch.

`make_linear` picks by the weight's device and type and says why in `.why`. `LinearGroup` runs several operators
with one call, which is what decoding one row at a time needs: its matrices are small and its calls many.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.cpu.memory import slabs

Activation = Literal["none", "relu2", "tanh", "sigmoid"]

_ACTIVATIONS: dict[str, int] = {"none": 0, "relu2": 1, "tanh": 2, "sigmoid": 3}
_TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}


class ReferenceLinear:
    """The plain PyTorch form, for every device: the matrix product in the compute type, the activation in float32.

    Args:
        weight: [N, K].
        dtype: compute type.
        deterministic: multiply one row at a time, so that a row's bits cannot depend on how many stand beside it.
        why: why this form serves, for the log.
    """

    def __init__(
        self, weight: torch.Tensor, dtype: torch.dtype, *, deterministic: bool = False, why: str = "PyTorch reference"
    ) -> None:
        _check_weight(weight)
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.why = why
        self._weight = weight.detach().to(dtype).contiguous()
        self._deterministic = deterministic

    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation = "none",
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] in `dtype` (default: the compute type), written into `out` when given."""
        _check_call(self, x, activation)
        y = self._product(x) if activation == "none" else _ACTIVATE[activation](self._product(x).float())
        dtype = _out_dtype(self, dtype, out)
        if out is None:
            return y.to(dtype)
        _check_out(self, x, out)
        return out.copy_(y)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not self._deterministic:
            return F.linear(x, self._weight)
        y = x.new_empty(x.shape[0], self.out_features)
        for i in range(x.shape[0]):  # each from a fresh buffer: BLAS may choose its order by the alignment
            y[i : i + 1] = F.linear(x[i : i + 1].clone(memory_format=torch.contiguous_format), self._weight)
        return y


_ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu2": lambda y: y.relu().square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


# LinearTask of linear.cpp: weight, x, y; rows, columns, depth, x_stride, y_stride; weight_type, y_type, activation, 0
_pack_task = struct.Struct("@3P5q4i").pack


class Kernels:
    """The functions of linear.cpp in a loaded library."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.packed_bytes = lib.linear_packed_bytes
        self.packed_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
        self.packed_bytes.restype = ctypes.c_int64
        self.pack = lib.linear_pack
        self.pack.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
            *(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32),
        ]
        self.pack.restype = None
        self.run = lib.linear_run
        self.run.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32]
        self.run.restype = None
        lib.linear_instructions.restype = ctypes.c_char_p
        self.instructions: str = lib.linear_instructions().decode()


_kernels = functools.cache(Kernels)


class PackedLinear:
    """The C++ kernel over a weight packed once. A row's result has the same bits whatever stands beside it.

    Sums are float32 in one order over the depth; the activation is applied to them before they are rounded.

    Args:
        weight: [N, K] on the CPU; not kept.
        dtype: compute type, float32 or bfloat16.
        kernels: the loaded library's functions.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> None:
        _check_weight(weight)
        if dtype not in _TYPES or weight.device.type != "cpu":
            raise ValueError(f"PackedLinear takes float32 or bfloat16 on the CPU, not {dtype} on {weight.device}")
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.kernels = kernels
        self.why = f"C++ kernel ({kernels.instructions if dtype == torch.bfloat16 else 'FMA'}), packed weights"
        self._type = _TYPES[dtype]
        shape = (self.out_features, self.in_features)
        self._packed = slabs.take(kernels.packed_bytes(*shape, self._type))
        self._address = self._packed.data_ptr()
        source = weight.detach().to(dtype).contiguous()
        kernels.pack(source.data_ptr(), *shape, self._type, self._address, torch.get_num_threads())

    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation = "none",
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] in `dtype` (default: the compute type), written into `out` when given.

        Rows of x and out may lie apart (a column slice of a wider buffer); `out` must not overlap x.

        Raises:
            ValueError: a wrong shape, type or device, naming it.
        """
        task, _, y = self.bind(x, activation, dtype, out)
        self.kernels.run(task, 1, torch.get_num_threads())
        return y

    def bind(
        self, x: torch.Tensor, activation: Activation, dtype: torch.dtype | None, out: torch.Tensor | None
    ) -> tuple[bytes, torch.Tensor, torch.Tensor]:
        """One call as (task for the kernel, x, y), checked but not yet run; x and y must outlive the run."""
        rows = _check_call(self, x, activation)
        dtype = _out_dtype(self, dtype, out)
        x_stride, y_stride = self.in_features, self.out_features
        if not x.is_contiguous():
            x = x if x.stride(1) == 1 else x.contiguous()
            x_stride = x.stride(0)
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=dtype)
        else:
            _check_out(self, x, out)
            y_stride = out.stride(0)
        task = _pack_task(
            *(self._address, x.data_ptr(), out.data_ptr()),
            *(rows, self.out_features, self.in_features, x_stride, y_stride),
            *(self._type, _TYPES[dtype], _ACTIVATIONS[activation], 0),
        )
        return task, x, out


AnyLinear = PackedLinear | ReferenceLinear


class LinearGroup:
    """Several operators run by one call and one parallel region, with the bits of separate calls."""

    def __init__(self, linears: Sequence[AnyLinear]) -> None:
        self.linears = list(linears)
        self._packed = [one for one in self.linears if isinstance(one, PackedLinear)]
        libraries = {one.kernels for one in self._packed}
        together = len(self._packed) == len(self.linears) and len(libraries) == 1
        self._kernels = libraries.pop() if together else None

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        activations: Sequence[Activation] | None = None,
        dtypes: Sequence[torch.dtype | None] | None = None,
        outs: Sequence[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor]:
        """Operator i applied to xs[i], as `linears[i](xs[i], activations[i], dtypes[i], outs[i])`.

        No input may be another's output. Raises ValueError when the numbers of operators and inputs differ.
        """
        count = len(self.linears)
        activations = activations or ["none"] * count
        dtypes = dtypes or [None] * count
        outs = outs or [None] * count
        if not len(xs) == len(activations) == len(dtypes) == len(outs) == count:
            raise ValueError(f"a group of {count} linears takes {count} inputs, activations, dtypes and outs")
        calls = list(zip(xs, activations, dtypes, outs, strict=True))
        if self._kernels is None:
            return [one(*call) for one, call in zip(self.linears, calls, strict=True)]
        bound = [one.bind(*call) for one, call in zip(self._packed, calls, strict=True)]
        self._kernels.run(b"".join([task for task, _, _ in bound]), count, torch.get_num_threads())
        return [y for _, _, y in bound]


def make_linear(weight: torch.Tensor, dtype: torch.dtype, *, deterministic: bool = False) -> AnyLinear:
    """The operator of a weight [N, K], in the compute type `dtype`, by the fastest form there is for its device.

    With `deterministic`, a row of the result has the same bits whatever the number of rows.

    Raises:
        ValueError: the weight is not a matrix of floating-point numbers.
    """
    _check_weight(weight)
    built = library() if weight.device.type == "cpu" else None
    if built is None:
        why = f"PyTorch's matrix product on {weight.device.type}"
    elif built.lib is None:
        why = f"PyTorch reference: {built.why}"
    elif dtype not in _TYPES:
        why = f"PyTorch reference: the C++ kernel takes float32 and bfloat16, not {dtype}"
    else:
        return PackedLinear(weight, dtype, _kernels(built.lib))
    return ReferenceLinear(weight, dtype, deterministic=deterministic, why=why)


def grouped(
    linears: Sequence[AnyLinear],
    xs: Sequence[torch.Tensor],
    activations: Sequence[Activation] | None = None,
    outs: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """`LinearGroup(linears)(xs, activations, outs=outs)`, for a group used once."""
    return LinearGroup(linears)(xs, activations, outs=outs)


def _check_weight(weight: torch.Tensor) -> None:
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise ValueError(
            f"a linear's weight is a non-empty floating-point matrix [N, K], not {weight.dtype} {list(weight.shape)}"
        )


def _check_call(linear: AnyLinear, x: torch.Tensor, activation: str) -> int:
    """The number of rows."""
    shape = x.shape
    if len(shape) != 2 or shape[1] != linear.in_features:
        raise ValueError(f"x has the shape {list(shape)}; this linear takes [T, {linear.in_features}]")
    if x.dtype is not linear.dtype:
        raise ValueError(f"x is {x.dtype}; this linear computes in {linear.dtype}: convert x")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown; choose one of {', '.join(_ACTIVATIONS)}")
    return shape[0]


def _out_dtype(linear: AnyLinear, dtype: torch.dtype | None, out: torch.Tensor | None) -> torch.dtype:
    wanted = dtype or (linear.dtype if out is None else out.dtype)
    if wanted not in _TYPES and wanted != linear.dtype:
        raise ValueError(f"dtype {wanted} is no output type of a linear; choose float32 or bfloat16")
    if out is not None and out.dtype != wanted:
        raise ValueError(f"out is {out.dtype}, but dtype asks for {wanted}")
    return wanted


def _check_out(linear: AnyLinear, x: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape != (x.shape[0], linear.out_features):
        raise ValueError(f"out has the shape {list(out.shape)}; needed is [{x.shape[0]}, {linear.out_features}]")
    if out.stride(1) != 1 or out.device != x.device:
        raise ValueError("out must lie on the device of x with its columns next to each other")
    if out.data_ptr() == x.data_ptr() and x.shape[0]:
        raise ValueError("out must not share memory with x")
