"""The linear operator over int8 and int4 weights: a C++ kernel on the CPU, else plain PyTorch over the weights meant.

The C++ kernel multiplies integers: a row is quantised on the way in, to 16 bits (weight-only accuracy) or to 8, which
takes half the products. `make_quantised` picks the form and says why in `.why`.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.cpu.memory import slabs
from rwkv_lightning.kernels.cpu.program import Kernel
from rwkv_lightning.kernels.linear import (
    ACTIVATIONS,
    TYPES,
    Activation,
    BoundLinear,
    KernelLinear,
    ReferenceLinear,
    place,
)
from rwkv_lightning.kernels.quantisation import QuantisedWeight

# Up to so many rows memory is the limit, and 16 bits cost no time; beyond, they cost what bfloat16 does.
# Measured by benchmarks/quantised.py on a processor with AVX512-VNNI.
AUTO_WIDE_ROWS = 4
ALWAYS = 2**62

# QuantisedTask of quantised.cpp: weight, x, y; rows, columns, depth, group, x_stride, y_stride;
# bits, planes, x_type, y_type, activation, 0
_pack_task = struct.Struct("@3P6q6i").pack


class Kernels:
    """The functions of quantised.cpp in a loaded library."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.packed_bytes = lib.quantised_packed_bytes
        self.packed_bytes.argtypes = [int64, int64, int64, int32]
        self.packed_bytes.restype = int64
        self.pack = lib.quantised_pack
        self.pack.argtypes = [pointer, pointer, int64, int64, int64, int32, pointer, int32]
        self.pack.restype = None
        self.run = Kernel(lib, "quantised_run", [ctypes.c_char_p, int64, int32])
        lib.quantised_instructions.restype = ctypes.c_char_p
        self.instructions: str = lib.quantised_instructions().decode()


_kernels = functools.cache(Kernels)


class QuantisedLinear(BoundLinear):
    """The C++ kernel. A row's result depends on nothing but the row and on whether 8 or 16 bits are taken for it.

    Args:
        weight: on the CPU; not kept.
        dtype: compute type, of the inputs: float32 or bfloat16.
        wide_rows: calls of up to so many rows take 16 bits, others 8.
        kernels: the loaded library's functions.
    """

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype, wide_rows: int, kernels: Kernels) -> None:
        if dtype not in TYPES or weight.values.device.type != "cpu":
            device = weight.values.device
            raise ValueError(f"QuantisedLinear takes float32 or bfloat16 on the CPU, not {dtype} on {device}")
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.kernels = kernels
        self.wide_rows = wide_rows
        self.why = f"C++ kernel ({kernels.instructions}), packed int{weight.bits} weights"
        self._bits, self._group = weight.bits, weight.group
        shape = (self.out_features, self.in_features, self._group, self._bits)
        self._packed = slabs.take(kernels.packed_bytes(*shape))
        self._address = self._packed.data_ptr()
        values, scales = weight.values.contiguous(), weight.scales.float().contiguous()
        kernels.pack(values.data_ptr(), scales.data_ptr(), *shape, self._address, torch.get_num_threads())

    def bind(
        self, x: torch.Tensor, activation: Activation, dtype: torch.dtype | None, out: torch.Tensor | None
    ) -> tuple[bytes, torch.Tensor, torch.Tensor]:
        x, out = place(self, x, activation, dtype, out)
        rows = x.shape[0]
        planes = 2 if rows <= self.wide_rows else 1
        task = _pack_task(
            *(self._address, x.data_ptr(), out.data_ptr()),
            *(rows, self.out_features, self.in_features, self._group, x.stride(0), out.stride(0)),
            *(self._bits, planes, TYPES[x.dtype], TYPES[out.dtype], ACTIVATIONS[activation], 0),
        )
        return task, x, out


def make_quantised(
    weight: QuantisedWeight, dtype: torch.dtype, *, wide_rows: int = ALWAYS, deterministic: bool = False
) -> KernelLinear:
    """The operator of a quantised weight, in the compute type `dtype`, by the fastest form there is for its device.

    Args:
        wide_rows: calls of up to so many rows quantise them to 16 bits, larger ones to 8. Plain PyTorch, which serves
            where there is no compiler and on other devices, leaves the rows as they are.
        deterministic: a row of the result has the same bits whatever the number of rows: always 16 bits.
    """
    built = library() if weight.values.device.type == "cpu" else None
    if built is not None and built.lib is not None and dtype in TYPES:
        return QuantisedLinear(weight, dtype, ALWAYS if deterministic else wide_rows, _kernels(built.lib))
    reason = built.why if built is not None else f"device {weight.values.device.type}"
    why = f"PyTorch reference over int{weight.bits} weights widened to {str(dtype).removeprefix('torch.')}: {reason}"
    return ReferenceLinear(weight.dequantise(), dtype, deterministic=deterministic, why=why)


def form(dtype: torch.dtype) -> str:
    """Which form serves on the CPU, for the banner."""
    weight = QuantisedWeight(torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1), 8)
    return make_quantised(weight, dtype).why.replace("int8", "integer")
