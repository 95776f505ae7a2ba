"""What goes into the next step: who gets a slot, which prompt tokens are read, which rows decode."""

from __future__ import annotations

from dataclasses import dataclass, field

from rwkv_lightning.core.seats import Seats
from rwkv_lightning.core.sequence import Capture, Chunk, Group, Sequence, Step


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    step: Step
    budget: int  # prompt tokens that may still be added
    swaps: int  # rows that may still be swapped out
    reads: dict[Sequence, int] = field(default_factory=dict)  # prompt tokens given to each row
    ready: list[Sequence] = field(default_factory=list)  # rows whose first token needs no forward


class Planner:
    """Makes steps.

    Prompts share a budget of tokens per step: first those who begin, then one chunk for each request with a prompt
    under way, then further prompts; what is still left then goes to the prompts at hand.

    Args:
        budget: most prompt tokens in a step.
        chunk: most prompt tokens of one row while others could use the rest.
        swaps: most rows swapped out in one step.
    """

    def __init__(self, seats: Seats, budget: int, chunk: int, swaps: int) -> None:
        self._seats = seats
        self._turns = seats.turns
        self._budget, self._chunk, self._swaps = budget, chunk, swaps
        self._now = 0  # number of the latest step

    def plan(self) -> Step:
        """The next step; without samples and chunks when no row can go on."""
        self._now += 1
        draft = _Draft(Step(self._now), self._budget, self._swaps)
        self._admit(draft)
        self._read_on(draft)
        self._start_more(draft)
        self._spend_rest(draft)
        self._write_decodes(draft.step)
        self._write_reads(draft)
        self._write_ready(draft)
        return draft.step

    def _admit(self, draft: _Draft) -> None:
        """Slots in fair order; a row with a prompt to read begins at once, but leaves room for a prompt under way."""
        reserve = self._chunk if self._turns.reading else 0
        while group := self._turns.next(may_start=draft.budget > reserve):
            if not self._grant(draft, group, draft.budget - reserve):
                return

    def _read_on(self, draft: _Draft) -> None:
        """One chunk for each request with a prompt under way, in turns, then for its further prompts."""
        reading = self._turns.reading
        for _ in range(len(reading)):
            if not draft.budget:
                return
            group = next(iter(reading))
            reading.move_to_end(group)
            self._read_next_of(draft, group)
        for group in list(reading):
            while draft.budget and self._read_next_of(draft, group):
                continue

    def _start_more(self, draft: _Draft) -> None:
        """Budget left: begin further prompts, beside others of the same request too."""
        while draft.budget and (group := self._turns.next_start()):
            if not self._grant(draft, group, draft.budget):
                return

    def _spend_rest(self, draft: _Draft) -> None:
        """Budget still left: nobody else can use it, so the prompts at hand go beyond one chunk."""
        for sequence in draft.reads:
            if draft.budget:
                self._read(draft, sequence, draft.budget)

    def _grant(self, draft: _Draft, group: Group, budget: int) -> bool:
        """Give a slot to the group's next row in line and let it read up to a chunk, if a slot can be had."""
        sequence = group.line[0]
        just_swapped_out = sequence.touched == self._now
        slot = None if just_swapped_out else self._slot_for(draft, sequence)
        if slot is None:
            return False
        group.line.popleft()
        self._seats.seat(sequence, slot, self._now)
        self._place_state(draft.step, sequence, slot)
        if sequence.unread:
            self._read(draft, sequence, min(budget, self._chunk))
        elif sequence.pending is None:
            draft.ready.append(sequence)
        return True

    def _place_state(self, step: Step, sequence: Sequence, slot: int) -> None:
        source = getattr(sequence.snapshot, "slot", None)  # a kept state may be in a slot of its own
        if sequence.snapshot is None:
            step.resets.append(slot)
        elif source is None:
            step.restores.append((sequence, slot))
        else:
            step.copies.append((source, slot))
            sequence.snapshot = None

    def _slot_for(self, draft: _Draft, sequence: Sequence) -> int | None:
        """A free slot, or one that another row must give up."""
        slot = self._seats.ledger.acquire(sequence)
        if slot is not None or not draft.swaps:
            return slot
        victim = self._turns.victim(sequence.group, self._now)
        if victim is None:
            return None
        slot = self._seats.hand_over(victim, sequence, self._now)
        draft.step.saves.append((victim, slot))
        draft.swaps -= 1
        return slot

    def _read_next_of(self, draft: _Draft, group: Group) -> bool:
        """A chunk for the group's first prompt under way that has had none in this step."""
        row = next((row for row in group.reading if row.touched != self._now), None)
        if row is not None:
            self._read(draft, row, self._chunk)
        return row is not None

    def _read(self, draft: _Draft, sequence: Sequence, most: int) -> None:
        """Give a row up to `most` prompt tokens of the budget."""
        tokens = min(most, draft.budget, sequence.readable)
        if not tokens:
            return
        draft.budget -= tokens
        draft.reads[sequence] = draft.reads.get(sequence, 0) + tokens
        sequence.prefilled += tokens
        sequence.touched = self._now
        self._turns.note_reading(sequence)

    def _write_decodes(self, step: Step) -> None:
        chunks, samples = step.chunks, step.samples
        for sequence in self._turns.resident:
            pending, slot = sequence.pending, sequence.slot
            if pending is not None and slot is not None:
                samples.append((sequence, len(chunks)))
                chunks.append(Chunk(sequence, slot, pending, True))
                if sequence.wants_backup:
                    step.backups.append((sequence, slot))

    def _write_reads(self, draft: _Draft) -> None:
        step, logits_row = draft.step, len(draft.step.samples)
        for sequence, count in draft.reads.items():
            assert sequence.slot is not None  # a row that was touched keeps its slot through the step
            tokens = sequence.prompt[sequence.prefilled - count : sequence.prefilled]
            ends = not sequence.unread
            step.chunks.append(Chunk(sequence, sequence.slot, tokens, ends))
            if ends:
                step.samples.append((sequence, logits_row))
            self._pass_mark(step, sequence, sequence.slot, logits_row if ends else None)
            logits_row += ends

    def _pass_mark(self, step: Step, sequence: Sequence, slot: int, logits_row: int | None) -> None:
        """The state after this step's last prompt token may be wanted, by a cache or by followers."""
        position = sequence.prefilled
        if sequence.marks and sequence.marks[-1] == position:
            sequence.marks.pop()
        if position in sequence.captures:
            step.captures.append(Capture(sequence, slot, position, logits_row))
        if sequence.followers:
            self._fork(step, sequence, slot, logits_row)

    def _write_ready(self, draft: _Draft) -> None:
        """Rows whose logits are known draw their first token, and so do the rows that follow them."""
        step = draft.step
        logits_row = sum(chunk.wants_logits for chunk in step.chunks)
        for sequence in draft.ready:
            assert sequence.slot is not None
            step.ready.append(sequence.ready)
            step.samples.append((sequence, logits_row))
            self._fork(step, sequence, sequence.slot, logits_row)
            sequence.ready = None
            logits_row += 1

    def _fork(self, step: Step, leader: Sequence, source: int, logits_row: int | None) -> None:
        """Followers that go no further with their leader copy its state.

        Those whose own prompt ends here draw from the same logits; the others read the rest of theirs.
        """
        here = [follower for follower in leader.followers if follower.fork_at == leader.prefilled]
        leader.followers = [follower for follower in leader.followers if follower.fork_at != leader.prefilled]
        without_slot = []
        for follower in here:
            follower.catch_up(leader)
            step.forked.append(follower)
            slot = self._seats.ledger.acquire(follower)
            if slot is None:
                self._seats.set_aside(follower)
                without_slot.append(follower)
            else:
                self._seats.seat(follower, slot, self._now)
                step.forks.append((source, slot))
            if not follower.unread and logits_row is not None:
                step.samples.append((follower, logits_row))
        if without_slot:
            step.fork_saves.append((source, without_slot))
