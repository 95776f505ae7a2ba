"""The gemlite backend: int8 and int4 weights, through GemLite's kernels on a GPU and our own on a CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.interfaces import Backend, LoadOptions, Model
    from rwkv_lightning.plugins.backends.precision import Precision
    from rwkv_lightning.plugins.backends.quantised_backend import Operators

EXTRA = "pip install 'rwkv-lightning[gemlite]'"


class GemliteSettings(BaseModel):
    """The engine's own settings."""

    model_config = ConfigDict(extra="forbid")

    activations: Literal["auto", "8", "16"] = Field(
        default="auto",
        description="bits of the activations that meet int8 and int4 weights: 16 is exact to the weights, 8 is faster "
        "for many rows; auto takes 8 on a CPU from a few rows on, and always 16 with --deterministic and on a GPU",
    )


class GemliteBackend:
    """Loads files that `rwkv-lightning convert --to gemlite-int8` or `--to gemlite-int4` wrote."""

    def __init__(self, settings: GemliteSettings | None = None) -> None:
        self.settings = settings or GemliteSettings()

    def probe(self, device: str) -> str | None:
        """None when this device can be used, else why not and the way out."""
        from importlib.util import find_spec

        from rwkv_lightning.plugins.backends.devices import device_problem

        problem = device_problem(device)
        if problem is not None or device.startswith("cpu"):
            return problem
        if find_spec("gemlite") is None:
            return f"on a GPU it needs the package gemlite: {EXTRA}, or choose --device cpu"
        if not c_compiler():
            return "on a GPU Triton needs a C compiler: install gcc or clang or set CC, or choose --device cpu"
        return None

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load a model file. Raises CheckpointError or StartError naming what is wrong and what to do."""
        if reason := self.probe(options.device):
            raise StartError(f"the gemlite engine cannot run here: {reason}")
        from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint
        from rwkv_lightning.plugins.backends.precision import choose_precision
        from rwkv_lightning.plugins.backends.quantised_backend import load_model

        checkpoint = QuantisedCheckpoint.open(path, "gemlite")
        precision = choose_precision(options)
        operators = self._operators(options, precision, checkpoint.manifest.scheme)
        return load_model(checkpoint, options, precision, operators)

    def _operators(self, options: LoadOptions, precision: Precision, scheme: str) -> Operators:
        if options.device.startswith("cpu"):
            return cpu_operators(options, precision, self.settings.activations)
        from rwkv_lightning.plugins.backends.gemlite_gpu import gpu_operators

        return gpu_operators(options, precision, scheme, self.settings.activations)


def c_compiler() -> str | None:
    """The compiler that Triton takes for what launches its kernels; None when there is none."""
    import os
    import shutil

    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def cpu_operators(options: LoadOptions, precision: Precision, activations: str) -> Operators:
    """Our own kernels. Raises StartError when settings contradict each other."""
    from rwkv_lightning.kernels import quantised
    from rwkv_lightning.plugins.backends.quantised_backend import Operators

    if options.deterministic and activations == "8":
        raise StartError(
            "gemlite's activations = 8 and --deterministic exclude each other, since 16 bits serve there: drop one"
        )
    wide = {"16": quantised.ALWAYS, "8": 0, "auto": quantised.AUTO_WIDE_ROWS}[activations]
    make = functools.partial(
        quantised.make_quantised, dtype=precision.dtype, wide_rows=wide, deterministic=options.deterministic
    )
    return Operators(make, f"{quantised.form(precision.dtype)}, {_bits(options, activations, wide)} activations")


def _bits(options: LoadOptions, activations: str, wide: int) -> str:
    if options.deterministic or activations == "16":
        return "16-bit"
    return "8-bit" if activations == "8" else f"16-bit up to {wide} rows, then 8-bit"


@hookimpl
def plugin_settings() -> type[BaseModel]:
    """`[plugins.gemlite]`."""
    return GemliteSettings


@hookimpl
def register_backends(
    register: Callable[[str, Callable[[], Backend], str], None], section: BaseModel | None = None
) -> None:
    """The built-in `gemlite` engine."""
    settings = section if isinstance(section, GemliteSettings) else None
    register("gemlite", functools.partial(GemliteBackend, settings), "int8 or int4 weights of a converted file")


@hookimpl
def choose_backend(settings: Settings, checkpoint: Path) -> str | None:
    """Files converted for this engine."""
    from rwkv_lightning.plugins.backends.quantised_backend import engine_for

    return "gemlite" if engine_for(checkpoint) == "gemlite" else None


@hookimpl
def shutdown() -> None:
    """Keep what GemLite's autotuner found for the next start."""
    import sys

    if "gemlite" in sys.modules:
        from rwkv_lightning.plugins.backends.gemlite_gpu import save_tuning

        save_tuning()
