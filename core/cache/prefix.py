"""`PrefixTree`: which beginnings of prompts have a state, found by the tokens themselves.

A radix tree over token ids: an edge holds a run of tokens, and nodes where a state exists hold an entry. Tokens are
packed, 4 bytes each, so that comparing an edge is one `memcmp`. No torch here.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

Tokens = Sequence[int] | bytes  # ids, or packed ids

WIDTH = 4


class Entry(Protocol):
    """What the tree keeps: a `StateRecord`, or a stand-in for one that is in a slower tier."""

    @property
    def key(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


E = TypeVar("E", bound=Entry)


class Hit(NamedTuple, Generic[E]):
    """The longest prefix found: how many tokens, and its entry."""

    length: int
    entry: E


@dataclass(slots=True)
class PrefixStats:
    """Look-ups that counted, those that found something, and the tokens that need no forward therefore."""

    queries: int = 0
    hits: int = 0
    tokens_saved: int = 0

    def count(self, length: int) -> None:
        """A look-up that saves `length` tokens; 0 for a miss."""
        self.queries += 1
        self.hits += length > 0
        self.tokens_saved += length


class _Node(Generic[E]):
    """`edge` leads from `parent` to here; `children` are found by the first token of their edges."""

    __slots__ = ("children", "edge", "entry", "parent")

    def __init__(self, edge: bytes, parent: _Node[E] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, _Node[E]] = {}
        self.entry: E | None = None


def pack(tokens: Tokens) -> bytes:
    """Token ids as unsigned 4-byte numbers, little endian. Packed ones are given back.

    Whoever looks up the same prompt more than once packs it once: for a long prompt that is most of the work.
    """
    return tokens if isinstance(tokens, bytes) else struct.pack(f"<{len(tokens)}I", *tokens)


def unpack(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack`. Raises ValueError for a length that is no multiple of 4."""
    if len(data) % WIDTH:
        raise ValueError(f"{len(data)} bytes are no packed tokens")
    return struct.unpack(f"<{len(data) // WIDTH}I", data)


class PrefixTree(Generic[E]):
    """Entries by the tokens that they stand for. Thread-safe.

    Sequences that began from different initial states share nothing: `initial` names a tree of its own.

    Args:
        budget: the most bytes of entries, the least recently used out; None when somebody else (a `MemoryTier`)
            keeps the account and calls `remove`.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.stats = PrefixStats()
        self._budget = budget
        self._nbytes = 0
        self._lock = RLock()
        self._roots: dict[str, _Node[E]] = {}
        self._nodes: OrderedDict[str, _Node[E]] = OrderedDict()  # by the entry's key, least recently used first

    def insert(self, tokens: Tokens, entry: E, *, initial: str = "") -> list[E]:
        """Keep an entry for these tokens (at least one), in place of an earlier one; the entries that had no room.

        An entry of the same key elsewhere in the tree is removed.
        """
        data = pack(tokens)
        if not data:
            raise ValueError("a prefix has at least one token")
        with self._lock:
            self.remove(entry.key)
            node = self._reach(self._roots.setdefault(initial, _Node(b"", None)), data)
            if node.entry is not None:
                self._forget(node.entry)
            node.entry = entry
            self._nodes[entry.key] = node
            self._nbytes += entry.nbytes
            return self._shrink()

    def longest(
        self,
        tokens: Tokens,
        *,
        initial: str = "",
        usable: Callable[[int, E], bool] | None = None,
        count: bool = True,
    ) -> Hit[E] | None:
        """The entry of the longest prefix of `tokens` (they themselves included), which becomes the last used.

        Args:
            usable: passes over the entries for which it is false, e.g. one of the whole prompt without logits.
            count: whether `stats` counts this look-up.
        """
        data = pack(tokens)
        with self._lock:
            hit = self._find(data, initial, usable)
            if hit is not None:
                self._nodes.move_to_end(hit.entry.key)
            if count:
                self.stats.count(hit.length if hit else 0)
            return hit

    def nearest(self, tokens: Tokens, *, initial: str = "") -> Hit[E] | None:
        """How many of the first tokens some entry's tokens begin with too, and one such entry; None where none does.

        Other than `longest`, what is found may have seen other tokens after these. Does not count as a use.
        """
        data = pack(tokens)
        with self._lock:
            node, position = self._roots.get(initial), 0
            while node is not None:
                child = node.children.get(data[position : position + WIDTH])
                if child is None:
                    break
                shared = _common(child.edge, data[position:])
                node, position = child, position + shared
                if shared < len(child.edge):
                    break
            while node is not None and node.entry is None:
                node = next(iter(node.children.values()), None)
            if node is None or node.entry is None or not position:
                return None
            return Hit(position // WIDTH, node.entry)

    def reject(self, hit: Hit[E]) -> None:
        """Take a counted hit back, because its state turned out to be unusable, and remove its entry."""
        with self._lock:
            self.remove(hit.entry.key)
            self.stats.hits -= 1
            self.stats.tokens_saved -= hit.length

    def get(self, key: str) -> E | None:
        """The entry of a key, or None; does not count as a use."""
        with self._lock:
            return self._nodes[key].entry if key in self._nodes else None

    def tokens_of(self, key: str) -> bytes:
        """The packed tokens that an entry stands for. Raises KeyError when there is none of this key."""
        with self._lock:
            node: _Node[E] | None = self._nodes[key]
            edges = []
            while node is not None:
                edges.append(node.edge)
                node = node.parent
            return b"".join(reversed(edges))

    def touch(self, key: str) -> None:
        """An entry becomes the last used; one that is gone does not matter."""
        with self._lock:
            if key in self._nodes:
                self._nodes.move_to_end(key)

    def remove(self, key: str) -> E | None:
        """Take an entry out; None when there is none of this key."""
        with self._lock:
            node = self._nodes.get(key)
            if node is None or node.entry is None:
                return None
            entry = node.entry
            self._forget(entry)
            node.entry = None
            _tidy(node)
            return entry

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, by their own account."""
        return self._nbytes

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def _find(self, data: bytes, initial: str, usable: Callable[[int, E], bool] | None) -> Hit[E] | None:
        node, position, hit = self._roots.get(initial), 0, None
        while node is not None:
            if node.entry is not None and (usable is None or usable(position // WIDTH, node.entry)):
                hit = Hit(position // WIDTH, node.entry)
            node = node.children.get(data[position : position + WIDTH])
            if node is not None and not data.startswith(node.edge, position):
                break
            position += len(node.edge) if node is not None else 0
        return hit

    def _reach(self, node: _Node[E], data: bytes) -> _Node[E]:
        """The node of these tokens, made where it does not exist yet."""
        position = 0
        while position < len(data):
            child = node.children.get(data[position : position + WIDTH])
            if child is None:
                return _add(node, data[position:])
            shared = _common(child.edge, data[position:])
            node = child if shared == len(child.edge) else _split(child, shared)
            position += shared
        return node

    def _forget(self, entry: E) -> None:
        del self._nodes[entry.key]
        self._nbytes -= entry.nbytes

    def _shrink(self) -> list[E]:
        gone = []
        while self._budget is not None and self._nbytes > self._budget:
            entry = self.remove(next(iter(self._nodes)))
            if entry is not None:
                gone.append(entry)
        return gone


def _common(edge: bytes, data: bytes) -> int:
    """How many bytes of whole tokens both begin with."""
    length = min(len(edge), len(data)) // WIDTH
    left, right = (np.frombuffer(side, np.uint32, length) for side in (edge, data))
    different = np.flatnonzero(left != right)
    return WIDTH * (int(different[0]) if len(different) else length)


def _add(parent: _Node[E], edge: bytes) -> _Node[E]:
    node = _Node(edge, parent)
    parent.children[edge[:WIDTH]] = node
    return node


def _split(node: _Node[E], at: int) -> _Node[E]:
    """Cut the edge to `node`; the new node in between."""
    assert node.parent is not None
    middle = _add(node.parent, node.edge[:at])
    node.edge, node.parent = node.edge[at:], middle
    middle.children[node.edge[:WIDTH]] = node
    return middle


def _tidy(node: _Node[E]) -> None:
    """Remove a node that neither holds an entry nor branches, and those above it that are thereby of no use."""
    while node.parent is not None and node.entry is None and len(node.children) < 2:
        parent = node.parent
        del parent.children[node.edge[:WIDTH]]
        for child in node.children.values():  # at most one: it takes over the edge
            child.edge, child.parent = node.edge + child.edge, parent
            parent.children[child.edge[:WIDTH]] = child
        node = parent
