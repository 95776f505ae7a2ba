"""Kernel calls that are recorded as they are made, and made again by one call.

A step of decoding is about a hundred kernel calls whose arguments do not change while the buffers stay in place. Made
one by one from Python they cost some hundred microseconds per step, and the interpreter's lock is taken after each.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

# The numbers of program.cpp.
KERNELS = ("linear_run", "quantised_run", "recurrent_shift_mix", "recurrent_wkv7", "recurrent_norm_rows")
MOST_ARGUMENTS = 11

Argument = int | bytes | None


class Call(NamedTuple):
    """A kernel by its number, and what it was called with; bytes are given by their address."""

    kernel: int
    arguments: tuple[Argument, ...]


class Kernel:
    """A C function of `KERNELS` that can be recorded.

    Args:
        lib: the loaded library.
        name: which function.
        types: of its arguments, for ctypes.
    """

    def __init__(self, lib: ctypes.CDLL, name: str, types: Sequence[Any]) -> None:
        self._number = KERNELS.index(name)
        self._function = getattr(lib, name)
        self._function.argtypes = list(types)
        self._function.restype = None

    def __call__(self, *arguments: Argument) -> None:
        if (tape := _thread.tape) is not None:
            tape.append(Call(self._number, arguments))
        self._function(*arguments)


class _Thread(threading.local):
    tape: list[Call] | None = None


_thread = _Thread()


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls that this thread makes in the block, in order."""
    before, _thread.tape = _thread.tape, []
    try:
        yield _thread.tape
    finally:
        _thread.tape = before


class _Packed(ctypes.Structure):
    """ProgramCall of program.cpp."""

    _fields_ = [("kernel", ctypes.c_int64), ("arguments", ctypes.c_int64 * MOST_ARGUMENTS)]


class Program:
    """Recorded calls to be made again. Whoever runs it keeps alive what the addresses in them point to.

    Args:
        lib: the loaded library.
        calls: from `recorded`.
    """

    def __init__(self, lib: ctypes.CDLL, calls: Sequence[Call]) -> None:
        self._calls = list(calls)  # keeps the bytes that are given by address
        self._packed = (_Packed * len(calls))(*map(_packed, calls))
        function = lib.program_run
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self._run: Callable[[int, int], None] = function
        self._address = ctypes.addressof(self._packed)

    def run(self) -> None:
        """Make the calls, in order."""
        self._run(self._address, len(self._calls))


def _packed(call: Call) -> _Packed:
    return _Packed(call.kernel, (ctypes.c_int64 * MOST_ARGUMENTS)(*map(_number, call.arguments)))


def _number(argument: Argument) -> int:
    if isinstance(argument, bytes):
        return ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0
    return argument or 0
