"""The prefix tree: equal to a dictionary of prefixes, whatever is put in, looked up or removed."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rwkv_lightning.core.cache import prefix
from rwkv_lightning.core.cache.prefix import Hit, PrefixStats, PrefixTree, _Node, pack, unpack


@dataclass(frozen=True)
class Item:
    key: str
    nbytes: int = 1
    logits: bool = True


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
INITIALS = st.sampled_from(["", "poet"])
BUDGET = 12


class AgainstADictionary(RuleBasedStateMachine):
    """The model: a dictionary from (initial, tokens) to items, in order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixTree[Item] = PrefixTree(BUDGET)
        self.model: dict[tuple[str, tuple[int, ...]], Item] = {}
        self.stats = PrefixStats()
        self.count = 0

    @rule(tokens=TOKENS, initial=INITIALS, nbytes=st.integers(0, 5), logits=st.booleans())
    def insert(self, tokens: tuple[int, ...], initial: str, nbytes: int, logits: bool) -> None:
        self.count += 1
        item = Item(f"k{self.count}", nbytes, logits)
        self.model.pop((initial, tokens), None)
        self.model[initial, tokens] = item
        gone = []
        while sum(item.nbytes for item in self.model.values()) > BUDGET:
            gone.append(self.model.pop(next(iter(self.model))))
        assert self.tree.insert(tokens, item, initial=initial) == gone

    @rule(tokens=TOKENS, initial=INITIALS, data=st.data())
    def move(self, tokens: tuple[int, ...], initial: str, data: st.DataObject) -> None:
        if not self.model:
            return
        old = data.draw(st.sampled_from(list(self.model)))
        item = self.model.pop(old)
        self.model.pop((initial, tokens), None)
        self.model[initial, tokens] = item
        assert self.tree.insert(tokens, item, initial=initial) == []

    @rule(tokens=TOKENS, initial=INITIALS, with_logits=st.booleans(), packed=st.booleans())
    def look_up(self, tokens: tuple[int, ...], initial: str, with_logits: bool, packed: bool) -> None:
        lengths = range(len(tokens), 0, -1)
        found = [(n, self.model[initial, tokens[:n]]) for n in lengths if (initial, tokens[:n]) in self.model]
        found = [(n, item) for n, item in found if item.logits or not with_logits]
        hit = self.tree.longest(
            pack(tokens) if packed else tokens,
            initial=initial,
            usable=(lambda length, item: item.logits) if with_logits else None,
        )
        assert hit == (Hit(*found[0]) if found else None)
        self.stats.count(hit.length if hit else 0)
        if hit:
            self.use(initial, tokens[: hit.length])

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if self.model:
            place = data.draw(st.sampled_from(list(self.model)))
            self.tree.touch(self.model[place].key)
            self.use(*place)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            place = data.draw(st.sampled_from(list(self.model)))
            item = self.model.pop(place)
            assert self.tree.remove(item.key) == item
            assert self.tree.remove(item.key) is None

    def use(self, initial: str, tokens: tuple[int, ...]) -> None:
        self.model[initial, tokens] = self.model.pop((initial, tokens))

    @invariant()
    def both_hold_the_same(self) -> None:
        assert len(self.tree) == len(self.model)
        assert self.tree.nbytes == sum(item.nbytes for item in self.model.values()) <= BUDGET
        for (_, tokens), item in self.model.items():
            assert self.tree.get(item.key) == item
            assert item.key in self.tree
            assert unpack(self.tree.tokens_of(item.key)) == tokens
        assert self.tree.stats == self.stats

    @invariant()
    def edges_are_as_long_as_they_can_be(self) -> None:
        for root in self.tree._roots.values():
            check_edges(root)


def check_edges(root: _Node[Item]) -> None:
    pending = list(root.children.items())
    while pending:
        first, node = pending.pop()
        assert node.edge[:4] == first
        assert node.edge
        assert node.entry is not None or len(node.children) > 1, "a node of no use"
        assert all(child.parent is node for child in node.children.values())
        pending += node.children.items()


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_long_prompts_share_their_beginning() -> None:
    tree: PrefixTree[Item] = PrefixTree()
    source = random.Random(0)
    system = tuple(source.randrange(65536) for _ in range(4000))
    for length in range(256, 4001, 256):
        tree.insert(system[:length], Item(f"b{length}"))
    assert tree.longest(system) == Hit(3840, Item("b3840"))
    for length in (255, 256, 257, 511, 512, 513):
        hit = tree.longest(system[:length])
        assert (hit.length if hit else 0) == length // 256 * 256
    other = (*system[:1000], system[1000] ^ 1, *system[1001:])
    assert tree.longest(other) == Hit(768, Item("b768"))
    assert tree.longest(system[1:]) is None


@pytest.mark.parametrize("form", [tuple, list, pack, lambda tokens: np.array(tokens, np.int32)])
def test_tokens_may_come_in_any_form(form: Any) -> None:
    tree: PrefixTree[Item] = PrefixTree()
    tree.insert(form((1, 65535, 3)), Item("a"))
    assert tree.longest(form((1, 65535, 3, 4))) == Hit(3, Item("a"))
    assert tree.tokens_of("a") == pack((1, 65535, 3))
    assert unpack(pack((1, 65535, 3))) == (1, 65535, 3)


def test_tokens_that_are_none_are_refused() -> None:
    tree: PrefixTree[Item] = PrefixTree()
    with pytest.raises(ValueError, match="at least one token"):
        tree.insert((), Item("a"))
    with pytest.raises(ValueError, match="5 bytes"):
        unpack(b"12345")
    with pytest.raises(KeyError):
        tree.tokens_of("a")
    assert tree.longest(()) is None


def test_an_identical_prompt_without_logits_falls_back_to_a_shorter_prefix() -> None:
    tree: PrefixTree[Item] = PrefixTree()
    tree.insert((1, 2), Item("short", logits=False))
    tree.insert((1, 2, 3), Item("whole", logits=False))
    prompt = (1, 2, 3)
    hit = tree.longest(prompt, usable=lambda length, item: item.logits or length < len(prompt))
    assert hit == Hit(2, Item("short", logits=False))


def test_a_hit_that_proves_unusable_is_taken_back() -> None:
    tree: PrefixTree[Item] = PrefixTree()
    tree.insert((1,), Item("a"))
    tree.insert((1, 2), Item("b"))
    hit = tree.longest((1, 2, 3))
    assert hit is not None
    tree.reject(hit)
    assert tree.stats == PrefixStats(queries=1, hits=0, tokens_saved=0)
    assert tree.longest((1, 2, 3), count=False) == Hit(1, Item("a"))
    assert tree.stats == PrefixStats(queries=1)


def test_an_entry_larger_than_the_budget_is_handed_back() -> None:
    tree: PrefixTree[Item] = PrefixTree(3)
    assert tree.insert((1,), Item("a", 4)) == [Item("a", 4)]
    assert len(tree) == 0


def test_many_threads() -> None:
    tree: PrefixTree[Item] = PrefixTree(50)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        try:
            for i in range(400):
                tokens = [source.randrange(3) for _ in range(source.randrange(1, 9))]
                tree.insert(tokens, Item(f"{seed}:{i}"))
                hit = tree.longest(tokens)
                assert hit is None or hit.length <= len(tokens)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert tree.nbytes == len(tree) <= 50
    check_edges(tree._roots[""])


def test_it_needs_no_torch() -> None:
    code = f"import sys, {prefix.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
