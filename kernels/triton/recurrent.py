"""The recurrence kernels on a GPU, with the signatures of kernels/reference.py.

Beyond the reference's: a slot below 0 marks a row of one token that only fills a batch; no state is touched for it and
its outputs are undefined. Decoding uses that to keep to a few batch sizes (graphs.py). Nothing here waits for the GPU.
"""

from __future__ import annotations

import torch
import triton

from rwkv_lightning.kernels import reference
from rwkv_lightning.kernels.reference import HeadWeights, Projections, Rows
from rwkv_lightning.kernels.triton.device import recurrent as device
from rwkv_lightning.kernels.triton.launch import launch


def _launch(width: int) -> dict[str, int | bool]:
    """The block that holds a row of this width, and how many warps work on it."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": 8 if block >= 2048 else 4, "enable_fp_fusion": True}


def check(**tensors: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless every tensor is contiguous and has its shape: kernels read by address."""
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            found = f"{list(tensor.shape)} with strides {tensor.stride()}"
            raise ValueError(f"{name} must be contiguous {list(shape)}, not {found}")


def row_of_tokens(rows: Rows) -> torch.Tensor:
    """[T] int64: which row each token belongs to; made once per step."""
    if rows.native is None:
        tokens = torch.arange(rows.tokens, dtype=torch.int32, device=rows.offsets.device)
        rows.native = torch.searchsorted(rows.offsets, tokens, right=True) - 1
    found: torch.Tensor = rows.native
    return found


class TritonShiftMix(reference.ShiftMix):
    """`reference.ShiftMix` in Triton: one kernel when every row is one token, else two."""

    def __init__(self, norm_weight: torch.Tensor, norm_bias: torch.Tensor, mix: torch.Tensor) -> None:
        super().__init__(norm_weight.contiguous(), norm_bias.contiguous(), mix.contiguous())
        self._count, self._width = mix.shape
        self._options = _launch(self._width)

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, shift: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        """As the reference. Raises ValueError for a tensor of another shape or not contiguous."""
        shape = rows.tokens, self._width
        check(x=(x, shape), delta=(delta, shape), out=(out, (self._count, *shape)))
        check(shift=(shift, (len(shift), self._width)))
        norm = self.norm_weight, self.norm_bias
        if rows.tokens == rows.slots.numel():
            places = shift, rows.slots, out, rows.tokens, self._count
            launch(device.shift_mix_decode, (rows.tokens,), x, delta, *norm, self.mix, *places, **self._options)
            return
        normed = torch.empty_like(x)
        launch(device.add_norm, (rows.tokens,), x, delta, *norm, normed, **self._options)
        structure = rows.offsets, rows.slots, row_of_tokens(rows)
        arguments = normed, self.mix, shift, *structure, out, rows.tokens, self._count
        launch(device.shift_mix_ragged, (rows.tokens,), *arguments, **self._options)


class TritonWkv7(reference.Wkv7):
    """`reference.Wkv7` in Triton."""

    def __init__(self, weights: HeadWeights, heads: int) -> None:
        super().__init__(weights, heads)
        self._width = weights.k_k.numel()
        self._size = self._width // heads
        p = weights
        small = p.w0, p.a0, p.v0, p.k_k, p.k_a, p.r_k, p.norm_weight, p.norm_bias
        self._small = [None if one is None else one.contiguous() for one in small]
        block = triton.next_power_of_2(self._size)
        warps = max(1, block // 32)  # a thread owns whole columns of the state: sums over keys cross no threads
        self._options = {"HEADS": heads, "SIZE": self._size, "BLOCK": block, "num_warps": warps}
        self._options["enable_fp_fusion"] = True

    def __call__(
        self, given: Projections, v_first: torch.Tensor, state: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        """As the reference. Raises ValueError for a tensor of another shape or not contiguous."""
        if (given.v_mix is None) != (self.weights.v0 is None):
            raise ValueError("v_mix is None in the first layer, which has no v0, and only there")
        shape = rows.tokens, self._width
        check(**{name: (tensor, shape) for name, tensor in given._asdict().items()})
        check(v_first=(v_first, shape), out=(out, shape))
        check(state=(state, (len(state), self.heads, self._size, self._size)))
        arguments = (*given, v_first, *self._small, state, rows.offsets, rows.slots, out)
        launch(device.wkv7, (rows.slots.numel(), self.heads), *arguments, **self._options)


class TritonNormRows(reference.NormRows):
    """`reference.NormRows` in Triton."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__(weight.contiguous(), bias.contiguous())
        self._width = weight.numel()
        self._options = _launch(self._width)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        delta: torch.Tensor | None,
        out: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> None:
        """As the reference. Raises ValueError for a tensor of another shape or not contiguous."""
        if scales is not None or x.dtype != torch.float32:
            x, positions = reference.float_rows(x, positions, scales), None
        count = len(out)
        tokens = count if positions is None else len(x)
        check(x=(x, (tokens, self._width)), positions=(positions, (count,)))
        check(delta=(delta, (count, self._width)), out=(out, (count, self._width)))
        if count:
            arguments = x, positions, delta, self.weight, self.bias, out
            launch(device.norm_rows, (count,), *arguments, **self._options)
