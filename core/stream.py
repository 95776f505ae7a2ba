"""From the engine thread to the event loop: one wake-up per step, merged when the reader is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rwkv_lightning.core.request import Event


class RequestStream:
    """The events of one request, in the event loop. Its memory is bounded by the request's own text.

    Rows that produce faster than the reader reads are merged, so that a slow reader holds up only itself.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.rows_done: set[int] = set()
        self._pending: dict[int, Event] = {}
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Every row's terminal event has arrived (it may not have been read yet)."""
        return len(self.rows_done) == self.rows

    def push(self, event: Event) -> None:
        """Add an event; call it in the event loop only."""
        earlier = self._pending.get(event.row)
        self._pending[event.row] = event if earlier is None else merge(earlier, event)
        if event.finish_reason is not None:
            self.rows_done.add(event.row)
            if self.finished:
                self._ended.set()
        self._news.set()

    async def ended(self) -> None:
        """Wait until every row's terminal event has arrived, read or not."""
        await self._ended.wait()

    async def wait(self, seconds: float) -> list[Event]:
        """Look at the news without taking it; empty when there was none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return []
        return list(self._pending.values())

    async def batches(self, heartbeat: float | None = None) -> AsyncIterator[list[Event]]:
        """Lists of events, at most one per row: what arrived since the last look, merged; ends after the last row's.

        Args:
            heartbeat: seconds without news after which an empty list is yielded; None waits for ever.
        """
        while self._pending or not self.finished:
            try:
                async with asyncio.timeout(heartbeat):
                    await self._news.wait()
            except TimeoutError:
                yield []
                continue
            self._news.clear()
            events = list(self._pending.values())
            self._pending = {}
            yield events


def merge(first: Event, then: Event) -> Event:
    """Two successive events of one row as one."""
    first.text += then.text
    first.tokens += then.tokens
    first.logprobs += then.logprobs
    first.finish_reason = then.finish_reason
    first.usage = then.usage
    first.error = then.error
    return first
