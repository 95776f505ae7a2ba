"""The writer thread: everything kept reaches L3 within the flush interval, in batches, beside the steps."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Protocol

from rwkv_lightning.core.errors import StoreError
from rwkv_lightning.core.interfaces import StateStore, StoredState

log = logging.getLogger(__name__)

BATCH = 64  # states per transaction
RETRY_SECONDS = 5.0


class Storable(Protocol):
    """What waits to be written."""

    def to_stored(self) -> StoredState | None:
        """Its stored form, None when it is not wanted any more. Called in the writer thread."""

    def was_stored(self) -> None:
        """L3 has it."""

    def failed(self) -> bool:
        """The store refused it; whether it is to be tried again. The thread that waits for it has been told."""


class Writer:
    """Writes to a store from a thread of its own.

    Args:
        store: open already.
        interval: seconds that a state may wait for others.
        budget: bytes that the store may use; over it the least recently used go.
    """

    def __init__(self, store: StateStore, interval: float, budget: int) -> None:
        self.failure: StoreError | None = None  # what the last write failed with, None when it succeeded
        self._store = store
        self._interval = interval
        self._budget = budget
        self._waiting: list[tuple[Storable, Future[None]]] = []
        self._news = threading.Condition()
        self._hurry = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="state-writer", daemon=True)
        self._thread.start()

    def put(self, item: Storable) -> Future[None]:
        """Have an item written; the future ends when L3 has it, or with the StoreError."""
        future: Future[None] = Future()
        with self._news:
            self._waiting.append((item, future))
            self._news.notify()
        return future

    def hurry(self) -> None:
        """Do not wait for the interval: somebody waits for the store."""
        with self._news:
            self._hurry = True
            self._news.notify()

    def close(self) -> None:
        """Write what waits, then end."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._write(batch)

    def _next_batch(self) -> list[tuple[Storable, Future[None]]]:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closing)
            self._news.wait_for(self._is_due, timeout=self._interval)
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            self._hurry = self._hurry and bool(self._waiting)
            return batch

    def _is_due(self) -> bool:
        return self._hurry or self._closing or len(self._waiting) >= BATCH

    def _write(self, batch: list[tuple[Storable, Future[None]]]) -> None:
        try:
            states = [(item, item.to_stored()) for item, _ in batch]
            self._store.put([state for _, state in states if state is not None])
            for item, state in states:
                if state is not None:
                    item.was_stored()
            if gone := self._store.evict(self._budget):
                log.info("the state store is full (--l3-bytes): %d of the oldest states went", len(gone))
            self._note(None)
        except StoreError as error:
            self._note(error)
            _settle(batch, error)
            self._try_again([item for item, _ in batch if item.failed()])
        except Exception as error:  # a fault of ours must not end the thread: later states still get written
            log.exception("a batch of states was not written")
            _settle(batch, StoreError(f"the states were not written: {error}", "other"))
        else:
            _settle(batch, None)

    def _try_again(self, items: list[Storable]) -> None:
        """Put items back in line, and give the store time to recover unless the server is closing."""
        with self._news:
            if not self._closing:
                self._waiting = [(item, Future()) for item in items] + self._waiting
                self._news.wait_for(lambda: self._closing, timeout=RETRY_SECONDS)

    def _note(self, failure: StoreError | None) -> None:
        """Say once what is wrong, and once that it is well again."""
        if failure and not self.failure:
            log.error("the state store fails: %s; sessions go on from RAM and are lost at a restart", failure)
        elif self.failure and not failure:
            log.warning("the state store works again")
        self.failure = failure


def _settle(batch: list[tuple[Storable, Future[None]]], error: StoreError | None) -> None:
    for _, future in batch:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
