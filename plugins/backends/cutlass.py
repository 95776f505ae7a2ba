"""The cutlass backend: int8 weights under 16-bit activations, on CUTLASS's tensor-core products or on a CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.interfaces import Backend, Linear, LoadOptions, Model
    from rwkv_lightning.kernels.quantisation import QuantisedWeight
    from rwkv_lightning.plugins.backends.precision import Precision
    from rwkv_lightning.plugins.backends.quantised_backend import Operators


class CutlassBackend:
    """Loads files that `rwkv-lightning convert --to cutlass-w8a16` wrote."""

    def probe(self, device: str) -> str | None:
        """None when this device can be used, else why not and the way out."""
        from rwkv_lightning.plugins.backends.devices import device_problem

        problem = device_problem(device)
        if problem is not None or device.startswith("cpu"):
            return problem
        import torch

        from rwkv_lightning.kernels.cuda import build

        if torch.version.hip is not None:
            return "CUTLASS is for NVIDIA cards: choose --inference-engine gemlite or --device cpu"
        return build.problem()

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load a model file. Raises CheckpointError or StartError naming what is wrong and what to do."""
        if reason := self.probe(options.device):
            raise StartError(f"the cutlass engine cannot run here: {reason}")
        from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint
        from rwkv_lightning.plugins.backends.precision import choose_precision
        from rwkv_lightning.plugins.backends.quantised_backend import load_model

        checkpoint = QuantisedCheckpoint.open(path, "cutlass")
        precision = choose_precision(options)
        on_cpu = options.device.startswith("cpu")
        operators = cpu_operators(options, precision) if on_cpu else gpu_operators(options, precision)
        return load_model(checkpoint, options, precision, operators)


def cpu_operators(options: LoadOptions, precision: Precision) -> Operators:
    """Our own kernels, weight-only at every number of rows."""
    from rwkv_lightning.kernels import quantised
    from rwkv_lightning.plugins.backends.quantised_backend import Operators

    make = functools.partial(quantised.make_quantised, dtype=precision.dtype, deterministic=options.deterministic)
    return Operators(make, f"{quantised.form(precision.dtype)}, 16-bit activations")


def gpu_operators(options: LoadOptions, precision: Precision) -> Operators:
    """The mixed-input products, built at the first use. Raises StartError when that fails."""
    import torch

    from rwkv_lightning.kernels.cuda.build import BuildError
    from rwkv_lightning.kernels.cuda.mixed import MixedLinear, kernels
    from rwkv_lightning.plugins.backends.quantised_backend import Operators

    if precision.dtype != torch.float16:
        raise StartError("the cutlass engine computes in float16 on a GPU: choose --dtype float16 or auto")
    try:
        functions = kernels(options.device)
    except BuildError as error:
        raise StartError(f"the cutlass engine cannot run here: {error}") from None

    def make(weight: QuantisedWeight) -> Linear:
        return MixedLinear(weight, options.device, functions, one_tile=options.deterministic)

    return Operators(make, MixedLinear.why)


@hookimpl
def register_backends(register: Callable[[str, Callable[[], Backend], str], None]) -> None:
    """The built-in `cutlass` engine."""
    register("cutlass", CutlassBackend, "int8 weights of a converted file under 16-bit activations")


@hookimpl
def choose_backend(settings: Settings, checkpoint: Path) -> str | None:
    """Files converted for this engine."""
    from rwkv_lightning.plugins.backends.quantised_backend import engine_for

    return "cutlass" if engine_for(checkpoint) == "cutlass" else None
