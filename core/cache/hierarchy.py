"""`StateCache`: the cache hierarchy of one model. L1 are slots of the running pool, L2 host memory, L3 a store.

Three threads meet here: the event loop opens, lists and deletes; the engine thread keeps finished states, gives up
slots and looks prefixes up; the writer thread copies states out of their slots and stores them. A state lives in
exactly one `Kept`, whose place changes under this object's lock; its numbers are never changed by anybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from rwkv_lightning.core.cache.kept import Kept, SessionTarget
from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.leases import Leases
from rwkv_lightning.core.cache.record import Expected, StateHeader, StateRecord
from rwkv_lightning.core.cache.sessions import BranchNumbers, Deletion, Level, Listing, Place, Turns, listing
from rwkv_lightning.core.cache.tiers import MemoryTier
from rwkv_lightning.core.cache.writer import Writer
from rwkv_lightning.core.errors import NotFound, StateError, StateExists, StateUnavailable, StoreError
from rwkv_lightning.core.interfaces import StateInfo, StateStore, StoredState

if TYPE_CHECKING:
    from rwkv_lightning.core.ledger import SlotLedger
    from rwkv_lightning.core.sequence import Sequence

log = logging.getLogger(__name__)

Export = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Budgets and habits of the hierarchy.

    Args:
        l1_slots: most slots that finished states may keep.
        l2_bytes: host memory for states.
        l3_bytes: what the store may use.
        flush_interval: seconds after which an answered turn is in L3.
        sync: an answer waits until its turn is in L3.
        waiting_turns: turns that may wait for one session.
    """

    l1_slots: int
    l2_bytes: int
    l3_bytes: int
    flush_interval: float
    sync: bool
    waiting_turns: int = 16


class StateCache:
    """Sessions and branches over the three tiers.

    Args:
        expected: what a stored record must be to be used with this model.
        store: L3, open; None to go without.
        export: copies a slot to host memory (`SlotStates.export`).
        text_of: the text of generated tokens, for people.
        pin: host memory is page-locked, for a device.
    """

    def __init__(
        self,
        config: CacheConfig,
        expected: Expected,
        store: StateStore | None,
        export: Export,
        text_of: Callable[[Iterable[int]], str],
        *,
        pin: bool = False,
    ) -> None:
        self.config = config
        self.leases = Leases(config.waiting_turns)
        self.turns = Turns()
        self.memory = MemoryTier(config.l2_bytes, pin=pin)
        self.branches = BranchNumbers(store.reserve_branches if store else None)
        self.writer = Writer(store, config.flush_interval, config.l3_bytes) if store else None
        self.store = store
        self.expected = expected
        self.refused: Counter[str] = Counter()  # records that were not loaded, by error code
        self.resumed: Counter[Level] = Counter()  # turns that went on from each level
        self._export = export
        self._text_of = text_of
        self._lock = RLock()
        self._resident: OrderedDict[str, Kept] = OrderedDict()  # L1, the least recently used first
        self._unwanted: list[Kept] = []  # hold slots that the next newcomer may have
        self._leaving: list[Kept] = []  # their slots are overwritten in the coming step
        self._unstored: dict[str, Kept] = {}  # L3 lacks them: they stay in RAM whatever the budget says

    # --- the engine thread ---

    def keep(self, sequence: Sequence, ledger: SlotLedger) -> bool:
        """Keep a finished row's state where its request wants it; True when the row's slot went with it."""
        target = sequence.request.target
        if not isinstance(target, SessionTarget):
            return False
        final = final_state(sequence, target, self.expected.fingerprint, self._text_of)
        return bool(self.turns.commit(target.turn, lambda: self._install(final, sequence.slot, ledger)))

    def _install(self, final: Final, slot: int | None, ledger: SlotLedger) -> bool:
        kept = final.kept
        with self._lock:
            self._replace(kept)
            if final.snapshot is not None:
                self._remember(kept, final.snapshot)
            elif slot is not None:
                kept.slot = slot
                ledger.transfer(slot, kept)
                self._resident[str(kept.key)] = kept
                self._trim()
        self._write(kept)
        return kept.slot is not None

    def _trim(self) -> None:
        """Over the L1 budget the least recently used leaves, as soon as somebody needs its slot."""
        while len(self._resident) > self.config.l1_slots:
            _, kept = self._resident.popitem(last=False)
            self._unwanted.append(kept)

    def reclaim(self) -> int | None:
        """Give up a slot: an unwanted one, else the least recently used; a state that is needed moves to L2."""
        with self._lock:
            for kept in [*self._unwanted, *self._resident.values()]:
                if not kept.busy:
                    return self._give_up(kept)
            return None

    def _give_up(self, kept: Kept) -> int | None:
        if kept in self._unwanted:
            self._unwanted.remove(kept)
        else:
            del self._resident[str(kept.key)]
        slot = kept.slot
        if kept.record is None and (kept.current or kept.users):
            self._leaving.append(kept)
        else:
            kept.slot = None
        return slot

    def move_out(self) -> None:
        """Copy the states whose slots the coming step overwrites; call after `schedule` and before the step runs."""
        with self._lock:
            for kept in self._leaving:
                self._leave(kept)
            self._leaving.clear()

    def _leave(self, kept: Kept) -> None:
        assert kept.slot is not None
        self._remember(kept, self._export(kept.slot))
        kept.slot = None

    @property
    def slots_held(self) -> int:
        """Slots of the pool that hold finished states."""
        with self._lock:
            return len(self._resident) + len(self._unwanted)

    # --- the writer thread ---

    def stored_form(self, kept: Kept) -> StoredState | None:
        """A state's record as the store takes it; None when a newer one has taken its place."""
        with self._lock:
            if not kept.current:
                return None
        return self._record_of(kept).to_stored()

    def _record_of(self, kept: Kept) -> StateRecord:
        """A state's copy in host memory, made if need be. Called in a worker thread."""
        with self._lock:
            if kept in self._leaving:  # the step that overwrites its slot waits for this lock
                self._leaving.remove(kept)
                self._leave(kept)
            kept.busy = kept.record is None
            record = kept.record
        return record or self._copy_out(kept)

    def _copy_out(self, kept: Kept) -> StateRecord:
        """Copy a state out of its slot, beside the steps: a busy slot is not given away, a kept one not written."""
        assert kept.slot is not None
        try:
            snapshot = self._export(kept.slot)
            with self._lock:
                return self._remember(kept, snapshot)
        finally:
            kept.busy = False

    def was_stored(self, kept: Kept) -> None:
        with self._lock:
            kept.stored = True
            self._unpin(kept)

    def was_not_stored(self, kept: Kept) -> bool:
        """The store fails: RAM has room for so much only, and what has no place there is lost. True to try again."""
        with self._lock:
            held = kept.slot is not None or str(kept.key) in self.memory
            if not held:
                self._unpin(kept)
            return kept.current and held

    def _unpin(self, kept: Kept) -> None:
        if self._unstored.get(str(kept.key)) is kept:
            del self._unstored[str(kept.key)]

    # --- the event loop ---

    async def open(self, key: SessionKey) -> Kept | None:
        """The state kept under a key, from the fastest tier that has it; in use until `close`.

        Raises StateError when L3 has a record that cannot be used, StateUnavailable when it cannot be asked.
        """
        with self._lock:
            kept = self._find(str(key))
            if kept is not None:
                kept.users += 1
                self.resumed[Level.L2 if kept.slot is None else Level.L1] += 1
                return kept
        record = await self._load(key)
        if record is None:
            return None
        kept = Kept.of(record)
        kept.users = 1
        self.memory.put(record)
        self.resumed[Level.L3] += 1
        return kept

    def close(self, kept: Kept | None) -> None:
        """The turn that went on from a state has ended."""
        if kept is not None:
            with self._lock:
                kept.users -= 1

    def _find(self, key: str) -> Kept | None:
        kept = self._resident.get(key)
        if kept is not None:
            self._resident.move_to_end(key)
            return kept
        for waiting in (*self._unwanted, *self._leaving):  # left L1, and is still in its slot
            if waiting.current and str(waiting.key) == key:
                return waiting
        if key in self._unstored:
            return self._unstored[key]
        record = self.memory.get(key)
        return None if record is None else Kept.of(record)

    async def _load(self, key: SessionKey) -> StateRecord | None:
        if self.store is None:
            return None
        expected = replace(self.expected, key=str(key), initial=key.initial)
        try:
            data = await asyncio.to_thread(self.store.get, str(key))
            return None if data is None else await asyncio.to_thread(StateRecord.from_bytes, data, expected)
        except StateError as error:
            self.refused[error.code] += 1
            log.error("%s", error.message)
            raise
        except StoreError as error:
            raise unavailable(error) from error

    async def export_bytes(self, key: SessionKey) -> bytes:
        """The record of a key, in its stored form. Raises NotFound, StateError, StateUnavailable."""
        kept = await self.open(key)
        if kept is None:
            raise NotFound(f"there is no session {key.shown!r}", param="session_id")
        try:
            return await asyncio.to_thread(lambda: self._record_of(kept).to_bytes())
        finally:
            self.close(kept)

    async def import_bytes(self, data: bytes, key: SessionKey | None, *, replace: bool) -> Kept:
        """Keep an exported record, under its own key or another.

        Raises StateError for a record that cannot be used here, StateExists where one of that key may not be replaced.
        """
        record = await asyncio.to_thread(StateRecord.from_bytes, data, self.expected)
        own = SessionKey.parse(record.key)
        key = SessionKey(key.session, key.branch, own.initial) if key else own
        async with self.leases.hold(str(key)):
            earlier = await self.open(key)
            self.close(earlier)
            if earlier is not None and not replace:
                raise StateExists(f"session {key.shown!r} exists; import with replace=true to replace it")
            if key.branch and self.store is not None:
                await asyncio.to_thread(self.store.reserve_branches, key.session, 1, key.branch)
            return self._keep_record(record.renamed(str(key)))

    def _keep_record(self, record: StateRecord) -> Kept:
        kept = Kept.of(record)
        with self._lock:
            self._replace(kept)
            self.memory.put(record)
        self._write(kept)
        return kept

    async def family(self, session: str) -> list[StateInfo | StateHeader]:
        """What is known of a session and its branches. Raises StateUnavailable."""
        try:
            infos = await asyncio.to_thread(self.store.family, session) if self.store else []
        except StoreError as error:
            raise unavailable(error) from error
        found: dict[str, StateInfo | StateHeader] = {info.key: info for info in infos}
        with self._lock:
            kept = [*self._resident.values(), *self._unstored.values()]
            headers = [*self.memory.sessions(), *(k.header for k in kept if k.key.session == session)]
        found |= {h.key: h for h in headers if SessionKey.parse(h.key).session == session}
        return list(found.values())

    async def durable(self, key: SessionKey) -> None:
        """With --state-durability sync: wait until what is kept under a key is in L3. Raises StateUnavailable."""
        with self._lock:
            kept = self._unstored.get(str(key))
        if kept is None or kept.written is None or self.writer is None or not self.config.sync:
            return
        self.writer.hurry()
        try:
            await asyncio.shield(asyncio.wrap_future(kept.written))
        except StoreError as error:
            raise unavailable(error) from error

    async def delete(self, deletion: Deletion) -> bool:
        """Delete from every tier and void the turns that run; whether there was anything (`Deletion.found`)."""
        voided = self.turns.void(deletion)
        gone = self._drop(deletion)
        if self.store is not None:
            try:
                gone += await asyncio.to_thread(deletion.apply, self.store)
            except StoreError as error:
                raise unavailable(error) from error
        return deletion.found(gone, voided)

    def _drop(self, deletion: Deletion) -> list[SessionKey]:
        with self._lock:
            gone = list({place.key for place in self._places() if deletion.covers(place.key)})
            for key in gone:
                self._displace(str(key))
            return gone

    async def status(self, limit: int | None, offset: int) -> Listing:
        """A page of all sessions and branches. Raises StateUnavailable."""
        with self._lock:
            places = self._places()
        try:
            return await asyncio.to_thread(listing, places, self.store, limit=limit, offset=offset)
        except StoreError as error:
            raise unavailable(error) from error

    def _places(self) -> list[Place]:
        headers = self.memory.sessions()
        in_slots = [*self._resident.values(), *(kept for kept in self._unwanted if kept.current)]
        places = [Place(SessionKey.parse(header.key), Level.L2, header.created) for header in headers]
        places += [Place(kept.key, Level.L2, kept.created) for kept in self._unstored.values()]
        return places + [Place(kept.key, Level.L1, kept.created) for kept in in_slots]

    # --- all of them ---

    def _replace(self, kept: Kept) -> None:
        self._displace(str(kept.key))
        kept.current = True
        if self.writer is not None:
            self._unstored[str(kept.key)] = kept

    def _displace(self, key: str) -> None:
        """What was kept under a key is out of date; turns that go on from it still can."""
        for old in (self._resident.pop(key, None), self._unstored.pop(key, None)):
            if old is not None:
                old.current = False
                if old.slot is not None and old not in (*self._unwanted, *self._leaving):
                    self._unwanted.append(old)
        for old in (*self._unwanted, *self._leaving):
            if str(old.key) == key:
                old.current = False
        self.memory.remove(key)

    def _remember(self, kept: Kept, snapshot: Any) -> StateRecord:
        """A state's copy in host memory: L2 where it is current, else only for the turns that use it."""
        record = kept.take(snapshot)
        for gone in self.memory.put(record) if kept.current else ():
            resident = self._resident.get(gone.key)
            if resident is not None:
                resident.record = None  # its slot still has it
        return record

    def _write(self, kept: Kept) -> None:
        if self.writer is not None:
            kept.written = self.writer.put(StateWrite(self, kept))

    def shut_down(self) -> None:
        """Write what is not stored yet, then close the store."""
        if self.writer is not None:
            self.writer.close()
        if self.store is not None:
            self.store.close()


@dataclass(frozen=True, slots=True)
class StateWrite:
    """A kept state on its way to L3."""

    cache: StateCache
    kept: Kept

    def to_stored(self) -> StoredState | None:
        return self.cache.stored_form(self.kept)

    def was_stored(self) -> None:
        self.cache.was_stored(self.kept)

    def failed(self) -> bool:
        return self.cache.was_not_stored(self.kept)


class Final(NamedTuple):
    """What a finished row leaves: its state is in `snapshot`, or where that is None in its slot."""

    kept: Kept
    snapshot: Any


def final_state(
    sequence: Sequence, target: SessionTarget, model: str, text_of: Callable[[Iterable[int]], str]
) -> Final:
    """The state that covers the prompt and the tokens of the returned text (native_api.md, "Stored states").

    The slot has seen all generated tokens but the last. Where a stop text or a cut character lies behind the covered
    ones, the row's backup from before them serves. Covered tokens that the state has not seen become its tail.
    """
    covered = sequence.output.covered
    seen, snapshot = len(sequence.generated) - 1, None
    if sequence.slot is None:  # it ended on its first token, and never needed a slot
        snapshot = sequence.snapshot
    elif seen > covered:
        assert sequence.backup is not None, "a row whose text may stop early has a backup"
        assert sequence.backup.seen <= covered, "a row's backup comes before its stop"
        seen, snapshot = sequence.backup
    answer = sequence.generated[:covered]
    base = target.base
    news = (*sequence.prompt[len(base.tail) if base else 0 :], *answer)
    kept = Kept(
        key=target.key,
        model=model,
        parent=str(base.key) if base else "",
        base=base.header if base else None,
        news=news,
        tail=tuple(answer[seen:]),
        text=text_of(answer),
    )
    return Final(kept, snapshot)


def unavailable(error: StoreError) -> StateUnavailable:
    return StateUnavailable(
        "the state store cannot be used at the moment; sessions that are in memory go on", retry_after=5.0
    )
