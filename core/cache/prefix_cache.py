"""`PrefixCache`: states of prompts' beginnings, shared by all requests; the longest one found saves that much forward.

Entries live in L2 beside the sessions (and go first when room is needed); long ones go to L3 too, and are found again
after a restart. The engine thread looks up and inserts; a look-up never waits for L3: `fetch` has been there before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rwkv_lightning.core.cache.keys import SEPARATOR
from rwkv_lightning.core.cache.prefix import PrefixTree, pack, unpack
from rwkv_lightning.core.cache.record import Expected, StateHeader, StateRecord, hash_tokens
from rwkv_lightning.core.errors import StateError, StoreError

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.hierarchy import StateCache
    from rwkv_lightning.core.interfaces import StoredState
    from rwkv_lightning.core.request import Tokens
    from rwkv_lightning.core.sequence import Capture

log = logging.getLogger(__name__)

LEAST_CACHED = 16  # tokens; a shorter beginning is read again sooner than it is copied
LEAST_STORED = 512  # tokens; a shorter one is read again sooner than it is loaded
MOST_ROWS = 16  # rows of one request whose prompts' ends are kept; a big batch would only drive the rest out


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """What the tree holds: a stand-in for the record in L2 or L3."""

    key: str
    has_logits: bool
    nbytes: int = 0


@dataclass(slots=True)
class PrefixRecord:
    """A prefix in host memory; `StateRecord`'s form is made when it is stored, as hashing the tokens takes time."""

    key: str
    snapshot: Any
    logits: Any
    header: None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        return int(self.snapshot.nbytes + (0 if self.logits is None else self.logits.nbytes))


class Found(NamedTuple):
    """The first `length` tokens of a prompt need no forward; `logits` follow them when they are the whole prompt."""

    length: int
    snapshot: Any
    logits: Any


class PrefixCache:
    """Prefixes over the tiers of a `StateCache`."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        self._memory = cache.memory
        self._expected = cache.expected
        self._tree: PrefixTree[PrefixEntry] = PrefixTree()
        self._stored: set[str] = set()
        self.stats = self._tree.stats
        self._remember_stored()

    def _remember_stored(self) -> None:
        """Know the prefixes of an earlier run by their tokens; their states are read when they are needed."""
        if self._cache.store is None:
            return
        try:
            known = self._cache.store.prefixes(self._expected.fingerprint)
        except StoreError as error:
            log.warning("the prefixes of earlier runs cannot be read: %s", error)
            return
        for info, tokens in reversed(known):
            self._tree.insert(tokens, PrefixEntry(info.key, has_logits=False), initial=info.initial)
            self._stored.add(info.key)

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
        assert self._cache.store is not None
        expected = replace(self._expected, key=key, initial=initial, token_hash=hash_tokens(tokens))
        try:
            data = await asyncio.to_thread(self._cache.store.get, key)
            if data is not None:
                record = await asyncio.to_thread(StateRecord.from_bytes, data, expected)
                if self._put(PrefixRecord(key, record.snapshot, record.logits)):
                    self._tree.insert(tokens, PrefixEntry(key, record.logits is not None), initial=initial)
                return
        except (StateError, StoreError) as error:  # a prefix is only a short cut: it is read again
            log.warning("a stored prefix cannot be used and is dropped: %s", error)
            if isinstance(error, StateError):
                self._cache.refused[error.code] += 1
        self._stored.discard(key)
        self._tree.remove(key)

    # --- the engine thread ---

    def find(self, prompt: Tokens, initial: str) -> Found | None:
        """The longest beginning of the prompt that is in memory."""
        packed = pack(prompt)

        def usable(length: int, entry: PrefixEntry) -> bool:
            return (length < len(prompt) or entry.has_logits) and entry.key in self._memory

        hit = self._tree.longest(packed, initial=initial, usable=usable)
        record: Any = self._memory.get(hit.entry.key) if hit is not None else None
        if hit is None or record is None or (hit.length == len(prompt) and record.logits is None):
            return None
        return Found(hit.length, record.snapshot, record.logits if hit.length == len(prompt) else None)

    def captures(self, prompt: Tokens, found: int, rows: int, chunk: int, boundaries: Seq[int]) -> tuple[int, ...]:
        """Where in a prompt states are to be kept: at every chunk, at the ends of messages, and at its own end."""
        if rows > MOST_ROWS or len(prompt) < LEAST_CACHED:
            return ()
        wanted = {*range(chunk, len(prompt), chunk), *boundaries, len(prompt)}
        return tuple(sorted(position for position in wanted if max(found, LEAST_CACHED - 1) < position <= len(prompt)))

    def put(self, capture: Capture, initial: str) -> None:
        """Keep a captured state."""
        tokens = pack(capture.sequence.prompt[: capture.position])
        parts = f"{self._expected.fingerprint}\n{initial}\n".encode() + tokens
        key = SEPARATOR + hashlib.blake2b(parts, digest_size=16).hexdigest()
        record = PrefixRecord(key, capture.snapshot, capture.logits)
        if not self._put(record):
            return
        gone = self._tree.insert(tokens, PrefixEntry(key, capture.logits is not None), initial=initial)
        assert not gone, "the account of bytes is the memory tier's"
        if capture.position >= LEAST_STORED and self._cache.writer is not None:
            self._cache.writer.put(PrefixWrite(self, record, tokens, initial))

    def _put(self, record: PrefixRecord) -> bool:
        """Into L2; whether it had room there. What it drove out is forgotten, unless L3 has it."""
        evicted = self._memory.put(record)  # type: ignore[arg-type]  # it needs a key, its bytes and the snapshot
        for gone in evicted:
            if gone.key not in self._stored:
                self._tree.remove(gone.key)
        return all(gone.key != record.key for gone in evicted)

    # --- the writer thread ---

    def note_stored(self, key: str) -> None:
        self._stored.add(key)

    def expected(self) -> Expected:
        return self._expected


@dataclass(frozen=True, slots=True)
class PrefixWrite:
    """A prefix on its way to L3."""

    prefixes: PrefixCache
    record: PrefixRecord
    tokens: bytes
    initial: str

    def to_stored(self) -> StoredState | None:
        tokens = unpack(self.tokens)
        header = StateHeader(
            model=self.prefixes.expected().fingerprint,
            initial=self.initial,
            tokens=len(tokens),
            token_hash=hash_tokens(tokens),
            key=self.record.key,
            created=time.time(),
        )
        return StateRecord(header, self.record.snapshot, (), self.record.logits).to_stored(self.tokens)

    def was_stored(self) -> None:
        self.prefixes.note_stored(self.record.key)

    def failed(self) -> bool:
        """A prefix is only a short cut: it is not tried again."""
        return False
