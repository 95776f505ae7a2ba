"""The linear operator y = activation(x @ W.T): a C++ kernel over packed weights on the CPU, else plain PyTorch.

`make_linear` picks by the weight's device and type and says why in `.why`. `LinearGroup` runs several operators
with one call, which is what decoding one row at a time needs: its matrices are small and its calls many.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from rwkv_lightning.kernels import triton
from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.cpu.memory import slabs
from rwkv_lightning.kernels.cpu.program import Kernel

Activation = Literal["none", "relu2", "tanh", "sigmoid"]

ACTIVATIONS: dict[str, int] = {"none": 0, "relu2": 1, "tanh": 2, "sigmoid": 3}
TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}


class Runner(Protocol):
    """A library's function that runs many products by one call."""

    def run(self, tasks: bytes, count: int, threads: int) -> None:
        """Run `count` products, laid end to end in `tasks`, in one parallel region."""


class KernelLinear(ABC):
    """An operator of this package: it can write into a buffer that it is given, and run in a `LinearGroup`.

    Attributes:
        dtype: compute type.
        why: why this form serves, for the log.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    why: str

    @abstractmethod
    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation = "none",
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] in `dtype` (default: the compute type), written into `out` when given."""


class BoundLinear(KernelLinear):
    """An operator whose calls are tasks of a C++ library, which runs any number of them at once."""

    kernels: Runner

    @abstractmethod
    def bind(
        self, x: torch.Tensor, activation: Activation, dtype: torch.dtype | None, out: torch.Tensor | None
    ) -> tuple[bytes, torch.Tensor, torch.Tensor]:
        """One call as (task for the kernel, x, y), checked but not yet run; x and y must outlive the run."""

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


class ReferenceLinear(KernelLinear):
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
        y = activated(self._product(x), activation)
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


def activated(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of a product, computed in float32; without one the product as it is."""
    return y if activation == "none" else _ACTIVATE[activation](y.float())


_IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "relu2": lambda y: y.relu_().square_(),
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
}


def activate_(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of a product in its own type, in place: the same as `activated` rounded to that type."""
    return _IN_PLACE[activation](y)


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
        self.run = Kernel(lib, "linear_run", [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32])
        lib.linear_instructions.restype = ctypes.c_char_p
        self.instructions: str = lib.linear_instructions().decode()


_kernels = functools.cache(Kernels)


class PackedLinear(BoundLinear):
    """The C++ kernel over a weight packed once. A row's result has the same bits whatever stands beside it.

    Sums are float32 in one order over the depth; the activation is applied to them before they are rounded.

    Args:
        weight: [N, K] on the CPU; not kept.
        dtype: compute type, float32 or bfloat16.
        kernels: the loaded library's functions.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> None:
        _check_weight(weight)
        if dtype not in TYPES or weight.device.type != "cpu":
            raise ValueError(f"PackedLinear takes float32 or bfloat16 on the CPU, not {dtype} on {weight.device}")
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.kernels = kernels
        self.why = f"C++ kernel ({kernels.instructions if dtype == torch.bfloat16 else 'FMA'}), packed weights"
        self._type = TYPES[dtype]
        shape = (self.out_features, self.in_features)
        self._packed = slabs.take(kernels.packed_bytes(*shape, self._type))
        self._address = self._packed.data_ptr()
        source = weight.detach().to(dtype).contiguous()
        kernels.pack(source.data_ptr(), *shape, self._type, self._address, torch.get_num_threads())

    def bind(
        self, x: torch.Tensor, activation: Activation, dtype: torch.dtype | None, out: torch.Tensor | None
    ) -> tuple[bytes, torch.Tensor, torch.Tensor]:
        x, out = place(self, x, activation, dtype, out)
        task = _pack_task(
            *(self._address, x.data_ptr(), out.data_ptr()),
            *(x.shape[0], self.out_features, self.in_features, x.stride(0), out.stride(0)),
            *(self._type, TYPES[out.dtype], ACTIVATIONS[activation], 0),
        )
        return task, x, out


def place(
    linear: KernelLinear,
    x: torch.Tensor,
    activation: str,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the result's buffer as the C++ kernels take them: columns next to each other, types they know.

    Raises:
        ValueError: a wrong shape, type or device, naming it.
    """
    _check_call(linear, x, activation)
    dtype = _out_dtype(linear, dtype, out)
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = torch.empty((x.shape[0], linear.out_features), dtype=dtype)
    else:
        _check_out(linear, x, out)
    return x, out


@dataclass(frozen=True, slots=True)
class _Binding:
    """A group's call, checked and packed: what it was made from, what to run, and what it gives."""

    given: tuple[object, ...] = ()
    runs: Sequence[tuple[Runner, bytes, int]] = ()
    inputs: Sequence[torch.Tensor] = ()  # as the kernels read them
    results: Sequence[torch.Tensor | None] = ()  # None where an operator is called by itself

    def serves(self, given: tuple[object, ...]) -> bool:
        return len(given) == len(self.given) and all(map(operator.is_, given, self.given))


class LinearGroup:
    """Several operators run by one call and one parallel region per library, with the bits of separate calls.

    A call with the very buffers of the call before is not checked again: the layers of a model reuse theirs.
    """

    def __init__(self, linears: Sequence[KernelLinear]) -> None:
        self.linears = list(linears)
        self.recordable = all(
            isinstance(linear, BoundLinear) and isinstance(linear.kernels.run, Kernel) for linear in linears
        )
        self._binding = _Binding()

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
        given = (*xs, *activations, *dtypes, *outs)
        binding = self._binding
        if not binding.serves(given):
            if not len(xs) == len(activations) == len(dtypes) == len(outs) == count:
                raise ValueError(f"a group of {count} linears takes {count} inputs, activations, dtypes and outs")
            binding = self._bind(given, xs, activations, dtypes, outs)
        threads = torch.get_num_threads()
        for runner, tasks, number in binding.runs:
            runner.run(tasks, number, threads)
        return [
            self.linears[i](xs[i], activations[i], dtypes[i], outs[i]) if y is None else y
            for i, y in enumerate(binding.results)
        ]

    def _bind(
        self,
        given: tuple[object, ...],
        xs: Sequence[torch.Tensor],
        activations: Sequence[Activation],
        dtypes: Sequence[torch.dtype | None],
        outs: Sequence[torch.Tensor | None],
    ) -> _Binding:
        """Check and pack a call; it is remembered when it can be run again, which takes the caller's own buffers."""
        results: list[torch.Tensor | None] = [None] * len(self.linears)
        inputs = list(xs)
        tasks: dict[Runner, list[bytes]] = {}
        for i, linear in enumerate(self.linears):
            if isinstance(linear, BoundLinear):
                task, inputs[i], results[i] = linear.bind(xs[i], activations[i], dtypes[i], outs[i])
                tasks.setdefault(linear.kernels, []).append(task)
        runs = [(runner, b"".join(each), len(each)) for runner, each in tasks.items()]
        binding = _Binding(given, runs, inputs, results)
        if all(out is not None for out in outs) and all(map(operator.is_, inputs, xs)):
            self._binding = binding
        return binding


def make_linear(
    weight: torch.Tensor, dtype: torch.dtype, *, deterministic: bool = False, sparse_input: bool = False
) -> KernelLinear:
    """The operator of a weight [N, K], in the compute type `dtype`, by the fastest form there is for its device.

    With `deterministic`, a row of the result has the same bits whatever the number of rows. `sparse_input` promises
    inputs that are mostly zero, which GPUs make use of.

    Raises:
        ValueError: the weight is not a matrix of floating-point numbers.
    """
    _check_weight(weight)
    if weight.device.type == "cuda" and not deterministic and triton.missing() is None:
        from rwkv_lightning.kernels.triton.linear import device_linear

        return device_linear(weight, dtype, sparse_input=sparse_input)
    built = library() if weight.device.type == "cpu" else None
    if built is None:
        why = f"PyTorch's matrix product on {weight.device.type}"
    elif built.lib is None:
        why = f"PyTorch reference: {built.why}"
    elif dtype not in TYPES:
        why = f"PyTorch reference: the C++ kernel takes float32 and bfloat16, not {dtype}"
    else:
        return PackedLinear(weight, dtype, _kernels(built.lib))
    return ReferenceLinear(weight, dtype, deterministic=deterministic, why=why)


def grouped(
    linears: Sequence[KernelLinear],
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


def _check_call(linear: KernelLinear, x: torch.Tensor, activation: str) -> int:
    """The number of rows."""
    shape = x.shape
    if len(shape) != 2 or shape[1] != linear.in_features:
        raise ValueError(f"x has the shape {list(shape)}; this linear takes [T, {linear.in_features}]")
    if x.dtype is not linear.dtype:
        raise ValueError(f"x is {x.dtype}; this linear computes in {linear.dtype}: convert x")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
    return shape[0]


def _out_dtype(linear: KernelLinear, dtype: torch.dtype | None, out: torch.Tensor | None) -> torch.dtype:
    wanted = dtype or (linear.dtype if out is None else out.dtype)
    if wanted not in TYPES and wanted != linear.dtype:
        raise ValueError(f"dtype {wanted} is no output type of a linear; choose float32 or bfloat16")
    if out is not None and out.dtype != wanted:
        raise ValueError(f"out is {out.dtype}, but dtype asks for {wanted}")
    return wanted


def _check_out(linear: KernelLinear, x: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape != (x.shape[0], linear.out_features):
        raise ValueError(f"out has the shape {list(out.shape)}; needed is [{x.shape[0]}, {linear.out_features}]")
    if out.stride(1) != 1 or out.device != x.device:
        raise ValueError("out must lie on the device of x with its columns next to each other")
    if out.data_ptr() == x.data_ptr() and x.shape[0]:
        raise ValueError("out must not share memory with x")
