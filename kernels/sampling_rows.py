"""A row's sampling memory, in a layout that Python and the C++ kernel share.

Python owns the memory, so the PyTorch reference and the kernel serve the same rows, in turn if need be.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np

FIRST_CAPACITY = 32
UNBOUNDED = 0  # top_k without a bound
PENALTY_LIMIT = 1e308  # penalties saturate here instead of becoming infinite


class Rule(IntEnum):
    """The sampling rules of native_api.md, "Samplers, exactly"; the numbers are the kernel's."""

    V1 = 1
    V2 = 2
    TEMPERATURE = 3


class RowState(ctypes.Structure):
    """Mirrors `Row` in cpu/sampling.cpp.

    `ids` and `values` point to the tokens drawn so far, ascending, and to their penalties (V1) or counts (V2).
    """

    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("presence", ctypes.c_double),
        ("frequency", ctypes.c_double),
        ("decay", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("position", ctypes.c_uint32),
        ("row", ctypes.c_uint32),
    )


class Row:
    """One row: its options, its random stream (seed, row, position) and its penalties.

    Args:
        seed: taken modulo 2^64.
        row: the row's index in its request, at least 0.
        top_k: any integer; without a bound when it is at most 0.
    """

    __slots__ = ("address", "ids", "state", "values")

    def __init__(
        self,
        seed: int,
        row: int,
        *,
        temperature: float,
        top_k: int = UNBOUNDED,
        top_p: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        decay: float = 1.0,
    ) -> None:
        self.state = RowState(
            temperature=temperature,
            top_p=top_p,
            presence=presence,
            frequency=frequency,
            decay=decay,
            seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
            top_k=min(max(top_k, UNBOUNDED), 0x7FFF_FFFF),
            row=row & 0xFFFF_FFFF,
        )
        self.address = ctypes.addressof(self.state)
        self.ids = np.empty(0, np.int32)
        self.values = np.empty(0, np.float64)
        self.grow(FIRST_CAPACITY)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` distinct tokens, keeping what is there."""
        count = self.state.count
        ids, values = np.zeros(capacity, np.int32), np.zeros(capacity, np.float64)
        ids[:count], values[:count] = self.ids[:count], self.values[:count]
        self.ids, self.values = ids, values
        self.state.ids, self.state.values = ids.ctypes.data, values.ctypes.data
        self.state.capacity = capacity

    def grow_if_full(self) -> None:
        """Doubles the room when it is used up: there is always place for one more token."""
        if self.state.count == self.state.capacity:
            self.grow(2 * self.state.capacity)

    def penalties(self) -> tuple[np.ndarray, np.ndarray]:
        """Views of the tokens drawn so far, ascending int32 [count], and of their values, float64 [count]."""
        count = self.state.count
        return self.ids[:count], self.values[:count]

    def place(self, token: int) -> tuple[int, bool]:
        """The index of a token's entry, made (with the value 0) if need be, and whether it was made."""
        ids, _ = self.penalties()
        at = int(np.searchsorted(ids, token))
        if at < len(ids) and ids[at] == token:
            return at, False
        count = len(ids)
        self.ids[at + 1 : count + 1] = self.ids[at:count].copy()
        self.values[at + 1 : count + 1] = self.values[at:count].copy()
        self.ids[at], self.values[at] = token, 0.0
        self.state.count += 1
        self.grow_if_full()
        return at, True
