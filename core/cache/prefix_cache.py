"""`PrefixCache`: states of prompts' beginnings, shared by all requests; the longest one found saves that much forward.

Entries live in L2 beside the sessions (and go first when room is needed); long ones go to L3 too, and are found again
after a restart. The engine thread looks up and inserts; a look-up never waits for L3: `fetch` has been there before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from rwkv_lightning.core.cache.keys import prefix_key
from rwkv_lightning.core.cache.prefix import PrefixTree, pack, unpack
from rwkv_lightning.core.cache.record import StateHeader, StateRecord, hash_tokens
from rwkv_lightning.core.errors import StateError, StoreError
from rwkv_lightning.core.slots import Snapshot

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.hierarchy import StateCache
    from rwkv_lightning.core.interfaces import StoredState
    from rwkv_lightning.core.request import Tokens
    from rwkv_lightning.core.sequence import Capture

log = logging.getLogger(__name__)

LEAST_CACHED = 16  # tokens; a shorter beginning is read again sooner than it is copied
LEAST_STORED = 512  # tokens; a shorter one is read again sooner than it is loaded
MOST_ROWS = 16  # rows of one request whose prompts' ends are kept; a big batch would only drive the rest out
MOST_CHUNKS = 16  # chunk boundaries kept of one prompt, evenly spread over it
MOST_ENDS = 8  # message ends kept of one prompt, the last ones
MOST_KNOWN = 10_000  # prefixes of earlier runs that are known from the start, the last used ones


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """What the tree holds: a stand-in for the record in L2 or L3."""

    key: str
    has_logits: bool
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """A prefix in host memory; `StateRecord`'s form is made when it is stored, as hashing the tokens takes time."""

    key: str
    snapshot: Snapshot
    logits: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.snapshot.nbytes + (0 if self.logits is None else self.logits.nbytes)


class Found(NamedTuple):
    """The first `length` tokens of a prompt need no forward; `logits` follow them when they are the whole prompt."""

    length: int
    snapshot: Snapshot
    logits: torch.Tensor | None


class PrefixCache:
    """Prefixes over the tiers of a `StateCache`."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        self._memory = cache.host.tier
        self._expected = cache.expected
        self._tree: PrefixTree[PrefixEntry] = PrefixTree()
        self._stored: set[str] = set()
        self.stats = self._tree.stats
        cache.on_prefix_out = self._forget
        cache.on_stored_prefix_out = self._forget_stored
        self._remember_stored()

    def _remember_stored(self) -> None:
        """Know the prefixes of an earlier run by their tokens; their states are read when they are needed."""
        store = self._cache.store
        if store is None:
            return
        try:
            known = self._cache.watch.run(store.prefixes, self._expected.fingerprint, MOST_KNOWN)
        except StoreError:
            return  # the watch has told; prompts are read again
        for info, tokens in reversed(known):
            self._tree.insert(tokens, PrefixEntry(info.key, has_logits=False), initial=info.initial)
            self._stored.add(info.key)

    def __len__(self) -> int:
        """Prefixes known, in L2 or L3."""
        return len(self._tree)

    # --- the event loop ---

    async def fetch(self, prompts: Seq[Tokens], initial: str) -> None:
        """Bring the longest stored prefix of each prompt into memory, where it is longer than what is there."""
        if not self._stored:
            return
        for prompt in dict.fromkeys(prompts[:MOST_ROWS]):
            hit = self._tree.longest(prompt, initial=initial, count=False)
            if hit is not None and hit.entry.key in self._stored and hit.entry.key not in self._memory:
                await self._load(hit.entry.key, prompt[: hit.length], initial)

    async def _load(self, key: str, tokens: Tokens, initial: str) -> None:
        try:
            record = await asyncio.to_thread(self._read, key, tokens, initial)
        except (StateError, StoreError) as error:  # a prefix is only a short cut: it is read again
            if isinstance(error, StateError):
                self._cache.refused[error.code] += 1
                log.warning("a stored prefix cannot be used and is dropped: %s", error)
            record = None
        if record is None:
            self._stored.discard(key)
            self._tree.remove(key)
            return
        if self._put(PrefixRecord(key, record.snapshot, record.logits)):
            self._tree.insert(tokens, PrefixEntry(key, record.logits is not None), initial=initial)

    def _read(self, key: str, tokens: Tokens, initial: str) -> StateRecord | None:
        """A prefix out of L3, checked. Blocks. Raises StateError, StoreError."""
        store = self._cache.store
        data = None if store is None else self._cache.watch.run(store.get, key)
        expected = replace(self._expected, key=key, initial=initial, token_hash=hash_tokens(tokens))
        return None if data is None else StateRecord.from_bytes(data, expected)

    # --- the engine thread ---

    def find(self, prompt: Tokens, initial: str) -> Found | None:
        """The longest beginning of the prompt that is in memory."""

        def usable(length: int, entry: PrefixEntry) -> bool:
            return (length < len(prompt) or entry.has_logits) and entry.key in self._memory

        hit = self._tree.longest(pack(prompt), initial=initial, usable=usable)
        if hit is None:
            return None
        record = self._memory.get(hit.entry.key)
        if not isinstance(record, PrefixRecord):  # it fell out this very moment
            self._tree.reject(hit)
            return None
        if self._cache.writer is not None and hit.entry.key in self._stored:
            self._cache.writer.touch(hit.entry.key)
        return Found(hit.length, record.snapshot, record.logits if hit.length == len(prompt) else None)

    def length(self, prompt: Tokens, initial: str) -> int:
        """How many of the first tokens need no forward at the moment; does not count as a look-up."""
        hit = self._tree.longest(
            pack(prompt), initial=initial, usable=lambda _, entry: entry.key in self._memory, count=False
        )
        return 0 if hit is None else hit.length

    def captures(
        self, prompt: Tokens, initial: str, found: int, rows: int, chunk: int, ends: Seq[int]
    ) -> tuple[int, ...]:
        """Where in a prompt states are to be kept: at chunk boundaries, at ends of messages, and at its own end.

        And where it parts from a prompt that is known: a third one may part there too.
        """
        if rows > MOST_ROWS or len(prompt) < LEAST_CACHED:
            return ()
        spread = chunk * -(-len(prompt) // (chunk * MOST_CHUNKS))
        near = self._tree.nearest(pack(prompt), initial=initial)
        fork = {near.length} if near is not None else set()
        wanted = {*range(spread, len(prompt), spread), *ends[-MOST_ENDS:], *fork, len(prompt)}
        return tuple(sorted(position for position in wanted if max(found, LEAST_CACHED - 1) < position <= len(prompt)))

    def put(self, capture: Capture, initial: str) -> None:
        """Keep a captured state."""
        tokens = pack(capture.sequence.prompt[: capture.position])
        key = prefix_key(self._expected.fingerprint, initial, tokens)
        if not self._put(PrefixRecord(key, capture.snapshot, capture.logits)):
            return
        self._tree.insert(tokens, PrefixEntry(key, capture.logits is not None), initial=initial)
        if capture.position >= LEAST_STORED and self._cache.writer is not None:
            self._cache.writer.put(PrefixWrite(self, key, tokens, initial))

    def _put(self, record: PrefixRecord) -> bool:
        """Into L2; whether it had room there. What it drives out is forgotten."""
        with self._cache.lock:
            return self._cache.host.put(record)

    def _forget(self, key: str) -> None:
        """L2 has lost a prefix."""
        if key not in self._stored:
            self._tree.remove(key)

    # --- the writer thread ---

    def _forget_stored(self, key: str) -> None:
        """L3 has lost a prefix."""
        self._stored.discard(key)
        if key not in self._memory:
            self._tree.remove(key)

    def note_stored(self, key: str) -> None:
        """L3 has a prefix."""
        self._stored.add(key)

    def stored_form(self, key: str, tokens: bytes, initial: str) -> StoredState | None:
        """A prefix as the store takes it; None when it is in memory no more."""
        record = self._memory.get(key)
        if not isinstance(record, PrefixRecord):
            return None
        seen = unpack(tokens)
        header = StateHeader(
            model=self._expected.fingerprint,
            initial=initial,
            tokens=len(seen),
            token_hash=hash_tokens(seen),
            key=key,
            created=time.time(),
        )
        return StateRecord(header, record.snapshot, (), record.logits).to_stored(tokens)


@dataclass(frozen=True, slots=True)
class PrefixWrite:
    """A prefix on its way to L3. It does not hold the state, which may have left L2 by then."""

    prefixes: PrefixCache
    key: str
    tokens: bytes
    initial: str

    def to_stored(self) -> StoredState | None:
        return self.prefixes.stored_form(self.key, self.tokens, self.initial)

    def was_stored(self) -> None:
        self.prefixes.note_stored(self.key)

    def failed(self) -> bool:
        """A prefix is only a short cut: it is not tried again."""
        return False
