"""`StateStoreSuite`: records come back byte for byte, in order and across restarts; branch numbers never do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rwkv_lightning.core.errors import StartError, StoreError
from rwkv_lightning.core.interfaces import StateInfo, StateStore, StoredState, StoreUsage
from rwkv_lightning.core.testing.suite import Suite, check, check_raises

MODEL = "0" * 32
ODD_IDS = ("a", "A", "ab", "a%", "a_", "ä", "x y\n'\";--", "𝄞" * 50)


def state(
    key: str, *, data: bytes = b"record", created: float = 1000.0, branch: int = 0, model: str = MODEL
) -> StoredState:
    """A state as a server stores it; the key of a prefix begins with ':'."""
    prefix = key.startswith(":")
    info = StateInfo(
        key=key,
        kind="prefix" if prefix else "session",
        session="" if prefix else key.partition(":")[0],
        branch=branch,
        parent="",
        model=model,
        initial="",
        tokens=3,
        token_hash="f" * 32,
        last_text="last words",
        created=created,
        nbytes=len(data),
    )
    return StoredState(info, data, b"tokens of " + key.encode() if prefix else b"")


class StateStoreSuite(Suite, ABC):
    """Subclass it, and return a closed store from `store`."""

    @abstractmethod
    def store(self) -> StateStore:
        """A new, closed store, as its factory makes it."""

    def location(self, folder: Path) -> str:
        """A place for tests within this folder, as `--state-db` names it."""
        return str(folder / "states")

    # Helpers, for further tests of your own too

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder that is removed afterwards."""
        with TemporaryDirectory(prefix="state-store-") as name:
            yield Path(name)

    @contextmanager
    def opened(self, folder: Path) -> Iterator[StateStore]:
        store = self.store()
        store.open(self.location(folder))
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def fresh(self) -> Iterator[StateStore]:
        """An open store that holds nothing."""
        with self.folder() as folder, self.opened(folder) as store:
            yield store

    # Records

    def test_records_come_back_byte_for_byte(self) -> None:
        contents = [b"", b"\0", bytes(range(256)) * 5000]
        with self.fresh() as store:
            stored = [state(key, data=contents[i % 3], created=i) for i, key in enumerate([*ODD_IDS, ":prefix"])]
            store.put(stored)
            for each in stored:
                key = each.info.key
                check(store.get(key) == each.data, f"the record of {key!r} is not what was put")
                check(store.info(key) == each.info, f"the index line of {key!r} is not what was put")
            check(
                store.get("missing") is None and store.info("missing") is None, "a missing key has a record or a line"
            )

    def test_a_put_replaces(self) -> None:
        with self.fresh() as store:
            store.put([state("a", data=b"old"), state("b")])
            new = state("a", data=b"newer", created=2000.0)
            store.put([new])
            check(
                (store.get("a"), store.info("a")) == (b"newer", new.info), "the second put has not replaced the first"
            )
            check(store.get("b") == b"record", "another record has changed")
            check(store.usage() == StoreUsage(2, 0, 11), f"usage after a replacement is {store.usage()}")

    def test_states_and_texts_survive_a_restart(self) -> None:
        with self.folder() as folder:
            with self.opened(folder) as store:
                store.put([state("a", data=b"\0kept"), state(":p")])
                store.set_meta("name", "old")
                store.set_meta("name", "ünder")
            with self.opened(folder) as store:
                check(store.get("a") == b"\0kept", "a record is lost")
                check([info.key for info, _ in store.prefixes(MODEL)] == [":p"], "a prefix is lost")
                check((store.get_meta("name"), store.get_meta("other")) == ("ünder", None), "a text is lost")
                check(list(store.check()) == [], f"a store that is well says {list(store.check())}")

    def test_a_store_belongs_to_one_server_and_can_be_opened_again(self) -> None:
        with self.folder() as folder:
            store = self.store()
            check_raises(lambda: store.get("a"), StoreError, "reading from a store that was never opened")
            with self.opened(folder) as first:
                check(first.location, "an open store has no location")
                check_raises(lambda: store.open(self.location(folder)), StartError, "opening a store that is in use")
            store.open(self.location(folder))
            store.put([state("a")])
            store.close()
            store.close()
            check_raises(lambda: store.put([state("b")]), StoreError, "writing to a closed store")
            store.open(self.location(folder))
            check(store.get("a") == b"record" and store.get("b") is None, "a store opened again holds something else")
            store.close()

    # Lists

    def test_sessions_are_listed_newest_first(self) -> None:
        with self.fresh() as store:
            created = {"a": 3.0, "b": 5.0, "c": 5.0, "d:1": 4.0, "e": 1.0}
            store.put([state(key, created=at, branch=int(key == "d:1")) for key, at in created.items()])
            store.put([state(":p", created=9.0)])
            order = ["b", "c", "d:1", "a", "e"]
            check(_keys(store.sessions()) == order, f"the order is {_keys(store.sessions())}, not {order}")
            check(_keys(store.sessions(limit=2, offset=1)) == order[1:3], "limit and offset do not cut the list")
            check(
                _keys(store.sessions(limit=2, exclude={"b", "a"})) == ["c", "d:1"],
                "excluded keys are listed or counted",
            )
            check((store.count(), store.count({"a", ":p", "none"})) == (5, 4), "count does not fit the list")

    def test_a_family_is_a_session_and_its_branches(self) -> None:
        with self.fresh() as store:
            for name in ODD_IDS:
                store.put([state(f"{name}:{n}", branch=n) for n in (10, 2)] + [state(name)])
            for name in ODD_IDS:
                expected = [name, f"{name}:2", f"{name}:10"]
                check(_keys(store.family(name)) == expected, f"family of {name!r}: {_keys(store.family(name))}")
            check(store.family("nobody") == [], "a session that does not exist has a family")

    def test_prefixes_are_listed_by_model_and_use(self) -> None:
        with self.fresh() as store:
            store.put(
                [state(f":{i}", created=float(i)) for i in range(4)] + [state(":other", model="1" * 32), state("a")]
            )
            store.touch([":1", "a", ":none"], 100.0)
            found = store.prefixes(MODEL)
            keys = [info.key for info, _ in found]
            check(keys == [":1", ":3", ":2", ":0"], f"the last used is not first: {keys}")
            check(found[0][1] == b"tokens of :1", "a prefix has not its own tokens")
            check(len(store.prefixes(MODEL, limit=2)) == 2, "limit does not cut the list of prefixes")

    def test_usage_counts_what_there_is(self) -> None:
        with self.fresh() as store:
            check(store.usage() == StoreUsage(0, 0, 0), "an empty store is used")
            store.put([state("a", data=b"12345"), state("a:1", branch=1), state(":p", data=b"123")])
            check(store.usage() == StoreUsage(2, 1, 14), f"two sessions and a prefix of 14 bytes are {store.usage()}")

    # Leaving

    def test_deleted_states_are_gone(self) -> None:
        with self.fresh() as store:
            store.put([state("a"), state("b"), state(":p")])
            check(store.delete(["a", ":p", "missing"]) == 2, "delete does not say how many there were")
            check(_keys(store.sessions()) == ["b"] and not store.prefixes(MODEL), "deleted states are listed")
            check(store.get("a") is None and store.usage() == StoreUsage(1, 0, 6), "a deleted state is still there")
            check(store.delete([]) == 0, "deleting nothing deletes something")

    def test_eviction_takes_prefixes_first_then_the_least_recently_used(self) -> None:
        with self.fresh() as store:
            store.put(
                [state(key, data=bytes(10), created=float(i)) for i, key in enumerate(["a", "b", "c", ":p", ":q"])]
            )
            store.touch(["a", ":p"], 100.0)
            check(store.evict(50) == [], "states are evicted though they fit")
            check(
                store.evict(35) == [":q", ":p"], "prefixes are not evicted first, the least recently used before others"
            )
            check(store.evict(20) == ["b"], "the least recently used session is not evicted")
            check(sorted(_keys(store.sessions())) == ["a", "c"], "eviction has left something else")
            check(sorted(store.evict(0)) == ["a", "c"] and store.usage().nbytes == 0, "a budget of 0 leaves something")

    # Branch numbers

    def test_branch_numbers_are_never_given_twice(self) -> None:
        with self.folder() as folder:
            with self.opened(folder) as store:
                check(store.reserve_branches("a") == 1, "the first number is not 1")
                check(store.reserve_branches("a", 3) == 2, "numbers do not follow each other")
                check(store.reserve_branches("a", at_least=10) == 10, "at_least is not kept")
                check(store.reserve_branches("b") == 1, "sessions share their numbers")
                store.put([state("b:7", branch=7)])
                check(store.reserve_branches("b", at_least=3) == 8, "a stored branch's number is not reserved")
                store.delete(["b:7"])
            with self.opened(folder) as store:
                check(store.reserve_branches("a") == 11, "a restart forgets numbers")
                check(store.reserve_branches("b") == 9, "a deletion forgets numbers")

    def test_threads_may_read_and_write_at_once(self) -> None:
        with self.fresh() as store, ThreadPoolExecutor(4) as pool:

            def work(number: int) -> int:
                store.put([state(f"s{number}", data=bytes([number]) * 1000)])
                check(store.get(f"s{number}") == bytes([number]) * 1000, "a thread reads another's record")
                return store.reserve_branches("shared")

            numbers = list(pool.map(work, range(40)))
            check(sorted(numbers) == list(range(1, 41)), "threads get the same branch number")
            check(store.count() == 40, "a thread's state is lost")


def _keys(infos: list[StateInfo]) -> list[str]:
    return [info.key for info in infos]
