"""The vocabulary: what a file may hold, and that encoding is greedy, reversible and the same in every form."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.text.vocabulary import MAX_ID, Vocabulary, find_for, world_file
from rwkv_lightning.kernels import tokenizer
from rwkv_lightning.kernels.cpu.build import Library, library

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "core" / "demo" / "rwkv7-demo.vocab.txt"
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden.json").read_text())
SINGLES = [f"{byte + 1} {bytes([byte])!r} 1" for byte in range(256)]


def with_lines(tmp_path: Path, *lines: str, singles: list[str] = SINGLES) -> Path:
    path = tmp_path / "test.vocab.txt"
    path.write_text("\n".join([*singles, *lines]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def world() -> Vocabulary:
    return Vocabulary.world()


@pytest.fixture(scope="module")
def demo() -> Vocabulary:
    return Vocabulary.load(DEMO)


def ids_of(vocabulary: Vocabulary) -> dict[bytes, int]:
    return {token: number for number, token in enumerate(vocabulary.token_bytes) if token}


# --- files ---


def test_world_is_complete(world: Vocabulary) -> None:
    assert world.size == 65530
    assert world.token_bytes[0] == b""
    assert len(ids_of(world)) == 65529
    assert world.id_of(b"\n\n") == 261
    assert world.id_of(b"no such token, surely") is None


def test_every_literal_reads_as_python_reads_it() -> None:
    """The quick reading of plain literals gives what evaluating each line gives."""
    expected = {}
    for line in world_file().read_text(encoding="utf-8").split("\n")[:-1]:
        number, literal = line.split(" ", 1)
        value = eval(literal.rsplit(" ", 1)[0], {"__builtins__": {}})
        expected[value.encode() if isinstance(value, str) else value] = int(number)
    assert ids_of(Vocabulary.world()) == expected


def test_unused_ids_have_no_bytes(tmp_path: Path) -> None:
    vocabulary = Vocabulary.load(with_lines(tmp_path, "300 'abc' 3"))
    assert vocabulary.size == 301
    assert vocabulary.token_bytes[299] == b""
    assert vocabulary.decode_bytes([0, 299, 300, 4000]) == b"abc"


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("'\\n\\u4f60'", "\n你".encode()),
        ('"it\'s"', b"it's"),
        ("b'\\xff\\xfe'", b"\xff\xfe"),
        ("'a b  c'", b"a b  c"),
        ("'\u2028x\x85'", "\u2028x\x85".encode()),
        ("'''qqq'''", b"qqq"),
    ],
)
def test_literals(tmp_path: Path, literal: str, expected: bytes) -> None:
    path = with_lines(tmp_path, f"300 {literal} {len(expected)}")
    assert Vocabulary.load(path).token_bytes[300] == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("300 'abc' 4", "3 bytes, the line says 4"),
        ("300 'é' 1", "2 bytes, the line says 1"),
        ("300 '' 0", "at least 1"),
        ("0 'abc' 3", "0 is the end of text"),
        (f"{MAX_ID + 1} 'abc' 3", "not between"),
        ("-5 'abc' 3", "expected"),
        ("300 'abc'", "expected"),
        ("300", "expected"),
        ("300  3", "expected"),
        ("300 abc 3", "not a Python string or bytes literal"),
        ("300 __import__('os') 3", "not a Python string or bytes literal"),
        ("300 ['abc'] 3", "not a Python string or bytes literal"),
        ("300 'ab\\' 3", "not a Python string or bytes literal"),
        ("300 'it's' 4", "not a Python string or bytes literal"),
        ("300 " + "(" * 5000 + " 3", "not a Python string or bytes literal"),
        ("300 '\\ud800' 3", "lone surrogate"),
        ("256 'abc' 3", "id 256 stands in the file twice"),
        ("300 'A' 1", "has the id 66 already"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = with_lines(tmp_path, line)
    with pytest.raises(CheckpointError) as raised:
        Vocabulary.load(path)
    assert str(raised.value).startswith(f"{path}, line 257: ")
    assert reason in str(raised.value)


def test_a_missing_byte_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no token for the single byte 0x41"):
        Vocabulary.load(with_lines(tmp_path, singles=[line for line in SINGLES if not line.startswith("66 ")]))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.txt: cannot read"):
        Vocabulary.load(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"1 '\xe9' 1\n")
    with pytest.raises(CheckpointError, match=r"latin\.txt: a vocabulary is UTF-8 text, but byte 3"):
        Vocabulary.load(tmp_path / "latin.txt")


def test_windows_line_ends_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "test.vocab.txt"
    path.write_bytes("\r\n".join([*SINGLES, "", "300 'abc' 3", ""]).encode())
    assert Vocabulary.load(path).token_bytes[300] == b"abc"


def test_the_models_vocabulary_is_found(tmp_path: Path) -> None:
    model = tmp_path / "rwkv7-0.1b.pth"
    beside = tmp_path / "rwkv7-0.1b.vocab.txt"
    assert find_for(model) == world_file()
    beside.write_text("")
    assert find_for(model, None) == beside
    assert find_for(str(model), str(tmp_path / "other.txt")) == tmp_path / "other.txt"


def test_without_the_rwkv_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="--vocab"):
        world_file()


def test_text_needs_neither_torch_nor_the_rwkv_package() -> None:
    code = (
        "import sys; from rwkv_lightning.core.text import chat, output, vocabulary; vocabulary.Vocabulary.world();"
        "sys.exit(' '.join({'torch', 'rwkv'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


# --- encoding ---


def random_text(random_source: random.Random, words: list[str]) -> str:
    def piece() -> str:
        kind = random_source.random()
        if kind < 0.5:
            return random_source.choice(words)
        if kind < 0.8:
            return chr(random_source.choice([random_source.randrange(32, 127), random_source.randrange(0x370, 0xD800)]))
        return chr(random_source.choice([random_source.randrange(0xE000, 0x110000), random_source.randrange(0x370)]))

    return "".join(piece() for _ in range(random_source.randrange(1, 40)))


def test_equal_to_the_rwkv_package(world: Vocabulary) -> None:
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    theirs = TRIE_TOKENIZER(str(world_file()))
    words = [token.decode("utf-8", "ignore") for token in world.token_bytes]
    source = random.Random(7)
    python = tokenizer.PythonEncoder(ids_of(world))
    for number in range(10_000):
        text = random_text(source, words)
        expected = theirs.encode(text)
        assert world.encode(text) == expected
        if number % 5 == 0:  # the reference is slow
            assert python.encode(text.encode()) == expected


def test_golden_prompts(demo: Vocabulary) -> None:
    for item in GOLDEN["items"]:
        assert demo.encode(item["prompt"]) == item["prompt_ids"]
        assert demo.decode_bytes(item["prompt_ids"]) == item["prompt"].encode()


def forms(ids: dict[bytes, int]) -> list[tokenizer.Encoder]:
    """The Python form and, where there is a compiler, the compiled one."""
    return [tokenizer.PythonEncoder(ids), tokenizer.encoder(ids)]


def naive(ids: dict[bytes, int], data: bytes) -> list[int]:
    out = []
    while data:
        token = max((token for token in ids if data.startswith(token)), key=len)
        out.append(ids[token])
        data = data[len(token) :]
    return out


small_bytes = st.lists(st.sampled_from(b"ab\x00\xff"), max_size=30).map(bytes)


@settings(deadline=None, max_examples=300)
@given(st.lists(small_bytes.filter(lambda token: len(token) > 1), max_size=20), small_bytes)
def test_the_longest_match_wins(tokens: list[bytes], data: bytes) -> None:
    singles = [bytes([byte]) for byte in b"ab\x00\xff"]
    ids = {token: number for number, token in enumerate(dict.fromkeys([*singles, *tokens]), 5)}
    expected = naive(ids, data)
    for form in forms(ids):
        assert form.encode(data) == expected


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_all_bytes_round_trip(data: bytes) -> None:
    for vocabulary in ROUND_TRIP:
        assert vocabulary.decode_bytes(vocabulary.encode_bytes(data)) == data


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=100))
def test_all_text_round_trips(text: str) -> None:
    for vocabulary in ROUND_TRIP:
        assert vocabulary.decode_bytes(vocabulary.encode(text)).decode() == text


ROUND_TRIP = [Vocabulary.load(DEMO), Vocabulary.world()]


def test_a_byte_without_a_token_is_named_by_its_position() -> None:
    for form in forms({b"a": 1, b"bc": 2}):
        assert form.encode(b"abc") == [1, 2]
        assert form.encode(b"") == []
        with pytest.raises(ValueError, match="0x62 at position 3"):
            form.encode(b"abcba")


def test_the_compiled_form_serves_where_it_was_built() -> None:
    built = library()
    form = tokenizer.encoder({b"a": 1})
    assert isinstance(form, tokenizer.CompiledEncoder) == (built.lib is not None)
    assert form.why == built.why


def test_the_python_form_serves_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "library", lambda: Library(None, "no compiler"))
    form = tokenizer.encoder({b"a": 1})
    assert isinstance(form, tokenizer.PythonEncoder)
    assert form.why == "no compiler"


def test_threads_share_a_vocabulary(world: Vocabulary) -> None:
    texts = [f"Thread {i} says 你好 and hello. " * 500 for i in range(4)]
    expected = [world.encode(text) for text in texts]
    found: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        found[i] = [world.encode(texts[i]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [expected[i]] * 10 for i in range(4)}


def test_a_lone_surrogate_is_named(demo: Vocabulary) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D800\) at character 2"):
        demo.encode("ab\ud800")


def test_a_negative_id_is_named(demo: Vocabulary) -> None:
    with pytest.raises(ValueError, match="token id -1 is negative"):
        demo.decode_bytes([5, -1])
