"""The weights of an official checkpoint as operators and tensors on a device: `WeightSource` over `Checkpoint`."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.byte_bar import byte_bar
from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.kernels.linear import make_linear

if TYPE_CHECKING:
    from rwkv_lightning.core.checkpoint import Checkpoint
    from rwkv_lightning.core.interfaces import Linear

LOW_RANK = re.compile(r"\.att\.[wavg][12]$")  # stored [in, out]; all other matrices are [out, in]


class CheckpointSource:
    """What core/rwkv7.py asks a model file for.

    Matrices are converted one at a time; the embedding stays in the file's own memory mapping on the CPU, and lies on
    the device in its stored type elsewhere. A damaged tensor raises CheckpointError as it is read.

    Args:
        checkpoint: the open file.
        device: where operators and tensors live.
        dtype: compute type of the operators.
        deterministic: operators whose rows do not depend on their neighbours, bit for bit.
        on_read: told the stored bytes of every tensor after it was read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
        on_read: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._deterministic = deterministic
        self._on_read = on_read
        self._embedding = self._read("emb.weight").contiguous()
        checkpoint.release(checkpoint.tensor("emb.weight"))  # rows come back as they are used

    def linear(self, name: str) -> Linear:
        """The operator of a matrix by its official name; low-rank pairs are transposed to [out, in]."""
        # Only float16 can overflow, so only there the converted weight must be looked at; make_linear converts others.
        weight = self._read(name, torch.float16 if self._dtype == torch.float16 else None)
        if LOW_RANK.search(name):
            weight = weight.t()
        after_relu2 = name.endswith("ffn.value.weight")
        linear = make_linear(weight, self._dtype, deterministic=self._deterministic, sparse_input=after_relu2)
        self._checkpoint.release(self._checkpoint.tensor(name))
        return linear

    def table(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """emb.weight as stored, without scales."""
        return self._embedding, None

    def tensor(self, name: str) -> torch.Tensor:
        """A small tensor as flat float32 on the device."""
        return self._read(name, torch.float32).reshape(-1)

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        self._checkpoint.verify(name)
        stored = self._checkpoint.tensor(name)
        tensor = stored.to(self._device).to(dtype or stored.dtype)  # over the bus as stored, converted there
        if not _finite(tensor):
            raise CheckpointError(self._not_finite(name, stored))
        self._on_read(stored.numel() * stored.element_size())
        return tensor

    def _not_finite(self, name: str, stored: torch.Tensor) -> str:
        if bool(stored.isfinite().all()):
            return f"'{self._checkpoint.path}': {name} holds values beyond float16: choose --dtype bfloat16 or float32"
        return f"'{self._checkpoint.path}' holds NaN or infinity in {name}: it is damaged, get a sound copy"


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite. The sum costs one pass at the speed of memory; isfinite some ten times more."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())  # a sum in float16 may overflow by itself


def loading_bar(checkpoint: Checkpoint) -> AbstractContextManager[Callable[[int], None]]:
    """A progress bar for a large file; the function that it gives takes the bytes that were read."""
    return byte_bar(f"loading {checkpoint.path.name}", checkpoint.nbytes)
