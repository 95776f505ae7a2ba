"""GemLite's Triton linears on an NVIDIA or AMD GPU, over the int8 and int4 weights of a converted file.

`import gemlite` needs a GPU, so this module is imported where there is one only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rwkv_lightning.core.errors import StartError
from rwkv_lightning.kernels.cpu.build import cache_dir
from rwkv_lightning.kernels.linear import KernelLinear, activate_, activated, place
from rwkv_lightning.kernels.quantisation import INT4_LEVELS, QuantisedWeight, unpack_int4
from rwkv_lightning.plugins.backends.quantised_backend import Operators

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Activation, Linear, LoadOptions
    from rwkv_lightning.plugins.backends.precision import Precision

log = logging.getLogger(__name__)

SPLITS = (1, 2, 4, 8, 16)  # parts that GemLite cuts the depth of a product into


class GemliteLinear(KernelLinear):
    """One of GemLite's operators as an operator of this package.

    Args:
        layer: called with x [T, K] in the compute type, gives a fresh [T, N] in it.
        shape: (N, K).
        dtype: compute type.
    """

    why = "GemLite"

    def __init__(
        self, layer: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self._layer = layer

    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation = "none",
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] in `dtype` (the compute type), written into `out` when given."""
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features, dtype=dtype or self.dtype)
        x, out = place(self, x, activation, dtype, out)
        if not x.shape[0]:
            return out
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton itself takes the current one
            y = self._layer(x)
        if out.dtype != y.dtype:
            return out.copy_(activated(y, activation))
        return activate_(out.copy_(y), activation)


def gpu_operators(options: LoadOptions, precision: Precision, scheme: str, activations: str) -> Operators:
    """GemLite's operators. Raises StartError for a choice that cannot serve, naming one that can."""
    if options.deterministic:
        raise StartError(
            "GemLite's kernels add up in no fixed order, so that --deterministic cannot hold on a GPU: "
            "choose --inference-engine cutlass or fp16, or --device cpu"
        )
    if precision.dtype == torch.float32:
        raise StartError("gemlite computes in 16 bits on a GPU: choose --dtype float16 or --dtype bfloat16")
    if scheme == "int4" and activations == "8":
        raise StartError(
            "int4 weights take 16-bit activations on a GPU: set gemlite's activations to auto or 16, "
            "or convert the original with --to gemlite-int8"
        )
    try:
        load_tuning(options.device)
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise StartError(
            f"the gemlite engine cannot run here: importing gemlite failed ({reason}): "
            "repair it with pip install --force-reinstall gemlite, or choose --device cpu"
        ) from error
    device, dtype = options.device, precision.dtype
    build = _pick(scheme, activations)

    def make(weight: QuantisedWeight) -> Linear:
        return GemliteLinear(build(weight, device, dtype), weight.shape, dtype)

    return Operators(make, f"GemLite {build.__name__}")


def _pick(scheme: str, activations: str) -> Callable[[QuantisedWeight, str, torch.dtype], Any]:
    if scheme == "int4":
        return A16W4
    return A8W8 if activations == "8" else A16W8


def A16W8(weight: QuantisedWeight, device: str, dtype: torch.dtype) -> Any:
    """16-bit activations, int8 weights; the sums are scaled, which is more exact than scaling every weight."""
    from gemlite import helper

    processor = helper.A16W8_INT8(device=device, dtype=dtype, post_scale=True)
    return processor.from_weights(weight.values.to(device), scales=weight.scales.to(device))


def A8W8(weight: QuantisedWeight, device: str, dtype: torch.dtype) -> Any:
    """Activations quantised to int8 row by row, int8 weights; the int32 sums are scaled by both scales."""
    from gemlite import helper

    processor = helper.A8W8_int8_dynamic(device=device, dtype=dtype)
    return processor.from_weights(weight.values.to(device), scales=weight.scales.to(device))


def A16W4(weight: QuantisedWeight, device: str, dtype: torch.dtype) -> Any:
    """16-bit activations, int4 weights with a scale per group; GemLite packs them its own way."""
    from gemlite import helper

    scales = weight.scales.to(device, dtype)
    zeros = torch.full_like(scales, INT4_LEVELS)
    levels = unpack_int4(weight.values.to(device))
    layer = helper.A16W4_HQQ_INT(device=device, dtype=dtype).from_weights(levels, scales, zeros)
    for name in ("scales", "zeros"):
        setattr(layer, name, torch.nn.Parameter(with_zeros_behind(getattr(layer, name)), requires_grad=False))
    return layer


def with_zeros_behind(rows: torch.Tensor) -> torch.Tensor:
    """The same [groups, N], with as many rows of zeros behind it in memory as GemLite may read beyond its end.

    Its kernels cut the depth into up to 16 parts of whole groups, and read a scale for every group of every part. What
    they find beyond the last is multiplied by zeros: that must not be NaN or infinity.
    """
    groups = rows.shape[0]
    beyond = max(-groups % parts for parts in SPLITS) + 1  # and one for the last block of columns
    return F.pad(rows, (0, 0, 0, beyond))[:groups]


# ---- what the autotuner found, kept per kind of GPU

_tuned: list[Path] = []  # the file of this process, once a model was loaded


def tuning_file(device: str) -> Path:
    """Where the tuned configurations of this kind of GPU are kept."""
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return cache_dir() / "gemlite" / f"{name}.json"


def load_tuning(device: str) -> None:
    """Give GemLite what earlier runs found."""
    import gemlite

    path = tuning_file(device)
    if path.exists():
        gemlite.load_config(str(path), print_error=False)
    _tuned[:] = [path]


def save_tuning() -> None:
    """Write what was found, whole or not at all; a failure is logged and costs the next start some time only."""
    import gemlite

    for path in _tuned:
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            gemlite.cache_config(str(partial))
            os.replace(partial, path)
        except OSError as error:
            log.warning("GemLite's tuning was not kept in '%s': %s", path, error.strerror)
