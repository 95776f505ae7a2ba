"""Give back the pages of a mapped model file once its tensors have been laid out elsewhere."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class MappedFile:
    """A file whose tensors are mapped into memory; without Linux's list of mappings nothing is ever given back.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fsencode(os.path.realpath(path))

    def release(self, tensor: torch.Tensor) -> None:
        """Let the system take back the pages of a tensor that is mapped from this file; reading it fetches them again.

        Memory that is not this file's is left alone: there the same call would lose what it holds, as it would in a
        tensor that somebody has written to.
        """
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        begin, end = begin & -mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if any(first <= begin and end <= last for first, last in self._ranges):
            _advise(begin, end - begin, mmap.MADV_DONTNEED)

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """The addresses at which the file is mapped."""
        try:
            lines = Path("/proc/self/maps").read_bytes().split(b"\n")
        except OSError:
            return []
        fields = [line.split(maxsplit=5) for line in lines]
        mine = [each[0].split(b"-") for each in fields if len(each) == 6 and each[5] == self._path]
        return [(int(first, 16), int(last, 16)) for first, last in mine]


def _advise(address: int, nbytes: int, advice: int) -> None:
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
