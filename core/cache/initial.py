"""Initial states from RWKV state-tuning files: what a sequence begins from instead of the zero state."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.errors import CheckpointError, InvalidField, SettingsError
from rwkv_lightning.core.request import StateSource
from rwkv_lightning.core.slots import Snapshot

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import ModelConfig

SUFFIX = ".att.time_state"
MOST_LOADED = 32  # state files kept in memory


@dataclass(frozen=True, slots=True)
class InitialState:
    """An initial state: `name` tells it from others (empty for the zero state, whose snapshot is None)."""

    name: str = ""
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class InitialSource(StateSource):
    """A request begins from an initial state."""

    initial: InitialState


class InitialStates:
    """The default initial state and those that requests may name.

    Args:
        folder: where named files are; None allows none.
        default: the file that every sequence begins from; None for the zero state.

    Raises SettingsError for a folder that cannot be used, CheckpointError for such a default.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, folder: Path | None, default: Path | None) -> None:
        self._config = config
        self._dtype = dtype
        self._folder = _checked(folder).resolve() if folder else None
        self._loaded: OrderedDict[Path, tuple[int, InitialState]] = OrderedDict()  # the least recently used first
        self._names: dict[Path, tuple[int, str]] = {}  # `InitialState.name` by file; empty for what is no state file
        self._lock = Lock()
        self.default = InitialState() if default is None else self._load_default(default)
        self._default_file = "" if default is None else default.name

    async def find(self, name: str) -> InitialState:
        """`named`, read beside the event loop."""
        return await asyncio.to_thread(self.named, name)

    def named(self, name: str) -> InitialState:
        """The file of this name in the folder. Raises InvalidField; nothing outside the folder is ever opened."""
        if self._folder is None:
            raise InvalidField(
                "state: this server takes no state files (--state-dir names their folder)", param="state"
            )
        path = (self._folder / name).resolve() if "\0" not in name else self._folder
        if self._folder not in path.parents or not path.is_file():
            raise InvalidField(f"state: there is no file {name[:80]!r} among this server's state files", param="state")
        try:
            return self._load(path)
        except CheckpointError as error:
            raise InvalidField(f"state: {name[:80]!r} cannot be used: {error}", param="state") from None

    def has(self, name: str) -> bool:
        """Whether a request can begin from the initial state of this name, by default or with `state`. May block."""
        return name == self.default.name or (name != "" and self.file_name(name) is not None)

    def file_name(self, name: str) -> str | None:
        """The file with the initial state of this name: as requests name it, else the default's; None where there is
        none. Blocks while files are read that are new or have changed.
        """
        for path in self._files():
            if name and self._name_of(path.resolve()) == name:
                assert self._folder is not None
                return path.relative_to(self._folder).as_posix()
        return self._default_file if name and name == self.default.name else None

    def _files(self) -> Iterator[Path]:
        """The files that requests may name."""
        if self._folder is not None:
            for path in sorted(self._folder.rglob("*")):
                if path.is_file() and self._folder in path.resolve().parents:
                    yield path

    def _name_of(self, path: Path) -> str:
        """The name of a file's state; empty where it holds none."""
        try:
            changed = path.stat().st_mtime_ns
            if self._names.get(path, (-1, ""))[0] != changed:
                self._names[path] = changed, ""
                self._names[path] = changed, self._read(path).name
        except (OSError, CheckpointError):
            return ""
        return self._names[path][1]

    def _load_default(self, path: Path) -> InitialState:
        try:
            return self._load(path)
        except CheckpointError as error:
            raise CheckpointError(f"--initial-state: {error}") from None

    def _load(self, path: Path) -> InitialState:
        """Raises CheckpointError naming what is wrong with the file."""
        changed = _time_of(path)
        with self._lock:
            if path in self._loaded and self._loaded[path][0] == changed:
                self._loaded.move_to_end(path)
                return self._loaded[path][1]
        state = self._read(path)
        with self._lock:
            self._loaded[path] = changed, state
            if len(self._loaded) > MOST_LOADED:
                self._loaded.popitem(last=False)
        return state

    def _read(self, path: Path) -> InitialState:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except MemoryError:
            raise CheckpointError(f"state file {path.name} does not fit into memory: free some") from None
        except Exception as error:  # whatever the unpickler makes of a file that is damaged, or something else
            raise CheckpointError(f"state file {path.name} cannot be read: {_reason(error)}") from None
        return self._from_tensors(path.name, tensors)

    def _from_tensors(self, name: str, tensors: object) -> InitialState:
        """`blocks.N.att.time_state` [H, N, N] of every layer.

        State tuning of RWKV-7 trains the matrix as its recurrence holds it, S = S diag(w) + S a b^T + v k^T, so the
        file's rows are values and its columns keys (for RWKV-5 and 6 it was the other way round). Slots are
        key-major: every head's matrix is transposed.
        """
        config = self._config
        shape = (config.n_head, config.head_size, config.head_size)
        keys = [f"blocks.{layer}{SUFFIX}" for layer in range(config.n_layer)]
        found = tensors if isinstance(tensors, dict) else {}
        for key in keys:
            tensor = found.get(key)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
                raise CheckpointError(f"state file {name} has no {key} of shape {list(shape)}: it fits another model")
            if fault := self._fault(tensor):
                raise CheckpointError(f"state file {name}: {key} {fault}")
        wkv = torch.stack([found[key].detach().float() for key in keys])
        digest = hashlib.blake2b(wkv.numpy().tobytes(), digest_size=8).hexdigest()
        shift = torch.zeros(config.n_layer, 2, config.n_embd)
        return InitialState(digest, Snapshot(shift, wkv.mT.contiguous().to(self._dtype)))

    def _fault(self, tensor: torch.Tensor) -> str | None:
        """What is wrong with a tensor of the right shape, which has to be finite in the slots' type."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_floating_point():
            return f"is no plain tensor of numbers ({tensor.dtype}, {tensor.layout}): save it as float32"
        if not tensor.isfinite().all():
            return "holds NaN or infinity: the training run diverged, take an earlier file"
        if not tensor.to(self._dtype).isfinite().all():
            return f"holds values too large for {self._dtype}: start the server with --state-dtype float32"
        return None


def _checked(folder: Path) -> Path:
    """The folder itself. Raises SettingsError."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise SettingsError(f"--state-dir: '{folder}' {what}; name the folder of the state-tuning files")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise SettingsError(f"--state-dir: '{folder}' cannot be read: check its permissions")
    return folder


def _time_of(path: Path) -> int:
    """When a file was changed, in nanoseconds. Raises CheckpointError for what is no file."""
    try:
        if path.is_dir():
            raise CheckpointError(f"state file {path.name} cannot be read: it is a folder; name the .pth file in it")
        return path.stat().st_mtime_ns
    except OSError as error:
        raise CheckpointError(f"state file {path.name} cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in words; PyTorch's own message may hold the path."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    if isinstance(error, pickle.UnpicklingError) and re.search(r"GLOBAL [\w.]+", str(error)):
        return "it holds pickled objects, which could run code and are never loaded; save a plain dict of tensors"
    return "it is truncated or damaged, or no PyTorch file at all; copy it again"
