"""The writer thread: everything kept reaches L3 within the flush interval, in batches, beside the steps."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from rwkv_lightning.core.cache.watch import StoreWatch
from rwkv_lightning.core.errors import StoreError
from rwkv_lightning.core.interfaces import StateStore, StoredState

log = logging.getLogger(__name__)

BATCH = 64  # states per transaction
RETRY_SECONDS = 5.0


class Storable(Protocol):
    """What waits to be written; of several with the same key only the last one is."""

    @property
    def key(self) -> str: ...

    def to_stored(self) -> StoredState | None:
        """Its stored form, None when it is not wanted any more. Called in the writer thread."""

    def was_stored(self) -> None:
        """L3 has it."""

    def failed(self) -> bool:
        """L3 did not take it; whether it is to be tried again. The thread that waits for it has been told."""


class _Job(NamedTuple):
    item: Storable
    ends: Future[None]


class Writer:
    """Writes to a store from a thread of its own.

    Args:
        store: open already.
        watch: every call of the store goes through it.
        gate: held while states are on their way to the store. Who deletes holds it too, so that what was taken up
            before the deletion does not arrive after it.
        interval: seconds that a state may wait for others.
        budget: bytes that the store may use; over it the least recently used go.
        on_evicted: told their keys, in the writer thread.
    """

    def __init__(
        self,
        store: StateStore,
        watch: StoreWatch,
        gate: threading.Lock,
        interval: float,
        budget: int,
        on_evicted: Callable[[Sequence[str]], None],
    ) -> None:
        self._store = store
        self._watch = watch
        self._gate = gate
        self._interval = interval
        self._budget = budget
        self._on_evicted = on_evicted
        self._waiting: dict[str, _Job] = {}
        self._used: dict[str, None] = {}  # keys whose use L3 is to be told of
        self._news = threading.Condition()
        self._hurry = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="state-writer", daemon=True)
        self._thread.start()

    def put(self, item: Storable, *, hurry: bool = False) -> Future[None]:
        """Have an item written; the future ends when L3 has it, or with the StoreError.

        Args:
            hurry: do not wait for the interval.
        """
        job = _Job(item, Future())
        with self._news:
            superseded = self._waiting.pop(item.key, None)
            self._waiting[item.key] = job
            self._hurry = self._hurry or hurry
            self._news.notify()
        if superseded is not None:
            superseded.ends.set_result(None)  # L3 is going to have a later state instead
        return job.ends

    def touch(self, key: str) -> None:
        """A stored state was used: L3 is told with the next batch, so that it does not go as the least used."""
        with self._news:
            self._used[key] = None

    def hurry(self) -> None:
        """Do not wait for the interval: somebody waits, or memory is short."""
        with self._news:
            self._hurry = True
            self._news.notify()

    @property
    def waiting(self) -> int:
        """How many states wait to be written."""
        return len(self._waiting)

    def close(self) -> None:
        """Write what waits, then end."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            failed = self._write(batch)
            if failed:
                self._try_again(failed)
            else:
                self._tidy()

    def _next_batch(self) -> list[_Job]:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closing)
            self._news.wait_for(self._is_due, timeout=self._interval)
            keys = list(itertools.islice(self._waiting, BATCH))
            batch = [self._waiting.pop(key) for key in keys]
            self._hurry = self._hurry and bool(self._waiting)
            return batch

    def _is_due(self) -> bool:
        return self._hurry or self._closing or len(self._waiting) >= BATCH

    def _write(self, batch: Sequence[_Job]) -> list[_Job]:
        """Put a batch into the store; those that failed and are to be tried again."""
        with self._gate:
            states, again = _stored_forms(batch)
            error = self._put([state for _, state in states]) if states else None
            if error is None:
                for job, _ in states:
                    job.item.was_stored()
        if error is not None and error.reason == "other" and len(states) > 1:
            # It may be the fault of one of them, which must not keep the others out.
            return again + [failed for job, _ in states for failed in self._write([job])]
        for job, _ in states:
            _settle(job, error)
        return again + [job for job, _ in states if error is not None and job.item.failed()]

    def _put(self, states: list[StoredState]) -> StoreError | None:
        try:
            self._watch.run(self._store.put, states)
        except StoreError as error:
            return error
        return None

    def _tidy(self) -> None:
        """Keep the store within its budget, the most recently used in it."""
        with self._news:
            used, self._used = list(self._used), {}
        try:
            if used:
                self._watch.run(self._store.touch, used, time.time())
            gone = self._watch.run(self._store.evict, self._budget)
        except StoreError:
            return  # the watch has noted it; what is stored stays
        if gone:
            log.info("the state store is full (--l3-bytes): %d of the oldest states went", len(gone))
            self._on_evicted(gone)

    def _try_again(self, jobs: Sequence[_Job]) -> None:
        """Put items back in line, and give the store time to recover unless the server is closing."""
        with self._news:
            if not self._closing:
                again = {job.item.key: _Job(job.item, Future()) for job in jobs}
                self._waiting = {**again, **self._waiting}  # what came meanwhile is newer
                self._news.wait_for(lambda: self._closing, timeout=RETRY_SECONDS)


def _stored_forms(batch: Sequence[_Job]) -> tuple[list[tuple[_Job, StoredState]], list[_Job]]:
    """What there is to write, and the jobs whose form could not be made and that are to be tried again.

    Those of which nothing is wanted any more are in neither. Jobs that are not to be written now are settled.
    """
    states, again = [], []
    for job in batch:
        try:
            state = job.item.to_stored()
        except Exception as error:  # a fault of ours must not end the thread: other states still get written
            log.exception("a state was not written")
            _settle(job, StoreError(f"a state was not written ({type(error).__name__})", "other"))
            if job.item.failed():
                again.append(job)
            continue
        if state is None:
            _settle(job, None)
        else:
            states.append((job, state))
    return states, again


def _settle(job: _Job, error: StoreError | None) -> None:
    if error is None:
        job.ends.set_result(None)
    else:
        job.ends.set_exception(error)
