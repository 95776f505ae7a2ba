"""The weights of a converted file as operators and tensors on a device: `WeightSource` over `QuantisedCheckpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.kernels.linear import make_linear
from rwkv_lightning.plugins.backends.weights import LOW_RANK

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Linear
    from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint
    from rwkv_lightning.kernels.quantisation import QuantisedWeight


class QuantisedSource:
    """What core/rwkv7.py asks a model file for; nothing is quantised here, at most laid out anew.

    Args:
        checkpoint: the open file.
        device: where operators and tensors live; the embedding stays in the file's mapping on the CPU.
        dtype: compute type of the operators.
        make: the engine's operator of a quantised matrix, which is given as it lies in the file.
        deterministic: operators whose rows do not depend on their neighbours, bit for bit.
        on_read: told the stored bytes of every tensor after it was read.
    """

    def __init__(
        self,
        checkpoint: QuantisedCheckpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        make: Callable[[QuantisedWeight], Linear],
        deterministic: bool = False,
        on_read: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._make = make
        self._deterministic = deterministic
        self._on_read = on_read
        rows = self._quantised("emb.weight")
        self._rows, self._row_scales = rows.values.to(device), rows.scales.to(device)

    def linear(self, name: str) -> Linear:
        """The operator of a matrix by its official name; low-rank pairs are transposed to [out, in]."""
        if name in self._checkpoint.manifest.layers:
            quantised = self._quantised(name)
            linear = self._make(quantised)
            self._checkpoint.release(quantised.values)
            return linear
        weight = self._kept(name)
        if LOW_RANK.search(name):
            weight = weight.t()
        linear = make_linear(weight, self._dtype, deterministic=self._deterministic)
        self._checkpoint.release(self._checkpoint.tensor(name))
        return linear

    def table(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """emb.weight in int8, with a scale per row."""
        return self._rows, self._row_scales

    def tensor(self, name: str) -> torch.Tensor:
        """A small tensor as flat float32 on the device."""
        return self._kept(name).float().reshape(-1)

    def _quantised(self, name: str) -> QuantisedWeight:
        weight = self._checkpoint.quantised(name)
        self._check_finite(name, weight.scales)
        self._on_read(weight.values.nbytes + weight.scales.nbytes)
        return weight

    def _kept(self, name: str) -> torch.Tensor:
        stored = self._checkpoint.tensor(name)
        self._check_finite(name, stored)
        self._on_read(stored.nbytes)
        return stored.to(self._device)

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"'{self._checkpoint.path}' holds NaN or infinity in {name}: it is damaged, convert the original again"
            )
