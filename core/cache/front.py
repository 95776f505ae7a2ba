"""`Sessions`: what routes ask of the cache, in the event loop; everything that blocks runs in worker threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

from rwkv_lightning.core.cache.hierarchy import StateCache
from rwkv_lightning.core.cache.kept import Kept
from rwkv_lightning.core.cache.keys import SessionKey, parse_name
from rwkv_lightning.core.cache.leases import Leases
from rwkv_lightning.core.cache.record import ANEW, StateHeader, StateRecord
from rwkv_lightning.core.cache.sessions import BranchNumbers, Deletion, Level, Listing, Turn, listing
from rwkv_lightning.core.errors import (
    InvalidField,
    NotFound,
    StateCorrupt,
    StateError,
    StateExists,
    StateForeign,
    StateLost,
    StateUnavailable,
    StoreError,
)
from rwkv_lightning.core.interfaces import StateInfo, StateStore

P = ParamSpec("P")
T = TypeVar("T")

MANY_TOKENS = 4096  # hashing them takes longer than going to another thread


class Sessions:
    """Sessions and branches: opening, keeping apart, listing, moving, deleting.

    Args:
        has_initial: whether a sequence can begin from an initial state here (`InitialStates.has`); may block.
    """

    def __init__(self, cache: StateCache, has_initial: Callable[[str], bool] = lambda initial: not initial) -> None:
        self._cache = cache
        self._has_initial = has_initial
        self.turns = cache.turns
        self.leases = Leases(cache.config.waiting_turns)
        self._numbers = BranchNumbers(None if cache.store is None else self._reserver(cache.store))

    def _reserver(self, store: StateStore) -> Callable[[str, int, int], int]:
        def reserve(session: str, count: int, at_least: int) -> int:
            return self._cache.watch.run(store.reserve_branches, session, count, at_least)

        return reserve

    # --- turns ---

    async def open(self, key: SessionKey) -> Kept | None:
        """The state kept under a key, from the fastest tier that has it; in use until `close`.

        Raises StateError when it cannot be used, or is lost; StateUnavailable when L3 cannot be asked.
        """
        kept = self._cache.find(key)
        if kept is None:
            kept = await self._from_store(key)
            level = Level.L3
        else:
            level = Level.L2 if kept.slot is None else Level.L1
            self._note_use(kept)
        if kept is not None:
            self._cache.resumed[level] += 1
            await self._hash(kept)
        return kept

    def close(self, kept: Kept | None) -> None:
        """The turn that went on from a state has ended."""
        if kept is not None:
            self._cache.close(kept)

    async def new_branch(self, session: str) -> int:
        """A branch number that the session never had, across restarts too."""
        return await asyncio.to_thread(self._numbers.take, session)

    async def durable(self, turn: Turn) -> None:
        """With --state-durability sync: wait until L3 has what a turn left. Raises StateUnavailable."""
        if not self._cache.config.sync or turn.voided:
            return
        if turn.written is None:
            raise StateUnavailable("there is no state store, so this turn is in RAM only", retry_after=5.0)
        try:
            await asyncio.shield(asyncio.wrap_future(turn.written))
        except StoreError as error:
            raise unavailable() from error

    def _note_use(self, kept: Kept) -> None:
        if self._cache.writer is not None:
            self._cache.writer.touch(kept.key)

    async def _hash(self, kept: Kept) -> None:
        """Have the header made here, so that the engine thread need not when the turn has ended."""
        if len(kept.news) < MANY_TOKENS:
            _ = kept.header
            return
        try:
            await asyncio.to_thread(lambda: kept.header)
        except BaseException:
            self.close(kept)
            raise

    async def _from_store(self, key: SessionKey) -> Kept | None:
        with self._cache.lock:
            loading = self._cache.loads.begin(key)
        try:
            record = await asyncio.to_thread(self._load, key)
            kept = self._cache.loaded(loading, record)
        finally:
            with self._cache.lock:
                self._cache.loads.end(loading)
        if kept is not None:
            self._note_use(kept)
        return kept

    def _load(self, key: SessionKey) -> StateRecord | None:
        """A record out of L3, checked. Blocks. Raises StateError, StateUnavailable."""
        store, expected = self._cache.store, replace(self._cache.expected, key=str(key), initial=key.initial)
        data = None if store is None else self._ask(store.get, str(key))
        with self._counted():
            if data is not None:
                return StateRecord.from_bytes(data, expected)
            self._refuse_stranded(key)
            return None

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the record that is refused."""
        try:
            yield
        except StateError as error:
            self._cache.refused[error.code] += 1
            raise

    def _refuse_stranded(self, key: SessionKey) -> None:
        """Raises StateForeign where the session has a state that no request can reach here, instead of beginning anew.

        One under another initial state that this server has got is another session.
        """
        for initial in self._initials_of(key):
            if not self._has_initial(initial):
                raise StateForeign(
                    f"session {key.shown!r} {_began_from(initial)}, from which nothing can begin on this server: "
                    f"{_way_to(initial)}, or {ANEW}",
                    param="session_id",
                )

    def _initials_of(self, key: SessionKey) -> set[str]:
        """The initial states under which there are states of a session or branch. Blocks."""
        store = self._cache.store
        if store is not None:
            owners = [SessionKey.parse(info.key) for info in self._ask(store.family, key.session)]
        else:
            with self._cache.lock:
                owners = [kept.owner for kept in self._cache.current()]
        return {owner.initial for owner in owners if (owner.session, owner.branch) == (key.session, key.branch)}

    def _ask(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """A call of the store. Blocks. Raises StateUnavailable."""
        try:
            return self._cache.watch.run(call, *args, **options)
        except StoreError as error:
            raise unavailable() from error

    # --- states that come and go ---

    async def export_bytes(self, key: SessionKey) -> bytes:
        """The record of a key, in its stored form. Raises NotFound, StateError, StateUnavailable."""
        kept = self._cache.find(key) or await self._from_store(key)
        if kept is None:
            raise NotFound(f"there is no session {key.shown!r}", param="session_id")
        try:
            return await asyncio.to_thread(self._to_bytes, kept)
        finally:
            self.close(kept)

    def _to_bytes(self, kept: Kept) -> bytes:
        return self._cache.record_of(kept).to_bytes()

    async def import_bytes(self, data: bytes, key: SessionKey | None, *, replace: bool) -> Kept:
        """Keep an exported record, under its own key or another, with the initial state that it began from.

        Raises StateError for a record that cannot be used here, StateExists where one of that key may not be replaced.
        """
        record = await asyncio.to_thread(self._read, data)
        own = SessionKey.parse(record.key)
        key = SessionKey(key.session, key.branch, own.initial) if key else own
        async with self.leases.hold(str(key)):
            if not replace and await self._exists(key):
                raise StateExists(f"session {key.shown!r} exists; import with replace=true to replace it")
            if key.branch:
                await asyncio.to_thread(self._numbers.take, key.session, key.branch)
            return self._cache.adopt(record.renamed(str(key), created=time.time()))

    def _read(self, data: bytes) -> StateRecord:
        with self._counted():
            record = StateRecord.from_bytes(data, self._cache.expected)
            try:
                key = SessionKey.parse(record.key)
                parse_name(key.shown)
            except (ValueError, InvalidField):
                raise StateCorrupt("the state is not that of a session: export a session or a branch") from None
            if not self._has_initial(key.initial):
                raise StateForeign(
                    f"the imported state {_began_from(key.initial)}, from which nothing can begin on this server: "
                    f"{_way_to(key.initial)}, then import it again"
                )
        return record

    async def _exists(self, key: SessionKey) -> bool:
        """Whether there is a state of this key, usable or not."""
        try:
            kept = self._cache.find(key)
        except StateLost:
            return True
        if kept is not None:
            self.close(kept)
            return True
        store = self._cache.store
        return store is not None and await asyncio.to_thread(self._ask, store.info, str(key)) is not None

    # --- looking and deleting ---

    async def family(self, session: str) -> list[StateInfo | StateHeader]:
        """What is known of a session and its branches, in any order. Raises StateUnavailable."""
        store = self._cache.store
        infos = [] if store is None else await asyncio.to_thread(self._ask, store.family, session)
        found: dict[str, StateInfo | StateHeader] = {info.key: info for info in infos}
        with self._cache.lock:
            held = {kept.key: kept for kept in self._cache.current() if kept.owner.session == session}
        headers = await asyncio.to_thread(lambda: {key: kept.header for key, kept in held.items()})
        return list((found | headers).values())

    async def status(self, limit: int | None, offset: int) -> Listing:
        """A page of all sessions and branches. Raises StateUnavailable."""
        places = self._cache.places()
        return await asyncio.to_thread(self._ask, listing, places, self._cache.store, limit=limit, offset=offset)

    async def delete(self, deletion: Deletion) -> bool:
        """Delete from every tier and void the turns that run; whether there was anything (`Deletion.found`).

        Raises StateUnavailable when L3 cannot delete; then nothing is deleted.
        """
        try:
            return await asyncio.to_thread(self._cache.delete, deletion)
        except StoreError as error:
            raise unavailable() from error


def _began_from(initial: str) -> str:
    return f"began from the state-tuning file of id {initial[:32]}" if initial else "began from the zero state"


def _way_to(initial: str) -> str:
    if initial:
        return "put that file into the folder that --state-dir names, or start the server with it as --initial-state"
    return "start the server without --initial-state"


def unavailable() -> StateUnavailable:
    return StateUnavailable(
        "the state store cannot be used at the moment; sessions that are in memory go on", retry_after=5.0
    )
