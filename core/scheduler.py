"""Continuous batching: which rows are fed what in the next step, and what their new tokens mean.

Every row that is decoding gets one token in every step. Beside them, prompts are read in chunks within a token budget,
in turns between requests (planner.py). When slots are short, requests that hold fewer come first, and rows are swapped
to host memory and back (turns.py). One turn is `schedule() -> Step`, the runner's work, then `update` (or `fail`) with
the same step; `add` and `abort` may come at any point between. Nothing here knows of tensors, clocks or threads.

The work per step grows with the rows in it, not with those that wait.
"""

from __future__ import annotations

import typing
from collections import deque
from collections.abc import Callable, Iterable

from rwkv_lightning.core.errors import RowFailed
from rwkv_lightning.core.ledger import SlotLedger
from rwkv_lightning.core.planner import Planner
from rwkv_lightning.core.request import Event, FinishReason, GenerationRequest
from rwkv_lightning.core.seats import Seats
from rwkv_lightning.core.sequence import Chunk, Group, RowParts, Sampled, Sequence, State, Step
from rwkv_lightning.core.sharing import share_prompts
from rwkv_lightning.core.turns import Turns

__all__ = ["Chunk", "RowParts", "Sampled", "Scheduler", "Sequence", "State", "Step"]

Keeper = Callable[[Sequence], bool]


def keep_nothing(sequence: Sequence) -> bool:
    return False


class Scheduler:
    """One running batch for all requests.

    Args:
        ledger: the slots.
        prefill_budget: most prompt tokens in a step, at least 2.
        chunk: most prompt tokens of one row in a step while others could use the rest; at most half the budget counts,
            so that two prompts advance together.
        quantum: steps a row keeps its slot, at least, where every request holds one and another waits for its first.
        swaps_per_step: most rows swapped out in one step; bounds the copying that stands between two tokens.
        keeper: called with each row that ends by STOP or LENGTH, before its slot is released and its last event made.
            It may take the slot over (`ledger.transfer`) and return True. `slot` is None for a row that ended on its
            first token without ever holding a slot: then its state, the prompt's, is in `snapshot`.
    """

    def __init__(
        self,
        ledger: SlotLedger,
        *,
        prefill_budget: int = 512,
        chunk: int = 256,
        quantum: int = 256,
        swaps_per_step: int = 16,
        keeper: Keeper = keep_nothing,
    ) -> None:
        if prefill_budget < 2 or min(chunk, quantum, swaps_per_step) < 1:
            raise ValueError("prefill_budget must be at least 2; chunk, quantum and swaps_per_step at least 1")
        self.ledger = ledger
        self._keeper = keeper
        self._groups: dict[str, Group] = {}
        self._seats = Seats(ledger, Turns(quantum))
        self._planner = Planner(self._seats, prefill_budget, min(chunk, prefill_budget // 2), swaps_per_step)
        self._in_flight: Step | None = None

    @property
    def num_waiting(self) -> int:
        """Rows that have not begun, or whose prompt's state has not been copied to them yet."""
        return self._seats.count(State.WAITING)

    @property
    def num_running(self) -> int:
        return self._seats.count(State.RUNNING)

    @property
    def num_swapped(self) -> int:
        return self._seats.count(State.SWAPPED)

    @property
    def slots_used(self) -> int:
        """Held slots, those kept by a cache included."""
        return self.ledger.used

    @property
    def slots_total(self) -> int:
        return self.ledger.total

    @property
    def idle(self) -> bool:
        """No unfinished row is left."""
        return not self._groups

    def add(self, request: GenerationRequest, rows: typing.Sequence[RowParts]) -> list[Sequence]:
        """Line a request's rows up, one `RowParts` per prompt. What their prompts have in common is read once."""
        self._check_new(request, rows)
        group = self._groups[request.id] = Group(request)
        for index, parts in enumerate(rows):
            group.rows[index] = Sequence(group, index, parts)
        group.line.extend(share_prompts(list(group.rows.values())))
        self._seats.enter(len(rows))
        self._seats.turns.rank(group)
        return list(group.rows.values())

    def abort(self, request_id: str) -> list[Event]:
        """End all unfinished rows of a request, wherever they are. Unknown and finished requests have none."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        group.line.clear()
        return [self._finish(sequence, FinishReason.ABORT) for sequence in list(group.rows.values())]

    def schedule(self) -> Step | None:
        """The next step, or None when no row can be fed."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.number} has been neither updated nor failed")
        if self.idle:
            return None
        step = self._planner.plan()
        self._in_flight = step if step.chunks or step.samples else None
        return self._in_flight

    def update(self, step: Step, samples: Iterable[Sampled]) -> list[Event]:
        """Take in what the runner drew, aligned with `step.samples`; rows that end release their slots here."""
        self._land(step)
        self._forget_restored(step)
        events = []
        for (sequence, _), (token, logprob) in zip(step.samples, samples, strict=True):
            if sequence.finish_reason is not None:
                continue  # aborted while the step ran
            if token < 0:
                events.append(self._finish(sequence, FinishReason.ERROR, _row_failed(sequence)))
            elif (reason := sequence.accept(token, logprob)) is not None:
                events.append(self._finish(sequence, reason))
            else:
                if sequence.kept:
                    sequence.watch_text()
                if sequence.due():
                    events.append(sequence.news())
        self._line_up_followers(step)
        return events

    def fail(self, step: Step, error: Exception) -> list[Event]:
        """The step could not be carried out: its rows end with ERROR, all others go on.

        Its rows are those fed, those sampled, those whose save had not been made, those that were to take over a state
        in it, and those that wait for one of them to read their common prompt.
        """
        self._land(step)
        rows = _rows_of(step)
        for group in {sequence.group for sequence in rows}:
            group.line = deque(sequence for sequence in group.line if sequence not in rows)
        return [self._finish(row, FinishReason.ERROR, error) for row in rows if row.finish_reason is None]

    def check_integrity(self) -> None:
        """Raises LedgerMismatch unless slots and rows agree; when idle this means that no row holds a slot."""
        self._seats.check_integrity(sum(len(group.rows) for group in self._groups.values()))

    def _land(self, step: Step) -> None:
        if step is not self._in_flight:
            raise RuntimeError(f"step {step.number} is not the one in flight")
        self._in_flight = None

    def _forget_restored(self, step: Step) -> None:
        for sequence, _ in step.restores:
            sequence.snapshot = None

    def _line_up_followers(self, step: Step) -> None:
        """Followers that copied a state but found no slot go on as swapped rows do."""
        for _, followers in step.fork_saves:
            going_on = [sequence for sequence in followers if sequence.finish_reason is None]
            if going_on:
                group = going_on[0].group
                group.line.extendleft(reversed(going_on))
                self._seats.turns.rank(group)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> Event:
        """End a row: its slot, its place among the request's rows, its last event."""
        sequence.finish_reason = reason
        event = sequence.last_news(error)  # first: only then is it known which tokens the text covers
        good = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._seats.vacate(sequence, kept=good and self._keeper(sequence))
        del sequence.group.rows[sequence.row]
        if not sequence.group.rows:
            del self._groups[sequence.request.id]
        return event

    def _check_new(self, request: GenerationRequest, rows: typing.Sequence[RowParts]) -> None:
        if request.id in self._groups:
            raise ValueError(f"request {request.id!r} is already here")
        if not rows or len(rows) != len(request.prompts):
            raise ValueError(f"request {request.id!r} has {len(request.prompts)} prompts and {len(rows)} rows")
        for index, (prompt, parts) in enumerate(zip(request.prompts, rows, strict=True)):
            if not 0 <= parts.cached < len(prompt) + (parts.logits is not None):
                raise ValueError(f"row {index} of request {request.id!r} has {len(prompt)} tokens and none to feed")


def _rows_of(step: Step) -> dict[Sequence, None]:
    """The rows that a failed step leaves without a good state."""
    rows = dict.fromkeys(chunk.sequence for chunk in step.chunks)
    rows |= dict.fromkeys(sequence for sequence, _ in step.samples)
    rows |= dict.fromkeys(sequence for sequence, _ in step.saves if sequence.snapshot is None)
    rows |= dict.fromkeys(step.forked)
    waiting = list(rows)
    while waiting:  # followers may have followers of their own
        followers = waiting.pop().followers
        rows |= dict.fromkeys(followers)
        waiting += followers
    return rows


def _row_failed(sequence: Sequence) -> RowFailed:
    return RowFailed(
        f"The model's output for row {sequence.row} held no finite number, so the row ended; "
        "the other rows went on. Try again, or with another prompt."
    )
