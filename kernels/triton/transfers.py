"""Copies between host memory and a GPU that no step waits for: its small inputs, and states on their way out and in.

All of them go through page-locked memory, which torch hands out again only when the copies that use it are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

ALIGNMENT = 16  # bytes; Triton compiles a kernel once more for addresses that are no multiple of it


class Arrival(Protocol):
    """Says when a copy to the host has ended: a `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Let the calling thread wait for it."""


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that a GPU reads and writes by itself, its content undefined.

    Ordinary memory when the system gives no more of it: copies are then right all the same, but waited for.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(shape, dtype=dtype)


def upload(tensors: Sequence[torch.Tensor], device: torch.device | str) -> Sequence[torch.Tensor]:
    """Small host tensors on a device, contiguous, by one copy; on a CPU they are what was given."""
    if torch.device(device).type == "cpu":
        return tensors
    buffer = page_locked([_end(tensors)], torch.uint8)
    for place, tensor in zip(_places(buffer, tensors), tensors, strict=True):
        place.copy_(tensor)
    there = buffer.to(device, non_blocking=buffer.is_pinned())
    return list(_places(there, tensors))


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _end(tensors: Sequence[torch.Tensor]) -> int:
    return sum(map(_padded, tensors))


def _places(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Views of bytes, one after the other, in the tensors' types and shapes."""
    begin = 0
    for tensor in tensors:
        yield buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += _padded(tensor)


class StateTransfers:
    """Moves states out of a GPU's memory and back while it goes on with its steps.

    Any thread may call. A thread that has not chosen a stream works on the device's default one, as the engine's does:
    what it reads is what the steps begun so far leave behind, and steps begun after the call may overwrite it.

    Args:
        cuda: the runtime; tests put a recorder in its place.
    """

    def __init__(self, device: torch.device | str, cuda: Any = torch.cuda) -> None:
        self._device = torch.device(device)
        self._cuda = cuda
        with cuda.device(self._device):
            # Streams are taken in turn from a few per priority; no capture of a step takes one of this priority.
            self._side = cuda.Stream(priority=-1)

    def to_host(self, views: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Arrival]:
        """The views in contiguous host memory, and when they have arrived there.

        They are copied on the device, in the order of its steps, and from there on a stream of their own.
        """
        cuda, side = self._cuda, self._side
        with cuda.device(self._device):
            staged = [view.clone(memory_format=torch.contiguous_format) for view in views]
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                arrived = [self._leave(each) for each in staged]
                event: Arrival = cuda.Event(blocking=True)  # a thread that waits for it sleeps
                side.record_event(event)
        return arrived, event

    def _leave(self, staged: torch.Tensor) -> torch.Tensor:
        staged.record_stream(self._side)  # it is dropped at once, but its memory must wait for the copy
        host = page_locked(staged.shape, staged.dtype)
        return host.copy_(staged, non_blocking=host.is_pinned())

    def to_device(self, tensors: Sequence[torch.Tensor], arrival: Arrival | None) -> list[torch.Tensor]:
        """Host tensors on the device, for what the calling thread gives it next; `arrival` as `to_host` gave it."""
        with self._cuda.device(self._device):
            if arrival is not None:
                self._cuda.current_stream().wait_event(arrival)
            return [tensor.to(self._device, non_blocking=tensor.is_pinned()) for tensor in tensors]
