"""`HostShelf`: finished states in host memory: L2 within its budget, and what L3 lacks on its way there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rwkv_lightning.core.cache.kept import Kept
from rwkv_lightning.core.errors import StateLost

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.tiers import Held, MemoryTier

log = logging.getLogger(__name__)

LOST = (
    "the last turn of this session was lost (the state store failed and memory was short), and an older state is not "
    "given in its place: delete the session with /state/delete, or use another session_id"
)


class HostShelf:
    """Which kept states are in host memory. Not thread-safe: the cache's lock guards it.

    A state that L3 has not got yet must not be lost when L2 has no room for it. It then stays beside L2, within
    `spare` bytes; beyond these the oldest is given up. Unless it is in a slot as well, its session answers with an
    error from then on: an older state in L3 is never given for it.

    Args:
        tier: L2.
        spare: bytes for what is on its way to L3.
        press: called when more than half of them are used, so that the writer does not wait.
        on_prefix_out: told the key of a prefix that L2 had no room for.
    """

    def __init__(
        self, tier: MemoryTier, spare: int, press: Callable[[], None], on_prefix_out: Callable[[str], None]
    ) -> None:
        self.tier = tier
        self.lost: set[str] = set()  # keys whose last state is gone
        self._spare = spare
        self._press = press
        self._on_prefix_out = on_prefix_out
        self._unstored: dict[str, Kept] = {}  # L3 lacks them
        self._beside: dict[str, Kept] = {}  # those of them that are in memory beside L2, the oldest first
        self._beside_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all states in host memory."""
        return self.tier.nbytes + self._beside_bytes

    def find(self, key: str) -> Kept | None:
        """The current state of a key. Raises StateLost when it is gone."""
        if key in self.lost:
            raise StateLost(LOST, param="session_id")
        found = self.tier.get(key) or self._beside.get(key)
        return found if isinstance(found, Kept) else None

    def current(self) -> Iterator[Kept]:
        """The current states in host memory."""
        yield from (held for held in self.tier.sessions() if isinstance(held, Kept))
        yield from self._beside.values()

    def touch(self, kept: Kept) -> None:
        """A state in a slot was used: its copy in L2, if there is one, is as recent."""
        self.tier.get(kept.key)

    def ensure(self, kept: Kept) -> None:
        """A current state is in no slot any more: its copy must be where it is found."""
        if kept.key not in self.tier and kept.key not in self._beside:
            self.put(kept)

    def put(self, held: Held) -> bool:
        """Into L2; whether it had room there."""
        gone = self.tier.put(held)
        for other in gone:
            if isinstance(other, Kept):
                self._fall_out(other)
            else:
                self._on_prefix_out(other.key)
        return held not in gone

    def expect(self, kept: Kept) -> None:
        """L3 lacks this state, until `release`."""
        self._unstored[kept.key] = kept

    def release(self, kept: Kept) -> None:
        """L3 has the state, or nobody wants it any more."""
        if self._unstored.get(kept.key) is kept:
            del self._unstored[kept.key]
            self._take_beside(kept.key)
            self._forget(kept)

    def displace(self, key: str) -> Kept | None:
        """Whatever is held under a key is out of date; the state, if there was one."""
        self.lost.discard(key)
        held = self.tier.remove(key)
        unstored = self._unstored.pop(key, None)
        self._take_beside(key)
        return held if isinstance(held, Kept) else unstored

    def lose(self, kept: Kept) -> None:
        """A state is gone for good."""
        self.tier.remove(kept.key)
        self.release(kept)
        if kept.current:
            kept.current = False
            self.lost.add(kept.key)
            log.error("the last turn of session %r is lost: memory for states (--l2-bytes) is short", kept.owner.shown)

    def give_up(self, kept: Kept) -> bool:
        """The store refused a state: it is lost unless a slot or L2 has it. True when it is still there."""
        if kept.current and kept.slot is None and kept.key not in self.tier:
            self.lose(kept)
        return kept.current

    def _fall_out(self, kept: Kept) -> None:
        """L2 has no room for a state."""
        if self._unstored.get(kept.key) is kept:
            self._beside[kept.key] = kept
            self._beside_bytes += kept.nbytes
            self._shrink()
        else:
            self._forget(kept)

    def _shrink(self) -> None:
        if 2 * self._beside_bytes > self._spare:
            self._press()
        while self._beside_bytes > self._spare:
            oldest = next(iter(self._beside.values()))
            if oldest.slot is None:
                self.lose(oldest)
            else:
                self._take_beside(oldest.key)
                self._forget(oldest)

    def _take_beside(self, key: str) -> None:
        kept = self._beside.pop(key, None)
        if kept is not None:
            self._beside_bytes -= kept.nbytes

    def _forget(self, kept: Kept) -> None:
        """Free a copy that no tier holds and no turn uses."""
        if not kept.users and kept.key not in self.tier:
            kept.copy = None
