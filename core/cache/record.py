"""`StateRecord`: a state with its tail and its header, and the bytes in which it is stored and exported.

The bytes are a safetensors file. Tensors, all of them covered by the checksum:

    shift   [L, 2, C] float32                  as core/slots.py
    wkv     [L, H, N, N] float32 or float16    in the slot's own type, bit for bit
    tail    [n] int32                          tokens seen by the record but not yet fed to the state
    logits  [V] float32                        only for prefixes: what the model said after the last token

Header, in the safetensors metadata, each value a text: `format` ("rwkv_lightning.state"), `version` ("1"), `model`
(fingerprint), `initial` (what the sequence began from; empty for the zero state), `tokens` (how many it has seen, the
tail included), `token_hash`, `key`, `parent`, `last_text`, `created` (Unix seconds) and `checksum`.

    token_hash: h(0) = 16 zero bytes; h(i+1) = BLAKE2b-128(h(i) + token(i) as 4 bytes, little endian); in hex, the
                tail included. A stored hash is thereby enough to go on from.
    checksum:   SHA-256, in hex, of the other header entries as JSON (sorted keys, no spaces, UTF-8), then for each
                tensor by name a line "\\n<name> <type> <shape>\\n", e.g. "\\ntail int32 [1]\\n", and its bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rwkv_lightning.core.cache.keys import SessionKey, is_prefix_key
from rwkv_lightning.core.errors import StateCorrupt, StateForeign, StateVersion
from rwkv_lightning.core.interfaces import ModelConfig, StateInfo, StoredState
from rwkv_lightning.core.slots import STATE_DTYPES, Snapshot

FORMAT = "rwkv_lightning.state"
VERSION = "1"
NO_TOKENS = "00" * 16
HEADER_LIMIT = 65536  # bytes; a header of ours has well under 4 KiB
FIELDS = ("model", "initial", "tokens", "token_hash", "key", "parent", "last_text", "created")
ENTRIES = {*FIELDS, "format", "version", "checksum"}
WORDS = 60  # characters of `last_text`
ANEW = "delete the session with /state/delete, import a good copy over it with replace=true, or use another session_id"
OF_THIS_KIND = "import one that a server of this version, model and state type has exported"


def hash_tokens(tokens: Iterable[int], start: str = NO_TOKENS) -> str:
    """The token-sequence hash (32 hex digits) after `tokens`, going on from the hash of those before them."""
    digest = bytes.fromhex(start)
    for token in tokens:
        digest = hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()
    return digest.hex()


def few_words(text: str) -> str:
    """The last words of a text on one line, at most 60 characters, valid Unicode."""
    words = " ".join(text[-4 * WORDS :].encode("utf-8", "replace").decode().split())
    if len(words) <= WORDS:
        return words
    cut = words[-WORDS:]
    space = cut.find(" ")
    return cut[space + 1 :] if 0 <= space < WORDS // 2 else cut


@dataclass(frozen=True, slots=True)
class StateHeader:
    """What is known of a state beside its numbers; the fields are those of the stored header (see the module)."""

    model: str
    initial: str
    tokens: int
    token_hash: str
    key: str
    parent: str = ""
    last_text: str = ""
    created: float = 0.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What a record must be to be used here; None leaves a point open. Without a key it is one to be imported.

    Args:
        fingerprint: of the loaded model.
        config: the model's shape; with it, tail tokens are checked against the vocabulary too.
        dtype: type of the resident wkv states.
        initial: what the sequence must have begun from.
        key: under which the record was asked for.
        token_hash: of the tokens that it must have seen.
    """

    fingerprint: str
    config: ModelConfig | None = None
    dtype: torch.dtype | None = None
    initial: str | None = None
    key: str | None = None
    token_hash: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StateRecord:
    """A state that knows what it has seen; nobody changes it.

    Args:
        tail: tokens that count as seen but are not yet fed: they go before the next prompt's tokens.
        logits: [V] float32 after the last token; only for prefixes, which have no tail.
    """

    header: StateHeader
    snapshot: Snapshot
    tail: tuple[int, ...] = ()
    logits: torch.Tensor | None = None

    @property
    def key(self) -> str:
        return self.header.key

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors in memory."""
        return self.snapshot.nbytes + 4 * len(self.tail) + (0 if self.logits is None else self.logits.nbytes)

    def renamed(self, key: str, parent: str = "", created: float | None = None) -> StateRecord:
        """The same state under another key, as an import or a fork needs it."""
        created = self.header.created if created is None else created
        return replace(self, header=replace(self.header, key=key, parent=parent, created=created))

    def to_bytes(self) -> bytes:
        """The stored form. Raises ValueError for a header text that is not valid Unicode."""
        tensors = {**self.snapshot.to_tensors(), "tail": torch.tensor(self.tail, dtype=torch.int32)}
        if self.logits is not None:
            tensors["logits"] = self.logits
        fields = {"format": FORMAT, "version": VERSION}
        fields |= {name: str(getattr(self.header, name)) for name in FIELDS}
        data: bytes = save(tensors, {**fields, "checksum": _checksum(fields, tensors)})
        return data

    @classmethod
    def from_bytes(cls, data: bytes, expect: Expected) -> StateRecord:
        """The record in stored bytes, checked throughout.

        Raises:
            StateVersion: written in a format that this server does not read.
            StateCorrupt: truncated or changed, or another record than the one asked for.
            StateForeign: of another model, initial state or state type.
        """
        name = IMPORTED if expect.key is None else _Subject(f"the stored state {expect.key!r}", ANEW)
        fields = _read_fields(data, name)
        tensors = _read_tensors(data, fields, name)
        record = cls(
            _header(fields, name),
            Snapshot.from_tensors(tensors),
            tuple(tensors["tail"].tolist()),
            tensors.get("logits"),
        )
        _check_sense(record, name)
        _check_expected(record, expect, name)
        return record

    def to_stored(self, tokens: bytes = b"") -> StoredState:
        """What a `StateStore` takes; `tokens` are those of a prefix (`prefix.pack`)."""
        data, header = self.to_bytes(), self.header
        prefix = is_prefix_key(header.key)
        place = SessionKey("") if prefix else SessionKey.parse(header.key)
        info = StateInfo(
            key=header.key,
            kind="prefix" if prefix else "session",
            session=place.session,
            branch=place.branch,
            parent=header.parent,
            model=header.model,
            initial=header.initial,
            tokens=header.tokens,
            token_hash=header.token_hash,
            last_text=header.last_text,
            created=header.created,
            nbytes=len(data) + len(tokens),
        )
        return StoredState(info, data, tokens)


def _checksum(fields: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    covered = {name: value for name, value in fields.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(covered, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {_dtype(tensor)} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _Subject(NamedTuple):
    """Which record a message is about, and the way out that is always open."""

    name: str
    anew: str

    def __str__(self) -> str:
        return self.name


IMPORTED = _Subject("the imported state", OF_THIS_KIND)


def _damaged(name: _Subject, why: str) -> StateCorrupt:
    return StateCorrupt(f"{name} is damaged ({why}): {name.anew}")


def _read_fields(data: bytes, name: _Subject) -> dict[str, str]:
    """The safetensors metadata: after 8 bytes of length (little endian) a JSON object whose `__metadata__` it is."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(HEADER_LIMIT, len(data) - 8):
        raise _damaged(name, "it has no readable header")
    try:
        fields = json.loads(data[8 : 8 + size])["__metadata__"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _damaged(name, "its header is not readable") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise _damaged(name, "its header is not that of a state")
    if fields.get("version") != VERSION:
        raise StateVersion(
            f"{name} has format version {str(fields.get('version'))[:20]!r}; this server reads version {VERSION}: "
            f"serve it with the version that wrote it, or {name.anew}"
        )
    if fields.keys() != ENTRIES:
        raise _damaged(name, "its header has other entries than it should")
    return fields


def _read_tensors(data: bytes, fields: Mapping[str, str], name: _Subject) -> dict[str, torch.Tensor]:
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        raise _damaged(name, "it is truncated or its header is wrong") from None
    if _checksum(fields, tensors) != fields["checksum"]:
        raise _damaged(name, "its checksum differs")
    if tensors.keys() - {"logits"} != {"shift", "wkv", "tail"}:
        raise _damaged(name, "it does not hold the tensors of a state")
    if tensors["tail"].dtype != torch.int32 or tensors["tail"].dim() != 1:
        raise _damaged(name, "its tail is not a row of tokens")
    return tensors


def _header(fields: Mapping[str, str], name: _Subject) -> StateHeader:
    texts = {entry: fields[entry] for entry in FIELDS if entry not in ("tokens", "created")}
    try:
        header = StateHeader(tokens=int(fields["tokens"]), created=float(fields["created"]), **texts)
        malformed = hash_tokens((), header.token_hash) != header.token_hash or not math.isfinite(header.created)
    except ValueError:
        malformed = True
    if malformed or len(header.token_hash) != len(NO_TOKENS):
        raise _damaged(name, "its header holds a malformed value")
    return header


def _check_sense(record: StateRecord, name: _Subject) -> None:
    """What a checksum cannot tell: a file made by hand may hold anything."""
    snapshot, header = record.snapshot, record.header
    if snapshot.shift.dtype != torch.float32 or snapshot.wkv.dtype not in STATE_DTYPES:
        raise _damaged(name, "its tensors have other types than a state's")
    if snapshot.shift.dim() != 3 or snapshot.wkv.dim() != 4:
        raise _damaged(name, "its tensors have other shapes than a state's")
    if not len(record.tail) <= header.tokens or min(record.tail, default=0) < 0:
        raise _damaged(name, "its tail is impossible")
    if record.logits is not None and (record.tail or record.logits.dtype != torch.float32 or record.logits.dim() != 1):
        raise _damaged(name, "its logits are impossible")


def _check_expected(record: StateRecord, expect: Expected, name: _Subject) -> None:
    header = record.header
    if expect.key not in (None, header.key):
        raise _damaged(name, "it is the record of another key")
    if header.model != expect.fingerprint:
        raise StateForeign(
            f"{name} belongs to another model (fingerprint {header.model[:32]}, loaded is {expect.fingerprint}): "
            f"load that model, or {name.anew}"
        )
    if expect.initial not in (None, header.initial):
        raise StateForeign(f"{name} began from another initial state: name that one, or {name.anew}")
    if expect.dtype not in (None, record.snapshot.wkv.dtype):
        raise StateForeign(
            f"{name} is kept in {_dtype(record.snapshot.wkv)}, but this server's states are of another type: "
            f"start it with --state-dtype {_dtype(record.snapshot.wkv)}, or {name.anew}"
        )
    if expect.token_hash not in (None, header.token_hash):
        raise _damaged(name, "it has seen other tokens than those it is kept for")
    if expect.config is not None:
        _check_shapes(record, expect.config, name)


def _check_shapes(record: StateRecord, config: ModelConfig, name: _Subject) -> None:
    square = (config.head_size, config.head_size)
    shapes = (tuple(record.snapshot.shift.shape), tuple(record.snapshot.wkv.shape))
    if shapes != ((config.n_layer, 2, config.n_embd), (config.n_layer, config.n_head, *square)):
        raise _damaged(name, "its shape is not that of the model it names")
    if max(record.tail, default=0) >= config.vocab_size:
        raise _damaged(name, "its tail holds a token that the model does not have")
    if record.logits is not None and len(record.logits) != config.vocab_size:
        raise _damaged(name, "its logits are not those of the model it names")
