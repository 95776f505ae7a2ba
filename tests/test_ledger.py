"""Slots are given once, come back once, and the books show any slip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_lightning.core.ledger import LedgerMismatch, SlotLedger


def test_every_slot_is_given_once_and_then_none() -> None:
    ledger = SlotLedger(3)
    slots = [ledger.acquire(name) for name in "abc"]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2]
    assert ledger.acquire("d") is None
    assert (ledger.free, ledger.used) == (0, 3)
    assert {owner for _, owner in ledger.held()} == set("abc")
    ledger.check_integrity()


def test_a_released_slot_is_given_again() -> None:
    ledger = SlotLedger(1)
    slot = ledger.acquire("a")
    assert slot == 0
    ledger.release(slot)
    assert (ledger.free, ledger.owner(slot)) == (1, None)
    assert ledger.acquire("b") == slot
    assert ledger.owner(slot) == "b"


def test_a_slot_changes_hands_without_becoming_free() -> None:
    ledger = SlotLedger(2)
    slot = ledger.acquire("a")
    assert slot is not None
    ledger.transfer(slot, "cache")
    assert ledger.owner(slot) == "cache"
    assert (ledger.free, ledger.used) == (1, 1)


def test_a_cache_is_asked_only_when_nothing_is_free() -> None:
    kept: list[int] = []
    ledger = SlotLedger(2, reclaim=lambda: kept.pop() if kept else None)
    first, second = ledger.acquire("cache"), ledger.acquire("a")
    assert first is not None
    assert second is not None
    kept.append(first)
    ledger.release(second)
    assert ledger.acquire("b") == second
    assert kept == [first]
    assert ledger.acquire("c") == first
    assert ledger.owner(first) == "c"
    assert ledger.acquire("d") is None
    ledger.check_integrity()


@pytest.mark.parametrize("call", [SlotLedger.release, lambda ledger, slot: ledger.transfer(slot, "x")])
def test_a_slot_nobody_holds_cannot_be_returned_or_passed_on(call) -> None:  # type: ignore[no-untyped-def]
    ledger = SlotLedger(2)
    slot = ledger.acquire("a")
    assert slot is not None
    ledger.release(slot)
    with pytest.raises(LedgerMismatch, match=f"slot {slot} .*2 free, 0 held"):
        call(ledger, slot)
    with pytest.raises(LedgerMismatch, match="slot 9 "):
        call(ledger, 9)


def test_a_cache_cannot_give_up_a_slot_it_does_not_hold() -> None:
    ledger = SlotLedger(1, reclaim=lambda: 5)
    assert ledger.acquire("a") == 0
    with pytest.raises(LedgerMismatch, match="slot 5"):
        ledger.acquire("b")


def test_a_ledger_has_slots() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        SlotLedger(0)


def lose_a_slot(ledger: SlotLedger) -> None:
    ledger._free.pop()


def give_a_slot_twice(ledger: SlotLedger) -> None:
    ledger._owners[ledger._free[0]] = "b"


def return_a_slot_twice(ledger: SlotLedger) -> None:
    ledger._free.append(ledger._free[0])


def invent_a_slot(ledger: SlotLedger) -> None:
    ledger._owners[4] = "b"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_a_slot, r"slots \[1\] are lost or unknown: 2 free \+ 1 held, 4 in total"),
        (give_a_slot_twice, r"slots \[3\] are free and held at once: 3 free \+ 2 held"),
        (return_a_slot_twice, r"in the free list twice: 4 free \+ 1 held"),
        (invent_a_slot, r"slots \[4\] are lost or unknown: 3 free \+ 2 held"),
    ],
)
def test_any_slip_is_loud(harm, message: str) -> None:  # type: ignore[no-untyped-def]
    ledger = SlotLedger(4)
    ledger.acquire("a")
    ledger.check_integrity()
    harm(ledger)
    with pytest.raises(LedgerMismatch, match=message):
        ledger.check_integrity()


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_slots_are_conserved(total: int, moves: list[tuple[bool, int]]) -> None:
    ledger, mine = SlotLedger(total), set[int]()
    for acquire, pick in moves:
        if acquire:
            slot = ledger.acquire("me")
            assert (slot is None) == (len(mine) == total)
            assert slot not in mine
            mine |= {slot} if slot is not None else set()
        elif mine:
            slot = sorted(mine)[pick % len(mine)]
            ledger.release(slot)
            mine.remove(slot)
        ledger.check_integrity()
        assert {slot for slot, _ in ledger.held()} == mine
        assert (ledger.free, ledger.used) == (total - len(mine), len(mine))
