"""The checksums that a `.pth` holds: a zip archive has the CRC-32 of every file in it, one file per tensor's storage.

Which file a tensor lies in stands in the pickled structure. It is read here with an unpickler that makes nothing of
what it names: the only values that come out of it are texts and dicts.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class DamagedStructure(ValueError):
    """The list of tensors itself differs from its checksum."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """CRC-32 and length in bytes of what was stored for a tensor."""

    crc: int
    nbytes: int

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of this tensor, on the CPU, is what was stored. One pass at some GB/s."""
        import torch

        storage = tensor.untyped_storage()
        content = torch.empty(0, dtype=torch.uint8).set_(storage)
        return storage.nbytes() == self.nbytes and zlib.crc32(content.numpy().data) == self.crc


def checksums(path: Path) -> Mapping[str, Checksum]:
    """Each tensor's checksum by its name; none for other formats and for files that were written without.

    Raises DamagedStructure.
    """
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if not any(entry.CRC for entry in entries.values()):  # torch.serialization.set_crc32_options(False)
            return {}
        structure = next((name for name in entries if name.endswith("/data.pkl")), "")
        root = structure.removesuffix("data.pkl")
        if not structure or _foreign_byte_order(archive, f"{root}byteorder", entries):
            return {}
        places = _places(_content(archive, structure))
    found = {name: entries.get(f"{root}data/{key}") for name, key in places.items()}
    return {name: Checksum(entry.CRC, entry.file_size) for name, entry in found.items() if entry is not None}


def _foreign_byte_order(archive: zipfile.ZipFile, name: str, entries: Mapping[str, zipfile.ZipInfo]) -> bool:
    """Whether reading turns the bytes around, so that they are no longer those of the checksum."""
    return name in entries and archive.read(name).decode("ascii", "replace") != sys.byteorder


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, zlib.error):
        raise DamagedStructure from None


def _places(structure: bytes) -> dict[str, str]:
    """Tensor name -> key of its storage. A structure of another kind has none."""
    try:
        content = _Places(BytesIO(structure)).load()
    except Exception:  # what it refers to does not exist here, and need not
        return {}
    return {name: key for name, key in content.items() if isinstance(key, str)} if isinstance(content, dict) else {}


class _Places(pickle.Unpickler):
    """Every function that the file names gives back its first argument: of a tensor, that is its storage's key."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _first

    def persistent_load(self, pid: Any) -> str:
        return str(pid[2])  # ("storage", type, key, device, length)


def _first(*arguments: Any) -> Any:
    return arguments[0] if arguments else None
