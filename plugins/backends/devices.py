"""Whether a device can be used."""

from __future__ import annotations

import torch


def device_problem(device: str) -> str | None:
    """None when there is this CPU, CUDA or ROCm device, else why not and the way out, in one sentence."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        return f"'{device}' is not a device: choose --device cpu, cuda or cuda:0"
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        return f"only cpu and cuda devices are served (ROCm's are called cuda), not '{device}': choose --device cpu"
    if torch.version.cuda is None and torch.version.hip is None:
        return "this PyTorch is built without CUDA and ROCm: install one that has it, or choose --device cpu"
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device is visible: check the driver, or choose --device cpu"
    count = torch.cuda.device_count()
    if (wanted.index or 0) >= count:
        return f"there is no '{device}', the last one is cuda:{count - 1}: choose another --device"
    return None
