"""The vocabulary: text to token ids by greedy longest match over bytes, and back.

Vocabularies are files in the World text format: one token a line, ``id literal length``, where the literal is a
Python string (encoded as UTF-8) or bytes literal and the length is the token's in bytes. Id 0 is the end of text
and stands in no file.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.kernels import tokenizer

WORLD_FILE = "rwkv_vocab_v20230424.txt"
END_OF_TEXT = 0
MAX_ID = (1 << 24) - 1  # a typing error in a file must not become a table of gigabytes


class Vocabulary:
    """A loaded vocabulary.

    Args:
        ids: token bytes -> id; ids from 1, every single byte among the tokens, so that all bytes round-trip.
        source: where it came from, for messages.
    """

    def __init__(self, ids: dict[bytes, int], source: str = "vocabulary") -> None:
        missing = next((byte for byte in range(256) if bytes([byte]) not in ids), None)
        if missing is not None:
            raise CheckpointError(
                f"{source}: no token for the single byte 0x{missing:02x}, so not every text could be encoded; "
                "use a vocabulary that holds all 256 single bytes"
            )
        self.source = source
        self.size = max(ids.values()) + 1
        self.token_bytes: list[bytes] = [b""] * self.size  # by id; b"" for the end of text and unused ids
        for token, number in ids.items():
            self.token_bytes[number] = token
        self._ids = ids

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read a vocabulary file. Raises CheckpointError naming the file, the line and what is wrong with it."""
        return cls(_parse(Path(path)), str(path))

    @classmethod
    def world(cls) -> Vocabulary:
        """The RWKV World vocabulary, 65529 tokens, from the `rwkv` package."""
        return cls.load(world_file())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError when it holds a lone surrogate, which no UTF-8 text can."""
        return self.encode_bytes(utf8(text))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes; `decode_bytes` gives the same bytes back."""
        return self._encoder.encode(data)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of token ids. Ids past the table have none: a model's head may be wider than its vocabulary."""
        if min(ids, default=0) < 0:
            raise ValueError(f"token id {min(ids)} is negative")
        return b"".join([self.token_bytes[i] for i in ids if i < self.size])

    def id_of(self, token: bytes) -> int | None:
        """The id of the token with exactly these bytes, or None."""
        return self._ids.get(token)

    @cached_property
    def _encoder(self) -> tokenizer.Encoder:
        return tokenizer.encoder(self._ids)  # on first use: a vocabulary that only decodes needs no compiler


def find_for(model_path: str | Path, vocab_option: str | Path | None = None) -> Path:
    """The vocabulary file of a model: `--vocab`, else `<model>.vocab.txt` beside the checkpoint, else World."""
    if vocab_option:
        return Path(vocab_option)
    beside = Path(model_path).with_name(f"{Path(model_path).stem}.vocab.txt")
    return beside if beside.is_file() else world_file()


def world_file() -> Path:
    """The World vocabulary's file inside the `rwkv` package, which is not imported: it would bring its model along."""
    spec = importlib.util.find_spec("rwkv")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / WORLD_FILE
        if path.is_file():
            return path
    raise CheckpointError(f"{WORLD_FILE} was not found: install the `rwkv` package or name a file with --vocab")


def utf8(text: str) -> bytes:
    """The text's UTF-8 bytes. Raises ValueError naming the place of a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"the text holds a lone surrogate (U+{code:04X}) at character {error.start}; send valid Unicode"
        ) from None


def _parse(path: Path) -> dict[bytes, int]:
    ids: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(_lines(path), 1):
        if not line:
            continue
        try:
            token_id, token = _parse_line(line)
            if token_id in seen:
                raise ValueError(f"id {token_id} stands in the file twice")
            if ids.setdefault(token, token_id) != token_id:
                raise ValueError(f"the token {token!r} has the id {ids[token]} already")
            seen.add(token_id)
        except ValueError as error:
            raise CheckpointError(f"{path}, line {number}: {error}") from None
    return ids


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028 inside a token
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the vocabulary: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: a vocabulary is UTF-8 text, but byte {error.start} is not") from None


def _parse_line(line: str) -> tuple[int, bytes]:
    first, _, rest = line.partition(" ")
    literal, _, last = rest.rpartition(" ")
    if not (first.isdecimal() and last.isdecimal() and literal):
        raise ValueError("expected `id literal length`")
    token_id, length, token = int(first), int(last), _parse_literal(literal.strip())
    if not 1 <= token_id <= MAX_ID:
        raise ValueError(f"id {token_id} is not between 1 and {MAX_ID} (0 is the end of text)")
    if len(token) != length or not token:
        raise ValueError(f"the token {token!r} has {len(token)} bytes, the line says {length}; at least 1 is needed")
    return token_id, token


def _parse_literal(literal: str) -> bytes:
    quote = literal[0]
    # Nearly every line: a quoted string without escapes stands for itself, and is read ten times quicker this way.
    if quote in "'\"" and literal[-1] == quote and literal.count(quote) == 2 and "\\" not in literal:
        return utf8(literal[1:-1])
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return utf8(value)
    raise ValueError(f"{literal[:40]} is not a Python string or bytes literal")
