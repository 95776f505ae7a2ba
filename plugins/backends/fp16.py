"""The fp16 backend: official RWKV-7 weights unquantised, in bfloat16 or float32 on a CPU and float16 on a GPU."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from rwkv_lightning.core.interfaces import Backend, LoadOptions, Model

log = logging.getLogger(__name__)


class Fp16Backend:
    """Loads `.pth` and `.safetensors` files in the official layout, stored in float32, bfloat16 or float16."""

    def probe(self, device: str) -> str | None:
        """None when this device can be used, else why not and the way out."""
        from rwkv_lightning.plugins.backends.devices import device_problem

        return device_problem(device)

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load a model file. Raises CheckpointError or StartError naming what is wrong and what to do."""
        if reason := self.probe(options.device):
            raise StartError(f"the fp16 engine cannot run here: {reason}")
        import torch

        from rwkv_lightning.core.checkpoint import Checkpoint
        from rwkv_lightning.core.rwkv7 import RWKV7
        from rwkv_lightning.kernels.linear import make_linear
        from rwkv_lightning.kernels.triton.graphs import capture_for
        from rwkv_lightning.plugins.backends.precision import choose_precision
        from rwkv_lightning.plugins.backends.weights import CheckpointSource, loading_bar

        start = time.perf_counter()
        device = torch.device(options.device)
        checkpoint = Checkpoint.open(path)
        precision = choose_precision(options)
        kernel = make_linear(torch.ones(16, 16, device=device), precision.dtype).why
        with loading_bar(checkpoint) as advance:
            source = CheckpointSource(
                checkpoint,
                device=device,
                dtype=precision.dtype,
                deterministic=options.deterministic,
                on_read=advance,
            )
            model = RWKV7(
                source,
                device=device,
                dtype=precision.dtype,
                state_dtype=precision.state_dtype,
                description=f"{precision.why}; linears: {kernel}",
                capture=None if options.deterministic else capture_for(device),
            )
        log.info("loaded %s in %.2f s", path.name, time.perf_counter() - start)
        return model


@hookimpl
def register_backends(register: Callable[[str, Callable[[], Backend], str], None]) -> None:
    """The built-in `fp16` engine."""
    register("fp16", Fp16Backend, "unquantised weights: bfloat16 or float32 on a CPU, float16 on a GPU")
