"""`StateCache`: the cache hierarchy of one model. L1 are slots of the running pool, L2 host memory, L3 a store.

Four kinds of threads meet here. The engine thread keeps finished states, gives up slots and looks prefixes up; the
copier copies states out of slots that are going to be needed, so that a step finds slots that it can take as they are;
the writer thread stores states, copied out of their slots if need be; the event loop and its worker threads open,
list, import and delete (front.py). What keeps them apart:

- `lock` guards where every state is: the shelves, the fields of a `Kept` that say so, the running turns, the loads
  under way. It is held for moments, and never while somebody waits for the store. The longest is the copy of a slot
  that the coming step overwrites: the last resort, when slots are needed faster than the copier goes. The shelves have
  no locks of their own; `MemoryTier`, the writer's queue and the watch have, and call nobody while they hold them.
- `storing` is held while the writer has states on their way to the store, and while somebody deletes, so that a
  deleted state cannot arrive afterwards. Whoever takes both takes `storing` first.
- A slot is copied outside the lock otherwise (`Kept.copying`, moves.py): it is not given away meanwhile, and no step
  writes to a slot that the cache holds. A state's numbers are never changed by anybody.
- A state that is stored (`Kept.stored`) and whose copy L2 has lost leaves its slot without another: L3 has it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock, RLock
from typing import TYPE_CHECKING

from rwkv_lightning.core.cache.final import final_state
from rwkv_lightning.core.cache.kept import Kept, SessionTarget
from rwkv_lightning.core.cache.keys import SessionKey, is_prefix_key
from rwkv_lightning.core.cache.loading import Loading, Loads
from rwkv_lightning.core.cache.memory import HostShelf
from rwkv_lightning.core.cache.moves import Export, Moves
from rwkv_lightning.core.cache.record import Expected, StateRecord
from rwkv_lightning.core.cache.sessions import Deletion, Level, Place, Turns
from rwkv_lightning.core.cache.shelf import SlotShelf
from rwkv_lightning.core.cache.tiers import MemoryTier
from rwkv_lightning.core.cache.watch import StoreWatch
from rwkv_lightning.core.cache.writer import Writer
from rwkv_lightning.core.errors import StateError
from rwkv_lightning.core.interfaces import StateStore, StoredState
from rwkv_lightning.core.ledger import LedgerMismatch

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.final import Final
    from rwkv_lightning.core.ledger import SlotLedger
    from rwkv_lightning.core.sequence import Sequence as Row

log = logging.getLogger(__name__)

LEAST_SPARE = 256 << 20  # bytes for states on their way to L3, however small L2 is


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Budgets and habits of the hierarchy.

    Args:
        l1_slots: most slots that finished states may keep.
        l2_bytes: host memory for states. As much again, and 256 MiB at least, may hold what L3 lacks yet.
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
    """Kept states over the three tiers.

    Args:
        expected: what a stored record must be to be used with this model.
        store: L3, open; None to go without.
        export: copies a slot to host memory (`SlotStates.export`).
        text_of: the text of generated tokens, for people.
    """

    def __init__(
        self,
        config: CacheConfig,
        expected: Expected,
        store: StateStore | None,
        export: Export,
        text_of: Callable[[Iterable[int]], str],
    ) -> None:
        self.config = config
        self.expected = expected
        self.store = store
        self.lock = RLock()
        self.storing = Lock()
        self.watch = StoreWatch()
        self.turns = Turns(self.lock)
        self.slots = SlotShelf(config.l1_slots)
        spare = max(config.l2_bytes, LEAST_SPARE)
        self.host = HostShelf(MemoryTier(config.l2_bytes), spare, self._press, self._prefix_fell_out)
        self.refused: Counter[str] = Counter()  # records that were not loaded, by error code
        self.resumed: Counter[Level] = Counter()  # turns that went on from each level
        self.on_prefix_out: Callable[[str], None] = lambda key: None  # L2 has lost a prefix
        self.on_stored_prefix_out: Callable[[str], None] = lambda key: None  # L3 has lost a prefix
        self._text_of = text_of
        self.moves = Moves(self.lock, self.slots, self.host, export)
        self.loads = Loads()
        self.writer = self._new_writer(store) if store is not None else None

    def _new_writer(self, store: StateStore) -> Writer:
        config = self.config
        return Writer(store, self.watch, self.storing, config.flush_interval, config.l3_bytes, self._evicted)

    # --- the engine thread ---

    def keep(self, row: Row, ledger: SlotLedger) -> bool:
        """Keep a finished row's state where its request wants it; True when the row's slot went with it."""
        target = row.request.target
        if not isinstance(target, SessionTarget):
            return False
        final = final_state(row, target, self.expected.fingerprint, self._text_of)
        return bool(self.turns.commit(target.turn, lambda: self._install(final, target, row.slot, ledger)))

    def _install(self, final: Final, target: SessionTarget, slot: int | None, ledger: SlotLedger) -> bool:
        kept = final.kept
        self._replace(kept)
        if final.snapshot is not None:
            kept.copy = final.snapshot
            self.host.put(kept)
        elif slot is not None:
            self.moves.move_in(kept, slot, ledger)
        if self.writer is not None:
            target.turn.written = self.writer.put(StateWrite(self, kept), hurry=self.config.sync)
        return kept.slot is not None

    def reclaim(self) -> int | None:
        """Give up a slot. A state that somebody needs and that is nowhere else is copied in `move_out`."""
        return self.moves.reclaim()

    def move_out(self) -> None:
        """Copy the states whose slots the coming step overwrites; call after `schedule` and before the step runs."""
        self.moves.move_out()

    def check_integrity(self, ledger: SlotLedger) -> None:
        """Raises LedgerMismatch unless the cache holds every slot that the ledger gives to somebody, as when idle."""
        with self.lock:
            held = self.slots.slots_held
        if held != ledger.used:
            raise LedgerMismatch(f"no row is left, {ledger.used} slots are held by the ledger and {held} by the cache")

    # --- the writer thread, and who exports ---

    def stored_form(self, kept: Kept) -> StoredState | None:
        """A state's record as the store takes it; None when a newer one has taken its place."""
        record = self.moves.record_of(kept, wanted=lambda: kept.current)
        return None if record is None else record.to_stored()

    def record_of(self, kept: Kept) -> StateRecord:
        """A state's record, copied out of its slot if need be. Blocks; raises StateLost."""
        record = self.moves.record_of(kept)
        assert record is not None
        return record

    def was_stored(self, kept: Kept) -> None:
        """L3 has a state."""
        with self.lock:
            kept.stored = True
            self.host.release(kept)

    def was_not_stored(self, kept: Kept) -> bool:
        """L3 refused a state; whether it is still there to be tried again."""
        with self.lock:
            return kept.current and self.host.give_up(kept)

    def _evicted(self, keys: Sequence[str]) -> None:
        for key in filter(is_prefix_key, keys):
            self.on_stored_prefix_out(key)
        gone = set(keys)
        with self.lock:
            for kept in self.slots.current():
                kept.stored = kept.stored and kept.key not in gone

    def _prefix_fell_out(self, key: str) -> None:
        self.on_prefix_out(key)

    def _press(self) -> None:
        if self.writer is not None:
            self.writer.hurry()

    # --- the event loop and its workers ---

    def find(self, key: SessionKey) -> Kept | None:
        """The state kept under a key, if it is in L1 or L2; in use until `close`. Raises StateLost."""
        with self.lock:
            kept = self.slots.find(str(key))
            if kept is not None:
                self.host.touch(kept)
            else:
                kept = self._in_memory(str(key))
            if kept is not None:
                kept.users += 1
            return kept

    def _in_memory(self, key: str) -> Kept | None:
        try:
            return self.host.find(key)
        except StateError as error:
            self.refused[error.code] += 1
            raise

    def close(self, kept: Kept) -> None:
        """A turn that went on from a state has ended."""
        with self.lock:
            kept.users -= 1
            if not kept.users and not kept.current:
                kept.copy = None

    def loaded(self, loading: Loading, record: StateRecord | None) -> Kept | None:
        """What was read from L3, in use until `close`; or what was kept under its key meanwhile, which is newer."""
        with self.lock:
            found = self.find(loading.key)
            if found is not None or record is None:
                return found
            kept = Kept.of(record)
            kept.users = 1
            if not loading.void:
                kept.current = True
                self.host.put(kept)
            return kept

    def adopt(self, record: StateRecord) -> Kept:
        """Keep a record that was imported, in place of what is under its key."""
        kept = Kept.of(record)
        with self.lock:
            self._replace(kept)
            self.host.put(kept)
            if self.writer is not None:
                self.writer.put(StateWrite(self, kept))
        return kept

    def delete(self, deletion: Deletion) -> bool:
        """Delete from every tier and void the turns that run; whether there was anything (`Deletion.found`).

        Blocks. Raises StoreError where L3 cannot delete; then nothing is deleted anywhere.
        """
        with self.storing:
            gone = [] if self.store is None else self.watch.run(deletion.apply, self.store)
            with self.lock:
                voided = self.turns.void(deletion)
                gone += self._drop(deletion)
        return deletion.found(gone, voided)

    def _drop(self, deletion: Deletion) -> list[SessionKey]:
        self.loads.overtake(deletion.covers)
        held = {kept.owner for kept in self.current()} | {SessionKey.parse(key) for key in self.host.lost}
        gone = [owner for owner in held if deletion.covers(owner)]
        for owner in gone:
            self._displace(str(owner))
        return gone

    def current(self) -> Iterator[Kept]:
        """Every current state in L1 and L2, those in both twice. Call with the lock."""
        yield from self.slots.current()
        yield from self.host.current()

    def places(self) -> list[Place]:
        """Where the states in L1 and L2 are, those in both twice."""
        with self.lock:
            in_slots = [Place(kept.owner, Level.L1, kept.created) for kept in self.slots.current()]
            return in_slots + [Place(kept.owner, Level.L2, kept.created) for kept in self.host.current()]

    # --- all of them, with the lock ---

    def _replace(self, kept: Kept) -> None:
        self._displace(kept.key)
        kept.current = True
        if self.writer is not None:
            self.host.expect(kept)

    def _displace(self, key: str) -> None:
        """What was kept under a key is out of date; turns that go on from it still can."""
        self.loads.overtake(lambda loading: str(loading) == key)
        for old in (self.slots.find(key), self.host.displace(key)):
            if old is not None:
                old.current = False
                self.slots.demote(old)
                if not old.users:
                    old.copy = None

    def shut_down(self) -> None:
        """Write what is not stored yet, then close the store."""
        self.moves.close()
        if self.writer is not None:
            self.writer.close()
        if self.store is not None:
            self.store.close()


@dataclass(frozen=True, slots=True)
class StateWrite:
    """A kept state on its way to L3."""

    cache: StateCache
    kept: Kept

    @property
    def key(self) -> str:
        return self.kept.key

    def to_stored(self) -> StoredState | None:
        return self.cache.stored_form(self.kept)

    def was_stored(self) -> None:
        self.cache.was_stored(self.kept)

    def failed(self) -> bool:
        return self.cache.was_not_stored(self.kept)
