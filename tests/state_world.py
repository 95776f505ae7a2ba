"""A `StateCache` over real slots without a model: states that are filled with a number each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cache_memory import MemoryStore

from rwkv_lightning.core.cache import writer
from rwkv_lightning.core.cache.front import Sessions
from rwkv_lightning.core.cache.hierarchy import CacheConfig, StateCache
from rwkv_lightning.core.cache.kept import Kept, SessionTarget
from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.record import Expected
from rwkv_lightning.core.cache.sessions import Turn
from rwkv_lightning.core.interfaces import ModelConfig, StateStore
from rwkv_lightning.core.ledger import SlotLedger
from rwkv_lightning.core.request import GenerationRequest, SamplingParams
from rwkv_lightning.core.slots import SlotPool, Snapshot

CONFIG = ModelConfig(n_layer=2, n_embd=8, n_head=2, head_size=4, n_ffn=8, vocab_size=50)
A, B = SessionKey("a"), SessionKey("b")


@dataclass
class Row:
    """As much of a finished sequence as the cache asks for."""

    request: GenerationRequest
    slot: int | None
    prompt: tuple[int, ...]
    generated: list[int] = field(default_factory=lambda: [7])
    snapshot: Any = None
    backup: Any = None

    @property
    def output(self) -> Any:
        return self

    covered = 1


class World:
    """A cache over real slots, with a store that stays where it is between two of these."""

    def __init__(
        self,
        store: StateStore | None = None,
        *,
        slots: int = 4,
        l1: int = 2,
        l2: int = 1 << 20,
        dtype: torch.dtype = torch.float32,
        interval: float = 0.0,
        **config: Any,
    ) -> None:
        self.pool = SlotPool(CONFIG, slots, dtype=dtype)
        self.ledger = SlotLedger(slots, reclaim=lambda: self.cache.reclaim())
        settings = CacheConfig(l1, l2, 1 << 30, interval, **{"sync": False, **config})
        expected = Expected("model", CONFIG, dtype)
        if store is not None:
            store.open("here")
        self.cache = StateCache(settings, expected, store, self.pool.export, lambda tokens: f"{list(tokens)}")
        self.front = Sessions(self.cache)

    def finish(self, key: SessionKey, number: int, base: Kept | None = None) -> Turn:
        """A turn ends whose state is filled with `number`."""
        turn = self.cache.turns.begin(Turn(key.session, forks=key.branch > 0))
        self.end(key, number, turn, base)
        return turn

    def end(self, key: SessionKey, number: int, turn: Turn, base: Kept | None = None) -> bool:
        slot = self.acquire("row")
        self.cache.move_out()
        self.pool.restore(slot, self.filled(number))
        request = GenerationRequest("r", [(1, 2)], SamplingParams("x", None, 1), target=SessionTarget(key, turn, base))
        kept = self.cache.keep(Row(request, slot, (1, number)), self.ledger)  # type: ignore[arg-type]
        if not kept:
            self.ledger.release(slot)
        self.cache.turns.end(turn)
        return kept

    def fill_slots(self) -> None:
        """Other rows take every slot there is."""
        taken = [self.acquire(f"other {i}") for i in range(self.ledger.total)]
        self.cache.move_out()
        for slot in taken:
            self.pool.reset([slot])
            self.ledger.release(slot)

    def acquire(self, owner: str) -> int:
        """A slot, as soon as one is not being copied."""
        deadline = time.monotonic() + 5
        while (slot := self.ledger.acquire(owner)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return slot

    def filled(self, number: int) -> Snapshot:
        shift = torch.full(self.pool.shift[:, :, 0].shape, float(number))
        return Snapshot(shift, torch.full(self.pool.wkv[:, 0].shape, float(number), dtype=self.pool.wkv.dtype))

    async def number(self, key: SessionKey) -> int | None:
        """What the state that the next turn would go on from is filled with; None for no state."""
        kept = await self.front.open(key)
        if kept is None:
            return None
        record = self.cache.record_of(kept)
        self.front.close(kept)
        values = {*record.snapshot.shift.unique().tolist(), *record.snapshot.wkv.unique().tolist()}
        (value,) = values
        return int(value)

    def wait_stored(self) -> None:
        writer_thread = self.cache.writer
        assert writer_thread is not None
        deadline = time.monotonic() + 5
        while writer_thread.waiting or self.cache.host._unstored:
            assert time.monotonic() < deadline
            time.sleep(0.002)


@contextmanager
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Makes worlds; two with stores of the same class share what it holds, if the first was shut down."""
    monkeypatch.setattr(MemoryStore, "disks", {})
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    with ExitStack() as stack:

        def make(store: StateStore | None = None, **options: Any) -> World:
            made = World(store, **options)
            stack.callback(made.cache.shut_down)
            return made

        yield make
