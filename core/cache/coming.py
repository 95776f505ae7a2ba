"""`ComingPrefixes`: prompts that are being read, and requests that wait for their beginnings.

Without this, a hundred requests with a common beginning that arrive at once would each find nothing in the cache.
Used from the engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from rwkv_lightning.core.cache.prefix import PrefixTree

if TYPE_CHECKING:
    from rwkv_lightning.core.request import GenerationRequest
    from rwkv_lightning.core.sequence import Sequence

LEAST_AWAITED = 64  # tokens; fewer are read again sooner than waited for
MOST_WAITS = 3  # times that one request waits; then it reads for itself
SWEPT = 64  # rows watched from which on those that have ended are looked for


@dataclass(frozen=True, slots=True, eq=False)
class Leader:
    """A row that is reading its prompt, as the tree holds it."""

    key: str
    row: Sequence
    nbytes: int = 0


class Held(NamedTuple):
    """A request that waits until a row has read `position` tokens."""

    request: GenerationRequest
    position: int


class ComingPrefixes:
    """Who reads what at the moment, and who waits for it."""

    def __init__(self) -> None:
        self._tree: PrefixTree[Leader] = PrefixTree()
        self._leaders: dict[Sequence, Leader] = {}
        self._held: dict[Sequence, list[Held]] = {}
        self._waits: dict[str, int] = {}  # by request: how often it has waited
        self._names = count()
        self._sweep_at = SWEPT

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._held.values()))

    def watch(self, row: Sequence, initial: str) -> None:
        """A row is going to read its prompt."""
        if len(self._leaders) >= self._sweep_at:
            self._sweep()
        leader = self._leaders[row] = Leader(str(next(self._names)), row)
        self._tree.insert(row.prompt, leader, initial=initial)

    def note_read(self, rows: Iterable[Sequence]) -> None:
        """These rows were fed; a prompt that is read whole is not coming any more."""
        for row in rows:
            if not row.unread:
                self._drop(row)

    def hold(self, request: GenerationRequest, initial: str, found: int) -> bool:
        """Let a request wait if a row is about to read much more of its prompt than the cache has (`found` tokens).

        That row keeps its state where the prompts part. One that has many rows to begin may come later than the
        request itself would: only a row that has its slot, or is alone, is waited for.
        """
        near = self._tree.nearest(request.prompts[0], initial=initial)
        waits = self._waits.pop(request.id, 0)
        if near is None or waits == MOST_WAITS:
            return False
        row, position = near.entry.row, min(near.length, len(request.prompts[0]) - 1)
        if row.finish_reason is not None:
            self._drop(row)
            return False
        is_next = row.slot is not None or len(row.group.rows) == 1
        if not is_next or position - max(found, row.prefilled) < LEAST_AWAITED:
            return False
        row.capture_at(position)
        self._held.setdefault(row, []).append(Held(request, position))
        self._waits[request.id] = waits + 1
        return True

    def released(self) -> list[GenerationRequest]:
        """The requests that need not wait any more, in the order in which they came."""
        released = []
        for row, held in list(self._held.items()):
            ended = row.finish_reason is not None
            released += [h.request for h in held if ended or row.prefilled >= h.position]
            self._keep(row, [h for h in held if not ended and row.prefilled < h.position])
        return released

    def cancel(self, request_id: str) -> GenerationRequest | None:
        """A request is not wanted any more: take it out; None when it does not wait."""
        for row, held in self._held.items():
            for entry in held:
                if entry.request.id == request_id:
                    self._keep(row, [h for h in held if h is not entry])
                    del self._waits[request_id]
                    return entry.request
        return None

    def _keep(self, row: Sequence, held: list[Held]) -> None:
        if held:
            self._held[row] = held
        else:
            self._held.pop(row, None)

    def _drop(self, row: Sequence) -> None:
        leader = self._leaders.pop(row, None)
        if leader is not None:
            self._tree.remove(leader.key)

    def _sweep(self) -> None:
        for row in [row for row in self._leaders if row.finish_reason is not None or not row.unread]:
            self._drop(row)
        self._sweep_at = max(SWEPT, 2 * len(self._leaders))
