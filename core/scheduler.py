"""Continuous batching: which rows are fed what in the next step, and what their new tokens mean.

Every row that is decoding gets one token in every step. Beside them, prompts are read in chunks within a token budget,
in turns between requests. When slots are short, requests that hold fewer come first (turns.py) and rows are swapped to
host memory and back. A turn is `schedule() -> Step`, the runner's work, then `update` (or `fail`) with the same step;
`add` and `abort` may come at any point between. Nothing here knows of tensors, clocks or threads.

The work per step grows with the rows in it, not with those that wait.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rwkv_lightning.core.errors import RowFailed
from rwkv_lightning.core.ledger import LedgerMismatch, SlotLedger
from rwkv_lightning.core.request import Event, FinishReason, GenerationRequest
from rwkv_lightning.core.sequence import Chunk, Group, RowParts, Sampled, Sequence, State, Step
from rwkv_lightning.core.turns import Turns

__all__ = ["Chunk", "RowParts", "Sampled", "Scheduler", "Sequence", "State", "Step"]

Keeper = Callable[[Sequence], bool]


def keep_nothing(sequence: Sequence) -> bool:
    return False


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    step: Step
    budget: int  # prompt tokens that may still be added
    swaps: int  # rows that may still be swapped out
    reads: dict[Sequence, int] = field(default_factory=dict)  # prompt tokens given to each row


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
        self._budget, self._chunk = prefill_budget, min(chunk, prefill_budget // 2)
        self._swaps = swaps_per_step
        self._keeper = keeper
        self._groups: dict[str, Group] = {}
        self._turns = Turns(quantum)
        self._count = [0] * len(State)
        self._now = 0  # number of the latest step
        self._in_flight: Step | None = None

    @property
    def num_waiting(self) -> int:
        """Rows that have not begun, or whose prompt's state has not been copied to them yet."""
        return self._count[State.WAITING]

    @property
    def num_running(self) -> int:
        return self._count[State.RUNNING]

    @property
    def num_swapped(self) -> int:
        return self._count[State.SWAPPED]

    @property
    def slots_used(self) -> int:
        """Held slots, those kept by a cache included."""
        return self.ledger.used

    @property
    def slots_total(self) -> int:
        return self.ledger.total

    @property
    def idle(self) -> bool:
        return not self._groups

    def add(self, request: GenerationRequest, rows: typing.Sequence[RowParts]) -> None:
        """Line a request's rows up, one `RowParts` per prompt. Rows with equal prompts and states share one prefill."""
        self._check_new(request, rows)
        group = self._groups[request.id] = Group(request)
        leaders: dict[tuple[tuple[int, ...], int, int], Sequence] = {}
        for index, parts in enumerate(rows):
            sequence = group.rows[index] = Sequence(group, index, parts)
            leader = leaders.setdefault((sequence.prompt, id(parts.snapshot), parts.cached), sequence)
            (group.line if leader is sequence else leader.followers).append(sequence)
        self._count[State.WAITING] += len(rows)
        self._turns.rank(group)

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
        if not self._groups:
            return None
        self._now += 1
        plan = _Plan(Step(self._now), self._budget, self._swaps)
        self._admit(plan)
        self._read_on(plan)
        self._start_more(plan)
        self._spend_rest(plan)
        self._add_decodes(plan.step)
        self._add_reads(plan)
        self._in_flight = plan.step if plan.step.chunks else None
        return self._in_flight

    def update(self, step: Step, samples: Iterable[Sampled]) -> list[Event]:
        """Take in what the runner drew, aligned with `step.samples`; rows that end release their slots here."""
        self._land(step)
        self._forget_restored(step)
        events = []
        for (sequence, _), sampled in zip(step.samples, samples, strict=True):
            if sequence.finish_reason is not None:
                continue  # aborted while the step ran
            if sampled.token < 0:
                events.append(self._finish(sequence, FinishReason.ERROR, _row_failed(sequence)))
            elif (reason := sequence.accept(sampled)) is not None:
                events.append(self._finish(sequence, reason))
            elif sequence.due():
                events.append(sequence.news())
        self._line_up_followers(step)
        return events

    def fail(self, step: Step, error: Exception) -> list[Event]:
        """The step could not be carried out: its rows end with ERROR, all others go on.

        Its rows are those fed, those sampled, those whose save had not been made, and those that wait for one of them
        to read their common prompt.
        """
        self._land(step)
        rows = dict.fromkeys(chunk.sequence for chunk in step.chunks)
        rows |= dict.fromkeys(sequence for sequence, _ in step.samples)
        rows |= dict.fromkeys(sequence for sequence, _ in step.saves if sequence.snapshot is None)
        rows |= dict.fromkeys(follower for leader in list(rows) for follower in leader.followers)
        unfinished = [sequence for sequence in rows if sequence.finish_reason is None]
        for group in {sequence.group for sequence in unfinished}:
            group.line = type(group.line)(sequence for sequence in group.line if sequence not in rows)
        return [self._finish(sequence, FinishReason.ERROR, error) for sequence in unfinished]

    def check_integrity(self) -> None:
        """Raises LedgerMismatch unless slots and rows agree; when idle this means that no row holds a slot."""
        self.ledger.check_integrity()
        seated = {slot: owner for slot, owner in self.ledger.held() if isinstance(owner, Sequence)}
        resident = {sequence.slot: sequence for sequence in self._turns.resident}
        unfinished = sum(len(group.rows) for group in self._groups.values())
        counted = self.num_waiting + self.num_running + self.num_swapped
        if seated == resident and self.num_running == len(seated) and counted == unfinished:
            return
        raise LedgerMismatch(
            f"rows hold {len(seated)} slots by the ledger ({self.ledger.free} free, {self.slots_used} held, "
            f"{self.slots_total} in total) and {len(resident)} by the scheduler ({self.num_running} running, "
            f"{self.num_swapped} swapped, {self.num_waiting} waiting, {unfinished} unfinished)"
        )

    # Planning a step

    def _admit(self, plan: _Plan) -> None:
        """Slots in fair order; a row with a prompt to read begins at once, but leaves room for a prompt under way."""
        reserve = self._chunk if self._turns.reading else 0
        while group := self._turns.next(may_start=plan.budget > reserve):
            if not self._grant(plan, group, plan.budget - reserve):
                return

    def _read_on(self, plan: _Plan) -> None:
        """One chunk for each request with a prompt under way, in turns, then for its further prompts."""
        reading = self._turns.reading
        for _ in range(len(reading)):
            if not plan.budget:
                return
            group = next(iter(reading))
            reading.move_to_end(group)
            self._read_next_of(plan, group)
        for group in list(reading):
            while plan.budget and self._read_next_of(plan, group):
                continue

    def _read_next_of(self, plan: _Plan, group: Group) -> bool:
        """A chunk for the group's first prompt under way that has had none in this step."""
        row = next((row for row in group.reading if row.touched != self._now), None)
        if row is not None:
            self._read(plan, row, self._chunk)
        return row is not None

    def _start_more(self, plan: _Plan) -> None:
        """Budget left: begin further prompts, beside others of the same request too."""
        while plan.budget and (group := self._turns.next_start()):
            if not self._grant(plan, group, plan.budget):
                return

    def _spend_rest(self, plan: _Plan) -> None:
        """Budget still left: nobody else can use it, so the prompts at hand go beyond one chunk."""
        for sequence in plan.reads:
            if plan.budget:
                self._read(plan, sequence, plan.budget)

    def _grant(self, plan: _Plan, group: Group, budget: int) -> bool:
        """Give a slot to the group's next row in line and let it read up to a chunk, if a slot can be had."""
        sequence = group.line[0]
        slot = None if sequence.touched == self._now else self._slot_for(sequence, plan)
        if slot is None:
            return False
        group.line.popleft()
        self._seat(sequence, slot)
        if sequence.snapshot is None:
            plan.step.resets.append(slot)
        else:
            plan.step.restores.append((sequence, slot))
        if sequence.unread:
            self._read(plan, sequence, min(budget, self._chunk))
        return True

    def _slot_for(self, sequence: Sequence, plan: _Plan) -> int | None:
        """A free slot, or one that another row must give up."""
        slot = self.ledger.acquire(sequence)
        if slot is not None or not plan.swaps:
            return slot
        victim = self._turns.victim(sequence.group, self._now)
        if victim is None or victim.slot is None:
            return None
        slot = victim.slot
        plan.swaps -= 1
        plan.step.saves.append((victim, slot))
        self.ledger.transfer(slot, sequence)
        self._swap_out(victim)
        return slot

    def _swap_out(self, victim: Sequence) -> None:
        victim.slot, victim.touched = None, self._now
        self._move(victim, State.SWAPPED)
        victim.group.line.appendleft(victim)
        self._turns.unseat(victim)

    def _seat(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        sequence.seated = sequence.touched = self._now
        self._move(sequence, State.RUNNING)
        self._turns.seat(sequence)

    def _read(self, plan: _Plan, sequence: Sequence, most: int) -> None:
        """Give a row up to `most` prompt tokens of the budget."""
        tokens = min(most, plan.budget, sequence.unread)
        if not tokens:
            return
        plan.budget -= tokens
        plan.reads[sequence] = plan.reads.get(sequence, 0) + tokens
        sequence.prefilled += tokens
        sequence.touched = self._now
        self._turns.note_reading(sequence)

    # Writing it down

    def _add_decodes(self, step: Step) -> None:
        chunks, samples = step.chunks, step.samples
        for sequence in self._turns.resident:
            pending, slot = sequence.pending, sequence.slot
            if pending is not None and slot is not None:
                samples.append((sequence, len(chunks)))
                chunks.append(Chunk(sequence, slot, pending, True))

    def _add_reads(self, plan: _Plan) -> None:
        logits_row = len(plan.step.samples)
        for sequence, count in plan.reads.items():
            assert sequence.slot is not None  # rows of this step are never swapped out
            tokens = sequence.prompt[sequence.prefilled - count : sequence.prefilled]
            plan.step.chunks.append(Chunk(sequence, sequence.slot, tokens, not sequence.unread))
            if not sequence.unread:
                plan.step.samples.append((sequence, logits_row))
                self._fork(plan.step, sequence, sequence.slot, logits_row)
                logits_row += 1

    def _fork(self, step: Step, leader: Sequence, source: int, logits_row: int) -> None:
        """The leader's prompt ends with this step: its followers copy the state and draw from the same logits."""
        without_slot = []
        for follower in leader.followers:
            follower.prefilled, follower.snapshot = len(follower.prompt), None  # the initial state is behind it
            follower.prompt_logprobs = leader.prompt_logprobs
            slot = self.ledger.acquire(follower)
            if slot is None:
                self._move(follower, State.SWAPPED)
                without_slot.append(follower)
            else:
                self._seat(follower, slot)
                step.forks.append((source, slot))
            step.samples.append((follower, logits_row))
        if without_slot:
            step.fork_saves.append((source, without_slot))
        leader.followers = []

    # After a step

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
                self._turns.rank(group)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> Event:
        sequence.finish_reason = reason
        self._vacate(sequence)
        group = sequence.group
        del group.rows[sequence.row]
        if not group.rows:
            del self._groups[sequence.request.id]
        return sequence.last_news(error)

    def _vacate(self, sequence: Sequence) -> None:
        """Release the row's slot and snapshot, unless the keeper wants them."""
        good = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        kept = good and self._keeper(sequence)
        if sequence.slot is not None and not kept:
            self.ledger.release(sequence.slot)
        self._move(sequence, State.FINISHED)
        self._turns.unseat(sequence)
        sequence.slot = sequence.snapshot = None

    def _move(self, sequence: Sequence, state: State) -> None:
        self._count[sequence.state] -= 1
        self._count[state] += 1
        sequence.state = state

    def _check_new(self, request: GenerationRequest, rows: typing.Sequence[RowParts]) -> None:
        if request.id in self._groups:
            raise ValueError(f"request {request.id!r} is already here")
        if not rows or len(rows) != len(request.prompts):
            raise ValueError(f"request {request.id!r} has {len(request.prompts)} prompts and {len(rows)} rows")
        for index, (prompt, parts) in enumerate(zip(request.prompts, rows, strict=True)):
            if not 0 <= parts.cached < len(prompt):
                raise ValueError(
                    f"row {index} of request {request.id!r} has no token to feed: {len(prompt)} in its prompt"
                )


def _row_failed(sequence: Sequence) -> RowFailed:
    return RowFailed(
        f"The model's output for row {sequence.row} held no finite number, so the row ended; "
        "the other rows went on. Try again, or with another prompt."
    )
