"""`MemoryTier` (L2): states in host memory, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from rwkv_lightning.core.cache.keys import is_prefix_key
from rwkv_lightning.core.slots import Snapshot

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.record import StateHeader, StateRecord


class MemoryTier:
    """Records by key, at most `budget` bytes of them. Thread-safe.

    When room is needed, prefixes go first, then sessions; of each the least recently used. What falls out is handed
    to the caller, who knows whether it is stored elsewhere.

    Args:
        budget: bytes.
        pin: keep the tensors in page-locked memory, so that copies to and from a device run beside its work. Pinning
            a state copies it once: with `pin`, call `put` from a worker thread.
    """

    def __init__(self, budget: int, *, pin: bool = False) -> None:
        self.budget = budget
        self._pin = pin
        self._lock = Lock()
        self._nbytes = 0
        self._prefixes: OrderedDict[str, StateRecord] = OrderedDict()
        self._sessions: OrderedDict[str, StateRecord] = OrderedDict()

    def put(self, record: StateRecord) -> list[StateRecord]:
        """Keep a record in place of any other of its key; the records that had no room, perhaps this one itself."""
        if record.nbytes > self.budget:
            self.remove(record.key)
            return [record]
        kept = _pinned(record) if self._pin else record
        with self._lock:
            self._drop(record.key)
            self._shelf(record.key)[record.key] = kept
            self._nbytes += record.nbytes
            return self._shrink()

    def get(self, key: str) -> StateRecord | None:
        """The record of a key, which becomes the most recently used, or None."""
        with self._lock:
            shelf = self._shelf(key)
            if key in shelf:
                shelf.move_to_end(key)
            return shelf.get(key)

    def remove(self, key: str) -> StateRecord | None:
        """Take a record out; None when there is none."""
        with self._lock:
            return self._drop(key)

    def sessions(self) -> list[StateHeader]:
        """The headers of the sessions and branches held, the least recently used first."""
        with self._lock:
            return [record.header for record in self._sessions.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        return self._nbytes

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._shelf(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._prefixes) + len(self._sessions)

    def _shelf(self, key: str) -> OrderedDict[str, StateRecord]:
        return self._prefixes if is_prefix_key(key) else self._sessions

    def _drop(self, key: str) -> StateRecord | None:
        record = self._shelf(key).pop(key, None)
        if record is not None:
            self._nbytes -= record.nbytes
        return record

    def _shrink(self) -> list[StateRecord]:
        gone = []
        while self._nbytes > self.budget:
            _, record = (self._prefixes or self._sessions).popitem(last=False)
            self._nbytes -= record.nbytes
            gone.append(record)
        return gone


def _pinned(record: StateRecord) -> StateRecord:
    snapshot = Snapshot(record.snapshot.shift.pin_memory(), record.snapshot.wkv.pin_memory())
    return replace(record, snapshot=snapshot)
