"""Draws the next token of many rows: the C++ kernel for logits in host memory, the Triton kernel for those on a GPU,
else the PyTorch reference."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rwkv_lightning.kernels import sampling_reference, triton
from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.sampling_rows import Row, Rule

__all__ = ["Row", "Rule", "sample", "select"]

Sample = Callable[[Rule, torch.Tensor, Sequence[Row], Sequence[int]], list[int]]


def sample(rule: Rule, logits: torch.Tensor, rows: Sequence[Row], exempt: Sequence[int] = ()) -> list[int]:
    """Draw one token per row and advance the rows.

    Args:
        logits: float32 [len(rows), V].
        rows: distinct rows.
        exempt: ids whose V2 count never grows.

    Returns:
        token ids; -1 for a row whose logits hold NaN, +inf or nothing finite, and which is not advanced.

    Raises:
        ValueError: the logits' type or shape is wrong.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"logits must be float32 [{len(rows)}, V], not {logits.dtype} {list(logits.shape)}")
    return select(logits.device)[0](rule, logits, rows, exempt)


def select(device: torch.device | str) -> tuple[Sample, str]:
    """The function that samples on a device, and why that one."""
    kind = torch.device(device).type
    if kind == "cuda":
        return _triton()
    if kind != "cpu":
        return sampling_reference.sample, "PyTorch reference (the C++ kernel reads host memory)"
    kernel, why = _kernel()
    return (_sample_cpu, why) if kernel else (sampling_reference.sample, f"PyTorch reference ({why})")


def _triton() -> tuple[Sample, str]:
    if why := triton.missing():
        return sampling_reference.sample, f"PyTorch reference ({why})"
    from rwkv_lightning.kernels.triton.sampling import sample as triton_sample

    return triton_sample, "Triton kernel"


@functools.cache
def _kernel() -> tuple[Callable[..., int] | None, str]:
    lib, why = library().lib, library().why
    if lib is None:
        return None, why
    kernel = lib.rwkv_sample
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    kernel.argtypes = [i32, pointer, i64, i32, i32, pointer, pointer, i32, i32, pointer, pointer]
    kernel.restype = i32
    return kernel, why


def _sample_cpu(rule: Rule, logits: torch.Tensor, rows: Sequence[Row], exempt: Sequence[int]) -> list[int]:
    """One call of the C++ kernel; it gets addresses, so everything it touches is held here meanwhile."""
    kernel = _kernel()[0]
    if kernel is None:
        raise RuntimeError(f"the C++ sampling kernel is not there: {_kernel()[1]}")
    if not rows:
        return []
    n, vocabulary = logits.shape
    if logits.stride(1) != 1 or logits.stride(0) < vocabulary:
        logits = logits.contiguous()
    addresses = array("Q", [row.address for row in rows])
    exempt_ids = array("i", exempt)
    out = np.empty((2, n), np.int32)  # tokens; rows that must grow
    full = kernel(
        int(rule),
        logits.data_ptr(),
        logits.stride(0),
        n,
        vocabulary,
        addresses.buffer_info()[0],
        exempt_ids.buffer_info()[0],
        len(exempt_ids),
        torch.get_num_threads(),
        out.ctypes.data,
        out[1:].ctypes.data,
    )
    for index in out[1, :full].tolist():
        rows[index].grow_if_full()
    tokens: list[int] = out[0].tolist()
    return tokens
