"""The kernels of GPUs in Triton, one source for NVIDIA and AMD; the code that runs on a device is in device/."""

from __future__ import annotations

import os
from importlib.util import find_spec


def missing() -> str | None:
    """Why these kernels cannot serve, or None. RWKV_LIGHTNING_KERNELS=reference turns them off."""
    if os.environ.get("RWKV_LIGHTNING_KERNELS") == "reference":
        return "RWKV_LIGHTNING_KERNELS=reference"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'rwkv-lightning[gpu]')"
    return None
