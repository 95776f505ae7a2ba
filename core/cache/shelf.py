"""`SlotShelf` (L1): finished states that stay in the slots in which they ended."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.kept import Kept


class SlotShelf:
    """Which kept states are in slots. Not thread-safe: the cache's lock guards it.

    A slot whose state is `bare` costs a copy before anybody else may have it, so others go first.

    A state is resident, or unwanted (over the limit, replaced or deleted: its slot is vacated as soon as nobody needs
    the numbers in it), or leaving (its slot is given away, and is overwritten when the coming step runs).

    Args:
        limit: most resident states.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._resident: OrderedDict[str, Kept] = OrderedDict()  # the least recently used first
        self._unwanted: dict[Kept, None] = {}
        self._vacated: list[int] = []  # slots of nobody's state, which the ledger does not know of yet
        self._leaving: dict[Kept, int] = {}  # their slots; `Kept.slot` is None already, as nobody may copy from there

    def put(self, kept: Kept, slot: int) -> None:
        """A finished state stays in its slot. Over the limit the least recently used is unwanted."""
        kept.slot = slot
        self._resident[kept.key] = kept
        while len(self._resident) > self._limit:
            _, oldest = self._resident.popitem(last=False)
            self._unwanted[oldest] = None

    def find(self, key: str) -> Kept | None:
        """The current state of a key, if it is in a slot; it becomes the most recently used."""
        kept = self._resident.get(key)
        if kept is not None:
            self._resident.move_to_end(key)
            return kept
        others = itertools.chain(self._unwanted, self._leaving)
        return next((kept for kept in others if kept.current and kept.key == key), None)

    def current(self) -> Iterator[Kept]:
        """The states in slots that are current."""
        others = itertools.chain(self._unwanted, self._leaving)
        return itertools.chain(self._resident.values(), (kept for kept in others if kept.current))

    def demote(self, kept: Kept) -> None:
        """A state is out of date: its slot goes first."""
        if self._resident.get(kept.key) is kept:
            del self._resident[kept.key]
            self._unwanted[kept] = None

    def vacate(self) -> list[Kept]:
        """Let the unwanted states that need no copy out of their slots; what is left in these is nobody's."""
        out = [kept for kept in self._unwanted if not kept.copying and not kept.bare]
        self._vacated += [self.give_up(kept, wanted=False) for kept in out]
        return out

    def next_vacated(self) -> int | None:
        """A vacated slot, which the ledger still counts as held: for the engine thread. None when there is none."""
        return self._vacated.pop() if self._vacated else None

    def next_out(self) -> Kept | None:
        """Whose slot goes next: one that needs no copy, an unwanted one, the least recently used, in this order.

        None while all are being copied.
        """
        bare = None
        for kept in self._in_turn():
            if not kept.copying:
                if not kept.bare:
                    return kept
                bare = bare or kept
        return bare

    def next_to_copy(self, free: int) -> Kept | None:
        """The next state to be copied ahead, so that a step finds slots that it can take as they are.

        Those over the limit are copied at once. Of the resident ones those that go next, so that half of the limit can
        be taken, free slots included. None when that is so.

        Args:
            free: slots that nobody holds.
        """
        ahead = -(-self._limit // 2) - free - len(self._vacated)
        candidates = itertools.islice(self._in_turn(), max(ahead, len(self._unwanted)))
        return next((kept for kept in candidates if kept.current and kept.bare and not kept.copied), None)

    def _in_turn(self) -> Iterator[Kept]:
        return itertools.chain(self._unwanted, self._resident.values())

    def give_up(self, kept: Kept, *, wanted: bool) -> int:
        """A state's slot, for somebody else.

        Args:
            wanted: its numbers are still to be copied: it is leaving until `leave`.
        """
        if kept in self._unwanted:
            del self._unwanted[kept]
        else:
            del self._resident[kept.key]
        slot, kept.slot = kept.slot, None
        assert slot is not None, "what is on the shelf is in a slot"
        if wanted:
            self._leaving[kept] = slot
        return slot

    def leave(self, kept: Kept) -> int | None:
        """The slot of a leaving state, which whoever asks must copy at once; None when it is not leaving (any more)."""
        return self._leaving.pop(kept, None)

    def leaving(self) -> list[Kept]:
        """The states whose slots the coming step overwrites."""
        return list(self._leaving)

    @property
    def slots_held(self) -> int:
        """How many slots are the shelf's by the ledger: those that hold states, and the vacated ones."""
        return len(self) + len(self._vacated)

    def __len__(self) -> int:
        """Slots that hold states."""
        return len(self._resident) + len(self._unwanted)
