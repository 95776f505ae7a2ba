"""States are copied out of their slots beside the steps, before these are needed; a copy in a step is a last resort."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cache_memory import MemoryStore
from state_calls import question, serve, turn
from state_stores import FlakyStore, GatedStore
from state_world import A, B, World, worlds

from rwkv_lightning.core.cache import hierarchy
from rwkv_lightning.core.cache.kept import Kept
from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.sessions import Deletion, Level
from rwkv_lightning.core.cache.shelf import SlotShelf
from rwkv_lightning.core.ledger import LedgerMismatch
from rwkv_lightning.core.slots import Snapshot

NEVER = 60.0  # seconds of a flush interval: the writer copies nothing in the time of a test


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with worlds(monkeypatch) as make:
        yield make


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def take_slots(here: World, count: int) -> None:
    """As many rows begin in the coming step."""
    for number in range(count):
        here.acquire(f"row {number}")
    here.cache.move_out()


def finish_all(here: World, count: int) -> list[SessionKey]:
    keys = [SessionKey(f"s{number}") for number in range(count)]
    for number, key in enumerate(keys):
        here.finish(key, number)
    return keys


def quiet(here: World) -> bool:
    """The copier has nothing to do, and does nothing."""
    with here.cache.lock:
        done = here.cache.slots.next_to_copy(here.ledger.free) is None
        return done and not any(kept.copying for kept in here.cache.slots.current())


def fail_once(here: Any) -> None:
    """The next copy out of a slot finds no memory."""
    export = here.cache.moves._export

    def fails(slot: int) -> Snapshot:
        here.cache.moves._export = export
        raise MemoryError

    here.cache.moves._export = fails


class TestAhead:
    @pytest.mark.parametrize("store", [None, MemoryStore])
    async def test_a_step_that_needs_slots_copies_nothing(self, world: Any, store: Any) -> None:
        here = world(store and store(), slots=6, l1=6, interval=NEVER)
        keys = finish_all(here, 6)
        wait_for(lambda: quiet(here))
        assert here.cache.moves.copies == {"beside": 3}, "half of the limit can go at any time"
        take_slots(here, 3)
        assert here.cache.moves.copies["step"] == 0
        assert [kept.key for kept in here.cache.slots.current()] == ["s3", "s4", "s5"]
        assert [await here.number(key) for key in keys] == list(range(6))
        wait_for(lambda: quiet(here))
        take_slots(here, 3)
        assert here.cache.moves.copies["step"] == 0, "the next ones were copied meanwhile"
        assert [await here.number(key) for key in keys] == list(range(6))

    async def test_nothing_is_copied_while_there_are_slots_enough(self, world: Any) -> None:
        here = world(None, slots=8, l1=8)
        finish_all(here, 4)
        here.cache.move_out()
        here.cache.moves.copier.close()
        assert here.cache.moves.copies == {}

    async def test_rows_that_take_the_free_slots_are_noticed(self, world: Any) -> None:
        here = world(None, slots=8, l1=8)
        finish_all(here, 4)
        take_slots(here, 3)
        wait_for(lambda: quiet(here))
        assert here.cache.moves.copies == {"beside": 3}

    async def test_states_over_the_limit_are_copied_at_once(self, world: Any) -> None:
        here = world(None, slots=8, l1=1)
        keys = finish_all(here, 4)
        wait_for(lambda: quiet(here))
        assert here.cache.moves.copies == {"beside": 3}
        assert [kept.key for kept in here.cache.slots.current()] == ["s3"], "and are in their slots no more"
        assert here.cache.slots.slots_held == here.ledger.used, "which are the cache's until a step begins"
        here.cache.move_out()
        assert here.cache.slots.slots_held == here.ledger.used == 1
        here.cache.check_integrity(here.ledger)
        here.acquire("row")
        with pytest.raises(LedgerMismatch, match="2 slots are held by the ledger and 1 by the cache"):
            here.cache.check_integrity(here.ledger)
        here.ledger.release(next(slot for slot, owner in here.ledger.held() if owner == "row"))
        assert here.ledger.free == 7
        here.ledger.check_integrity()
        here.fill_slots()
        assert [await here.number(key) for key in keys] == list(range(4))

    async def test_a_vacated_slot_is_taken_before_any_state_goes(self, world: Any) -> None:
        here = world(None, slots=4, l1=1)
        keys = finish_all(here, 4)
        wait_for(lambda: quiet(here) and len(here.cache.slots) == 1)
        assert here.ledger.free < 3, "no step has told the ledger of them all"
        taken = [here.ledger.acquire(f"row {number}") for number in range(3)]
        assert len(set(taken) - {None}) == 3
        assert len(here.cache.slots) == 1
        here.ledger.check_integrity()
        assert [await here.number(key) for key in keys] == list(range(4))

    async def test_one_that_was_copied_before_it_is_over_the_limit_goes_as_well(self, world: Any) -> None:
        here = world(None, slots=2, l1=1)
        here.finish(A, 1)
        here.acquire("row")
        here.cache.move_out()
        wait_for(lambda: quiet(here))
        assert here.cache.moves.copies == {"beside": 1}
        here.ledger.release(1 - here.cache.find(A).slot)
        here.finish(B, 2)
        assert [kept.key for kept in here.cache.slots.current()] == ["b"]
        assert (await here.number(A), await here.number(B)) == (1, 2)

    async def test_a_state_over_the_limit_that_a_turn_uses_stays_readable(self, world: Any) -> None:
        here = world(None, slots=4, l1=0, l2=0)
        here.finish(A, 3)
        base = await here.front.open(A)
        wait_for(lambda: quiet(here) and len(here.cache.slots) == 0)
        assert (base.slot, int(base.snapshot.shift[0, 0, 0])) == (None, 3)
        here.front.close(base)

    async def test_without_room_in_l2_what_l3_lacks_is_copied_ahead_all_the_same(self, world: Any) -> None:
        here = world(MemoryStore(), slots=3, l1=3, l2=0, interval=NEVER)
        keys = finish_all(here, 3)
        wait_for(lambda: quiet(here))
        take_slots(here, 2)
        assert here.cache.moves.copies == {"beside": 2}
        assert [await here.number(key) for key in keys] == [0, 1, 2]
        here.cache.writer.hurry()
        here.wait_stored()
        assert here.cache.host.nbytes == 0

    async def test_copies_that_memory_has_no_room_for_cost_no_state(
        self, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hierarchy, "LEAST_SPARE", 500)
        store = FlakyStore()
        here = world(store, slots=8, l1=8, l2=0, interval=NEVER)
        store.fail(lasting=True)
        keys = finish_all(here, 8)
        wait_for(lambda: quiet(here))
        assert here.cache.moves.copies["beside"] >= 4
        assert here.cache.host.nbytes <= 500, "room for one"
        assert here.cache.host.lost == set()
        assert [await here.number(key) for key in keys] == list(range(8))
        store.work()

    async def test_it_does_not_wait_for_a_store_that_hangs(self, world: Any) -> None:
        store = GatedStore()
        here = world(store, slots=4, l1=4)
        store.hold("put")
        here.finish(A, 9)
        wait_for(store.entered.is_set)
        try:
            keys = finish_all(here, 3)
            wait_for(lambda: quiet(here))
            take_slots(here, 2)
            assert here.cache.moves.copies["step"] == 0
        finally:
            store.release()
        assert [await here.number(key) for key in (A, *keys)] == [9, 0, 1, 2]

    async def test_a_copy_that_fails_is_made_in_the_step(self, world: Any, caplog: pytest.LogCaptureFixture) -> None:
        here = world(None, slots=1, l1=1)
        fail_once(here)
        here.finish(A, 1)
        wait_for(lambda: "could not be copied ahead" in caplog.text)
        take_slots(here, 1)
        assert here.cache.moves.copies["step"] == 1
        assert await here.number(A) == 1

    async def test_a_copy_that_fails_for_the_store_is_tried_again(self, world: Any) -> None:
        store = MemoryStore()
        here = world(store, slots=4, l1=4)
        here.cache.moves.copier.close()
        fail_once(here)
        here.finish(A, 3)
        here.finish(B, 4)
        here.wait_stored()
        assert store.get("a") is not None
        assert store.get("b") is not None

    @pytest.mark.parametrize("then", ["deleted", "replaced"])
    async def test_what_became_of_a_state_during_its_copy(self, world: Any, then: str) -> None:
        here = world(None, slots=2, l1=2)
        started, go = threading.Event(), threading.Event()
        export = here.cache.moves._export

        def slowly(slot: int) -> Snapshot:
            started.set()
            assert go.wait(5)
            return export(slot)

        here.finish(B, 5)
        here.cache.moves._export = slowly
        here.acquire("row")
        here.cache.move_out()
        wait_for(started.is_set)
        old = here.cache.find(B)
        here.front.close(old)
        if then == "deleted":
            assert await here.front.delete(Deletion("b"))
        else:
            here.ledger.release(1 - old.slot)
            here.finish(B, 6)
        go.set()
        wait_for(lambda: not old.copying)
        assert old.copy is None, "nobody wants it"
        assert await here.number(B) == (None if then == "deleted" else 6)


class TestTheLastResort:
    async def test_slots_that_are_needed_at_once_are_copied_in_the_step(self, world: Any) -> None:
        here = world(MemoryStore(), slots=4, l1=4, interval=NEVER)
        here.cache.moves.copier.close()
        keys = finish_all(here, 4)
        take_slots(here, 3)
        assert here.cache.moves.copies == {"step": 3}
        assert [await here.number(key) for key in keys] == list(range(4))

    async def test_a_stored_state_that_l2_has_dropped_needs_no_copy(self, world: Any) -> None:
        here = world(MemoryStore(), slots=4, l1=2, l2=0)
        here.finish(A, 1)
        here.wait_stored()
        here.fill_slots()
        assert here.cache.moves.copies["step"] == 0
        assert await here.number(A) == 1
        assert here.cache.resumed == {Level.L3: 1}

    async def test_unless_l3_has_dropped_it_as_well(self, world: Any) -> None:
        store = MemoryStore()
        here = world(store, slots=4, l1=4, l2=0)
        here.finish(A, 1)
        here.wait_stored()
        base = await here.front.open(A)
        here.cache.host.tier.budget = 1 << 20
        store.delete(["a"])
        here.cache._evicted(["a"])
        here.front.close(base)
        here.fill_slots()
        assert await here.number(A) == 1

    async def test_a_state_in_use_is_copied_wherever_it_is_stored(self, world: Any) -> None:
        here = world(MemoryStore(), slots=4, l1=2, l2=0)
        here.finish(A, 1)
        here.wait_stored()
        base = await here.front.open(A)
        assert base.copy is None
        here.fill_slots()
        assert int(base.snapshot.shift[0, 0, 0]) == 1
        here.front.close(base)


class TestWhoGoesNext:
    def kept(self, shelf: SlotShelf, name: str, slot: int, *, copied: bool) -> Kept:
        kept = Kept(SessionKey(name), "model", "", None, (), (), "", current=True)
        kept.copy = Snapshot(None, None) if copied else None  # type: ignore[arg-type]
        shelf.put(kept, slot)
        return kept

    def order(self, shelf: SlotShelf) -> str:
        order = ""
        while (kept := shelf.next_out()) is not None:
            order += kept.key
            shelf.give_up(kept, wanted=False)
        return order

    def test_copied_ones_then_the_others_the_least_recently_used_first(self) -> None:
        shelf = SlotShelf(4)
        for slot, (name, copied) in enumerate({"a": False, "b": True, "c": False, "d": True}.items()):
            self.kept(shelf, name, slot, copied=copied)
        shelf.find("a")
        assert self.order(shelf) == "bdca"

    def test_unwanted_ones_go_before_others_of_their_kind(self) -> None:
        shelf = SlotShelf(2)
        for slot, (name, copied) in enumerate({"a": True, "b": False, "c": True, "d": False}.items()):
            self.kept(shelf, name, slot, copied=copied)
        assert self.order(shelf) == "acbd"

    def test_one_that_nobody_wants_needs_no_copy_and_one_being_copied_stays(self) -> None:
        shelf = SlotShelf(4)
        a, b, c, d = (self.kept(shelf, name, slot, copied=False) for slot, name in enumerate("abcd"))
        a.copying, b.stored, c.current = 1, True, False
        d.users = c.users = 1
        assert self.order(shelf) == "bcd"
        assert [kept.key for kept in shelf.current()] == ["a"]

    async def test_a_state_used_in_its_slot_stays_in_l2(self, world: Any) -> None:
        here = world(None, slots=4, l1=4, l2=2 * 460)
        s0, s1, *_ = finish_all(here, 4)
        wait_for(lambda: quiet(here))
        assert here.cache.moves.copies == {"beside": 2}
        before = {key: here.cache.find(key) for key in (s1, s0)}
        for kept in before.values():
            here.front.close(kept)
        assert None not in [kept.copy for kept in before.values()]
        record = here.cache.record_of(before[s0])
        here.cache.adopt(record.renamed("other", created=0.0))
        assert (before[s0].copy is None, before[s1].copy is None) == (False, True)


def test_a_server_under_a_normal_load_hardly_ever_copies_in_a_step(tmp_path: Path) -> None:
    """Many more sessions than slots, and no flush that would copy them; rows leave some slots to kept states."""
    prompts = [question("Count from 1 to 12."), question("What is 7 + 8?")]

    def play(lane: int) -> None:
        for prompt in prompts:
            for number in range(12):
                turn(server, f"s{lane} {number}", prompt, max_tokens=6)

    with serve(tmp_path, max_batch=8, l1_slots=5, state_flush_interval=NEVER) as server:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(play, range(3)))
        beside, in_steps = (server.metric(f'state_copies_total{{where="{where}"}}') for where in ("beside", "step"))
        assert beside > 36, "there was pressure"
        assert in_steps <= beside / 20
        assert server.metric('sessions_resumed_total{tier="l2"}') > 20
