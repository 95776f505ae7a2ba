"""Buffers of a forward that live from step to step: fresh memory costs page faults, and fixed addresses save checks."""

from __future__ import annotations

import torch

MIXES = "rkvwag"  # the inputs of time mixing, in the order of their buffers
KEPT = 256  # row counts whose views are kept


class Buffers:
    """The buffers of one step, for T tokens (or S chosen ones). Same-sized steps share them.

    Args:
        x: [T, C] float32, the residual stream.
        y: [T, C] in the compute type, as v_first.
        v_first: the first layer's values.
        time_in: [6, T, C], what time mixing interpolates; time_inputs are its rows for the operators of a layer
            (the value operator and the low-rank value mix read the same one); the first layer has no value mix.
        channel_in: [1, T, C], what channel mixing interpolates; channel_inputs likewise.
    """

    def __init__(self, workspace: Workspace, rows: int, width: int) -> None:
        self.rows = rows
        self.workspace = workspace
        self._outputs: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, ...]] = {}
        self.x = workspace.take("x", (rows, width), torch.float32)
        self.y = workspace.take("y", (rows, width))
        self.v_first = workspace.take("v_first", (rows, width))
        self.time_in = workspace.take("mixed", (len(MIXES), rows, width))
        each = self.time_in.unbind()
        self.first_time_inputs = each
        self.time_inputs = (*each, each[MIXES.index("v")])
        self.channel_in = self.time_in[:1]
        self.channel_inputs = each[:1]

    @property
    def current(self) -> bool:
        """Whether the workspace still gives these buffers for their number of rows."""
        return self.workspace.holds(self)

    def outputs(self, name: str, widths: tuple[int, ...], dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        """One [rows, width] buffer per width, the same ones whenever asked with the same name and widths."""
        found = self._outputs.get((name, widths))
        if found is None:
            take = self.workspace.take
            found = tuple(take(f"{name}{i}", (self.rows, width), dtype) for i, width in enumerate(widths))
            self._outputs[name, widths] = found
        return found


class Workspace:
    """Named memory that grows to the largest step so far.

    Args:
        width: C.
        dtype: compute type.
        device: where the buffers live.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.width = width
        self.dtype = dtype
        self.device = device
        self._memory: dict[str, torch.Tensor] = {}
        self._buffers: dict[int, Buffers] = {}

    def buffers(self, rows: int) -> Buffers:
        """The buffers for this many rows."""
        found = self._buffers.get(rows)
        if found is None:
            if len(self._buffers) >= KEPT:
                self._buffers.clear()
            found = Buffers(self, rows, self.width)
            self._buffers[rows] = found
        return found

    def holds(self, buffers: Buffers) -> bool:
        """Whether `buffers` gives these very ones."""
        return self._buffers.get(buffers.rows) is buffers

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A view of this shape on the memory of that name; its content is undefined."""
        count = 1
        for size in shape:
            count *= size
        memory = self._memory.get(name)
        if memory is None or memory.numel() < count:
            self._buffers.clear()  # what they view would otherwise stay alive beside the larger memory
            memory = torch.empty(count + count // 4, dtype=dtype or self.dtype, device=self.device)
            self._memory[name] = memory
        return memory[:count].view(shape)
