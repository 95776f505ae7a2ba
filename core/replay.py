"""Decoding on a CPU: the kernel calls of a step, recorded once per number of rows and made again by one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.cpu.program import Program, recorded
from rwkv_lightning.kernels.reference import Rows

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from rwkv_lightning.core.slots import SlotPool
    from rwkv_lightning.core.workspace import Buffers, Workspace

    Run = Callable[[Buffers, torch.Tensor, Rows, SlotPool], torch.Tensor]

KEPT = 256  # numbers of rows whose steps are kept


@dataclass(frozen=True, slots=True)
class _Step:
    """A recorded step, with what its addresses point to."""

    buffers: Buffers
    pool: SlotPool
    threads: int
    tokens: torch.Tensor
    rows: Rows
    program: Program
    logits: torch.Tensor

    def fits(self, buffers: Buffers, pool: SlotPool) -> bool:
        return self.buffers is buffers and self.pool is pool and self.threads == torch.get_num_threads()


class CpuSteps:
    """Steps in which every row feeds one token.

    Args:
        lib: the loaded kernels.
        run: the eager step, of recorded kernel calls only: buffers, tokens [R] int64, rows and states -> logits in a
            buffer that stays.
        workspace: gives the buffers.
    """

    def __init__(self, lib: ctypes.CDLL, run: Run, workspace: Workspace) -> None:
        self._lib = lib
        self._run = run
        self._workspace = workspace
        self._steps: dict[int, _Step] = {}

    def __call__(self, tokens: torch.Tensor, slots: torch.Tensor, pool: SlotPool) -> torch.Tensor:
        """Advance the states in `slots` [R] by `tokens` [R], both int32: logits [R, V]."""
        buffers = self._workspace.buffers(len(tokens))
        step = self._steps.get(buffers.rows)
        if step is None or not step.fits(buffers, pool):
            return self._record(buffers, tokens, slots, pool)
        step.tokens.copy_(tokens)
        step.rows.slots.copy_(slots)
        step.program.run()
        return step.logits

    def _record(self, buffers: Buffers, tokens: torch.Tensor, slots: torch.Tensor, pool: SlotPool) -> torch.Tensor:
        """The eager step, remembered."""
        count, own = buffers.rows, tokens.long()
        rows = Rows(torch.arange(count + 1, dtype=torch.int32), slots.clone(), count)
        with recorded() as calls:
            logits = self._run(buffers, own, rows, pool)
        # Buffers that the workspace has replaced by larger ones would stay alive beside these.
        self._steps = {n: step for n, step in self._steps.items() if step.buffers.current and n != count}
        if len(self._steps) >= KEPT:
            self._steps.clear()
        program = Program(self._lib, calls)
        self._steps[count] = _Step(buffers, pool, torch.get_num_threads(), own, rows, program, logits)
        return logits


def cpu_steps(device: str, recordable: bool, run: Run, workspace: Workspace) -> CpuSteps | None:
    """Recorded steps, where every kernel of the step can be recorded; else None."""
    built = library() if device == "cpu" and recordable else None
    return None if built is None or built.lib is None else CpuSteps(built.lib, run, workspace)
