"""The RWKV-7 forward ("Goose", x070), written once over the linear operators that a backend supplies.

What lies between the operators is in kernels/: token shift with its norm, the recurrence, the norm of chosen rows.
The residual stream and the shift states are float32; the operators' inputs and outputs have the compute type.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, cast

import torch

from rwkv_lightning.core.last_layer import Ends, LastLayer, choose
from rwkv_lightning.core.layer import Layer, Operators, norm_of
from rwkv_lightning.core.replay import CpuSteps, cpu_steps
from rwkv_lightning.core.slots import SlotPool
from rwkv_lightning.core.workspace import Buffers, Workspace
from rwkv_lightning.kernels import recurrent
from rwkv_lightning.kernels.reference import Rows
from rwkv_lightning.kernels.triton import pairs_for
from rwkv_lightning.kernels.triton.graphs import DecodeGraphs
from rwkv_lightning.kernels.triton.transfers import upload

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Batch, SlotStates, WeightSource
    from rwkv_lightning.kernels.triton.graphs import Capture, DecodeInputs

FEW = 256  # numbers of which Python finds the least sooner than torch does


class RWKV7:
    """A loaded model: implements `interfaces.Model` over any `WeightSource`.

    Args:
        source: the open model file.
        device: where it runs, e.g. 'cpu'.
        dtype: compute type of the operators.
        state_dtype: type of the resident wkv states, float32 or float16.
        description: the backend's part of the banner line.
        capture: makes a step of decoding replayable, where that pays (on GPUs); None: every step runs eagerly.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        description: str,
        capture: Capture | None = None,
    ) -> None:
        kernels = recurrent.select(device)
        self.config = source.config
        self.device = str(device)
        self.dtype = str(dtype).removeprefix("torch.")
        self.description = f"{description}; recurrence: {kernels.why}"
        table, self._table_scales = source.table()
        self._table = table if table.dtype in recurrent.ROW_TYPES else table.float()
        self._state_dtype = state_dtype
        self._workspace = Workspace(source.config.n_embd, dtype, device)
        self._embed_norm = kernels.norm_rows(*norm_of(source, "blocks.0.ln0"))
        join = pairs_for(torch.device(device).type)
        *before, end = range(source.config.n_layer)
        self._layers = [Layer(source, kernels, index, join) for index in before]
        self._last = LastLayer(source, kernels, end, join)
        self._final_norm = kernels.norm_rows(*norm_of(source, "ln_out"))
        self._head = Operators("head", [source.linear("head.weight")], dtype=torch.float32)
        recordable = self._head.recordable and all(layer.recordable for layer in (*self._layers, self._last))
        # Decoding by steps met before; None: every step runs eagerly.
        self._steps: _Replay | CpuSteps | None
        if capture is None:
            self._steps = cpu_steps(self.device, recordable, self._run, self._workspace)
        else:
            self._steps = _Replay(self, capture, Workspace(self.config.n_embd, dtype, device))

    def new_states(self, count: int) -> SlotPool:
        """Room for `count` resident states, zero at first."""
        return SlotPool(self.config, count, dtype=self._state_dtype, device=self.device)

    def state_nbytes(self) -> int:
        """Bytes of one resident state."""
        c = self.config
        wkv = c.n_head * c.head_size**2 * self._state_dtype.itemsize
        return c.n_layer * (wkv + 2 * c.n_embd * torch.float32.itemsize)

    @torch.inference_mode()
    def forward(self, batch: Batch, states: SlotStates) -> torch.Tensor:
        """Feed the batch, advance the states in place, and return float32 logits [S, V].

        The returned tensor is a buffer that the next call overwrites.

        Raises:
            ValueError: a token, slot, offset or position is out of range; nothing has been changed then.
        """
        pool = cast("SlotPool", states)
        _check(batch, self.config.vocab_size, pool.count)
        if self._steps is not None and _decodes(batch):
            logits = self._steps(batch.tokens, batch.slots, pool)
            if logits is not None:
                return logits
        given = batch.tokens, batch.offsets, batch.slots, batch.logit_positions
        tokens, offsets, slots, positions, *chosen = upload((*given, *choose(batch)), self.device)
        rows = Rows(offsets.contiguous(), slots.contiguous(), len(tokens))
        return self.run(tokens, rows, positions, pool, self._workspace, Ends.of(chosen, rows.slots))

    def run(
        self,
        tokens: torch.Tensor,
        rows: Rows,
        positions: torch.Tensor,
        pool: SlotPool,
        workspace: Workspace,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """The eager step over a checked batch, in the buffers of `workspace`; logits [S, V] after `positions`."""
        return self._run(workspace.buffers(rows.tokens), tokens.long(), rows, pool, positions, ends)

    def _run(
        self,
        b: Buffers,
        tokens: torch.Tensor,
        rows: Rows,
        pool: SlotPool,
        positions: torch.Tensor | None = None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """A step over tokens [T] int64; logits after `positions`, None for all."""
        self._embed_norm(self._table, tokens, None, b.x, self._table_scales)
        delta = None
        for layer, state in zip(self._layers, pool.layers, strict=False):
            delta = layer.time_mix(delta, state, rows, b)
            layer.mix_channels(b.x, delta, state.channel_shift, rows, b.channel_in)
            delta = layer.feed_forward(b.channel_inputs, b)
        last, state = self._last, pool.layers[-1]
        if ends is None:
            delta = last.time_mix(delta, state, rows, b)
        else:
            delta, b = last.time_mix_ends(delta, state, rows, ends, b)
            rows, positions = ends.rows, ends.positions
        last.mix_channels(b.x, delta, state.channel_shift, rows, b.channel_in)
        return self._logits(b, positions)

    def _logits(self, b: Buffers, positions: torch.Tensor | None) -> torch.Tensor:
        """The last layer's feed-forward, the final norm and the head, only where logits are wanted."""
        inputs, chosen = b.channel_inputs, b
        if positions is not None:
            if not positions.numel():
                return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=positions.device)
            inputs, chosen = (inputs[0].index_select(0, positions),), b.workspace.buffers(positions.numel())
        delta = self._last.feed_forward(inputs, chosen)
        self._final_norm(b.x, positions, delta, chosen.y)
        return self._head((chosen.y,), chosen)[0]


class _Replay:
    """Decoding by captured steps, over the states that decoded last; in buffers of its own, which stay in place."""

    def __init__(self, model: RWKV7, capture: Capture, workspace: Workspace) -> None:
        self._model = model
        self._capture = capture
        self._workspace = workspace
        self._pool: SlotPool | None = None
        self._graphs: DecodeGraphs

    def __call__(self, tokens: torch.Tensor, slots: torch.Tensor, pool: SlotPool) -> torch.Tensor | None:
        """Logits after one token per row, or None when this batch must run eagerly."""
        if self._pool is not pool:
            model, workspace = self._model, self._workspace

            def step(given: DecodeInputs) -> torch.Tensor:
                return model.run(given.tokens, given.rows, given.positions, pool, workspace)

            self._pool, self._graphs = pool, DecodeGraphs(step, self._capture, model.device, pool.count)
        return self._graphs(tokens, slots)


def _decodes(batch: Batch) -> bool:
    """Whether every row is one token, after which logits are wanted."""
    rows = len(batch.slots)
    return len(batch.tokens) == rows and batch.logit_positions.tolist() == list(range(rows))


def _check(batch: Batch, vocab_size: int, slot_count: int) -> None:
    """Raise ValueError unless every index of a batch is in range: the kernels check nothing."""
    tokens, offsets, slots = len(batch.tokens), batch.offsets.tolist(), batch.slots.tolist()
    rising = all(map(operator.lt, offsets, offsets[1:]))
    if not slots or len(offsets) != len(slots) + 1 or not rising or offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(f"batch.offsets {offsets} do not cut {tokens} tokens into {len(slots)} rows")
    if len(set(slots)) < len(slots):
        raise ValueError(f"batch.slots {slots} must be distinct")
    _check_range("slots", batch.slots, slot_count)
    _check_range("tokens", batch.tokens, vocab_size)
    _check_range("logit_positions", batch.logit_positions, tokens)


def _check_range(name: str, values: torch.Tensor, end: int) -> None:
    if not len(values):
        return
    ends = values.tolist() if len(values) < FEW else [int(each) for each in values.aminmax()]
    least, most = min(ends), max(ends)
    if least < 0 or most >= end:
        raise ValueError(f"batch.{name} must lie in 0..{end - 1}, not in {least}..{most}")
