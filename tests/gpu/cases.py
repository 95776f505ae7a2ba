"""What the kernel checks share: where they run, and kernels that take inputs from anywhere."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from rwkv_lightning.kernels.recurrent import Kernels
from rwkv_lightning.kernels.triton.recurrent import TritonNormRows, TritonShiftMix, TritonWkv7

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU through Triton's interpreter
INTERPRETED = DEVICE == "cpu"
NATIVE = Kernels(TritonShiftMix, TritonWkv7, TritonNormRows, "Triton kernels")


def on_device(value: Any) -> Any:
    """The same with every tensor copied to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE, copy=True) if value.is_contiguous() else value.to(DEVICE)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: on_device(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        moved = [on_device(each) for each in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


class Moved:
    """A kernel of the device behind the interface of a kernel of the CPU: what it changes is copied back."""

    def __init__(self, kind: type[Any], *weights: Any) -> None:
        self.kernel = kind(*on_device(weights))

    def __call__(self, *arguments: Any) -> None:
        moved = on_device(arguments)
        self.kernel(*moved)
        for own, changed in zip(arguments, moved, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(changed)


FORMS = Kernels(
    partial(Moved, TritonShiftMix),  # type: ignore[arg-type]
    partial(Moved, TritonWkv7),  # type: ignore[arg-type]
    partial(Moved, TritonNormRows),  # type: ignore[arg-type]
    "Triton kernels",
)
