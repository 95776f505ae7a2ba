"""`MemoryTier` (L2): states in host memory, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Protocol

from rwkv_lightning.core.cache.keys import is_prefix_key


class Held(Protocol):
    """What the tier keeps: a session's state or a prefix. Its size is asked for once, when it is put."""

    @property
    def key(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


class MemoryTier:
    """States by key, at most `budget` bytes of them. Thread-safe.

    When room is needed, prefixes go first, then sessions; of each the least recently used. What falls out is handed
    to the caller, who knows whether it is stored elsewhere.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = Lock()
        self._nbytes = 0
        self._prefixes: OrderedDict[str, tuple[Held, int]] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[Held, int]] = OrderedDict()

    def put(self, state: Held) -> list[Held]:
        """Keep a state in place of any other of its key; the states that had no room, perhaps this one itself."""
        nbytes = state.nbytes
        with self._lock:
            self._drop(state.key)
            if nbytes > self.budget:
                return [state]
            self._shelf(state.key)[state.key] = state, nbytes
            self._nbytes += nbytes
            return self._shrink()

    def get(self, key: str) -> Held | None:
        """The state of a key, which becomes the most recently used, or None."""
        with self._lock:
            shelf = self._shelf(key)
            if key not in shelf:
                return None
            shelf.move_to_end(key)
            return shelf[key][0]

    def remove(self, key: str) -> Held | None:
        """Take a state out; None when there is none."""
        with self._lock:
            return self._drop(key)

    def sessions(self) -> list[Held]:
        """The sessions and branches held, the least recently used first."""
        with self._lock:
            return [state for state, _ in self._sessions.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return self._nbytes

    def counts(self) -> tuple[int, int]:
        """How many sessions and branches, and how many prefixes."""
        return len(self._sessions), len(self._prefixes)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._shelf(key)

    def __len__(self) -> int:
        return sum(self.counts())

    def _shelf(self, key: str) -> OrderedDict[str, tuple[Held, int]]:
        return self._prefixes if is_prefix_key(key) else self._sessions

    def _drop(self, key: str) -> Held | None:
        state, nbytes = self._shelf(key).pop(key, (None, 0))
        self._nbytes -= nbytes
        return state

    def _shrink(self) -> list[Held]:
        gone = []
        while self._nbytes > self.budget:
            _, (state, nbytes) = (self._prefixes or self._sessions).popitem(last=False)
            self._nbytes -= nbytes
            gone.append(state)
        return gone
