"""`Leases`: one writer per session at a time, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rwkv_lightning.core.errors import SessionBusy


@dataclass(slots=True)
class _Line:
    """Who holds a key and who waits for it; `asyncio.Lock` serves them first come, first served."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Leases:
    """Leases on keys, within one event loop.

    Args:
        waiting: how many may wait for one key beside its holder.
    """

    def __init__(self, waiting: int = 16) -> None:
        self._waiting = waiting
        self._lines: dict[str, _Line] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Wait for the key and hold it for the length of the block; cancellation ends the waiting or the holding.

        Raises SessionBusy, at once, when as many wait as may.
        """
        line = self._lines.setdefault(key, _Line())
        if line.users > self._waiting:
            raise SessionBusy(
                f"{self._waiting} turns wait for this session already: send the next when one has ended",
                param="session_id",
                retry_after=1.0,
            )
        line.users += 1
        try:
            async with line.lock:
                yield
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[key]

    def users(self, key: str) -> int:
        """How many hold a key or wait for it."""
        return self._lines[key].users if key in self._lines else 0

    def __len__(self) -> int:
        """How many keys are held."""
        return len(self._lines)
