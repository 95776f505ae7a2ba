"""`Moves`: kept states into the slots of the running pool and out of them, beside the steps where time permits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Literal

from rwkv_lightning.core.cache.copier import Copier
from rwkv_lightning.core.slots import Snapshot

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.kept import Kept
    from rwkv_lightning.core.cache.memory import HostShelf
    from rwkv_lightning.core.cache.record import StateRecord
    from rwkv_lightning.core.cache.shelf import SlotShelf
    from rwkv_lightning.core.ledger import SlotLedger

log = logging.getLogger(__name__)

Export = Callable[[int], Snapshot]
CopyPlace = Literal["step", "beside"]  # a step waits for the copy, or none does


class Moves:
    """Moves states between L1 and L2. Thread-safe: see hierarchy.py, "What keeps them apart".

    Attributes:
        copies: how many states were copied out of slots.

    Args:
        lock: the cache's.
        export: copies a slot to host memory (`SlotStates.export`).
    """

    def __init__(self, lock: RLock, slots: SlotShelf, host: HostShelf, export: Export) -> None:
        self.copies: Counter[CopyPlace] = Counter()
        self._lock = lock
        self._slots = slots
        self._host = host
        self._export = export
        self._ledger: SlotLedger | None = None  # known once a state is in one of its slots
        self.copier = Copier(self.copy_ahead)

    def close(self) -> None:
        """Copy nothing ahead any more."""
        self.copier.close()

    # --- the engine thread ---

    def move_in(self, kept: Kept, slot: int, ledger: SlotLedger) -> None:
        """A finished state stays in its slot. Call with the lock."""
        ledger.transfer(slot, kept)
        self._slots.put(kept, slot)
        self.vacate()  # what it drives out may have been copied before
        self._ledger = ledger
        self._look_ahead()

    def _free_vacated(self) -> None:
        """Tell the ledger which slots hold nobody's state."""
        self.vacate()
        while (slot := self._slots.next_vacated()) is not None:
            assert self._ledger is not None, "a state was in it"
            self._ledger.release(slot)

    def reclaim(self) -> int | None:
        """Give up a slot; None while all are being copied. What is still to be copied then is, in `move_out`."""
        with self._lock:
            vacated = self._slots.next_vacated()
            if vacated is not None:
                return vacated
            kept = self._slots.next_out()
            if kept is None:
                return None
            slot = self._slots.give_up(kept, wanted=kept.bare)
            self._is_out(kept)
            return slot

    def vacate(self) -> None:
        """Let states over the limit, and those that nobody wants, out of their slots. Call with the lock."""
        for kept in self._slots.vacate():
            self._is_out(kept)

    def _is_out(self, kept: Kept) -> None:
        """A state is in no slot any more."""
        if kept.copy is not None and kept.current:
            self._host.ensure(kept)

    def move_out(self) -> None:
        """Copy the states whose slots the coming step overwrites."""
        with self._lock:
            for kept in self._slots.leaving():
                self._leave(kept)
            self._free_vacated()
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self._next_to_copy() is not None:
            self.copier.wake()

    def _next_to_copy(self) -> Kept | None:
        return None if self._ledger is None else self._slots.next_to_copy(self._ledger.free)

    def _leave(self, kept: Kept) -> None:
        """Copy a leaving state, if somebody still wants it. Where memory is short it is lost, never wrong."""
        slot = self._slots.leave(kept)
        if slot is None or not (kept.current or kept.users):
            return
        self.copies["step"] += 1
        try:
            kept.copy = self._export(slot)
        except (MemoryError, RuntimeError):
            log.exception("a state could not be copied to host memory")
            self._host.lose(kept)
            return
        if kept.current:
            self._host.put(kept)

    # --- the copier, the writer thread, and who exports ---

    def copy_ahead(self) -> bool:
        """Copy the state that needs it first out of its slot; False when enough slots can be taken as they are."""
        with self._lock:
            kept = self._next_to_copy()
            if kept is None:
                return False
            slot = self._begin_copy(kept)
        self._copy_out(kept, slot)
        return True

    def record_of(self, kept: Kept, wanted: Callable[[], bool] = lambda: True) -> StateRecord | None:
        """A state's record, copied out of its slot if need be; None when it is not wanted. Blocks; raises StateLost."""
        with self._lock:
            if not wanted():
                return None
            self._leave(kept)
            if kept.copy is not None or kept.slot is None:
                snapshot = kept.snapshot
                slot = None
            else:
                slot = self._begin_copy(kept)
        return kept.record(snapshot if slot is None else self._copy_out(kept, slot))

    def _begin_copy(self, kept: Kept) -> int:
        """The slot of a state, which is not given away before `_copy_out` has ended. Call with the lock."""
        assert kept.slot is not None
        kept.copying += 1
        kept.copied = True
        self.copies["beside"] += 1
        return kept.slot

    def _copy_out(self, kept: Kept, slot: int) -> Snapshot:
        """Copy a state out of its slot, beside the steps; L2 has it then as well, while it is current."""
        try:
            snapshot = self._export(slot)
            with self._lock:
                if kept.bare:
                    kept.copy = snapshot
                    if kept.current:
                        self._host.put(kept)
            return snapshot
        finally:
            with self._lock:
                kept.copying -= 1
                self.vacate()
