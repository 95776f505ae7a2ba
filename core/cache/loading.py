"""`Loads`: records on their way from L3, and what overtakes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rwkv_lightning.core.cache.keys import SessionKey


@dataclass(eq=False, slots=True)
class Loading:
    """A record on its way from L3. Void once its key was deleted, or something newer kept under it."""

    key: SessionKey
    void: bool = False


class Loads:
    """The loads under way. Not thread-safe: the cache's lock guards it."""

    def __init__(self) -> None:
        self._running: set[Loading] = set()

    def begin(self, key: SessionKey) -> Loading:
        """A record is about to be read."""
        loading = Loading(key)
        self._running.add(loading)
        return loading

    def end(self, loading: Loading) -> None:
        """It was read, or could not be."""
        self._running.discard(loading)

    def overtake(self, covers: Callable[[SessionKey], bool]) -> None:
        """What is being read under these keys is out of date."""
        for loading in self._running:
            loading.void = loading.void or covers(loading.key)

    def __len__(self) -> int:
        return len(self._running)
