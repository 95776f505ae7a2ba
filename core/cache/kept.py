"""`Kept`: one finished state that somebody may go on from, wherever it is at the moment."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.record import StateHeader, StateRecord, few_words, hash_tokens
from rwkv_lightning.core.cache.sessions import Turn
from rwkv_lightning.core.request import StateSource, StateTarget, Tokens


@dataclass(eq=False)
class Kept:
    """A session's or branch's state: in a slot (L1), or as a record in host memory, or both.

    Args:
        key: what it is kept under.
        model: the model's fingerprint.
        parent: the stored key of the state it went on from; empty for none.
        base: the header of that state, None for a beginning.
        news: the tokens seen since then, the tail included.
        tail: the last of them, which were not fed.
        text: the text of the turn, for people.
    """

    key: SessionKey
    model: str
    parent: str
    base: StateHeader | None
    news: Tokens
    tail: Tokens
    text: str
    created: float = field(default_factory=time.time)
    slot: int | None = None  # where the state is in L1
    record: StateRecord | None = None  # the state in host memory
    busy: bool = False  # a worker is copying the slot, which must not be given away meanwhile
    users: int = 0  # turns that go on from here
    current: bool = False  # nothing newer has been kept under its key, and nobody deleted it
    stored: bool = False  # L3 has it
    written: Future[None] | None = None  # ends when L3 has it

    @cached_property
    def header(self) -> StateHeader:
        """The header of its record; hashing the tokens takes about a microsecond each."""
        seen, digest = (self.base.tokens, self.base.token_hash) if self.base else (0, None)
        return StateHeader(
            model=self.model,
            initial=self.key.initial,
            tokens=seen + len(self.news),
            token_hash=hash_tokens(self.news) if digest is None else hash_tokens(self.news, digest),
            key=str(self.key),
            parent=self.parent,
            last_text=few_words(self.text),
            created=self.created,
        )

    @classmethod
    def of(cls, record: StateRecord) -> Kept:
        """A record that was loaded or imported."""
        header = record.header
        kept = cls(SessionKey.parse(header.key), header.model, header.parent, None, (), record.tail, "", header.created)
        kept.record, kept.current = record, True
        kept.header = header  # a cached property: set instead of computed
        return kept

    @property
    def snapshot(self) -> Any:
        """The state in host memory. Only where `slot` is None."""
        assert self.record is not None, "a kept state is in a slot or in memory"
        return self.record.snapshot

    def take(self, snapshot: Any) -> StateRecord:
        """Remember the state's copy in host memory."""
        self.record = StateRecord(self.header, snapshot, self.tail)
        return self.record


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
