"""What plugins implement and are given: `Backend`, `Model`, `Linear`, `Sampler`, `StateStore`, `RouteGroup`,
`ServerContext`.

A plugin author reads hookspecs.py for when things are called, and this page for what they must do.
Shapes: T tokens in a step, R rows, S rows that need logits, V vocabulary, C width, H heads, N head size.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from fastapi import APIRouter, Request, Response

    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.errors import RequestError
    from rwkv_lightning.core.host import PluginHost
    from rwkv_lightning.core.http import Call
    from rwkv_lightning.core.metrics import Metrics
    from rwkv_lightning.core.models import ModelManager

Activation = Literal["none", "relu2", "tanh", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of an RWKV-7 model."""

    n_layer: int
    n_embd: int
    n_head: int
    head_size: int
    n_ffn: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How the user wants a model loaded; 'auto' leaves the choice to the backend.

    Args:
        device: a torch device string, e.g. 'cpu' or 'cuda:0'.
        dtype: compute type: 'auto', 'float32', 'bfloat16' or 'float16'.
        state_dtype: type of the resident WKV states: 'auto', 'float32' or 'float16'.
        deterministic: a row's logits must not depend on its neighbours, bit for bit.
    """

    device: str = "cpu"
    dtype: str = "auto"
    state_dtype: str = "auto"
    deterministic: bool = False


@dataclass(slots=True)
class Batch:
    """One ragged step: row i feeds tokens[offsets[i]:offsets[i+1]] to the state in slots[i].

    The tensors are contiguous and in host memory, whatever the device: a model checks them there, and takes along what
    its device needs.

    Args:
        tokens: [T] int32, flat, row after row; every row has at least one token.
        offsets: [R+1] int32, offsets[0] == 0 and offsets[R] == T.
        slots: [R] int32, distinct.
        logit_positions: [S] int64, positions in `tokens` after which logits are wanted.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    logit_positions: torch.Tensor


@runtime_checkable
class SlotStates(Protocol):
    """The resident recurrent states of one model, `count` of them."""

    count: int
    nbytes_per_slot: int

    def reset(self, slots: Sequence[int]) -> None:
        """Set these slots to the zero state."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (source, destination) slot; sources are untouched, destinations distinct."""

    def export(self, slot: int) -> Any:
        """A lossless snapshot of one slot in host memory, independent of later changes to the slot.

        May be called beside a step, from another thread, for a slot that no step touches meanwhile.
        """

    def restore(self, slot: int, snapshot: Any) -> None:
        """Put a snapshot made by `export` into a slot, bit for bit."""


@runtime_checkable
class Model(Protocol):
    """A loaded model: what the runner drives."""

    config: ModelConfig
    dtype: str  # compute type, for the banner
    device: str
    description: str  # one line for the banner: which kernels serve and why

    def new_states(self, count: int) -> SlotStates:
        """Room for `count` resident states."""

    def state_nbytes(self) -> int:
        """Bytes of one resident state."""

    def forward(self, batch: Batch, states: SlotStates) -> torch.Tensor:
        """Feed the batch, advance the states in place, and return float32 logits [S, V].

        The returned tensor may be a buffer that the next call overwrites.
        """


class Linear(Protocol):
    """y = activation(x @ W.T) with a weight W of [out_features, in_features] in whatever form the backend keeps it."""

    in_features: int
    out_features: int

    def __call__(
        self, x: torch.Tensor, activation: Activation = "none", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x [T, in_features] contiguous, in the compute type -> [T, out_features] in `dtype` (the compute type)."""


class WeightSource(Protocol):
    """One open model file, as core/rwkv7.py asks for it. Names are those of the official layout."""

    config: ModelConfig

    def linear(self, name: str) -> Linear:
        """The operator of a matrix, by its official name, e.g. 'blocks.0.att.key.weight' or 'head.weight'.

        The low-rank pairs ('blocks.0.att.w1' ...) are stored as [in, out] in the official layout; the source
        transposes, so that every operator maps its input width to its output width.
        """

    def table(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """emb.weight as it lies in memory, contiguous.

        Returns:
            its rows [V, C] of a floating-point type or int8, and float32 [V, 1] that they are to be multiplied by, or
            None.
        """

    def tensor(self, name: str) -> torch.Tensor:
        """A small tensor (norms, mixes, biases, k_k, r_k ...) as flat float32 on the device."""


class Backend(Protocol):
    """A weight loader: turns one kind of model file into a `Model` on a device."""

    def probe(self, device: str) -> str | None:
        """None when usable on this device, else why not and the way out, in one sentence."""

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load a model file. Raises CheckpointError naming what is wrong and what to do."""


class SamplerRow(Protocol):
    """A row's own sampling memory: penalties, random stream, position. Moves with the row, never with a slot."""


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """What a sampler's factory is told about the model it will serve.

    Args:
        vocab_size: V, the length of a row of logits.
        token_bytes: the bytes of each token id, V of them; empty for ids without text.
    """

    vocab_size: int
    token_bytes: Sequence[bytes]


class Sampler(Protocol):
    """Draws the next token of many rows at once."""

    def validate(self, values: Mapping[str, Any]) -> Any:
        """Check the sampling fields of a request and return this sampler's options.

        Unknown names are ignored. Raises errors.InvalidField naming the field and its range.
        """

    def open(self, options: Any, seed: int, row: int) -> SamplerRow:
        """Begin a row: fresh penalties, random stream (seed, row), position 0."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> Sequence[int]:
        """Draw one token per row from float32 logits [len(rows), V] and advance the rows.

        A row whose logits hold NaN (or no finite value) gets -1 and is not advanced. `logits` may be overwritten.
        """


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One line of a state store's index: what is known of a state without reading it.

    Args:
        key: unique; `core.cache.keys` says how it is made.
        kind: 'session' (a branch is one too) or 'prefix'.
        session: the session's id; empty for a prefix.
        branch: the branch's number; 0 for the session itself and for a prefix.
        parent: the key of the state that this one went on from; empty for none.
        model: the fingerprint of the model it belongs to.
        initial: what its sequence began from; empty for the zero state.
        tokens: how many tokens it has seen, its tail included.
        token_hash: their hash (core/cache/record.py).
        last_text: the last few words, for people.
        created: Unix seconds.
        nbytes: bytes that the record takes in the store.
    """

    key: str
    kind: Literal["session", "prefix"]
    session: str
    branch: int
    parent: str
    model: str
    initial: str
    tokens: int
    token_hash: str
    last_text: str
    created: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state as a store takes it: its index line, its record, and for a prefix its tokens (`core.cache.prefix.pack`).

    The record is opaque to the store, which gives it back byte for byte.
    """

    info: StateInfo
    data: bytes
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a store holds: states of each kind, and the sum of their `nbytes`."""

    sessions: int
    prefixes: int
    nbytes: int


class StateStore(Protocol):
    """A tier below RAM: keeps states by key, and the numbers of branches, across restarts.

    Called from worker threads, never in the event loop; reads and writes may come from two threads at once. Every
    method raises errors.StoreError when the store fails, and has then changed nothing that a later call can see,
    except that a branch number may be lost. What a `put` that returned has stored outlives the process.
    """

    location: str  # what the log calls the place, once open

    def open(self, location: str | None = None) -> None:
        """Make ready to serve from `--state-db`, or from the store's own default. Reads no states.

        Raises errors.StartError when another server uses the same place, errors.StoreError when it cannot be used.
        """

    def close(self) -> None:
        """Release everything; never raises. A closed store may be opened again."""

    def put(self, states: Sequence[StoredState]) -> None:
        """Store all or none of them; a state of the same key is replaced. A branch's number counts as reserved."""

    def get(self, key: str) -> bytes | None:
        """The record of a key, or None."""

    def info(self, key: str) -> StateInfo | None:
        """The index line of a key, or None."""

    def family(self, session: str) -> list[StateInfo]:
        """The session itself and its branches, by number."""

    def sessions(self, *, limit: int | None = None, offset: int = 0, exclude: Collection[str] = ()) -> list[StateInfo]:
        """Sessions and branches, the newest first (by `created`, then key), without the excluded keys."""

    def count(self, exclude: Collection[str] = ()) -> int:
        """How many sessions and branches there are, without the excluded keys."""

    def prefixes(self, model: str, limit: int | None = None) -> list[tuple[StateInfo, bytes]]:
        """Prefixes of a model with their tokens, the last used first."""

    def touch(self, keys: Collection[str], now: float) -> None:
        """Note that these states were used at `now` (Unix seconds). A put counts as a use at `created`."""

    def delete(self, keys: Collection[str]) -> int:
        """Delete states; how many there were. Branch numbers stay."""

    def evict(self, budget: int) -> list[str]:
        """Delete states until at most `budget` bytes are used: prefixes first, then the least recently used.

        The result is the deleted keys.
        """

    def reserve_branches(self, session: str, count: int = 1, at_least: int = 1) -> int:
        """The first of `count` branch numbers that were never reserved before: 1 and up, and not below `at_least`.

        Numbers outlive the process, and the deletion of the session.
        """

    def usage(self) -> StoreUsage:
        """What it holds, in a moment however much that is."""

    def get_meta(self, name: str) -> str | None:
        """A text stored under a name, or None."""

    def set_meta(self, name: str, value: str) -> None:
        """Store a text under a name."""

    def check(self) -> Sequence[str]:
        """What is wrong with it, in sentences; empty when all is well. Reads everything."""


@dataclass(frozen=True, slots=True)
class BodyClaim:
    """A claim on a path that several groups share: requests whose JSON body holds `key` go to `handle`.

    A key counts when its value is neither null nor an empty list. Core owns such a path, parses the body once and
    asks the claims; a body with the keys of two claims is refused.

    Args:
        method: 'POST'.
        path: the shared path, e.g. '/v1/chat/completions'.
        key: the body's top-level key that decides.
        label: how an error names this kind of body, e.g. 'native batch'.
        handle: awaited with the call: the request, its parsed body without the password, who calls.
        body_schema: JSON schema of the body, for /openapi.json.
        fallback: this claim also gets the bodies that hold nobody's key (at most one per path).
    """

    method: str
    path: str
    key: str
    label: str
    handle: Callable[[Call], Awaitable[Response]]
    body_schema: Mapping[str, Any]
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """Routes that speak one wire form.

    Args:
        name: unique; requests are counted and errors rendered under it.
        router: its routes. A method and path that another group has too stops the start.
        render_error: turns any RequestError raised under these routes into the group's error form.
        validation_status: the status of an `InvalidField` here, 400 or 422.
        claims: what it wants of paths that several groups share.
        prefixes: paths under which even unknown paths and methods are answered in this group's error form.
    """

    name: str
    router: APIRouter
    render_error: Callable[[Request, RequestError], Response]
    validation_status: int = 400
    claims: Sequence[BodyClaim] = ()
    prefixes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The server's parts, as route groups and the life-cycle hooks see them.

    Args:
        started: `time.monotonic()` at the start of the server.
    """

    settings: Settings
    host: PluginHost
    models: ModelManager
    metrics: Metrics
    started: float = field(default_factory=time.monotonic)
