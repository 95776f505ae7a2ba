"""`SlotPool`: the resident recurrent states of a model, and snapshots of single ones.

A state is the last normed input of both halves of every layer (shift, float32 [L, 2, C]) and the matrix of every head
(wkv, [L, H, N, N], key-major: wkv[layer, head, key, value]). It has the same size however many tokens it has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from rwkv_lightning.kernels.cpu.memory import slabs
from rwkv_lightning.kernels.triton.transfers import StateTransfers

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import ModelConfig
    from rwkv_lightning.kernels.triton.transfers import Arrival

STATE_DTYPES = (torch.float32, torch.float16)


class Snapshot:
    """One state in host memory, bit for bit; nobody changes its tensors.

    What was exported from a GPU may still be on its way. Only reading `shift` or `wkv` on the host waits for it.

    Args:
        shift: [L, 2, C] float32.
        wkv: [L, H, N, N] float32 or float16, key-major.
        arrival: when both hold their numbers; None when they do already.
    """

    __slots__ = ("_arrival", "_shift", "_wkv")

    def __init__(self, shift: torch.Tensor, wkv: torch.Tensor, arrival: Arrival | None = None) -> None:
        self._shift, self._wkv, self._arrival = shift, wkv, arrival

    @property
    def shift(self) -> torch.Tensor:
        """[L, 2, C] float32; may wait. Raises RuntimeError when the device failed."""
        return self.wait()._shift

    @property
    def wkv(self) -> torch.Tensor:
        """[L, H, N, N]; as `shift`."""
        return self.wait()._wkv

    @property
    def pending(self) -> tuple[tuple[torch.Tensor, torch.Tensor], Arrival | None]:
        """Shift and wkv, for a device to read once they have arrived, and when that is."""
        return (self._shift, self._wkv), self._arrival

    def wait(self) -> Snapshot:
        """Let the calling thread wait until its numbers are there."""
        arrival = self._arrival
        if arrival is not None:
            arrival.synchronize()
            self._arrival = None
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self._shift.nbytes + self._wkv.nbytes

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """The form that is stored: contiguous CPU tensors 'shift' and 'wkv'."""
        return {"shift": self.shift, "wkv": self.wkv}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """The inverse of `to_tensors`; further entries are ignored. Raises ValueError when one is missing."""
        missing = {"shift", "wkv"} - tensors.keys()
        if missing:
            raise ValueError(f"stored state lacks {' and '.join(sorted(missing))}: it is not a state of this server")
        return cls(tensors["shift"].cpu().contiguous(), tensors["wkv"].cpu().contiguous())


class LayerStates(NamedTuple):
    """One layer's part of all states: views that stay the same objects."""

    time_shift: torch.Tensor  # [count, C]
    channel_shift: torch.Tensor  # [count, C]
    wkv: torch.Tensor  # [count, H, N, N]


class SlotPool:
    """`count` resident states, zero at first.

    On a CPU, memory is taken when a slot is first written, so a large `count` costs address space only; it comes in
    huge pages where the system has them, because a step reads and writes every running state once.

    Args:
        config: the model's shape.
        count: how many slots.
        dtype: type of the wkv part, float32 or float16.
        device: where they live.
    """

    def __init__(
        self, config: ModelConfig, count: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if count < 1:
            raise ValueError(f"count of slots must be at least 1, not {count}")
        if dtype not in STATE_DTYPES:
            raise ValueError(f"states are float32 or float16, not {dtype}")
        self.count = count
        square = (config.head_size, config.head_size)
        self.shift = _zeros((config.n_layer, 2, count, config.n_embd), torch.float32, device)
        self.wkv = _zeros((config.n_layer, count, config.n_head, *square), dtype, device)
        halves = zip(self.shift.unbind(), self.wkv.unbind(), strict=True)
        self.layers = [LayerStates(shift[0], shift[1], wkv) for shift, wkv in halves]
        self.nbytes_per_slot = (self.shift.nbytes + self.wkv.nbytes) // count
        self._transfers = StateTransfers(device) if torch.device(device).type == "cuda" else None

    def reset(self, slots: Sequence[int]) -> None:
        """Set these slots to the zero state. Raises ValueError for a slot that does not exist."""
        self._check(slots)
        for slot in slots:
            self.shift[:, :, slot].zero_()
            self.wkv[:, slot].zero_()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (source, destination) slot.

        Raises ValueError for a slot that does not exist, a destination named twice, or one that is a source too.
        """
        sources, destinations = {source for source, _ in pairs}, {destination for _, destination in pairs}
        self._check(sources | destinations)
        if len(destinations) < len(pairs):
            raise ValueError(f"copy {list(pairs)}: a destination is named twice")
        if sources & destinations:
            raise ValueError(f"copy {list(pairs)}: slots {sorted(sources & destinations)} are source and destination")
        for source, destination in pairs:
            self.shift[:, :, destination].copy_(self.shift[:, :, source])
            self.wkv[:, destination].copy_(self.wkv[:, source])

    def export(self, slot: int) -> Snapshot:
        """A lossless snapshot in host memory, independent of later changes. Raises ValueError for a bad slot.

        On a GPU nothing waits for the copy; it may be called from any thread (`StateTransfers`).
        """
        self._check((slot,))
        views = self.shift[:, :, slot], self.wkv[:, slot]
        if self._transfers is None:
            return Snapshot(_to_host(views[0]), _to_host(views[1]))
        (shift, wkv), arrival = self._transfers.to_host(views)
        return Snapshot(shift, wkv, arrival)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Put a snapshot into a slot, bit for bit. Raises ValueError for a bad slot or a state of another form."""
        self._check((slot,))
        views = self.shift[:, :, slot], self.wkv[:, slot]
        given, arrival = snapshot.pending
        for name, tensor, view in zip(("shift", "wkv"), given, views, strict=True):
            _check_form(name, tensor, view)
        there = snapshot.wait().pending[0] if self._transfers is None else self._transfers.to_device(given, arrival)
        for view, tensor in zip(views, there, strict=True):
            view.copy_(tensor)

    def _check(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.count:
                raise ValueError(f"slot {slot} does not exist: there are {self.count}, numbered from 0")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return slabs.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _to_host(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(view.shape, dtype=view.dtype).copy_(view)


def _check_form(name: str, given: torch.Tensor, wanted: torch.Tensor) -> None:
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise ValueError(
            f"{name} of the snapshot is {given.dtype} {list(given.shape)}, but this model's states are "
            f"{wanted.dtype} {list(wanted.shape)}: it comes from another model or another state type"
        )
