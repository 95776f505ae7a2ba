"""Who holds which slot: numbers only, the states themselves live in `SlotStates` (interfaces.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class LedgerMismatch(RuntimeError):
    """The books do not balance: a slot was given twice, returned twice, or lost."""


def _nothing_to_reclaim() -> int | None:
    return None


class SlotLedger:
    """Slots 0 .. total-1, each either free or held by exactly one owner.

    Args:
        total: number of slots, at least 1.
        reclaim: asked when no slot is free. A cache that keeps finished states in slots of its own gives one up by
            returning its number (it has put the state elsewhere by then, or dropped it), else None.
    """

    def __init__(self, total: int, reclaim: Callable[[], int | None] = _nothing_to_reclaim) -> None:
        if total < 1:
            raise ValueError(f"a ledger needs at least one slot, not {total}")
        self.total = total
        self._reclaim = reclaim
        self._free = list(range(total - 1, -1, -1))  # the most recently returned slot is handed out next
        self._owners: dict[int, object] = {}

    @property
    def free(self) -> int:
        """Slots nobody holds (those that a cache could give up are not among them)."""
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._owners)

    def acquire(self, owner: object) -> int | None:
        """A slot for `owner`, a reclaimed one if need be, or None."""
        if self._free:
            slot = self._free.pop()
            self._owners[slot] = owner
            return slot
        reclaimed = self._reclaim()
        if reclaimed is not None:
            self.transfer(reclaimed, owner)
        return reclaimed

    def transfer(self, slot: int, owner: object) -> None:
        """Hand a held slot to another owner without freeing it."""
        self._require_held(slot, "transferred")
        self._owners[slot] = owner

    def release(self, slot: int) -> None:
        self._require_held(slot, "released")
        del self._owners[slot]
        self._free.append(slot)

    def owner(self, slot: int) -> object | None:
        return self._owners.get(slot)

    def held(self) -> Iterable[tuple[int, object]]:
        """(slot, owner) of every held slot."""
        return self._owners.items()

    def check_integrity(self) -> None:
        """Raises LedgerMismatch unless every slot is in exactly one place."""
        free, held = set(self._free), set(self._owners)
        counts = f"{len(self._free)} free + {len(held)} held, {self.total} in total"
        if len(free) != len(self._free):
            raise LedgerMismatch(f"a slot is in the free list twice: {counts}")
        if both := free & held:
            raise LedgerMismatch(f"slots {sorted(both)} are free and held at once: {counts}")
        if lost := set(range(self.total)) ^ (free | held):
            raise LedgerMismatch(f"slots {sorted(lost)} are lost or unknown: {counts}")

    def _require_held(self, slot: int, verb: str) -> None:
        if slot not in self._owners:
            raise LedgerMismatch(f"slot {slot} was {verb} but nobody holds it: {self.free} free, {self.used} held")
