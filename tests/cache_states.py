"""States for tests of stores. The processes that tests kill import this: it needs no torch and no pytest."""

from __future__ import annotations

import hashlib

from rwkv_lightning.core.cache.prefix import pack
from rwkv_lightning.core.interfaces import StateInfo, StoredState


def state(session: str, branch: int = 0, *, created: float = 0.0, data: bytes = b"state") -> StoredState:
    """A session's or branch's state; the record is opaque to a store, so any bytes do."""
    key = f"{session}:{branch}" if branch else session
    info = StateInfo(key, "session", session, branch, "", "model", "", 7, "00" * 16, "", created, len(data))
    return StoredState(info, data)


def prefix(name: str, *, created: float = 0.0, data: bytes = b"prefix", model: str = "model") -> StoredState:
    """A prefix of two tokens with the key `:<name>`; it takes 8 bytes beside its record."""
    tokens = pack([len(name), 65535])
    nbytes = len(data) + len(tokens)
    info = StateInfo(f":{name}", "prefix", "", 0, "", model, "", 2, "00" * 16, "", created, nbytes)
    return StoredState(info, data, tokens)


def record_of(name: str, turn: int) -> bytes:
    """A record that tells its turn and any mixture with another."""
    return turn.to_bytes(8, "big") + hashlib.sha256(f"{name} {turn}".encode()).digest() * (300 + turn % 5 * 700)
