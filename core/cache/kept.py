"""`Kept`: one finished state that somebody may go on from, wherever it is at the moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.record import StateHeader, StateRecord, few_words, hash_tokens
from rwkv_lightning.core.cache.sessions import Turn
from rwkv_lightning.core.errors import StateLost
from rwkv_lightning.core.request import StateSource, StateTarget, Tokens
from rwkv_lightning.core.slots import Snapshot


@dataclass(eq=False)
class Kept:
    """A session's or branch's state: in a slot (L1), or as a copy in host memory (L2), or both.

    There is at most one current `Kept` of a key. Where the state is changes under the cache's lock only; its numbers
    never change.

    Args:
        owner: the session or branch it belongs to.
        model: the model's fingerprint.
        parent: the stored key of the state it went on from; empty for none.
        base: the header of that state, None for a beginning.
        news: the tokens seen since then, the tail included.
        tail: the last of them, which were not fed.
        text: the text of the turn, for people.
    """

    owner: SessionKey
    model: str
    parent: str
    base: StateHeader | None
    news: Tokens
    tail: Tokens
    text: str
    created: float = field(default_factory=time.time)
    slot: int | None = None  # where the state is in L1
    copy: Snapshot | None = None  # the state in host memory
    copying: int = 0  # threads that copy the slot, which must not be given away meanwhile
    copied: bool = False  # it has been copied out of its slot, or that was tried, though L2 may have lost the copy
    stored: bool = False  # L3 has it
    users: int = 0  # turns that go on from here
    current: bool = False  # nothing newer has been kept under its key, and nobody deleted it

    @cached_property
    def key(self) -> str:
        """The key in a tier."""
        return str(self.owner)

    @cached_property
    def header(self) -> StateHeader:
        """The header of its record. Hashing the tokens takes about a microsecond each: not for the engine thread."""
        seen, digest = (self.base.tokens, self.base.token_hash) if self.base else (0, None)
        return StateHeader(
            model=self.model,
            initial=self.owner.initial,
            tokens=seen + len(self.news),
            token_hash=hash_tokens(self.news) if digest is None else hash_tokens(self.news, digest),
            key=self.key,
            parent=self.parent,
            last_text=few_words(self.text),
            created=self.created,
        )

    @classmethod
    def of(cls, record: StateRecord) -> Kept:
        """A record that was loaded or imported."""
        header = record.header
        kept = cls(SessionKey.parse(header.key), header.model, header.parent, None, (), record.tail, "", header.created)
        kept.copy = record.snapshot
        kept.header = header  # a cached property: set instead of computed
        return kept

    @property
    def bare(self) -> bool:
        """Whether somebody needs its numbers, and they are in its slot alone."""
        return self.copy is None and (self.users > 0 or (self.current and not self.stored))

    @property
    def snapshot(self) -> Snapshot:
        """The state in host memory, for a row that goes on from it. Raises StateLost."""
        if self.copy is None:
            raise StateLost("the state of this session was lost while memory was short; delete the session")
        return self.copy

    @property
    def nbytes(self) -> int:
        """Bytes of the copy in host memory."""
        return 0 if self.copy is None else self.copy.nbytes + 4 * len(self.tail)

    def record(self, snapshot: Snapshot) -> StateRecord:
        """Its record, around a copy of its numbers."""
        return StateRecord(self.header, snapshot, self.tail)


@dataclass(frozen=True, slots=True)
class KeptSource(StateSource):
    """A request goes on from a kept state, whose tail already stands before its prompt."""

    kept: Kept


@dataclass(frozen=True, slots=True)
class SessionTarget(StateTarget):
    """A request's final state is kept under a key, unless its session is deleted meanwhile.

    Args:
        base: the state it goes on from; the first `len(base.tail)` prompt tokens are that state's tail.
    """

    key: SessionKey
    turn: Turn
    base: Kept | None = None
