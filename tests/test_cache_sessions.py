"""Deletions, turns that they void, numbers of branches, and the listing over all tiers."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from cache_memory import Disk, MemoryStore
from cache_states import state
from hypothesis import given
from hypothesis import strategies as st

from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.sessions import BranchNumbers, Deletion, Level, Place, Turn, Turns, listing
from rwkv_lightning.core.errors import StoreError
from rwkv_lightning.core.interfaces import StoredState


@pytest.fixture
def store() -> Any:
    MemoryStore.disks["sessions"] = Disk()
    store = MemoryStore()
    store.open("sessions")
    yield store
    store.close()


A, A1, A12, A1_POET = SessionKey("a"), SessionKey("a", 1), SessionKey("a", 12), SessionKey("a", 1, "poet")
A_POET, B = SessionKey("a", 0, "poet"), SessionKey("b")
EVERY = [A, A1, A12, A1_POET, A_POET, B, SessionKey("ab"), SessionKey("ab", 1)]


@pytest.mark.parametrize(
    ("deletion", "covered"),
    [
        (Deletion("a"), [A, A_POET]),
        (Deletion("a", branches=True), [A, A1, A12, A1_POET, A_POET]),
        (Deletion("a:1"), [A1, A1_POET]),
        (Deletion("a:1", branches=True), [A1, A1_POET]),
        (Deletion("b", branches=True), [B]),
        (Deletion("a:0"), []),
        (Deletion("a:1:poet"), []),
        (Deletion("never", branches=True), []),
        (Deletion(":", branches=True), []),
    ],
    ids=str,
)
def test_what_a_deletion_covers(store: MemoryStore, deletion: Deletion, covered: list[SessionKey]) -> None:
    assert [key for key in EVERY if deletion.covers(key)] == covered
    store.put([stored(key) for key in EVERY])
    assert sorted(map(str, deletion.apply(store))) == sorted(map(str, covered))
    left = {str(key) for key in EVERY} - {str(key) for key in covered}
    assert {info.key for info in store.sessions()} == left


def stored(key: SessionKey) -> StoredState:
    plain = state(key.session, key.branch)
    return replace(plain, info=replace(plain.info, key=str(key), initial=key.initial))


@pytest.mark.parametrize(
    ("deletion", "deleted", "voided", "found"),
    [
        (Deletion("a"), [], 0, False),
        (Deletion("a"), [A], 0, True),
        (Deletion("a"), [A_POET], 0, True),
        (Deletion("a"), [], 1, True),
        (Deletion("a", branches=True), [], 0, True),
        (Deletion("a:1"), [A1], 0, True),
        (Deletion("a:1"), [], 0, False),
    ],
    ids=str,
)
def test_not_found_only_when_the_very_session_is_missing(
    deletion: Deletion, deleted: list[SessionKey], voided: int, found: bool
) -> None:
    assert deletion.found(deleted, voided) is found


# Turns


@pytest.mark.parametrize(
    ("deletion", "kept"),
    [
        (Deletion("a"), ["fork of a", "turn of b"]),
        (Deletion("a", branches=True), ["turn of b"]),
        (Deletion("a:1"), ["turn of a", "fork of a", "turn of b"]),
        (Deletion("b", branches=True), ["turn of a", "fork of a"]),
    ],
    ids=str,
)
def test_a_turn_of_a_session_deleted_meanwhile_is_not_stored(deletion: Deletion, kept: list[str]) -> None:
    turns, done = Turns(), list[str]()
    running = {
        "turn of a": turns.begin(Turn("a")),
        "fork of a": turns.begin(Turn("a", forks=True)),
        "turn of b": turns.begin(Turn("b")),
    }
    assert turns.void(deletion) == 3 - len(kept)
    for name, turn in running.items():
        turns.commit(turn, partial(done.append, name))
        turns.end(turn)
        turns.end(turn)
    assert done == kept
    assert len(turns) == 0


def test_a_turn_begun_after_the_deletion_is_stored() -> None:
    turns = Turns()
    assert turns.void(Deletion("a", branches=True)) == 0
    turn = turns.begin(Turn("a"))
    assert turns.commit(turn, lambda: "stored") == "stored"
    turns.end(turn)
    assert turns.void(Deletion("a")) == 0, "a turn that has ended is not running"


def test_no_deletion_comes_between_the_check_and_the_storing() -> None:
    turns, order = Turns(), list[str]()
    turn = turns.begin(Turn("a"))

    def delete() -> None:
        turns.void(Deletion("a"))
        order.append("deleted")

    deleter = threading.Thread(target=delete)

    def keep() -> None:
        deleter.start()
        deleter.join(0.05)
        order.append("stored")

    turns.commit(turn, keep)
    deleter.join()
    assert order == ["stored", "deleted"], "the deletion then removes what was stored"


def test_a_failure_while_storing_is_the_callers() -> None:
    turns = Turns()
    turn = turns.begin(Turn("a"))
    with pytest.raises(ZeroDivisionError):
        turns.commit(turn, lambda: 1 // 0)
    assert turns.void(Deletion("a")) == 1, "the lock is free again"


# Branch numbers


class Clock:
    now = 1_000_000.7

    def __call__(self) -> float:
        return self.now


def test_numbers_come_from_the_store(store: MemoryStore) -> None:
    numbers = BranchNumbers(store.reserve_branches)
    assert [numbers.take("a"), numbers.take("a"), numbers.take("b")] == [1, 2, 1]
    assert BranchNumbers(store.reserve_branches).take("a") == 3, "after a restart"


def test_numbers_never_repeat_while_the_store_fails_or_after(store: MemoryStore) -> None:
    broken = False

    def reserve(session: str, count: int, at_least: int) -> int:
        if broken:
            raise StoreError("no", "other")
        return store.reserve_branches(session, count, at_least)

    numbers = BranchNumbers(reserve, Clock())
    taken = [numbers.take("a"), numbers.take("a")]
    broken = True
    taken += [numbers.take("a"), numbers.take("a")]
    broken = False
    taken += [numbers.take("a"), numbers.take("a")]
    assert taken == [1, 2, 1_000_000, 1_000_001, 1_000_002, 1_000_003]
    assert store.reserve_branches("a") == 1_000_004, "the store has caught up"


def test_without_a_store_a_restart_gives_later_numbers() -> None:
    clock = Clock()
    first = [BranchNumbers(None, clock).take("a") for _ in range(1)]
    clock.now += 1
    assert BranchNumbers(None, clock).take("a") > first[0]


def test_numbers_taken_in_many_threads_differ(store: MemoryStore) -> None:
    numbers, taken = BranchNumbers(store.reserve_branches), list[int]()
    threads = [threading.Thread(target=lambda: taken.extend(numbers.take("a") for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 201))


# The listing

PLACES = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from([Level.L1, Level.L2, Level.L3]), st.integers(0, 3)), max_size=20
)


@given(PLACES, st.one_of(st.none(), st.integers(0, 10)), st.integers(0, 12))
def test_each_session_is_listed_once_at_its_fastest_level(
    places: list[tuple[int, Level, int]], limit: int | None, offset: int
) -> None:
    MemoryStore.disks["listing"] = Disk()
    store = MemoryStore()
    store.open("listing")
    resident, fastest = [], dict[SessionKey, Level]()
    for number, level, updated in places:
        key = SessionKey(f"s{number % 3}", number // 3)
        fastest[key] = min(fastest.get(key, Level.L3), level, key=list(Level).index)
        if level == Level.L3:
            store.put([state(key.session, key.branch, created=float(updated))])
        else:
            resident.append(Place(key, level, float(updated)))
    page = listing(resident, store, limit=limit, offset=offset)
    everything = listing(resident, store)
    store.close()
    assert {place.key: place.level for place in everything.places} == fastest
    assert len(everything.places) == len(fastest) == everything.total == page.total
    counts = [sum(level == wanted for level in fastest.values()) for wanted in Level]
    assert [page.l1, page.l2, page.l3] == counts
    assert page.places == everything.places[offset:][:limit]
    order = [(list(Level).index(place.level), -place.updated) for place in everything.places]
    assert order == sorted(order), "the fastest level first, the newest first within it"


def test_the_listing_without_a_store() -> None:
    found = listing([Place(A, Level.L2, 1.0), Place(B, Level.L1, 0.0)], None, limit=1)
    assert found.places == [Place(B, Level.L1, 0.0)]
    assert (found.total, found.l1, found.l2, found.l3) == (2, 1, 1, 0)


def test_levels_are_named_as_the_contract_names_them() -> None:
    assert [str(level) for level in Level] == ["L1 (VRAM)", "L2 (RAM)", "Database (Disk)"]
