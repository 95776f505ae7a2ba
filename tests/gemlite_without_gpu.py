"""Run GemLite's own packing and kernels over our quantised weights, in Triton's interpreter; a script of its own,
because it makes this process believe in a device.

Checked: GemLite takes our numbers as they are, packs int4 into the words that our bytes form already, and its
weight-only products are right for one row and for a few. (Its dynamic int8 kernel does not run in the interpreter:
only its packing is checked.)
"""

from __future__ import annotations

import os
import types

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime

from rwkv_lightning.kernels.quantisation import quantise_int4, quantise_int8

MEMORY = {"max_shared_mem": 160_000, "multiprocessor_count": 1, "max_num_regs": 65536, "warpSize": 32}


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


def pretend() -> None:
    triton.runtime.driver.set_active(PretendedDriver())
    properties = types.SimpleNamespace(name="none", multi_processor_count=1, major=8, minor=0)
    torch.cuda.get_device_capability = lambda *args: (8, 0)
    torch.cuda.get_device_properties = lambda *args: properties  # type: ignore[assignment]


def check() -> None:
    from rwkv_lightning.plugins.backends.gemlite_gpu import A8W8, A16W4, A16W8

    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    int8, int4 = quantise_int8(weight), quantise_int4(weight, 64)
    for build, quantised in ((A16W8, int8), (A8W8, int8), (A16W4, int4)):
        layer = build(quantised, "cpu", torch.float16)
        values = quantised.values if quantised.bits == 8 else quantised.values.view(torch.int32)
        assert torch.equal(layer.W_q, values.t()), build.__name__
        assert torch.equal(layer.scales, quantised.scales.t()), build.__name__
        for rows in (1, 8) if build is not A8W8 else ():
            x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).half()
            want = x.float() @ quantised.dequantise().T
            assert float((layer(x).float() - want).norm() / want.norm()) < 2e-3, (build.__name__, rows)


if __name__ == "__main__":
    pretend()
    check()
