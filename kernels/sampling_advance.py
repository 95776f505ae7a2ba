"""Counts drawn tokens in their rows, for kernels that draw elsewhere than in host memory."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.sampling_reference import advance_row
from rwkv_lightning.kernels.sampling_rows import Row, Rule


def advance(rule: Rule, rows: Sequence[Row], tokens: Sequence[int], exempt: Sequence[int] = ()) -> None:
    """Count tokens[i], drawn for rows[i]; a negative one leaves its row as it is.

    Args:
        exempt: ids whose V2 count never grows.
    """
    kernel = _kernel()
    if kernel is None or not rows:
        for row, token in zip(rows, tokens, strict=True):
            if token >= 0:
                advance_row(rule, row, token, exempt)
        return
    addresses, ids, exempt_ids = array("Q", [row.address for row in rows]), array("i", tokens), array("i", exempt)
    full = np.empty(len(rows), np.int32)
    pointers = [each.buffer_info()[0] for each in (addresses, ids, exempt_ids)]
    count = kernel(int(rule), len(rows), *pointers, len(exempt_ids), torch.get_num_threads(), full.ctypes.data)
    for index in full[:count].tolist():
        rows[index].grow_if_full()


@functools.cache
def _kernel() -> Callable[..., int] | None:
    lib = library().lib
    if lib is None:
        return None
    kernel = lib.rwkv_advance
    i32, pointer = ctypes.c_int32, ctypes.c_void_p
    kernel.argtypes = [i32, i32, pointer, pointer, pointer, i32, i32, pointer]
    kernel.restype = i32
    return kernel
