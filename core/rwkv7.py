"""The RWKV-7 forward ("Goose", x070), written once over the linear operators that a backend supplies.

What lies between the operators is in kernels/: token shift with its norm, the recurrence, the norm of chosen rows.
The residual stream and the shift states are float32; the operators' inputs and outputs have the compute type.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from rwkv_lightning.core.replay import CpuSteps, cpu_steps
from rwkv_lightning.core.slots import LayerStates, SlotPool
from rwkv_lightning.core.workspace import MIXES, Buffers, Workspace
from rwkv_lightning.kernels import recurrent
from rwkv_lightning.kernels.linear import KernelLinear, LinearGroup
from rwkv_lightning.kernels.reference import HeadWeights, Projections, Rows
from rwkv_lightning.kernels.triton import pairs_for
from rwkv_lightning.kernels.triton.graphs import DecodeGraphs
from rwkv_lightning.kernels.triton.transfers import upload

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Activation, Batch, Linear, SlotStates, WeightSource
    from rwkv_lightning.kernels.triton.graphs import Capture, DecodeInputs
    from rwkv_lightning.kernels.triton.low_rank import LowRankPairs

    Join = Callable[..., LowRankPairs | None]

LOW = tuple(map(MIXES.index, "wagv"))  # the inputs of the low-rank pairs, in the order of their operators
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
        self._embed_norm = kernels.norm_rows(*_norm(source, "blocks.0.ln0"))
        join = pairs_for(torch.device(device).type)
        self._layers = [_Layer(source, kernels, index, join) for index in range(source.config.n_layer)]
        self._final_norm = kernels.norm_rows(*_norm(source, "ln_out"))
        self._head = _Operators("head", [source.linear("head.weight")], dtype=torch.float32)
        recordable = self._head.recordable and all(layer.recordable for layer in self._layers)
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
        tokens, offsets, slots, positions = upload(given, self.device)
        rows = Rows(offsets.contiguous(), slots.contiguous(), len(tokens))
        return self.run(tokens, rows, positions, pool, self._workspace)

    def run(
        self, tokens: torch.Tensor, rows: Rows, positions: torch.Tensor, pool: SlotPool, workspace: Workspace
    ) -> torch.Tensor:
        """The eager step over a checked batch, in the buffers of `workspace`; logits [S, V] after `positions`."""
        return self._run(workspace.buffers(rows.tokens), tokens.long(), rows, pool, positions)

    def _run(
        self, b: Buffers, tokens: torch.Tensor, rows: Rows, pool: SlotPool, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A step over tokens [T] int64; logits after `positions`, None for all."""
        self._embed_norm(self._table, tokens, None, b.x, self._table_scales)
        delta = None
        for layer, state in zip(self._layers, pool.layers, strict=True):
            delta = layer.time_mix(delta, state, rows, b)
            layer.mix_channels(b.x, delta, state.channel_shift, rows, b.channel_in)
            if layer is not self._layers[-1]:
                delta = layer.feed_forward(b.channel_inputs, b)
        return self._logits(b, positions)

    def _logits(self, b: Buffers, positions: torch.Tensor | None) -> torch.Tensor:
        """The last layer's feed-forward, the final norm and the head, only where logits are wanted."""
        inputs, chosen = b.channel_inputs, b
        if positions is not None:
            if not positions.numel():
                return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=positions.device)
            inputs, chosen = (inputs[0].index_select(0, positions),), b.workspace.buffers(positions.numel())
        delta = self._layers[-1].feed_forward(inputs, chosen)
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


class _Layer:
    """One layer: its small weights in kernels, its matrices in groups of operators that run together."""

    def __init__(self, source: WeightSource, kernels: recurrent.Kernels, index: int, join: Join | None) -> None:
        name = f"blocks.{index}."
        att, ffn = f"{name}att.", f"{name}ffn."
        mixes = torch.stack([source.tensor(f"{att}x_{letter}") for letter in MIXES])
        self._is_first = index == 0
        self.mix_tokens = kernels.shift_mix(*_norm(source, f"{name}ln1"), mixes)
        self.wkv7 = kernels.wkv7(_head_weights(source, att, self._is_first), source.config.n_head)
        self.mix_channels = kernels.shift_mix(*_norm(source, f"{name}ln2"), source.tensor(f"{ffn}x_k").unsqueeze(0))

        def operators(group: str, names: str, *activations: Activation) -> _Operators:
            return _Operators(group, [source.linear(name + each) for each in names.split()], activations)

        v1, v2 = ("", "") if self._is_first else (" att.v1", " att.v2")
        matrices = "att.receptance.weight att.key.weight att.value.weight"
        shapes: tuple[Activation, ...] = ("none", "none", "none", "tanh", "none", "sigmoid")
        self.project = operators("project", f"{matrices} att.w1 att.a1 att.g1{v1}", *shapes)
        self.expand = operators("expand", f"att.w2 att.a2 att.g2{v2}")
        self._matrices = _Operators("project", self.project.linears[:3])
        self._pairs = None if join is None else self._joined(join)
        self.output = operators("output", "att.output.weight")
        self.key = operators("key", "ffn.key.weight", "relu2")
        self.value = operators("value", "ffn.value.weight")
        groups = (self.project, self.expand, self.output, self.key, self.value)
        self.recordable = kernels.recordable and all(group.recordable for group in groups)

    def _joined(self, join: Join) -> LowRankPairs | None:
        """The low-rank pairs in one, where that can be had."""
        down, activations = self.project.linears[3:], self.project.activations[3:]
        return join(down, self.expand.linears, activations, LOW[: len(down)])

    def time_mix(self, delta: torch.Tensor | None, state: LayerStates, rows: Rows, b: Buffers) -> torch.Tensor:
        """Add `delta` to the residual stream, and return what time mixing adds next."""
        self.mix_tokens(b.x, delta, state.time_shift, rows, b.time_in)
        if self._pairs is not None and b.rows <= self._pairs.most_rows:
            r, k, v = self._matrices(b.time_inputs[:3], b)
            w, a, g, *v_mix = self._pairs(b.time_in)
        else:
            r, k, v, *low = self.project(b.first_time_inputs if self._is_first else b.time_inputs, b)
            w, a, g, *v_mix = self.expand(low, b)
        given = Projections(r, k, v, w, a, g, v_mix[0] if v_mix else None)
        self.wkv7(given, b.v_first, state.wkv, rows, b.y)
        return self.output((b.y,), b)[0]

    def feed_forward(self, mixed: Sequence[torch.Tensor], b: Buffers) -> torch.Tensor:
        """What channel mixing adds to the residual stream, from its token-shifted input."""
        return self.value(self.key(mixed, b), b)[0]


class _Operators:
    """Linear operators that run together, into buffers that stay, where they can."""

    def __init__(
        self,
        name: str,
        linears: Sequence[Linear],
        activations: Sequence[Activation] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self._name = name
        self.linears = linears
        self._widths = tuple(linear.out_features for linear in linears)
        others: list[Activation] = ["none"] * (len(linears) - len(activations))
        self.activations = (*activations, *others)
        self._dtype = dtype
        own = [linear for linear in linears if isinstance(linear, KernelLinear)]
        self._group = LinearGroup(own) if len(own) == len(linears) else None
        self.recordable = self._group is not None and self._group.recordable

    def __call__(self, xs: Sequence[torch.Tensor], b: Buffers) -> Sequence[torch.Tensor]:
        """One result [T, out_features] per operator and input; the next call may overwrite them."""
        if self._group is None:
            calls = zip(self.linears, xs, self.activations, strict=True)
            return [linear(x, activation, self._dtype) for linear, x, activation in calls]
        return self._group(xs, self.activations, outs=b.outputs(self._name, self._widths, self._dtype))


def _norm(source: WeightSource, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return source.tensor(f"{name}.weight"), source.tensor(f"{name}.bias")


def _head_weights(source: WeightSource, att: str, is_first: bool) -> HeadWeights:
    v0 = None if is_first else source.tensor(f"{att}v0")
    w0, a0, k_k, k_a, r_k = (source.tensor(att + name) for name in ("w0", "a0", "k_k", "k_a", "r_k"))
    return HeadWeights(w0, a0, v0, k_k, k_a, r_k, *_norm(source, f"{att}ln_x"))


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
