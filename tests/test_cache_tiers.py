"""The RAM tier: within its budget, prefixes out first, the least recently used before others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from rwkv_lightning.core.cache.record import NO_TOKENS, StateHeader, StateRecord
from rwkv_lightning.core.cache.tiers import Held, MemoryTier
from rwkv_lightning.core.slots import Snapshot


def record(key: str, size: int = 100) -> StateRecord:
    """A record of `size` bytes, a multiple of 4."""
    snapshot = Snapshot(torch.zeros(size // 4), torch.zeros(0))
    return StateRecord(StateHeader("model", "", 1, NO_TOKENS, key), snapshot)


def names(records: list[Held]) -> list[str]:
    return [record.key for record in records]


def test_the_least_recently_used_goes_first() -> None:
    tier = MemoryTier(300)
    for key in "abc":
        assert tier.put(record(key)) == []
    assert tier.get("a") is not None
    assert names(tier.put(record("d"))) == ["b"]
    assert names(tier.put(record("e", 200))) == ["c", "a"]
    assert [held.key for held in tier.sessions()] == ["d", "e"]
    assert (tier.nbytes, len(tier)) == (300, 2)


def test_prefixes_go_before_any_session() -> None:
    tier = MemoryTier(400)
    for key in ("old", ":p", ":q", "new"):
        tier.put(record(key))
    tier.get(":p")
    assert names(tier.put(record("newer"))) == [":q"]
    assert names(tier.put(record("newest", 200))) == [":p", "old"]
    assert names(tier.put(record(":r"))) == [":r"], "it may not push a session out"
    assert [":r" in tier, "new" in tier] == [False, True]


def test_a_record_replaces_that_of_its_key() -> None:
    tier = MemoryTier(300)
    tier.put(record("a", 200))
    newer = record("a", 100)
    assert tier.put(newer) == []
    assert tier.get("a") is newer
    assert (tier.nbytes, len(tier)) == (100, 1)


def test_what_is_larger_than_everything_is_handed_back_and_leaves_no_older_one() -> None:
    tier = MemoryTier(300)
    tier.put(record("a"))
    tier.put(record("b"))
    large = record("a", 304)
    assert tier.put(large) == [large]
    assert tier.get("a") is None, "the older state of the session is not given for the newer one"
    assert tier.get("b") is not None


def test_removal() -> None:
    tier = MemoryTier(300)
    a = record("a")
    tier.put(a)
    assert tier.remove("a") is a
    assert tier.remove("a") is None
    assert (tier.nbytes, len(tier), tier.get("a")) == (0, 0, None)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "remove"]), st.sampled_from(["a", "b", "c", ":p", ":q"]), st.integers(0, 9)
    )
)


@given(OPERATIONS, st.integers(0, 60))
def test_it_equals_the_plain_rules(operations: list[tuple[str, str, int]], budget: int) -> None:
    tier, model = MemoryTier(budget), OrderedDict[str, StateRecord]()
    for operation, key, size in operations:
        if operation == "put":
            new = record(key, 4 * size)
            model.pop(key, None)
            assert tier.put(new) == expected_put(model, new, budget)
        elif operation == "get":
            assert tier.get(key) is model.get(key)
            if key in model:
                model.move_to_end(key)
        else:
            assert tier.remove(key) is model.pop(key, None)
        assert tier.nbytes == sum(kept.nbytes for kept in model.values()) <= budget
        assert [held.key for held in tier.sessions()] == [kept for kept in model if kept[0] != ":"]


def expected_put(model: OrderedDict[str, StateRecord], new: StateRecord, budget: int) -> list[Held]:
    if new.nbytes > budget:
        return [new]
    model[new.key] = new
    gone: list[Held] = []
    while sum(record.nbytes for record in model.values()) > budget:
        key = next((key for key in model if key[0] == ":"), next(iter(model)))
        gone.append(model.pop(key))
    return gone


def test_a_size_is_asked_for_once() -> None:
    """A state may lose its numbers while it is held; the account still closes."""

    class Shrinking:
        key, nbytes = "a", 100

    tier, state = MemoryTier(300), Shrinking()
    tier.put(state)
    state.nbytes = 0
    assert tier.remove("a") is state
    assert tier.nbytes == 0


def test_many_threads_keep_the_account_right() -> None:
    tier = MemoryTier(2000)
    errors: list[Any] = []

    def work(name: str) -> None:
        try:
            for i in range(300):
                tier.put(record(f"{name}{i % 7}", 4 * (i % 50)))
                tier.get(f"{name}{i % 5}")
                tier.remove(f"{name}{i % 3}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", ":c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    keys = [f"{name}{i}" for name in ("a", "b", ":c") for i in range(7)]
    assert tier.nbytes == sum(kept.nbytes for key in keys if (kept := tier.get(key)))
