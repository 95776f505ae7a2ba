"""Whose turn it is: which request gets the next slot, and which row gives one up.

The order is max-min fair between requests: who holds fewest slots comes first, and among equals who has waited longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from rwkv_lightning.core.sequence import Group, Sequence

Rank = tuple[bool, int]  # (has a prompt under way, slots held)


class Place(NamedTuple):
    """A group's place in a ranking; places of rankings with common tickets compare across them."""

    rank: Rank
    ticket: int
    group: Group


class Ranking:
    """Groups ordered by rank, first come first served within a rank.

    Ranks are counts of held slots, of which at most sqrt(2 * slots) can differ at once: the extremes are found among
    a few dozen keys, however many groups there are.
    """

    def __init__(self, tickets: Iterator[int]) -> None:
        self._tickets = tickets
        self._rank: dict[Group, Rank] = {}
        self._peers: dict[Rank, OrderedDict[Group, int]] = {}

    def place(self, group: Group, rank: Rank) -> None:
        """Put a group at a rank, behind its peers; a group that is there already keeps its place."""
        if self._rank.get(group) == rank:
            return
        self.drop(group)
        self._rank[group] = rank
        self._peers.setdefault(rank, OrderedDict())[group] = next(self._tickets)

    def drop(self, group: Group) -> None:
        rank = self._rank.pop(group, None)
        if rank is None:
            return
        del self._peers[rank][group]
        if not self._peers[rank]:
            del self._peers[rank]

    def first(self) -> Place | None:
        return self._longest_at(min(self._peers)) if self._peers else None

    def top(self) -> Group | None:
        """A group of the highest rank."""
        return self._longest_at(max(self._peers)).group if self._peers else None

    def _longest_at(self, rank: Rank) -> Place:
        group, ticket = next(iter(self._peers[rank].items()))
        return Place(rank, ticket, group)


class Turns:
    """Rows in slots, requests in line for one.

    Attributes:
        resident: every row that holds a slot, oldest holder first.
        reading: requests with prompts under way, in the order of their next turn at the prefill budget.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        tickets = count()
        self._resume = Ranking(tickets)  # the next row in line only needs a slot
        self._start = Ranking(tickets)  # ... has prompt to feed, so needs prefill budget as well
        self._holders = Ranking(tickets)
        self.resident: OrderedDict[Sequence, None] = OrderedDict()
        self.reading: OrderedDict[Group, None] = OrderedDict()

    def seat(self, sequence: Sequence) -> None:
        """The row has got a slot."""
        self.resident[sequence] = sequence.group.resident[sequence] = None
        self.note_reading(sequence)

    def unseat(self, sequence: Sequence) -> None:
        """The row has lost its slot, or never had one."""
        self.resident.pop(sequence, None)
        sequence.group.resident.pop(sequence, None)
        self._stop_reading(sequence)
        self.rank(sequence.group)

    def note_reading(self, sequence: Sequence) -> None:
        """The row's prompt has advanced, perhaps to its end."""
        if sequence.unread:
            sequence.group.reading[sequence] = None
            self.reading.setdefault(sequence.group)
        else:
            self._stop_reading(sequence)
        self.rank(sequence.group)

    def rank(self, group: Group) -> None:
        """Put a group where its line, its slots and its prompts under way say it belongs."""
        held = len(group.resident)
        if held:
            self._holders.place(group, (False, held))
        else:
            self._holders.drop(group)
        begun = bool(group.line) and not group.line[0].unread
        if begun:
            self._resume.place(group, (False, held))
        else:
            self._resume.drop(group)
        if group.line and not begun:
            self._start.place(group, (bool(group.reading), held))
        else:
            self._start.drop(group)

    def next(self, may_start: bool) -> Group | None:
        """The group whose next row in line should get a slot; with `may_start`, one without a prompt under way too."""
        resume, start = self._resume.first(), self._start.first()
        if start is None or start.rank[0] or not may_start:
            return resume.group if resume else None
        return min(resume or start, start, key=lambda place: place[:2]).group

    def next_start(self) -> Group | None:
        """The group whose next row in line should begin its prompt, even beside other prompts of that group."""
        first = self._start.first()
        return first.group if first else None

    def victim(self, taker: Group, now: int) -> Sequence | None:
        """The row that must give up its slot to `taker` in step `now`, if any must.

        A request with at least two slots more than the taker loses its youngest row. Where everybody holds one, a
        taker without any gets that of the oldest holder, once that row has had its quantum of steps. Both leave the
        taker no better off than the loser, so the loser cannot take the slot back at once. A row that this step has
        planned with already is left alone.
        """
        top = self._holders.top()
        if top and len(top.resident) >= len(taker.resident) + 2:
            return next((row for row in reversed(top.resident) if row.touched != now), None)
        oldest = next(iter(self.resident), None)
        if taker.resident or oldest is None or oldest.touched == now or now - oldest.seated < self._quantum:
            return None
        return oldest

    def _stop_reading(self, sequence: Sequence) -> None:
        reading = sequence.group.reading
        reading.pop(sequence, None)
        if not reading:
            self.reading.pop(sequence.group, None)
