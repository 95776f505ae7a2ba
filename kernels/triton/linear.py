"""Linear operators on a GPU: the vendor's matrix product into a given buffer, and one that skips zeros of its input."""

from __future__ import annotations

import torch
import triton

from rwkv_lightning.kernels.linear import Activation, KernelLinear, ReferenceLinear, activate_
from rwkv_lightning.kernels.triton.device import linear as device
from rwkv_lightning.kernels.triton.launch import launch

TINY = 4  # rows up to which reading only the rows of the weight that are needed can pay
SPLITS = 16  # programs that share the depth of one product
BLOCK_K, BLOCK_N = 32, 128
OPTIONS = {"BLOCK_N": BLOCK_N, "enable_fp_fusion": True}


class DeviceLinear(ReferenceLinear):
    """The product and the activation straight into the caller's buffer: no allocation, no copy.

    The activation is applied to the rounded product, as in the reference, with the same result.
    """

    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation = "none",
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] in `dtype` (default: the compute type), written into `out` when given."""
        fits = out is not None and out.is_contiguous() and out.shape == (x.shape[0], self.out_features)
        if not fits or out is None or not out.dtype == x.dtype == self.dtype == (dtype or self.dtype):
            return super().__call__(x, activation, dtype, out)
        self._multiply(x, out)
        return activate_(out, activation)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, self._weight.t(), out=out)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K] in the compute type."""
        return self._weight

    def move_to(self, memory: torch.Tensor) -> None:
        """Keep the weight in this memory, [N, K] of its type, from now on."""
        self._weight = memory.copy_(self._weight)


class SparseInputLinear(DeviceLinear):
    """For an input that is mostly zero, as squared ReLU leaves it: the weight is kept transposed, [K, N], and for a few
    rows only the rows of it that meet something else than zero are read. More rows take the vendor's product.

    The sum of a row has one order whatever stands beside it.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, *, why: str) -> None:
        super().__init__(weight, dtype, why=why)
        self._weight = self._weight.t().contiguous().t()  # [N, K] in shape, [K, N] in memory

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        self._multiply(x, out)
        return out

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if 0 < x.shape[0] <= TINY:
            gathered(x.contiguous(), self._weight.t(), out)
        else:
            super()._multiply(x, out)


def gathered(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, N] = x [T, K] @ weight [K, N], all contiguous; rows of the weight where x is 0 are not read."""
    rows, depth = x.shape
    columns = weight.shape[1]
    per_split = triton.cdiv(triton.cdiv(depth, SPLITS), BLOCK_K) * BLOCK_K
    splits = triton.cdiv(depth, per_split)
    partial = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(columns, BLOCK_N)
    sizes = rows, depth, columns, per_split
    launch(device.gathered_product, (blocks, splits, rows), x, weight, partial, *sizes, BLOCK_K=BLOCK_K, **OPTIONS)
    launch(device.sum_splits, (blocks, rows), partial, out, rows, columns, out.stride(0), SPLITS=splits, **OPTIONS)


def device_linear(weight: torch.Tensor, dtype: torch.dtype, *, sparse_input: bool = False) -> KernelLinear:
    """The operator of a weight [N, K] on a GPU; `sparse_input` for the one after squared ReLU."""
    where = weight.device.type
    if sparse_input:
        why = f"matrix product on {where}; for up to {TINY} rows Triton reads only what meets no zero"
        return SparseInputLinear(weight, dtype, why=why)
    return DeviceLinear(weight, dtype, why=f"matrix product on {where}")
