"""`StoreSuite`: what every state store must do, run over SQLite and over a dictionary."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cache_states import prefix, state

from rwkv_lightning.core.cache.prefix import pack
from rwkv_lightning.core.errors import StartError, StoreError
from rwkv_lightning.core.interfaces import StateInfo, StateStore, StoredState, StoreUsage
from rwkv_lightning.core.testing.suite import Suite, check_raises


def keys(infos: Sequence[StateInfo]) -> list[str]:
    return [info.key for info in infos]


class StoreSuite(Suite):
    """Subclass it and return a closed store from `store`, and from `place` a location that no other test has."""

    @abstractmethod
    def store(self) -> StateStore:
        """A new store, as its factory makes it."""

    @abstractmethod
    def place(self) -> str:
        """A location where nothing is stored yet."""

    @contextmanager
    def opened(self, place: str | None = None) -> Iterator[StateStore]:
        store = self.store()
        store.open(place or self.place())
        try:
            yield store
        finally:
            store.close()

    # States

    def test_what_is_put_is_got_byte_for_byte(self) -> None:
        every_byte = bytes(range(256)) * 300
        with self.opened() as store:
            store.put([state("a", data=every_byte), state("a", 1, data=b"")])
            assert store.get("a") == every_byte, "the record of a"
            assert store.get("a:1") == b"", "the empty record"
            assert store.get("b") is None, "a key that was never put"
            assert store.info("b") is None, "the index line of a key that was never put"

    def test_index_lines_come_back_unchanged(self) -> None:
        line = StateInfo(
            "naïve 會話:12:f00d",
            "session",
            "naïve 會話",
            12,
            "naïve 會話:3:f00d",
            "ab" * 16,
            "f00d",
            2**40,
            "cd" * 16,
            "said “goodbye” 😀 'now'",
            1764490000.123456,
            3,
        )
        with self.opened() as store:
            store.put([StoredState(line, b"abc")])
            assert store.info(line.key) == line, "the index line"
            assert store.family("naïve 會話") == [line], "the family"
            assert store.sessions() == [line], "the listing"

    def test_a_put_replaces_and_usage_follows(self) -> None:
        with self.opened() as store:
            assert store.usage() == StoreUsage(0, 0, 0), "usage of nothing"
            store.put([state("a", data=b"12345"), prefix("p")])
            store.put([state("a", data=b"123", created=5.0), prefix("p", data=b"")])
            assert store.get("a") == b"123", "the later record"
            assert store.usage() == StoreUsage(1, 1, 3 + 8), "usage after replacement"
            assert store.delete(["a", ":p", "never"]) == 2, "how many were deleted"
            assert store.usage() == StoreUsage(0, 0, 0), "usage after deletion"
            assert store.get("a") is None, "a deleted record"
            assert store.check() == [], "problems"

    def test_of_one_key_twice_in_a_put_the_later_counts(self) -> None:
        with self.opened() as store:
            store.put([state("a", data=b"first"), state("a", data=b"second")])
            assert store.get("a") == b"second", "the record"
            assert store.usage().sessions == 1, "sessions"

    def test_nothing_to_do_is_fine(self) -> None:
        with self.opened() as store:
            store.put([])
            store.touch([], 1.0)
            assert store.delete([]) == 0, "deleted of no keys"
            assert store.evict(0) == [], "evicted of nothing"

    def test_everything_outlives_a_restart(self) -> None:
        place = self.place()
        with self.opened(place) as store:
            store.put([state("a", 3, data=b"kept"), prefix("p")])
            store.set_meta("flag", "on")
            assert store.reserve_branches("b") == 1, "the first number"
        with self.opened(place) as store:
            assert store.get("a:3") == b"kept", "the record"
            assert store.prefixes("model") == [(prefix("p").info, prefix("p").tokens)], "the prefixes"
            assert store.get_meta("flag") == "on", "the text"
            assert store.reserve_branches("b") == 2, "the next number"
            assert store.usage() == StoreUsage(1, 1, 4 + prefix("p").info.nbytes), "usage"
            assert store.location != "", "an open store says where it is"

    def test_texts_are_kept_by_name(self) -> None:
        with self.opened() as store:
            assert store.get_meta("x") is None, "a text never set"
            store.set_meta("x", "1")
            store.set_meta("x", "2")
            assert store.get_meta("x") == "2", "the later text"

    # Listings

    def test_sessions_are_listed_newest_first_in_pages(self) -> None:
        with self.opened() as store:
            store.put([state(f"s{i}", created=float(i)) for i in range(5)])
            store.put([state("s1", 1, created=2.0), prefix("p", created=9.0)])
            everything = ["s4", "s3", "s1:1", "s2", "s1", "s0"]
            assert keys(store.sessions()) == everything, "the listing"
            assert keys(store.sessions(limit=2, offset=1)) == everything[1:3], "a page"
            assert keys(store.sessions(limit=0)) == [], "an empty page"
            assert keys(store.sessions(offset=99)) == [], "a page beyond the end"
            without = ["s3", "s1", "never", ":p"]
            assert keys(store.sessions(exclude=without, limit=2, offset=1)) == ["s1:1", "s2"], "a page without some"
            assert (store.count(), store.count(exclude=without)) == (6, 4), "counts"

    def test_a_family_is_the_session_and_its_branches_by_number(self) -> None:
        with self.opened() as store:
            store.put([state(name, branch) for name in ("a", "a'", "ab", "a%") for branch in (10, 2, 0)])
            assert keys(store.family("a")) == ["a", "a:2", "a:10"], "the family of a"
            assert keys(store.family("a%")) == ["a%", "a%:2", "a%:10"], "the family of a%"
            assert keys(store.family("")) == [], "the family of nobody"

    def test_prefixes_are_of_one_model_and_the_last_used_first(self) -> None:
        with self.opened() as store:
            store.put([prefix(f"p{i}", created=float(i)) for i in range(3)] + [prefix("q", model="other")])
            store.touch([":p0", "never"], 7.0)
            assert [info.key for info, _ in store.prefixes("model")] == [":p0", ":p2", ":p1"], "prefixes"
            assert [info.key for info, _ in store.prefixes("model", 1)] == [":p0"], "one prefix"
            assert [tokens for _, tokens in store.prefixes("other")] == [pack([1, 65535])], "tokens"

    # Eviction

    def test_prefixes_go_first_then_the_least_recently_used(self) -> None:
        with self.opened() as store:
            store.put([state(f"s{i}", created=float(i), data=bytes(10)) for i in range(4)])
            store.put([prefix(f"p{i}", created=10.0 + i, data=bytes(2)) for i in range(3)])  # of 10 bytes each
            store.touch(["s0", ":p0"], 20.0)
            assert store.evict(70) == [], "evicted when all fits"
            assert store.evict(61) == [":p1"], "the first to go"
            assert store.evict(35) == [":p2", ":p0", "s1"], "the next to go"
            assert store.usage() == StoreUsage(3, 0, 30), "what is left"
            assert store.get("s1") is None, "an evicted record"
            assert store.evict(0) == ["s2", "s3", "s0"], "the last to go"
            assert store.check() == [], "problems"

    def test_many_are_evicted_at_once(self) -> None:
        with self.opened() as store:
            store.put([state(f"s{i:04}", created=float(i), data=b"x") for i in range(1000)])
            assert store.evict(100) == [f"s{i:04}" for i in range(900)], "evicted"

    def test_a_late_touch_does_not_turn_the_clock_back(self) -> None:
        with self.opened() as store:
            store.put([state("a", created=5.0, data=b"1"), state("b", created=4.0, data=b"1")])
            store.touch(["a"], 1.0)
            assert store.evict(1) == ["b"], "the least recently used"

    # Branch numbers

    def test_branch_numbers_never_repeat(self) -> None:
        with self.opened() as store:
            numbers = [store.reserve_branches("a") for _ in range(3)]
            assert numbers == [1, 2, 3], "numbers"
            store.put([state("a"), state("a", 3)])
            store.delete(["a", "a:3"])
            assert store.reserve_branches("a", 10) == 4, "the number after a deletion"
            assert store.reserve_branches("a") == 14, "the number after a block of ten"
            assert store.reserve_branches("a", at_least=100) == 100, "a number with a bound"
            assert store.reserve_branches("a", at_least=5) == 101, "a number with a bound below"
            assert store.reserve_branches("b") == 1, "the number of another session"

    def test_a_branch_that_is_put_takes_its_number(self) -> None:
        with self.opened() as store:
            store.put([state("a", 7)])
            assert store.reserve_branches("a") == 8, "the next number"
            store.put([state("a", 2)])
            assert store.reserve_branches("a") == 9, "the number after that"

    # Order of life

    def test_a_closed_store_says_so(self) -> None:
        store, place = self.store(), self.place()
        check_raises(lambda: store.get("a"), StoreError, "reading before opening")
        store.open(place)
        check_raises(lambda: store.open(place), StoreError, "opening twice")
        assert store.get("a") is None, "a store that somebody tried to open twice"
        store.close()
        store.close()
        error = check_raises(lambda: store.put([state("a")]), StoreError, "writing after closing")
        assert "open" in str(error), f"{error} does not say that the store is not open"
        store.open(place)
        assert store.get("a") is None, "an opened store"
        store.close()

    def test_a_second_server_is_refused_and_disturbs_nothing(self) -> None:
        with self.opened() as store:
            store.put([state("a", data=b"1")])
            second = self.store()
            error = check_raises(lambda: second.open(store.location), StartError, "a second opener")
            assert "--state-db" in str(error), f"{error} does not name the way out"
            assert store.location in str(error), f"{error} does not name the place"
            assert store.get("a") == b"1", "a record of the first server"
            place = store.location
        with self.opened(place) as third:
            assert third.get("a") == b"1", "a record after the first server has gone"

    def test_readers_and_writers_in_many_threads(self) -> None:
        wrong: list[object] = []

        def write(store: StateStore, name: str) -> None:
            numbers = [store.reserve_branches("shared") for _ in range(10)]
            for number in numbers:
                store.put([state(name, data=number.to_bytes(4, "big") * 500)])
            got.extend(numbers)

        def read(store: StateStore) -> None:
            for i in range(60):
                data = store.get(f"w{i % 3}") or bytes(2000)
                wrong.extend([data] if data != data[:4] * 500 else [])

        with self.opened() as store:
            got: list[int] = []
            threads = [threading.Thread(target=write, args=(store, f"w{i}")) for i in range(3)]
            threads += [threading.Thread(target=read, args=(store,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(got) == list(range(1, 31)), "numbers reserved by three threads"
            assert wrong == [], "records that are a mixture of two"
            assert store.check() == [], "problems"

    def test_a_replaced_line_is_listed_by_its_new_time(self) -> None:
        with self.opened() as store:
            store.put([state("a", created=1.0), state("b", created=2.0)])
            renewed = state("a", created=3.0)
            store.put([replace(renewed, info=replace(renewed.info, last_text="hello"))])
            assert [(info.key, info.last_text) for info in store.sessions()] == [("a", "hello"), ("b", "")], "listing"
