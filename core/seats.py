"""Rows in slots: keeps the ledger, the turns and the rows' own notes in agreement, and counts rows by state."""

from __future__ import annotations

from rwkv_lightning.core.ledger import LedgerMismatch, SlotLedger
from rwkv_lightning.core.sequence import Sequence, State
from rwkv_lightning.core.turns import Turns


class Seats:
    """The only place where a row gets or loses a slot."""

    def __init__(self, ledger: SlotLedger, turns: Turns) -> None:
        self.ledger = ledger
        self.turns = turns
        self._count = [0] * len(State)

    def count(self, state: State) -> int:
        """Rows in a state."""
        return self._count[state]

    def enter(self, rows: int) -> None:
        """New rows, waiting."""
        self._count[State.WAITING] += rows

    def seat(self, sequence: Sequence, slot: int, now: int) -> None:
        """Let a row run in a slot that the ledger has in its name."""
        sequence.slot = slot
        sequence.seated = sequence.touched = now
        self._move(sequence, State.RUNNING)
        self.turns.seat(sequence)

    def hand_over(self, victim: Sequence, taker: Sequence, now: int) -> int:
        """Swap a row out and put its slot in the taker's name; the victim lines up before its request's other rows."""
        assert victim.slot is not None  # only running rows can be victims
        slot, victim.slot, victim.touched = victim.slot, None, now
        self.ledger.transfer(slot, taker)
        self.set_aside(victim)
        victim.group.line.appendleft(victim)
        self.turns.unseat(victim)
        return slot

    def set_aside(self, sequence: Sequence) -> None:
        """The row's state is in its snapshot, or will be when the step is carried out."""
        self._move(sequence, State.SWAPPED)

    def vacate(self, sequence: Sequence, kept: bool) -> None:
        """A finished row leaves; its slot is released unless somebody keeps it."""
        if sequence.slot is not None and not kept:
            self.ledger.release(sequence.slot)
        sequence.slot = sequence.snapshot = sequence.backup = None
        self._move(sequence, State.FINISHED)
        self.turns.unseat(sequence)

    def check_integrity(self, unfinished: int) -> None:
        """Raises LedgerMismatch unless the ledger, the turns and the counts agree on who sits where."""
        self.ledger.check_integrity()
        seated = {slot: owner for slot, owner in self.ledger.held() if isinstance(owner, Sequence)}
        resident = {sequence.slot: sequence for sequence in self.turns.resident}
        waiting, running, swapped, _ = self._count
        if seated == resident and len(seated) == running and waiting + running + swapped == unfinished:
            return
        raise LedgerMismatch(
            f"rows hold {len(seated)} slots by the ledger ({self.ledger.free} free, {self.ledger.used} held, "
            f"{self.ledger.total} in total) and {len(resident)} by the scheduler ({running} running, "
            f"{swapped} swapped, {waiting} waiting, {unfinished} unfinished)"
        )

    def _move(self, sequence: Sequence, state: State) -> None:
        self._count[sequence.state] -= 1
        self._count[state] += 1
        sequence.state = state
