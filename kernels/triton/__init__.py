"""The kernels of GPUs in Triton, one source for NVIDIA and AMD; the code that runs on a device is in device/."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rwkv_lightning.kernels.triton.low_rank import LowRankPairs


def missing() -> str | None:
    """Why these kernels cannot serve, or None. RWKV_LIGHTNING_KERNELS=reference turns them off."""
    if os.environ.get("RWKV_LIGHTNING_KERNELS") == "reference":
        return "RWKV_LIGHTNING_KERNELS=reference"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'rwkv-lightning[gpu]')"
    return None


def pairs_for(kind: str) -> Callable[..., LowRankPairs | None] | None:
    """What joins low-rank pairs (`low_rank.pairs_of`) on a kind of device, e.g. 'cuda'; None where nothing does."""
    if kind != "cuda" or missing() is not None:
        return None
    from rwkv_lightning.kernels.triton.low_rank import pairs_of

    return pairs_of
