"""`MemoryStore`: a state store in dictionaries, the plainest thing that keeps the rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import ClassVar

from rwkv_lightning.core.errors import StartError, StoreError
from rwkv_lightning.core.interfaces import StateInfo, StoredState, StoreUsage


@dataclass
class Disk:
    """What outlives a store that is closed."""

    states: dict[str, StoredState] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    next_branch: dict[str, int] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    taken: bool = False


class MemoryStore:
    """Implements `interfaces.StateStore`; every location is a name."""

    disks: ClassVar[dict[str, Disk]] = {}

    def __init__(self) -> None:
        self.location = ""
        self._disk: Disk | None = None
        self._lock = RLock()

    @property
    def disk(self) -> Disk:
        if self._disk is None:
            raise StoreError("the store is not open", "other")
        return self._disk

    def open(self, location: str | None = None) -> None:
        if self._disk is not None:
            raise StoreError("the store is open already", "other")
        disk = self.disks.setdefault(location or "", Disk())
        if disk.taken:
            raise StartError(f"'{location}' is in use: give another --state-db")
        disk.taken, self._disk, self.location = True, disk, location or ""

    def close(self) -> None:
        if self._disk is not None:
            self._disk.taken = False
        self._disk = None

    def put(self, states: Sequence[StoredState]) -> None:
        with self._lock:
            for state in states:
                info = state.info
                self.disk.states[info.key] = state
                self.disk.used[info.key] = info.created
                if info.branch:
                    self.disk.next_branch[info.session] = max(self._next(info.session), info.branch + 1)

    def get(self, key: str) -> bytes | None:
        state = self.disk.states.get(key)
        return state.data if state else None

    def info(self, key: str) -> StateInfo | None:
        state = self.disk.states.get(key)
        return state.info if state else None

    def family(self, session: str) -> list[StateInfo]:
        family = [info for info in self._sessions() if info.session == session]
        return sorted(family, key=lambda info: (info.branch, info.key))

    def sessions(self, *, limit: int | None = None, offset: int = 0, exclude: Collection[str] = ()) -> list[StateInfo]:
        kept = [info for info in self._sessions() if info.key not in set(exclude)]
        kept.sort(key=lambda info: (-info.created, info.key))
        return kept[offset:] if limit is None else kept[offset : offset + limit]

    def count(self, exclude: Collection[str] = ()) -> int:
        return len(self.sessions(exclude=exclude))

    def prefixes(self, model: str, limit: int | None = None) -> list[tuple[StateInfo, bytes]]:
        with self._lock:
            found = [state for state in self.disk.states.values() if state.info.kind == "prefix"]
            found = [state for state in found if state.info.model == model]
            found.sort(key=lambda state: -self.disk.used[state.info.key])
            return [(state.info, state.tokens) for state in found[:limit]]

    def touch(self, keys: Collection[str], now: float) -> None:
        with self._lock:
            for key in self.disk.used.keys() & set(keys):
                self.disk.used[key] = max(now, self.disk.used[key])

    def delete(self, keys: Collection[str]) -> int:
        with self._lock:
            there = self.disk.states.keys() & set(keys)
            for key in there:
                del self.disk.states[key], self.disk.used[key]
            return len(there)

    def evict(self, budget: int) -> list[str]:
        with self._lock:
            order = sorted(self.disk.states.values(), key=lambda s: (s.info.kind, self.disk.used[s.info.key]))
            gone: list[str] = []
            for state in order:
                if self.usage().nbytes > budget:
                    self.delete([state.info.key])
                    gone.append(state.info.key)
            return gone

    def reserve_branches(self, session: str, count: int = 1, at_least: int = 1) -> int:
        with self._lock:
            first = max(at_least, self._next(session))
            self.disk.next_branch[session] = first + count
            return first

    def usage(self) -> StoreUsage:
        with self._lock:
            infos = [state.info for state in self.disk.states.values()]
            sessions = sum(info.kind == "session" for info in infos)
            return StoreUsage(sessions, len(infos) - sessions, sum(info.nbytes for info in infos))

    def get_meta(self, name: str) -> str | None:
        return self.disk.meta.get(name)

    def set_meta(self, name: str, value: str) -> None:
        self.disk.meta[name] = value

    def check(self) -> Sequence[str]:
        return [] if self.disk.used.keys() == self.disk.states.keys() else ["times without states"]

    def _next(self, session: str) -> int:
        return self.disk.next_branch.get(session, 1)

    def _sessions(self) -> list[StateInfo]:
        with self._lock:
            return [state.info for state in self.disk.states.values() if state.info.kind == "session"]
