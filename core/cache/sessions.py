"""Sessions: turns that a deletion may void, the numbers of branches, and the listing over all tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock, RLock
from typing import NamedTuple, TypeVar

from rwkv_lightning.core.cache.keys import SEPARATOR, SessionKey
from rwkv_lightning.core.errors import StoreError
from rwkv_lightning.core.interfaces import StateStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deletion:
    """What one /state/delete is about.

    Args:
        name: a session's id, or a branch as the listing shows it (`<id>:<number>`).
        branches: delete everything named `<name>:*` too (`delete_prefix`).
    """

    name: str
    branches: bool = False

    @property
    def session(self) -> str:
        """The id of the session it is in."""
        return self.name.partition(SEPARATOR)[0]

    def covers(self, key: SessionKey) -> bool:
        """Whether this state is to be deleted; from which initial state it began does not matter."""
        return key.shown == self.name or (self.branches and key.shown.startswith(self.name + SEPARATOR))

    def found(self, deleted: Iterable[SessionKey], voided: int = 0) -> bool:
        """False is answered with 404: the very session does not exist, and its branches were not asked for.

        Args:
            deleted: the keys that were in any tier.
            voided: how many running turns it voided; a session in its first turn exists.
        """
        return self.branches or voided > 0 or any(key.shown == self.name for key in deleted)

    def apply(self, store: StateStore) -> list[SessionKey]:
        """Delete from a store; what was there. Blocks; raises StoreError."""
        infos = [info for info in store.family(self.session) if self.covers(SessionKey.parse(info.key))]
        store.delete([info.key for info in infos])
        return [SessionKey.parse(info.key) for info in infos]


@dataclass(eq=False, slots=True)
class Turn:
    """A running turn. With `forks` it will store a new branch of the session, else the session itself.

    Args:
        written: ends when L3 has what the turn left; None before it left anything, and without L3.
    """

    session: str
    forks: bool = False
    voided: bool = False
    written: Future[None] | None = None

    def hit_by(self, deletion: Deletion) -> bool:
        """Whether what this turn is going to store would be deleted."""
        if self.forks:
            return deletion.branches and deletion.name == self.session
        return deletion.covers(SessionKey(self.session))


class Turns:
    """The running turns. A session deleted meanwhile voids them: they end normally but are not stored. Thread-safe.

    Args:
        lock: that of a cache, whose look-ups, deletions and commits exclude each other then.
    """

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._running: set[Turn] = set()

    def begin(self, turn: Turn) -> Turn:
        """Call before the earlier state is read, and `end` whatever happens."""
        with self._lock:
            self._running.add(turn)
        return turn

    def commit(self, turn: Turn, keep: Callable[[], T]) -> T | None:
        """Run `keep`, which stores the turn's state in RAM, unless the turn is voided: then None.

        No deletion comes between the check and `keep`, which must be short.
        """
        with self._lock:
            return None if turn.voided else keep()

    def end(self, turn: Turn) -> None:
        """The turn is over; further calls do nothing."""
        with self._lock:
            self._running.discard(turn)

    def void(self, deletion: Deletion) -> int:
        """Void the running turns that a deletion covers; how many. Call before deleting from the tiers."""
        with self._lock:
            hit = [turn for turn in self._running if turn.hit_by(deletion)]
            for turn in hit:
                turn.voided = True
            return len(hit)

    def __len__(self) -> int:
        return len(self._running)


class BranchNumbers:
    """Branch numbers that never repeat within a session, across restarts too. Thread-safe; may block on the store.

    While there is no store to remember them, or it fails, numbers are at least the Unix time in seconds: larger than
    any that the store has given, and than those of an earlier run.

    Args:
        reserve: `StateStore.reserve_branches`; None without a store.
        clock: Unix seconds.
    """

    def __init__(self, reserve: Callable[[str, int, int], int] | None, clock: Callable[[], float] = time.time) -> None:
        self._reserve = reserve
        self._clock = clock
        self._lock = Lock()
        self._unstored: dict[str, int] = {}  # session -> the least number that is free, where the store lags behind

    def take(self, session: str, at_least: int = 1) -> int:
        """The next number of a session, `at_least` and up."""
        with self._lock:
            self._unstored[session] = max(at_least, self._unstored.get(session, 1))
            try:
                return self._stored(session)
            except StoreError:
                number = max(self._unstored.get(session, 1), int(self._clock()))
                self._unstored[session] = number + 1
                return number

    def _stored(self, session: str) -> int:
        if self._reserve is None:
            raise StoreError("there is no state store", "other")
        number = self._reserve(session, 1, self._unstored.get(session, 1))
        self._unstored.pop(session, None)
        return number


class Level(StrEnum):
    """A tier as /state/status names it."""

    L1 = "L1 (VRAM)"
    L2 = "L2 (RAM)"
    L3 = "Database (Disk)"


class Place(NamedTuple):
    """Where a session's or branch's state is, and the Unix time at which it was stored."""

    key: SessionKey
    level: Level
    updated: float


@dataclass(frozen=True, slots=True)
class Listing:
    """Sessions and branches, each counted once, at its fastest level; `places` is the page that was asked for."""

    places: list[Place]
    l1: int
    l2: int
    l3: int

    @property
    def total(self) -> int:
        return self.l1 + self.l2 + self.l3


def listing(
    resident: Iterable[Place], store: StateStore | None, *, limit: int | None = None, offset: int = 0
) -> Listing:
    """A page of everything there is: L1, then L2, then L3, the newest first within each. Blocks on the store.

    Args:
        resident: what is in L1 and L2; the fastest counts where a key comes twice.
        store: L3, None without.
        limit: the most places in the page; None for all from `offset` on.
    """
    fastest: dict[SessionKey, Place] = {}
    for place in sorted(resident, key=lambda place: place.level, reverse=True):
        fastest[place.key] = place
    first = sorted(fastest.values(), key=lambda place: (place.level, -place.updated, str(place.key)))
    in_l1 = sum(place.level == Level.L1 for place in first)
    page = first[offset:] if limit is None else first[offset : offset + limit]
    stored = 0
    if store is not None:
        keys = [str(key) for key in fastest]
        stored = store.count(exclude=keys)
        rest = None if limit is None else limit - len(page)
        infos = store.sessions(limit=rest, offset=max(0, offset - len(first)), exclude=keys) if rest != 0 else []
        page = page + [Place(SessionKey.parse(info.key), Level.L3, info.created) for info in infos]
    return Listing(page, in_l1, len(first) - in_l1, stored)
