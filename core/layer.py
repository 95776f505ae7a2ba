"""One layer of RWKV-7 over the linear operators that a backend supplies, and these in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.workspace import MIXES, Buffers
from rwkv_lightning.kernels import recurrent
from rwkv_lightning.kernels.linear import KernelLinear, LinearGroup
from rwkv_lightning.kernels.reference import HeadWeights, Projections, Rows

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Activation, Linear, WeightSource
    from rwkv_lightning.core.slots import LayerStates
    from rwkv_lightning.kernels.triton.low_rank import LowRankPairs

    Join = Callable[..., LowRankPairs | None]

LOW = tuple(map(MIXES.index, "wagv"))  # the inputs of the low-rank pairs, in the order of their operators


class Layer:
    """One layer: its small weights in kernels, its matrices in groups of operators that run together."""

    def __init__(self, source: WeightSource, kernels: recurrent.Kernels, index: int, join: Join | None) -> None:
        name = f"blocks.{index}."
        att, ffn = f"{name}att.", f"{name}ffn."
        mixes = torch.stack([source.tensor(f"{att}x_{letter}") for letter in MIXES])
        self._is_first = index == 0
        self.mix_tokens = kernels.shift_mix(*norm_of(source, f"{name}ln1"), mixes)
        self.wkv7 = kernels.wkv7(_head_weights(source, att, self._is_first), source.config.n_head)
        self.mix_channels = kernels.shift_mix(*norm_of(source, f"{name}ln2"), source.tensor(f"{ffn}x_k").unsqueeze(0))

        def operators(group: str, names: str, *activations: Activation) -> Operators:
            return Operators(group, [source.linear(name + each) for each in names.split()], activations)

        v1, v2 = ("", "") if self._is_first else (" att.v1", " att.v2")
        matrices = "att.receptance.weight att.key.weight att.value.weight"
        shapes: tuple[Activation, ...] = ("none", "none", "none", "tanh", "none", "sigmoid")
        self.project = operators("project", f"{matrices} att.w1 att.a1 att.g1{v1}", *shapes)
        self.expand = operators("expand", f"att.w2 att.a2 att.g2{v2}")
        self._matrices = Operators("project", self.project.linears[:3])
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
            r, k, v, *low = self.project(self.time_inputs(b), b)
            w, a, g, *v_mix = self.expand(low, b)
        given = Projections(r, k, v, w, a, g, v_mix[0] if v_mix else None)
        self.wkv7(given, b.v_first, state.wkv, rows, b.y)
        return self.output((b.y,), b)[0]

    def time_inputs(self, b: Buffers) -> Sequence[torch.Tensor]:
        """The inputs of `project`."""
        return b.first_time_inputs if self._is_first else b.time_inputs

    def feed_forward(self, mixed: Sequence[torch.Tensor], b: Buffers) -> torch.Tensor:
        """What channel mixing adds to the residual stream, from its token-shifted input."""
        return self.value(self.key(mixed, b), b)[0]


class Operators:
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
        self.dtype = dtype
        own = [linear for linear in linears if isinstance(linear, KernelLinear)]
        self._group = LinearGroup(own) if len(own) == len(linears) else None
        self.recordable = self._group is not None and self._group.recordable

    def __call__(self, xs: Sequence[torch.Tensor], b: Buffers) -> Sequence[torch.Tensor]:
        """One result [T, out_features] per operator and input; the next call may overwrite them."""
        if self._group is None:
            calls = zip(self.linears, xs, self.activations, strict=True)
            return [linear(x, activation, self.dtype) for linear, x, activation in calls]
        return self._group(xs, self.activations, outs=b.outputs(self._name, self._widths, self.dtype))


def norm_of(source: WeightSource, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return source.tensor(f"{name}.weight"), source.tensor(f"{name}.bias")


def _head_weights(source: WeightSource, att: str, is_first: bool) -> HeadWeights:
    v0 = None if is_first else source.tensor(f"{att}v0")
    w0, a0, k_k, k_a, r_k = (source.tensor(att + name) for name in ("w0", "a0", "k_k", "k_a", "r_k"))
    return HeadWeights(w0, a0, v0, k_k, k_a, r_k, *norm_of(source, f"{att}ln_x"))
