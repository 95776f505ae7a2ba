"""A row's text as its tokens come: whole characters only, and nothing that may still be the beginning of a stop.

Everything is decided byte by byte, so the text does not depend on how it was cut into tokens: as soon as a stop is
complete the text ends before it, and where several end at the same byte, before the longest of them. Without a stop
the text is what ``bytes.decode("utf-8", "replace")`` gives, less a character that is cut off at the end.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence

from rwkv_lightning.core.text.vocabulary import utf8

MAX_STOP_BYTES = 1 << 16  # of all stops of a request together; a node of the automaton costs about 200 bytes


class StopSet:
    """The stops of one request, compiled once and shared by its rows: the Aho-Corasick automaton over their bytes.

    (Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.) Node 0 is the root. The node reached after
    some bytes is the longest of their suffixes that begins a stop, so `depth` says how much has to be held back.

    Args:
        stops: non-empty texts. Raises ValueError for an empty one, a lone surrogate, or more than 64 KiB in all.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        patterns = [utf8(stop) for stop in stops]
        if not all(patterns):
            raise ValueError("a stop sequence is empty; leave it out instead")
        if sum(map(len, patterns)) > MAX_STOP_BYTES:
            raise ValueError(f"the stop sequences have more than {MAX_STOP_BYTES} bytes in all; send fewer or shorter")
        self.stops = tuple(stops)
        self.depth = [0]  # bytes from the root to each node
        self.ends = [0]  # length of the longest stop that ends with each node, 0 for none
        self._fail = [0]  # node of the longest proper suffix
        self._edges: dict[int, int] = {}  # node * 256 + byte -> node
        for pattern in patterns:
            self._insert(pattern)
        self._link()
        self._plain: dict[int, str] = {}
        self._plain_of: Sequence[bytes] = ()

    def scan(self, node: int, data: bytes) -> tuple[int, int]:
        """Feed bytes: the node after them and -1, or where a stop ends, its node and the index of its last byte."""
        edges, fail = self._edges, self._fail
        for index, byte in enumerate(data):
            after = edges.get(node << 8 | byte)
            while after is None and node:
                node = fail[node]
                after = edges.get(node << 8 | byte)
            node = after or 0
            if self.ends[node]:
                return node, index
        return node, -1

    def plain(self, token_bytes: Sequence[bytes]) -> dict[int, str]:
        """A memo for `TextOutput`: the texts of tokens that stand for themselves when nothing is held back."""
        if self._plain_of is not token_bytes:
            self._plain, self._plain_of = {}, token_bytes
        return self._plain

    def _insert(self, pattern: bytes) -> None:
        node = 0
        for byte in pattern:
            after = self._edges.get(node << 8 | byte)
            if after is None:
                after = self._edges[node << 8 | byte] = len(self.depth)
                self.depth.append(self.depth[node] + 1)
                self.ends.append(0)
                self._fail.append(0)
            node = after
        self.ends[node] = len(pattern)

    def _link(self) -> None:
        """Suffix links, shortest nodes first: a node's link is found from its parent's."""
        for key, child in sorted(self._edges.items(), key=lambda edge: self.depth[edge[1]]):
            parent, byte = key >> 8, key & 255
            link = parent
            while link:
                link = self._fail[link]
                found = self._edges.get(link << 8 | byte)
                if found is not None:
                    self._fail[child] = found
                    break
            self.ends[child] = self.ends[child] or self.ends[self._fail[child]]


class TextOutput:
    """The text of one row. Create, `push` every generated token but an end of text, and `flush` at the end.

    Args:
        token_bytes: each id's bytes, b"" where it has none; ids past its end have none either.
        stops: the request's stops.
    """

    __slots__ = ("_held", "_node", "_plain", "_remaining", "_stops", "_token_bytes", "pushed", "shown", "stopped")

    def __init__(self, token_bytes: Sequence[bytes], stops: StopSet) -> None:
        self._token_bytes = token_bytes
        self._stops = stops
        self._plain = stops.plain(token_bytes)
        self._held = bytearray()  # bytes not yet in the returned text
        self._remaining: deque[int] = deque()  # how many of them lie in each pending token
        self._node = 0  # of the automaton, after the held bytes
        self.pushed = 0
        self.shown = 0  # bytes of the first pending token that lie in the returned text
        self.stopped = False  # a stop matched: the text is complete, later tokens change nothing

    def push(self, token: int) -> str:
        """The text that has become certain with this token. Raises ValueError for a negative id."""
        self.pushed += 1
        if not self._remaining:
            text = self._plain.get(token)
            if text is not None:
                return text
        return self._push(token)

    def flush(self) -> str:
        """The row ended without a stop: what was held back, less a character cut off at the end."""
        text, count = utf_8_decode(self._held, "replace", False)
        self._release(count)
        self._node = 0
        return text

    @property
    def pending(self) -> int:
        """How many of the latest tokens are not wholly inside the returned text: the earliest live stop candidate or
        an incomplete character begins in the first of them. While no text was returned these are all tokens."""
        return len(self._remaining)

    @property
    def covered(self) -> int:
        """How many of the tokens have all their bytes in the returned text; final after a stop or `flush`."""
        return self.pushed - len(self._remaining)

    def _push(self, token: int) -> str:
        if token < 0:
            raise ValueError(f"token id {token} is negative")
        data = self._token_bytes[token] if token < len(self._token_bytes) else b""
        fresh = not self._remaining
        self._remaining.append(len(data))
        if self.stopped:
            return ""
        self._node, index = self._stops.scan(self._node, data)
        if index >= 0:
            return self._stop(data[: index + 1])
        self._held += data
        text = self._certain()
        if fresh and text and not self._remaining:
            self._plain[token] = text
        return text

    def _certain(self) -> str:
        """Release what lies before the longest live candidate; it begins a character, so what precedes it is whole."""
        depth = self._stops.depth[self._node]
        text, count = utf_8_decode(self._held[: len(self._held) - depth], "replace", depth > 0)
        self._release(count)
        return text

    def _stop(self, data: bytes) -> str:
        """End before the stop that `data` completes. It begins a character, too: a cut one before it is garbage."""
        self.stopped = True
        self._held += data
        count = len(self._held) - self._stops.ends[self._node]
        text = self._held[:count].decode("utf-8", "replace")
        self._release(count)
        self._held.clear()
        return text

    def _release(self, count: int) -> None:
        """The first `count` held bytes are in the returned text now; so are the tokens that lie within them.

        Tokens without bytes go with the text before them; ahead of all text they cover nothing.
        """
        del self._held[:count]
        remaining = self._remaining
        any_text = count > 0 or self.covered > 0
        while any_text and remaining and remaining[0] <= count:
            count -= remaining.popleft()
            self.shown = 0
        if count:
            remaining[0] -= count
            self.shown += count


def decode_text(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    """The text of tokens as `TextOutput` gives it without stops: a character cut off at the end is left out."""
    known = len(token_bytes)
    return utf_8_decode(b"".join([token_bytes[i] for i in ids if i < known]), "replace", False)[0]
