"""Memory for packed weights: large mappings in huge pages, which spare address translation while weights stream."""

from __future__ import annotations

import mmap
import sys
import threading
import weakref

import torch

SLAB_BYTES = 32 << 20
HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # bytes: a cache line and the widest register


class Slabs:
    """Cuts 64-byte aligned pieces from mappings shared by many weights, so that small ones fill huge pages too.

    A piece keeps its mapping alive; the mapping goes back to the system with its last piece.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab: weakref.ref[mmap.mmap] | None = None
        self._next = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A zeroed uint8 tensor [nbytes] of its own."""
        with self._lock:
            slab = self._slab() if self._slab else None
            if slab is None or self._next + nbytes > len(slab):
                slab = _map(max(SLAB_BYTES, nbytes) + HUGE_PAGE)
                self._slab = weakref.ref(slab)
                self._next = -torch.frombuffer(slab, dtype=torch.uint8).data_ptr() % HUGE_PAGE
            piece = torch.frombuffer(slab, dtype=torch.uint8, count=nbytes, offset=self._next)
            self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT
            return piece


def _map(nbytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    slab = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        try:
            slab.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages: ordinary pages serve
            return slab
    return slab


slabs = Slabs()
