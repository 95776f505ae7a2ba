"""Decoding through CUDA graphs: one captured step per batch size of a short list, replayed with new inputs.

A step of decoding is some hundred small launches; a graph makes them one. A batch is filled up to the next size of the
list with rows whose slot is -1, for which the kernels touch no state. Buffers are static: replaying allocates nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rwkv_lightning.kernels.reference import Rows
from rwkv_lightning.kernels.triton import missing
from rwkv_lightning.kernels.triton.transfers import ALIGNMENT, page_locked

log = logging.getLogger(__name__)

# Larger batches run eagerly: there the launches hide behind the work.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 960, 1024)
NO_SLOT = -1

Run = Callable[[], torch.Tensor]


class Capture(Protocol):
    """Makes a step replayable."""

    def __call__(self, run: Run) -> Run:
        """Run the step, record it, and return what repeats it on whatever its input buffers hold by then."""


class CudaCapture:
    """Captures CUDA (or HIP) graphs, which share one memory pool: nothing in it outlives a replay."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            return self._captured(run)

    def _captured(self, run: Run) -> Run:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles kernels and sets up libraries, which a capture must not see
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the server may use the device meanwhile; only this one is watched.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._pool = self._pool or graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def capture_for(device: torch.device | str) -> Capture | None:
    """How steps are captured on a device; None where they are not: only the Triton kernels can be."""
    return CudaCapture(device) if torch.device(device).type == "cuda" and missing() is None else None


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The static inputs of a step of `size` rows of one token each; all rows fill until `load` is called.

    Args:
        tokens: [size] int32.
        rows: their structure; its slots are an input too.
        positions: [size] int64, logits are wanted after every token.
        memory: [2, size and a little more] int32, what the tokens and the slots are views of.
    """

    tokens: torch.Tensor
    rows: Rows
    positions: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def make(cls, size: int, device: torch.device | str) -> DecodeInputs:
        aligned = ALIGNMENT // torch.int32.itemsize
        memory = torch.empty(2, -(-size // aligned) * aligned, dtype=torch.int32, device=device)
        memory[0].zero_()
        memory[1].fill_(NO_SLOT)
        offsets = torch.arange(size + 1, dtype=torch.int32, device=device)
        rows = Rows(offsets, memory[1, :size], size)
        return cls(memory[0, :size], rows, torch.arange(size, device=device), memory)

    def load(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Put a batch of at most `size` rows in, from the host and in one copy; the rest fills."""
        count = len(tokens)
        given = page_locked(self.memory.shape, torch.int32)
        given[0, :count] = tokens
        given[0, count:] = 0
        given[1, :count] = slots
        given[1, count:] = NO_SLOT
        self.memory.copy_(given, non_blocking=given.is_pinned())


class DecodeGraphs:
    """Steps of decoding by size. A size is captured when it is first met.

    Args:
        step: the eager step over static inputs; its result must be a buffer that stays in place.
        capture: makes it replayable.
        device: where the inputs live.
        most: rows of the largest batch there can be.
    """

    def __init__(
        self, step: Callable[[DecodeInputs], torch.Tensor], capture: Capture, device: torch.device | str, most: int
    ) -> None:
        self._step = step
        self._capture = capture
        self._device = device
        self._sizes: Sequence[int] = SIZES[: bisect_left(SIZES, most) + 1]
        self._replays: dict[int, tuple[DecodeInputs, Run]] = {}
        self._usable = True

    def size_for(self, rows: int) -> int | None:
        """The smallest size that holds this many rows; None when the batch must run eagerly."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if self._usable and at < len(self._sizes) else None

    def __call__(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor | None:
        """Logits [R, V] of R rows of one token each, a buffer that the next call overwrites; None: run it eagerly.

        Tokens and slots, [R] int32, are in host memory.
        """
        size = self.size_for(len(tokens))
        if size is None:
            return None
        found = self._replays.get(size) or self._record(size)
        if found is None:
            return None
        inputs, replay = found
        inputs.load(tokens, slots)
        return replay()[: len(tokens)]

    def _record(self, size: int) -> tuple[DecodeInputs, Run] | None:
        """Capture a size. When that fails, decoding goes on without graphs, and the log says so."""
        try:
            if not self._replays:  # the buffers that all sizes share must not move afterwards
                self._step(DecodeInputs.make(self._sizes[-1], self._device))
            inputs = DecodeInputs.make(size, self._device)
            self._replays[size] = inputs, self._capture(lambda: self._step(inputs))
        except RuntimeError as error:
            self._usable = False
            self._replays.clear()
            log.warning("capturing a step of %d rows failed (%s); decoding goes on without graphs", size, error)
            return None
        return self._replays[size]
