"""Stores that fail when they are told to, for tests of what stands above them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cache_memory import MemoryStore

from rwkv_lightning.core.errors import StoreError, StoreFailure
from rwkv_lightning.core.interfaces import StateInfo, StoredState, StoreUsage


class FlakyStore(MemoryStore):
    """Fails the n-th call from now on, or with `lasting` every one from then on; only calls of `kinds`, if given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self._fails: Callable[[str, int], bool] = lambda kind, call: False
        self._reason: StoreFailure = "other"
        self._counting = threading.Lock()

    def fail(
        self, nth: int = 1, *, lasting: bool = False, kinds: Collection[str] = (), reason: StoreFailure = "other"
    ) -> None:
        self.calls, self._reason = 0, reason
        self._fails = lambda kind, call: call == nth or (lasting and call > nth)
        if kinds:
            self._fails = lambda kind, call: kind in kinds

    def work(self) -> None:
        self._fails = lambda kind, call: False

    def _call(self, kind: str) -> None:
        with self._counting:
            self.calls += 1
            if self._fails(kind, self.calls):
                raise StoreError(f"{kind} fails by order", self._reason)

    def put(self, states: Sequence[StoredState]) -> None:
        self._call("put")
        super().put(states)

    def get(self, key: str) -> bytes | None:
        self._call("get")
        return super().get(key)

    def info(self, key: str) -> StateInfo | None:
        self._call("info")
        return super().info(key)

    def family(self, session: str) -> list[StateInfo]:
        self._call("family")
        return super().family(session)

    def sessions(self, *, limit: int | None = None, offset: int = 0, exclude: Collection[str] = ()) -> list[StateInfo]:
        self._call("sessions")
        return super().sessions(limit=limit, offset=offset, exclude=exclude)

    def prefixes(self, model: str, limit: int | None = None) -> list[tuple[StateInfo, bytes]]:
        self._call("prefixes")
        return super().prefixes(model, limit)

    def touch(self, keys: Collection[str], now: float) -> None:
        self._call("touch")
        super().touch(keys, now)

    def delete(self, keys: Collection[str]) -> int:
        self._call("delete")
        return super().delete(keys)

    def evict(self, budget: int) -> list[str]:
        self._call("evict")
        return super().evict(budget)

    def reserve_branches(self, session: str, count: int = 1, at_least: int = 1) -> int:
        self._call("reserve_branches")
        return super().reserve_branches(session, count, at_least)

    def usage(self) -> StoreUsage:
        return super().usage()


class GatedStore(MemoryStore):
    """Lets a test stand between the beginning and the end of a call: `hold` the kinds, then `release` them."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self._go = threading.Event()
        self._held: Collection[str] = ()

    def hold(self, *kinds: str) -> None:
        self.entered.clear()
        self._go.clear()
        self._held = kinds

    def release(self) -> None:
        self._held = ()
        self._go.set()

    def _wait(self, kind: str) -> None:
        if kind in self._held:
            self.entered.set()
            assert self._go.wait(10)

    def put(self, states: Sequence[StoredState]) -> None:
        self._wait("put")
        super().put(states)

    def get(self, key: str) -> Any:
        data = super().get(key)
        self._wait("get")
        return data
