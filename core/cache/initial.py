"""Initial states from RWKV state-tuning files: what a sequence begins from instead of the zero state."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.errors import CheckpointError, InvalidField
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
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, folder: Path | None, default: Path | None) -> None:
        self._config = config
        self._dtype = dtype
        self._folder = folder.resolve() if folder else None
        self._loaded: OrderedDict[Path, tuple[int, InitialState]] = OrderedDict()  # the least recently used first
        self._lock = Lock()
        self.default = InitialState() if default is None else self._load(default)

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

    def _load(self, path: Path) -> InitialState:
        """Raises CheckpointError naming what is wrong with the file."""
        try:
            changed = path.stat().st_mtime_ns
            with self._lock:
                if path in self._loaded and self._loaded[path][0] == changed:
                    self._loaded.move_to_end(path)
                    return self._loaded[path][1]
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"state file {path.name} cannot be read ({type(error).__name__})") from None
        state = self._from_tensors(path.name, tensors)
        with self._lock:
            self._loaded[path] = changed, state
            if len(self._loaded) > MOST_LOADED:
                self._loaded.popitem(last=False)
        return state

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
        wkv = torch.stack([found[key].float() for key in keys])
        digest = hashlib.blake2b(wkv.numpy().tobytes(), digest_size=8).hexdigest()
        shift = torch.zeros(config.n_layer, 2, config.n_embd)
        return InitialState(digest, Snapshot(shift, wkv.mT.contiguous().to(self._dtype)))
