"""Open a `.pth` or `.safetensors` file as named, memory-mapped tensors, or say what is wrong with it.

The format is found by content, not by suffix. A `.pth` is read with PyTorch's weights-only unpickler: nothing stored
in a file is ever executed.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rwkv_lightning.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

AGAIN = "copy or download it again"
PLAIN_DICT = "save a plain dict of tensors, as torch.save(model.state_dict(), ...) does"
# The length of a .safetensors header (8 bytes, little endian), then JSON; the format allows 100 MB of it.
SAFETENSORS_START = re.compile(rb"[\s\S]{4}[\x00-\x05]\x00\x00\x00\{")
FOREIGN_STARTS = {
    b"GGUF": "a GGUF file; give the original .pth or .safetensors file",
    b"version https://git-lfs": "a Git LFS pointer, not the model itself; fetch it with `git lfs pull`",
    b"<": "a web page, not a model; download the file itself",
}


@dataclass(frozen=True)
class TensorFile:
    """The tensors of one file, on the CPU, mapped from the file where its format allows.

    Args:
        path: where they came from.
        tensors: name -> strided tensor, in the file's order.
        metadata: the text entries of a `.safetensors` header; empty for a `.pth`.
    """

    path: Path
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]


def open_tensors(path: Path) -> TensorFile:
    """Open a file of tensors. Raises CheckpointError naming what is wrong with it and what to do."""
    start = _first_bytes(path)
    if not start:
        raise CheckpointError(f"'{path}' is empty (0 bytes): {AGAIN}")
    if start.startswith(b"PK"):
        return _open_zip(path)
    if SAFETENSORS_START.match(start) or path.suffix == ".safetensors":
        return _open_safetensors(path, start)
    if start.startswith(b"\x80"):
        return TensorFile(path, _load_pickled(path, mmap=False), {})
    for prefix, what in FOREIGN_STARTS.items():
        if start.startswith(prefix):
            raise CheckpointError(f"'{path}' is {what}")
    raise CheckpointError(f"'{path}' is not a checkpoint: neither a PyTorch .pth nor a .safetensors file")


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except FileNotFoundError:
        raise CheckpointError(f"there is no model file at '{path}': check --model-path") from None
    except IsADirectoryError:
        raise CheckpointError(f"'{path}' is a directory: name the .pth or .safetensors file in it") from None
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror}): check its permissions") from None


def _truncated(path: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"'{path}' is truncated or damaged ({path.stat().st_size:,} bytes; {detail}): {AGAIN}")


def _open_safetensors(path: Path, start: bytes) -> TensorFile:
    from safetensors import SafetensorError, safe_open

    if len(start) < 8 or path.stat().st_size < 8 + int.from_bytes(start[:8], "little"):
        if len(start) > 8 and not SAFETENSORS_START.match(start):
            raise CheckpointError(f"'{path}' is not a checkpoint, although its name ends in .safetensors")
        raise _truncated(path, "its header is incomplete")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return TensorFile(path, tensors, dict(file.metadata() or {}))
    except (SafetensorError, OSError, ValueError) as error:
        raise _truncated(path, _reason(error)) from None


def _open_zip(path: Path) -> TensorFile:
    """PyTorch's own format since 1.6: a zip of the pickled structure and of one stored file per tensor."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        raise _truncated(path, "the directory at its end is missing") from None
    if not any(name.endswith("/data.pkl") for name in members):
        raise CheckpointError(f"'{path}' is a zip archive but not a PyTorch checkpoint: give the .pth file itself")
    if any(name.endswith("/constants.pkl") for name in members):
        raise CheckpointError(f"'{path}' holds a TorchScript program, which is never executed: {PLAIN_DICT}")
    return TensorFile(path, _load_pickled(path, mmap=True), {})


def _load_pickled(path: Path, *, mmap: bool) -> dict[str, torch.Tensor]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from None
    except MemoryError:
        raise CheckpointError(f"'{path}' does not fit into memory: free some, or choose a smaller model") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise _truncated(path, _reason(error)) from None
    return _plain_dict(path, content)


def _refused(path: Path, error: Exception) -> CheckpointError:
    """The weights-only unpickler met something that is not a tensor, a number, a text or a container."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found is None:
        return _truncated(path, _reason(error))
    return CheckpointError(
        f"'{path}' holds pickled objects ({found[1]}), which could run code and are never loaded: {PLAIN_DICT}"
    )


def _reason(error: Exception) -> str:
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().splitlines()
    return lines[0].split(". ")[0][:160] if lines else type(error).__name__


def _plain_dict(path: Path, content: Any) -> dict[str, torch.Tensor]:
    import torch

    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' holds a {type(content).__name__}, not a dict of tensors: {PLAIN_DICT}")
    for name, value in content.items():
        if isinstance(value, dict) and value:
            raise CheckpointError(f"'{path}' holds its weights under the key '{name}': {PLAIN_DICT}")
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"'{path}' holds a {type(value).__name__} under the key {name!r}: {PLAIN_DICT}")
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"'{path}': {name} is a sparse or quantised tensor: {PLAIN_DICT}")
    return {name: value.detach() for name, value in content.items()}
