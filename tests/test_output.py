"""Incremental output: the same text for every cut into tokens, nothing given out too early, nothing held too long."""

from __future__ import annotations

from codecs import utf_8_decode
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rwkv_lightning.core.text.output import MAX_STOP_BYTES, StopSet, TextOutput, decode_text

# Few characters, so that stops meet; every length of character, and bytes that begin or continue none.
TEXT = st.text("ab\n:éи你🙂\ufffd", max_size=12)
GARBAGE = st.lists(st.sampled_from(b"a\n\xc3\xa9\xe4\xbd\xa0\xf0\x9f\x99\x82\xff\x80\xed"), max_size=12).map(bytes)
PIECES = st.one_of(
    st.text("ab", max_size=8).map(str.encode),
    TEXT.map(str.encode),
    GARBAGE,
    st.text(max_size=5).map(str.encode),
    st.binary(max_size=5),
)
DATA = st.lists(PIECES, max_size=5).map(b"".join)
STOP = st.one_of(st.text("ab", min_size=2, max_size=6), st.text("ab\n:éи你🙂", min_size=1, max_size=4))
STOPS = st.lists(STOP, max_size=4)
CUTS = st.lists(st.integers(0, 60), max_size=25)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def stop_start(data: bytes, stops: list[str]) -> int | None:
    """By definition: where the longest of the stops begins that are complete at the earliest byte."""
    for end in range(1, len(data) + 1):
        lengths = [len(stop.encode()) for stop in stops if data[:end].endswith(stop.encode())]
        if lengths:
            return end - max(lengths)
    return None


def certain(data: bytes, stops: list[str]) -> tuple[str, int]:
    """By definition: the text, and its bytes, before the earliest live candidate and an incomplete character."""
    prefixes = {stop.encode()[:n] for stop in stops for n in range(1, len(stop.encode()))}
    held = max((len(prefix) for prefix in prefixes if data.endswith(prefix)), default=0)
    return utf_8_decode(data[: len(data) - held], "replace", held > 0)


def ended(data: bytes, stops: list[str]) -> tuple[str, int]:
    start = stop_start(data, stops)
    if start is None:
        return utf_8_decode(data, "replace", False)
    return data[:start].decode("utf-8", "replace"), start


def inside(tokens: list[bytes], count: int) -> int:
    """Leading tokens whose bytes all lie in the first `count`; an empty text covers nothing."""
    return sum(end <= count for end in accumulate(map(len, tokens))) if count else 0


@settings(deadline=None, max_examples=800)
@given(DATA, CUTS, STOPS)
@example(b"Hi\n\nUser: x", [2, 4], ["\nUser:"])
@example(b"abab\n", [1, 2, 3], ["bab:", "ab\n"])
@example(b"\xe4\xbd\na", [1, 2], ["\n"])
@example(b"\xed\xa0", [1], [])
@example(b"a\xed\xa0\x80b", [2, 3], ["b:"])
def test_every_cut_gives_the_same_text_and_nothing_too_early(data: bytes, cuts: list[int], stops: list[str]) -> None:
    tokens = split(data, cuts)
    check_row(list(range(len(tokens))), tokens, stops, StopSet(stops))


@settings(deadline=None, max_examples=800)
@given(st.lists(PIECES, min_size=1, max_size=4), st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=4), STOPS)
@example([b"a", b"\n"], [[0, 1, 0, 0], [0]], ["\n:"])
def test_rows_that_share_a_stop_set(table: list[bytes], rows: list[list[int]], stops: list[str]) -> None:
    """Later rows find what earlier ones remembered of the same tokens."""
    compiled = StopSet(stops)
    for row in rows:
        check_row([token % len(table) for token in row], table, stops, compiled)


def check_row(ids: list[int], table: list[bytes], stops: list[str], compiled: StopSet) -> None:
    output = TextOutput(table, compiled)
    tokens = [table[token] for token in ids]
    text, data, settled = "", b"", 0
    for count, token in enumerate(ids, 1):
        text += output.push(token)
        data += table[token]
        stopped = stop_start(data, stops) is not None
        expected, length = (ended if stopped else certain)(data, stops)
        assert (text, output.stopped) == (expected, stopped)
        assert output.pending == count - inside(tokens[:count], length)
        assert settled <= count - output.pending  # what was settled stays so: the state kept for it can go
        settled = count - output.pending
    text += output.flush()
    expected, length = ended(data, stops)
    assert text == expected
    assert output.covered == inside(tokens, length) >= settled
    assert output.pushed == len(tokens)
    assert output.flush() == ""


@settings(deadline=None, max_examples=300)
@given(DATA, CUTS)
def test_without_stops_it_is_plain_decoding(data: bytes, cuts: list[int]) -> None:
    tokens = split(data, cuts)
    text = decode_text(tokens, range(len(tokens)))
    assert text == utf_8_decode(data, "replace", False)[0]
    assert data.decode("utf-8", "replace").startswith(text)


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=5), st.text("ab\n:éи你🙂", min_size=1, max_size=4), TEXT, CUTS)
def test_one_stop_ends_the_text_where_it_first_occurs(before: str, stop: str, after: str, cuts: list[int]) -> None:
    text = before + stop + after
    tokens = split(text.encode(), cuts)
    output = TextOutput(tokens, StopSet([stop]))
    assert "".join(output.push(i) for i in range(len(tokens))) + output.flush() == text.split(stop)[0]
    assert output.stopped


TABLE = [b"", b"Hi", b"\n\n", b"\n", b"User", b":", b" Use", "é".encode(), b"\xe4\xbd", b"\xa0", b"a\xe4", b"\xff"]
HI, TWO, ONE, USER, COLON, USE, ACUTE, NI, NI_END, A_NI, BAD = range(1, len(TABLE))


def run(tokens: list[int], *stops: str) -> tuple[list[str], TextOutput]:
    output = TextOutput(TABLE, StopSet(stops))
    return [*map(output.push, tokens), output.flush()], output


def test_a_separator_cut_by_a_stop_is_not_covered() -> None:
    """`\\n\\n` cut at `\\nUser:` leaves exactly one separator for the next turn."""
    texts, output = run([HI, TWO, USER, COLON], "\nUser:")
    assert texts == ["Hi", "\n", "", "", ""]
    assert (output.stopped, output.covered) == (True, 1)


def test_a_dead_candidate_is_released() -> None:
    texts, output = run([HI, ONE, USE, ONE, USER, HI], "\nUser:")
    assert texts == ["Hi", "", "\n Use", "", "", "\nUserHi", ""]
    assert (output.stopped, output.covered, output.pending) == (False, 6, 0)


def test_a_row_that_ends_inside_a_candidate() -> None:
    texts, output = run([HI, ONE, USER], "\nUser:")
    assert texts == ["Hi", "", "", "\nUser"]
    assert output.covered == 3


def test_a_character_cut_off_at_the_end_is_dropped() -> None:
    texts, output = run([HI, A_NI])
    assert texts == ["Hi", "a", ""]
    assert (output.covered, output.pending) == (1, 1)
    texts, output = run([NI])
    assert ("".join(texts), output.covered) == ("", 0)


def test_garbage_in_the_middle_is_replaced() -> None:
    assert run([NI, HI, BAD, NI, NI_END])[0] == ["", "\ufffdHi", "\ufffd", "", "你", ""]


def test_a_cut_character_before_a_stop_is_garbage() -> None:
    texts, output = run([HI, NI, ONE, USER, COLON], "\nUser:")
    assert "".join(texts) == "Hi\ufffd"
    assert output.covered == 2


def test_tokens_without_bytes() -> None:
    """They go with the text before them; ahead of all text they cover nothing."""
    texts, output = run([0, 0])
    assert (texts, output.covered, output.pending) == (["", "", ""], 0, 2)
    texts, output = run([0, HI, 0, ONE, 0, USER], "\nUser")
    assert (texts, output.covered) == (["", "Hi", "", "", "", "", ""], 3)
    texts, output = run([HI, 99], "\nUser")
    assert (texts, output.covered) == (["Hi", "", ""], 2)


def test_tokens_after_a_stop_change_nothing() -> None:
    texts, output = run([HI, ONE, HI, HI], "\n")
    assert texts == ["Hi", "", "", "", ""]
    assert (output.stopped, output.covered, output.pending) == (True, 1, 3)


def test_a_stop_inside_a_token() -> None:
    output = TextOutput([b"", b"one, two, three"], StopSet([", t"]))
    assert (output.push(1), output.stopped, output.covered) == ("one", True, 0)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abcd", "bc"], "xabcd", "xa"),  # the shorter one is complete first
        (["abc", "bc"], "xabc", "x"),  # both at one byte: the longer one began earlier
        (["ab", "abc"], "xabc", "x"),
        (["aab"], "xaaab", "xa"),
        (["aaa:", "b"], "xaaab", "xaaa"),  # several candidates die at one byte
        (["aaa:", "ab"], "xaaab", "xaa"),
        (["b", "b"], "ab", "a"),
        (["a"], "a", ""),
    ],
)
def test_several_stops(stops: list[str], text: str, expected: str) -> None:
    table = [b"", *(bytes([byte]) for byte in text.encode())]
    output = TextOutput(table, StopSet(stops))
    assert "".join(output.push(i) for i in range(1, len(table))) == expected
    assert output.stopped


def test_rows_of_different_vocabularies_share_a_stop_set() -> None:
    stops = StopSet(["\n"])
    assert TextOutput([b"", b"one"], stops).push(1) == "one"
    assert TextOutput([b"", b"two"], stops).push(1) == "two"


@pytest.mark.parametrize(
    ("stops", "reason"),
    [
        (["a", ""], "is empty"),
        (["\udc00"], "lone surrogate"),
        (["a" * MAX_STOP_BYTES, "b"], "more than 65536 bytes"),
    ],
)
def test_bad_stops_are_named(stops: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StopSet(stops)


def test_the_work_on_a_long_candidate_is_linear() -> None:
    """One visit of the automaton's edges a byte, not one of the whole candidate a token."""
    size = 20_000
    stops = StopSet(["a" * size + "b"])
    output = TextOutput([b"", b"a", b"b"], stops)
    assert all(output.push(1) == "" for _ in range(size))
    assert output.push(1) == "a"
    assert (output.push(2), output.stopped, output.covered, output.pending) == ("", True, 1, size + 1)


def test_a_negative_id_is_named() -> None:
    with pytest.raises(ValueError, match="token id -1 is negative"):
        TextOutput(TABLE, StopSet()).push(-1)
