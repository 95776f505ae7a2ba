"""Greedy longest-match encoding of bytes to token ids: a C++ trie, or the same in Python without a compiler."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rwkv_lightning.kernels.cpu.build import library


class Encoder(Protocol):
    """Encodes bytes: at every position the longest token that matches there."""

    why: str  # which form serves, and why

    def encode(self, data: bytes) -> list[int]:
        """Token ids of `data`. Raises ValueError naming the first position where no token matches."""


def encoder(ids: Mapping[bytes, int]) -> Encoder:
    """The quickest encoder this machine has for a vocabulary: `ids` maps non-empty token bytes to ids >= 0."""
    built = library()
    if built.lib is None:
        return PythonEncoder(ids, built.why)
    return CompiledEncoder(ids, built.lib, built.why)


class CompiledEncoder:
    """The trie of cpu/tokenizer.cpp. Safe to share between threads; the GIL is free while it encodes."""

    def __init__(self, ids: Mapping[bytes, int], lib: ctypes.CDLL, why: str = "C++ kernels") -> None:
        self.why = why
        self._encode = _declare(lib)
        self._trie = _build_trie(lib, ids)
        self._release = weakref.finalize(self, lib.tokenizer_free, self._trie)

    def encode(self, data: bytes) -> list[int]:
        out = np.empty(len(data), np.int32)
        count: int = self._encode(self._trie, data, len(data), out.ctypes.data)
        if count < 0:
            raise _no_match(data, -1 - count)
        found: list[int] = out[:count].tolist()
        return found


class PythonEncoder:
    """The reference: tries the lengths that tokens with the next two bytes have, longest first."""

    def __init__(self, ids: Mapping[bytes, int], why: str = "the Python reference") -> None:
        self.why = why
        self._ids = dict(ids)
        lengths: dict[bytes, set[int]] = {}
        for token in ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        # A one-byte token may also begin where a pair does.
        self._lengths = {pair: (*sorted(found - {1}, reverse=True), 1) for pair, found in lengths.items()}

    def encode(self, data: bytes) -> list[int]:
        out: list[int] = []
        start = 0
        while start < len(data):
            token = self._longest(data, start)
            if not token:
                raise _no_match(data, start)
            out.append(self._ids[token])
            start += len(token)
        return out

    def _longest(self, data: bytes, start: int) -> bytes:
        for length in self._lengths.get(data[start : start + 2], (1,)):
            token = data[start : start + length]  # shorter at the end of the data, which no longer token outdoes
            if token in self._ids:
                return token
        return b""


def _declare(lib: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    pointer, length = ctypes.c_void_p, ctypes.c_int64
    lib.tokenizer_build.argtypes = [ctypes.c_char_p, pointer, pointer, length]
    lib.tokenizer_build.restype = pointer
    lib.tokenizer_encode.argtypes = [pointer, ctypes.c_char_p, length, pointer]
    lib.tokenizer_encode.restype = length
    lib.tokenizer_free.argtypes = [pointer]
    lib.tokenizer_free.restype = None
    return lib.tokenizer_encode


def _build_trie(lib: ctypes.CDLL, ids: Mapping[bytes, int]) -> int:
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(token) for token in ids], out=offsets[1:])
    numbers = np.array(list(ids.values()), np.int32)
    trie: int | None = lib.tokenizer_build(b"".join(ids), offsets.ctypes.data, numbers.ctypes.data, len(ids))
    if trie is None:
        raise MemoryError("no memory for the vocabulary's trie")
    return trie


def _no_match(data: bytes, position: int) -> ValueError:
    return ValueError(f"no token of the vocabulary matches the byte 0x{data[position]:02x} at position {position}")
