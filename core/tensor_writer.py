"""Write a `.safetensors` file piece by piece: it appears under its name whole, or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from rwkv_lightning.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorWriter:
    """`with TensorWriter(path, entries, metadata) as out:` writes beside `path` and renames at the end.

    Every tensor must have been written whole by then. Any failure, from a full disk to an interrupt, leaves nothing
    behind and an older file of that name as it was; those of the system are raised as CheckpointError.

    Args:
        path: the file to write.
        entries: name -> what will be written under it.
        metadata: the text entries of the header; `set_metadata` may change them, not their lengths.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        # Larger items first, so that every tensor is aligned to its own.
        self._entries = dict(sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize))
        self._missing = {name: entry.nbytes for name, entry in self._entries.items()}
        self._header = self._encode(metadata)
        self._offsets = self._places(len(self._header))
        self._file: IO[bytes] | None = None

    def __enter__(self) -> TensorWriter:
        try:
            self._file = self.partial.open("wb")
            self._file.write(self._header)
        except OSError as error:
            self._discard()
            raise self._failure(error) from None
        return self

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Write a tensor, or some of its rows from `row` on. Raises ValueError when it is not what was announced."""
        entry = self._entries[name]
        if tensor.dtype != entry.dtype or tensor.shape[1:] != entry.shape[1:]:
            raise ValueError(f"{name} was announced as {entry}, not {tensor.dtype} {list(tensor.shape)}")
        content = tensor.contiguous().reshape(-1).view(_uint8()).numpy().data
        self._missing[name] -= len(content)
        file = self._opened()
        file.seek(self._offsets[name] + row * (entry.nbytes // entry.shape[0]))
        file.write(content)

    def set_metadata(self, metadata: Mapping[str, str]) -> None:
        """Put other metadata of the same length into the header."""
        header = self._encode(metadata)
        if len(header) != len(self._header):
            raise ValueError("the metadata has another length than what was announced")
        self._opened().seek(0)
        self._opened().write(header)

    def flush(self) -> Path:
        """Everything written so far, in a file under another name."""
        self._opened().flush()
        return self.partial

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as failure:
            raise self._failure(failure) from None
        finally:
            self._discard()
        if isinstance(error, OSError):
            raise self._failure(error) from None

    def _finish(self) -> None:
        missing = [name for name, nbytes in self._missing.items() if nbytes]
        if missing:
            raise ValueError(f"these tensors were announced but not written whole: {missing}")
        file = self._opened()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(self.partial, self.path)

    def _discard(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of a full disk once more
                self._file.close()
        self.partial.unlink(missing_ok=True)

    def _opened(self) -> IO[bytes]:
        assert self._file is not None, "a TensorWriter is used inside its with statement"
        return self._file

    def _failure(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"'{self.path}' cannot be written ({error.strerror or error}): name a folder that exists, "
            "may be written to and has the space"
        )

    def _encode(self, metadata: Mapping[str, str]) -> bytes:
        """The header: its length in 8 bytes, JSON, and spaces up to a multiple of 8."""
        fields: dict[str, object] = {"__metadata__": dict(metadata)}
        at = 0
        for name, entry in self._entries.items():
            kind = TYPES[str(entry.dtype).removeprefix("torch.")]
            fields[name] = {"dtype": kind, "shape": entry.shape, "data_offsets": (at, at + entry.nbytes)}
            at += entry.nbytes
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _places(self, start: int) -> dict[str, int]:
        places = {}
        for name, entry in self._entries.items():
            places[name] = start
            start += entry.nbytes
        return places


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8
