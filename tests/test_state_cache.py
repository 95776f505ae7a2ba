"""`StateCache` without a model: what is kept comes back bit for bit, is never older than it should be, never wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from cache_memory import MemoryStore
from state_stores import FlakyStore, GatedStore
from state_world import A, B, worlds

from rwkv_lightning.core.cache import hierarchy
from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.record import Expected, StateRecord
from rwkv_lightning.core.cache.sessions import Deletion, Level, Turn
from rwkv_lightning.core.errors import StateLost, StateUnavailable, StoreError
from rwkv_lightning.core.slots import Snapshot


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with worlds(monkeypatch) as make:
        yield make


class TestTiers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("tier", ["L1", "L2", "L3", "L3 after a restart"])
    async def test_every_round_trip_is_lossless_bit_for_bit(self, world: Any, dtype: torch.dtype, tier: str) -> None:
        """Whatever the bits mean: NaNs with a payload, infinities, negative zeros, denormal numbers."""
        here = world(MemoryStore(), dtype=dtype, l2=0 if tier.startswith("L3") else 1 << 20)
        wild = Snapshot(random_bits(here.pool.shift[:, :, 0]), random_bits(here.pool.wkv[:, 0]))
        here.filled = lambda number: wild
        here.finish(A, 1)
        if tier != "L1":
            here.fill_slots()
        if tier.startswith("L3"):
            here.wait_stored()
        if tier.endswith("restart"):
            here.cache.shut_down()
            here = world(MemoryStore(), dtype=dtype)
        kept = await here.front.open(A)
        assert kept is not None
        assert here.cache.resumed == {{"L1": Level.L1, "L2": Level.L2}.get(tier, Level.L3): 1}
        slot = kept.slot if tier == "L1" else 0
        if tier != "L1":
            here.pool.restore(slot, kept.snapshot)
        assert same_bits(here.pool.export(slot), wild)
        assert kept.tail == (7,)

    @pytest.mark.parametrize("l1", [0, 1, 4])
    @pytest.mark.parametrize("l2", [0, 400, 1 << 20])
    @pytest.mark.parametrize("slots", [1, 2, 4])
    async def test_with_a_store_nothing_is_lost_however_small_the_rest(
        self, world: Any, slots: int, l1: int, l2: int
    ) -> None:
        here = world(MemoryStore(), slots=slots, l1=l1, l2=l2)
        last = {}
        for number in range(1, 25):
            key = SessionKey(f"s{number % 5}")
            last[key] = number
            here.finish(key, number)
            assert await here.number(key) == number
        assert {key: await here.number(key) for key in last} == last
        here.wait_stored()
        assert {key: await here.number(key) for key in last} == last
        assert here.cache.host.nbytes <= l2
        here.cache.shut_down()
        again = world(MemoryStore(), slots=slots, l1=l1, l2=l2)
        assert {key: await again.number(key) for key in last} == last

    async def test_without_a_store_the_least_recently_used_sessions_are_forgotten(self, world: Any) -> None:
        here = world(None, slots=2, l1=1, l2=2 * 460)
        here.cache.moves.copier.close()  # copied ahead, states come to L2 in any order within a moment
        for number in range(1, 7):
            here.finish(SessionKey(f"s{number}"), number)
        found = [await here.number(SessionKey(f"s{number}")) for number in range(1, 7)]
        assert found[-1] == 6
        assert found[0] is None
        assert [number for number in found if number is not None] == list(range(7 - sum(map(bool, found)), 7))

    async def test_l1_needs_no_copy_and_the_writer_makes_one(self, world: Any) -> None:
        here = world(MemoryStore(), interval=30.0)
        here.finish(A, 1)
        kept = await here.front.open(A)
        assert (kept.slot, kept.copy) == (0, None)
        here.cache.writer.hurry()
        here.wait_stored()
        assert kept.slot == 0, "it stays in its slot"
        assert kept.copy is not None
        here.fill_slots()
        assert (kept.slot, await here.number(A)) == (None, 1)

    async def test_a_state_in_use_outlives_its_slot_and_its_session(self, world: Any) -> None:
        here = world(MemoryStore(), interval=30.0)
        here.finish(A, 1)
        base = await here.front.open(A)
        here.finish(A, 2, base)
        here.fill_slots()
        assert int(base.snapshot.shift[0, 0, 0]) == 1
        assert await here.front.delete(Deletion("a"))
        assert int(base.snapshot.shift[0, 0, 0]) == 1
        here.front.close(base)
        assert base.copy is None, "nobody else wants it"

    async def test_states_hold_no_memory_after_they_were_replaced(self, world: Any) -> None:
        here = world(MemoryStore(), slots=8, l1=8)
        kept = []
        for number in range(1, 30):
            base = await here.front.open(A)
            here.finish(A, number, base)
            here.wait_stored()
            here.front.close(base)
            kept.append(base)
        assert all(old.copy is None for old in kept[1:])
        assert here.cache.host.nbytes <= 500
        assert len(here.cache.host.tier) == 1


def random_bits(like: torch.Tensor) -> torch.Tensor:
    integers = torch.int32 if like.dtype is torch.float32 else torch.int16
    info = torch.iinfo(integers)
    return torch.randint(info.min, info.max, like.shape, dtype=integers).view(like.dtype)


def same_bits(one: Snapshot, other: Snapshot) -> bool:
    pairs = (one.shift, other.shift), (one.wkv, other.wkv)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


class TestThreads:
    """What one thread does while another is in the middle of something."""

    @pytest.mark.parametrize("then", ["delete", "newer", "delete and newer"])
    async def test_a_load_that_something_overtakes_is_not_kept(self, world: Any, then: str) -> None:
        store = GatedStore()
        here = world(store, l2=1 << 20)
        here.finish(A, 1)
        here.wait_stored()
        here.cache.shut_down()
        store = GatedStore()
        here = world(store)
        store.hold("get")
        reading = asyncio.create_task(here.front.export_bytes(A))
        await asyncio.to_thread(store.entered.wait)
        if "delete" in then:
            assert await here.front.delete(Deletion("a"))
        if "newer" in then:
            here.finish(A, 2)
        store.release()
        exported = StateRecord.from_bytes(await reading, Expected("model"))
        assert int(exported.snapshot.shift[0, 0, 0]) == (2 if "newer" in then else 1)
        assert await here.number(A) == (2 if "newer" in then else None)
        here.fill_slots()
        assert await here.number(A) == (2 if "newer" in then else None)

    async def test_a_load_does_not_bring_back_what_a_newer_state_has_replaced_and_left(self, world: Any) -> None:
        here = world(MemoryStore())
        here.finish(A, 1)
        here.wait_stored()
        here.cache.shut_down()
        store = GatedStore()
        here = world(store, slots=1, l1=0, l2=500)
        store.hold("get")
        reading = asyncio.create_task(here.front.export_bytes(A))
        await asyncio.to_thread(store.entered.wait)
        here.finish(A, 2)
        here.finish(B, 3)
        here.fill_slots()
        here.wait_stored()
        assert "a" not in here.cache.host.tier, "the newer state is in the store alone"
        store.release()
        await reading
        assert await here.number(A) == 2

    async def test_a_deleted_state_does_not_arrive_in_the_store_afterwards(self, world: Any) -> None:
        store = GatedStore()
        here = world(store)
        store.hold("put")
        here.finish(A, 1)
        await asyncio.to_thread(store.entered.wait)
        deleting = asyncio.create_task(here.front.delete(Deletion("a")))
        await asyncio.sleep(0.05)
        store.release()
        assert await deleting
        here.wait_stored()
        assert (await here.number(A), store.sessions()) == (None, [])

    async def test_a_slot_is_not_given_away_while_it_is_copied(self, world: Any) -> None:
        here = world(None, slots=1)
        started, go = threading.Event(), threading.Event()
        export = here.pool.export

        def slowly(slot: int) -> Snapshot:
            started.set()
            assert go.wait(5)
            return export(slot)

        here.cache.moves._export = slowly
        here.finish(A, 1)
        copies = [asyncio.create_task(here.front.export_bytes(A)) for _ in range(2)]
        await asyncio.to_thread(started.wait)
        assert here.cache.reclaim() is None
        go.set()
        for copy in copies:
            record = StateRecord.from_bytes(await copy, Expected("model"))
            assert int(record.snapshot.wkv.max()) == 1
        assert here.acquire("row") == 0
        assert await here.number(A) == 1

    async def test_turns_and_deletions_from_many_threads(self, world: Any) -> None:
        """Nothing raises, nothing is left over, and the last turn of each session is what is there."""
        here = world(MemoryStore(), slots=6, l1=3, l2=900)
        lock, last, stop = threading.Lock(), dict[SessionKey, int](), threading.Event()

        def engine() -> None:
            for number in range(1, 400):
                key = SessionKey(f"s{number % 4}")
                with lock:
                    here.finish(key, number)
                    last[key] = number
                if number % 7 == 0:
                    here.fill_slots()
            stop.set()

        async def reader() -> None:
            while not stop.is_set():
                for key in list(last):
                    before = last[key]
                    found = await here.number(key)
                    assert found is not None
                    assert before <= found, "an older state than one that was there before"
                await here.front.status(2, 0)
                await here.front.family("s1")

        work = asyncio.create_task(asyncio.to_thread(engine))
        await asyncio.gather(reader(), reader(), work)
        here.wait_stored()
        assert {key: await here.number(key) for key in last} == last
        assert len(here.cache.turns) == 0
        assert len(here.cache.loads) == 0

    def test_a_new_state_of_a_key_takes_the_place_of_the_waiting_one(self, world: Any) -> None:
        here = world(MemoryStore(), interval=30.0)
        turns = [here.finish(A, number) for number in range(1, 9)]
        assert here.cache.writer.waiting == 1
        here.cache.writer.hurry()
        here.wait_stored()
        assert all(turn.written.done() and turn.written.exception() is None for turn in turns)


class TestWhenTheStoreFails:
    async def test_sessions_go_on_from_memory_and_the_log_says_once_what_to_do(
        self, world: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = FlakyStore()
        here = world(store)
        store.fail(lasting=True, reason="full")
        for number in range(1, 9):
            here.finish(A, number)
            await asyncio.sleep(0.02)
            assert await here.number(A) == number
        assert here.cache.watch.failure.reason == "full"
        told = [record.message for record in caplog.records if "state store" in record.message]
        assert told == ["the state store fails: put fails by order. Sessions go on from RAM and are lost at a restart"]
        store.work()
        here.wait_stored()
        assert here.cache.watch.failure is None
        assert "works again" in caplog.records[-1].message
        assert store.get("a") is not None

    async def test_a_small_write_that_works_does_not_mean_that_there_is_room(
        self, world: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = FlakyStore()
        here = world(store)
        store.fail(kinds=["put"], reason="full")
        here.finish(A, 1)
        while here.cache.watch.failure is None:
            await asyncio.sleep(0.001)
        assert await here.front.new_branch("a") == 1
        assert await here.front.delete(Deletion("nobody")) is False
        assert here.cache.watch.failure.reason == "full"
        store.work()
        here.wait_stored()
        assert here.cache.watch.failure is None
        told = [record.message[:24] for record in caplog.records]
        assert told == ["the state store fails: p", "the state store works ag"]

    async def test_an_older_state_is_never_given_for_one_that_is_lost(self, world: Any) -> None:
        store = FlakyStore()
        here = world(store, slots=1, l1=0, l2=0)
        here.finish(A, 1)
        here.wait_stored()
        store.fail(kinds=["put"])
        here.finish(A, 2)
        here.fill_slots()
        deadline = time.monotonic() + 5
        while "a" not in here.cache.host.lost:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        store.work()
        with pytest.raises(StateLost, match="older state is not given"):
            await here.front.open(A)
        assert here.cache.refused["state_lost"] == 1
        assert await here.front.delete(Deletion("a"))
        assert await here.number(A) is None
        here.finish(A, 3)
        assert await here.number(A) == 3

    async def test_memory_stays_within_its_budgets_while_the_store_fails(
        self, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hierarchy, "LEAST_SPARE", 2000)
        store = FlakyStore()
        here = world(store, slots=2, l1=1, l2=1500)
        store.fail(lasting=True)
        for number in range(1, 60):
            here.finish(SessionKey(f"s{number}"), number)
            assert here.cache.host.nbytes <= 1500 + 2000
        states = [kept for kept in here.cache.current() if kept.copy is not None]
        assert sum(kept.nbytes for kept in {id(kept): kept for kept in states}.values()) <= 1500 + 2000 + 500
        store.work()

    async def test_a_load_that_fails_is_an_error_that_can_be_tried_again(self, world: Any) -> None:
        store = FlakyStore()
        here = world(store, slots=1, l1=0, l2=0)
        here.finish(A, 1)
        here.wait_stored()
        here.fill_slots()
        store.fail(1)
        with pytest.raises(StateUnavailable):
            await here.front.open(A)
        assert await here.number(A) == 1

    async def test_a_deletion_that_fails_deletes_nothing(self, world: Any) -> None:
        store = FlakyStore()
        here = world(store)
        here.finish(A, 1)
        here.wait_stored()
        here.finish(A, 2)
        for nth in (1, 2):
            store.fail(nth, lasting=True)
            with pytest.raises(StateUnavailable):
                await here.front.delete(Deletion("a"))
            store.work()
            assert await here.number(A) == 2

    async def test_one_state_that_cannot_be_stored_does_not_keep_the_others_out(self, world: Any) -> None:
        class Picky(MemoryStore):
            def put(self, states: Any) -> None:
                if any(state.info.key == "b" for state in states):
                    raise StoreError("not that one", "other")
                super().put(states)

        store = Picky()
        here = world(store, interval=0.1)
        for key in (A, B, SessionKey("c")):
            here.finish(key, 1)
        deadline = time.monotonic() + 5
        while not {"a", "c"} <= store.disk.states.keys():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert "b" not in store.disk.states

    async def test_a_fault_of_the_store_is_a_failure_like_any_other(self, world: Any) -> None:
        class Broken(MemoryStore):
            def get(self, key: str) -> Any:
                raise KeyError(key)

        here = world(Broken())
        with pytest.raises(StateUnavailable):
            await here.front.open(A)
        assert here.cache.watch.errors == 1

    async def test_sync_waits_for_the_store_and_says_when_it_fails(self, world: Any) -> None:
        store = FlakyStore()
        here = world(store, interval=30.0, sync=True)
        turn = here.finish(A, 1)
        await asyncio.wait_for(here.front.durable(turn), 5)
        assert store.get("a") is not None
        store.fail(lasting=True)
        turn = here.finish(A, 2)
        with pytest.raises(StateUnavailable):
            await asyncio.wait_for(here.front.durable(turn), 5)
        assert await here.number(A) == 2, "the turn has taken place all the same"
        store.work()

    async def test_sync_without_a_store_is_an_error(self, world: Any) -> None:
        here = world(None, sync=True)
        with pytest.raises(StateUnavailable, match="no state store"):
            await here.front.durable(here.finish(A, 1))

    async def test_a_copy_that_fails_loses_one_state_and_no_step(self, world: Any) -> None:
        here = world(MemoryStore(), slots=1, interval=30.0)
        export, here.cache.moves._export = here.cache.moves._export, no_memory
        here.finish(A, 1)
        assert here.acquire("row") == 0
        here.cache.move_out()
        here.cache.moves._export = export
        with pytest.raises(StateLost):
            await here.front.open(A)


def no_memory(slot: int) -> Snapshot:
    raise MemoryError


class TestDeletion:
    async def test_it_reaches_every_tier(self, world: Any) -> None:
        here = world(MemoryStore(), slots=2, l1=1, l2=1 << 20)
        keys = [A, SessionKey("a", 1), SessionKey("a", 2), SessionKey("a", 0, "init"), B]
        for number, key in enumerate(keys):
            here.finish(key, number)
        assert not await here.front.delete(Deletion("nobody"))
        assert await here.front.delete(Deletion("a", branches=True))
        here.fill_slots()
        here.wait_stored()
        assert [await here.number(key) for key in keys] == [None, None, None, None, 4]

    async def test_a_state_that_leaves_its_slot_this_very_moment_is_deleted_too(self, world: Any) -> None:
        here = world(None, slots=1)
        here.finish(A, 1)
        assert here.acquire("row") == 0  # a step is planned that overwrites it
        assert await here.front.delete(Deletion("a"))
        here.cache.move_out()
        assert await here.number(A) is None

    async def test_a_turn_that_runs_meanwhile_is_voided_whenever_it_began(self, world: Any) -> None:
        here = world(MemoryStore())
        here.finish(A, 1)
        turn = here.cache.turns.begin(Turn("a"))
        base = await here.front.open(A)
        assert await here.front.delete(Deletion("a"))
        assert not here.end(A, 2, turn, base)
        assert await here.number(A) is None


class TestImport:
    async def test_a_damaged_state_can_be_replaced(self, world: Any) -> None:
        store = FlakyStore()
        here = world(store)
        here.finish(A, 1)
        data = await here.front.export_bytes(A)
        here.wait_stored()
        here.cache.shut_down()
        disk = MemoryStore.disks["here"]
        disk.states["a"] = type(disk.states["a"])(disk.states["a"].info, b"damaged")
        here = world(FlakyStore())
        with pytest.raises(Exception, match="damaged"):
            await here.front.open(A)
        assert here.cache.refused["state_corrupt"] == 1
        await here.front.import_bytes(data, None, replace=True)
        assert await here.number(A) == 1


async def test_what_waits_is_written_when_the_cache_is_shut_down(world: Any) -> None:
    here = world(MemoryStore(), interval=60.0)
    turns = [here.finish(SessionKey(f"s{number}"), number) for number in range(3)]
    here.cache.shut_down()
    written: list[Future[None]] = [turn.written for turn in turns if turn.written is not None]
    assert [future.result(0) for future in written] == [None] * 3
    assert len(MemoryStore.disks["here"].states) == 3
