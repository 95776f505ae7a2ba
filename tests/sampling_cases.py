"""What the sampler tests share: the rules, both implementations, the default options and random logits."""

from __future__ import annotations

import torch

from rwkv_lightning.kernels import sampling, sampling_reference
from rwkv_lightning.kernels.sampling import Rule

RULES = {"V1": Rule.V1, "V2": Rule.V2, "temperature": Rule.TEMPERATURE}
IMPLEMENTATIONS = {"kernel": sampling.sample, "reference": sampling_reference.sample}
DEFAULTS = {
    "V1": {"temperature": 1.0, "top_k": 50, "top_p": 0.6, "presence": 2.0, "frequency": 0.2, "decay": 0.996},
    "V2": {"temperature": 1.0, "top_k": 500, "top_p": 0.5, "presence": 1.0, "frequency": 0.1, "decay": 0.99},
    "temperature": {"temperature": 1.0},
}
EXEMPT = (2, 5)


def normal_logits(rows: int, vocabulary: int, scale: float, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale
