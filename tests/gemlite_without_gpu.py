"""Run GemLite's own packing and kernels over our quantised weights, in Triton's interpreter; a script of its own,
because it makes this process believe in a device.

Checked: GemLite takes our numbers as they are, packs int4 into the words that our bytes form already, reads nothing but
zeros beyond its scales, and all its products are right: A16W8, A16W4 and A8W8, by the kernel for one row, the one for a
few and the one for many, at sizes that fill its blocks and at sizes that do not. Except: A16W4 for many rows and
bfloat16 under 16-bit activations, which the interpreter cannot run.
"""

from __future__ import annotations

import os
import types
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language as tl
import triton.runtime
from triton.language.extra import libdevice

from rwkv_lightning.kernels.quantisation import QuantisedWeight, quantise_int4, quantise_int8

MEMORY = {"max_shared_mem": 160_000, "multiprocessor_count": 1, "max_num_regs": 65536, "warpSize": 32}
FEW, MANY = (1, 8), (1, 8, 64)  # rows
ROUNDED = {torch.float16: 1e-3, torch.bfloat16: 5e-3}  # what writing the result in this type may cost


class PretendedDriver:
    """What GemLite asks Triton's driver for while it is imported and picks configurations."""

    utils = types.SimpleNamespace(get_device_properties=lambda device: MEMORY)

    def get_current_target(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(backend="cuda", arch=80, warp_size=32)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> object:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> object:
        return lambda call, **options: [0.0]


def rounded(x: Any) -> Any:
    """libdevice's `round`, halves away from zero: the interpreter has none."""
    return tl.where(x < 0, -tl.floor(0.5 - x), tl.floor(x + 0.5))


def pretend() -> None:
    triton.runtime.driver.set_active(PretendedDriver())
    properties = types.SimpleNamespace(name="none", multi_processor_count=1, major=8, minor=0)
    torch.cuda.get_device_capability = lambda *args: (8, 0)
    torch.cuda.get_device_properties = lambda *args: properties  # type: ignore[assignment]
    libdevice.round = rounded


def distance(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.float() - want).norm() / want.norm())


def check_packing(layer: Any, weight: QuantisedWeight) -> None:
    values = weight.values if weight.bits == 8 else weight.values.view(torch.int32)
    assert torch.equal(layer.W_q, values.t())
    assert torch.equal(layer.scales, weight.scales.t())
    if weight.bits == 4:
        groups, columns = layer.scales.shape
        for parts in (1, 2, 4, 8, 16):
            beyond = torch.as_strided(layer.scales, (-groups % parts + 1, columns), (columns, 1), groups * columns)
            assert not beyond.any(), parts


def check_products(layer: Any, weight: QuantisedWeight, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Against float32 over the same numbers: exact but for the rounding of the result (and of weights in A16W4)."""
    w = weight.dequantise()
    for count in rows:
        x = torch.randn(count, w.shape[1], generator=torch.Generator().manual_seed(count)).to(dtype)
        y, taken = layer(x), x.float()
        assert y.dtype == dtype
        if layer.scaled_activations:
            assert distance(y, taken @ w.T) < 0.015, count  # what 8 bits cost: a step is 1/127 of the largest
            step = taken.abs().amax(1, keepdim=True) / 127
            taken = (taken / step).round() * step
        assert distance(y, taken @ w.T) < ROUNDED[dtype], (count, distance(y, taken @ w.T))


def check() -> None:
    from rwkv_lightning.plugins.backends.gemlite_gpu import A8W8, A16W4, A16W8

    for shape in ((128, 512), (120, 192)):  # the second fills no block of columns and no number of parts
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        int8, int4 = quantise_int8(weight), quantise_int4(weight, 64)
        half, brain = torch.float16, torch.bfloat16
        for build, quantised, dtype, rows in (
            (A16W8, int8, half, MANY),
            (A16W4, int4, half, FEW),
            (A8W8, int8, half, MANY),
            (A8W8, int8, brain, MANY),
        ):
            layer = build(quantised, "cpu", dtype)
            check_packing(layer, quantised)
            check_products(layer, quantised, dtype, rows)
            print(f"{build.__name__}, {dtype}, {shape}: right for {rows} rows")


if __name__ == "__main__":
    pretend()
    check()
