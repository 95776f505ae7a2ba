"""Leases: one holder per key, in the order of arrival, a bounded queue, and never one that is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_lightning.core.cache.leases import Leases
from rwkv_lightning.core.errors import SessionBusy


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_holder_at_a_time_first_come_first_served() -> None:
    leases, log = Leases(), list[str]()

    async def turn(name: str) -> None:
        async with leases.hold("a"):
            log.append(f"+{name}")
            await asyncio.sleep(0)
            log.append(f"-{name}")

    await asyncio.gather(*(turn(str(i)) for i in range(5)))
    assert log == [f"{sign}{i}" for i in range(5) for sign in "+-"]
    assert len(leases) == 0


async def test_keys_do_not_wait_for_each_other() -> None:
    leases = Leases()
    async with leases.hold("a"), leases.hold("b"), leases.hold("a:1"):
        assert (len(leases), leases.users("a"), leases.users("c")) == (3, 1, 0)


@pytest.mark.parametrize("waiting", [0, 1, 16])
async def test_a_full_queue_refuses_at_once(waiting: int) -> None:
    leases, go = Leases(waiting), asyncio.Event()

    async def turn() -> None:
        async with leases.hold("a"):
            await go.wait()

    tasks = [asyncio.create_task(turn()) for _ in range(1 + waiting)]
    await settle()
    assert leases.users("a") == 1 + waiting
    with pytest.raises(SessionBusy, match=f"{waiting} turns wait for this session already: send the next") as caught:
        async with leases.hold("a"):
            pytest.fail("held")
    assert (caught.value.status, caught.value.param, caught.value.retry_after) == (409, "session_id", 1.0)
    go.set()
    await asyncio.gather(*tasks)
    async with leases.hold("a"):
        assert leases.users("a") == 1


async def test_an_exception_in_the_block_ends_the_lease() -> None:
    leases = Leases()
    with pytest.raises(ZeroDivisionError):
        async with leases.hold("a"):
            raise ZeroDivisionError
    assert len(leases) == 0


async def test_cancelling_the_one_that_is_next_passes_the_lease_on() -> None:
    """The holder leaves and the next is cancelled in the same turn of the loop: the one after it must get the key."""
    leases, go, log = Leases(), asyncio.Event(), list[str]()

    async def turn(name: str) -> None:
        async with leases.hold("a"):
            log.append(name)
            await go.wait()

    tasks = [asyncio.create_task(turn(name)) for name in "xyz"]
    await settle()
    go.set()
    await asyncio.sleep(0)  # x leaves and hands over to y, which has not run yet
    tasks[1].cancel()
    await asyncio.wait_for(tasks[2], 5)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log[0] == "x"
    assert log[-1] == "z"
    assert len(leases) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from("ab")),
        st.tuples(st.sampled_from(["leave", "cancel", "yield"]), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(STEPS, st.integers(0, 3))
def test_whatever_comes_leaves_or_is_cancelled(steps: list[tuple[str, Any]], waiting: int) -> None:
    asyncio.run(play(steps, waiting))


async def play(steps: list[tuple[str, Any]], waiting: int) -> None:
    leases = Leases(waiting)
    turns: list[_Turn] = []
    holders: dict[str, list[_Turn]] = {"a": [], "b": []}
    entered: dict[str, list[int]] = {"a": [], "b": []}
    for step, value in steps:
        if step == "come":
            turns.append(_Turn(leases, value, len(turns), holders[value], entered[value]))
        elif step == "yield":
            await asyncio.sleep(0)
        elif value < len(turns):
            turns[value].go.set() if step == "leave" else turns[value].task.cancel()
        assert all(len(now) <= 1 for now in holders.values()), "two writers"
        assert all(leases.users(key) <= 1 + waiting for key in "ab"), "the queue is bounded"
    for turn in turns:
        turn.go.set()
    await asyncio.wait_for(asyncio.gather(*(turn.task for turn in turns), return_exceptions=True), 10)
    assert len(leases) == 0, "a lease is left behind"
    assert holders == {"a": [], "b": []}
    assert all(order == sorted(order) for order in entered.values()), "first come, first served"


class _Turn:
    """A task that takes the key and keeps it until told to go."""

    def __init__(self, leases: Leases, key: str, number: int, holders: list[_Turn], entered: list[int]) -> None:
        self.go = asyncio.Event()
        self.task = asyncio.create_task(self._run(leases, key, number, holders, entered))

    async def _run(self, leases: Leases, key: str, number: int, holders: list[_Turn], entered: list[int]) -> None:
        async with leases.hold(key):
            holders.append(self)
            entered.append(number)
            assert holders == [self]
            try:
                await self.go.wait()
            finally:
                holders.remove(self)
