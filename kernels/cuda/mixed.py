"""The linear operator over int8 weights on an NVIDIA GPU: the mixed-input GEMM of w8a16.cu."""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F

from rwkv_lightning.kernels.cuda.build import arch, library
from rwkv_lightning.kernels.linear import Activation, KernelLinear, activate_, activated, place
from rwkv_lightning.kernels.quantisation import QuantisedWeight

COLUMN_UNIT = 8  # the kernel's results are whole 128-bit words
DEPTH_UNIT = 16
MANY_ROWS = 64  # from here on the tiles for many rows; both sum in the same order


class Kernels:
    """The functions of w8a16.cu in a loaded library."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.run = lib.w8a16_run
        self.run.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int32] * 4, ctypes.c_void_p]
        self.run.restype = ctypes.c_int32
        lib.w8a16_message.argtypes = [ctypes.c_int32]
        lib.w8a16_message.restype = ctypes.c_char_p
        self._message = lib.w8a16_message

    def message(self, status: int) -> str:
        """What a status of `run` means."""
        text: bytes = self._message(status)
        return text.decode()


@functools.cache
def kernels(device: str) -> Kernels:
    """The kernels for a device, built if need be. Raises build.BuildError."""
    return Kernels(library(arch(torch.cuda.get_device_capability(device))))


class MixedLinear(KernelLinear):
    """y = activation(x @ W.T) in float16 with int8 weights, on PyTorch's current stream.

    Nothing is allocated where the result goes straight into the caller's buffer; else PyTorch's allocator is asked, so
    that steps of it can be captured.

    Args:
        weight: int8, K a multiple of 16.
        device: a CUDA device.
        functions: the loaded library's.
        one_tile: take the tiles for few rows whatever the number of rows.
    """

    dtype = torch.float16
    why = "CUTLASS mixed-input products, fp16 x int8"

    def __init__(self, weight: QuantisedWeight, device: str, functions: Kernels, *, one_tile: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        if weight.bits != 8 or self.in_features % DEPTH_UNIT:
            raise ValueError(f"MixedLinear takes int8 [N, a multiple of {DEPTH_UNIT}], not {weight.shape}")
        padding = (0, 0, 0, -self.out_features % COLUMN_UNIT)
        self._values = F.pad(weight.values, padding).to(device).contiguous()
        self._scales = F.pad(weight.scales.float(), padding).to(device).reshape(-1)
        self._functions = functions
        self._one_tile = one_tile

    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation = "none",
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, K] float16 -> [T, N] in `dtype` (float16), written into `out` when given.

        Raises:
            ValueError: a wrong shape, type or device, naming it.
            RuntimeError: the kernel refuses.
        """
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features, dtype=dtype or self.dtype)
        x, out = place(self, x, activation, dtype, out)
        if not x.shape[0]:
            return out
        if self._takes(out):
            return activate_(self._run(x.contiguous(), out), activation)
        y = self._run(x.contiguous(), x.new_empty(x.shape[0], self._values.shape[0]))
        return out.copy_(activated(y[:, : self.out_features], activation))

    def _takes(self, out: torch.Tensor) -> bool:
        """Whether the kernel can write there."""
        words = self.out_features % COLUMN_UNIT == 0 and out.data_ptr() % 16 == 0
        return words and out.dtype == self.dtype and out.is_contiguous()

    def _run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        many = not self._one_tile and x.shape[0] >= MANY_ROWS
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            status = self._functions.run(
                *(tensor.data_ptr() for tensor in (x, self._values, self._scales, y)),
                *(x.shape[0], y.shape[1], self.in_features, int(many)),
                torch.cuda.current_stream(x.device).cuda_stream,
            )
        if status:
            raise RuntimeError(f"the W8A16 product failed: {self._functions.message(status)}")
        return y
