"""Sampler V1: one decaying penalty per token drawn; top-k and top-p share one cut, and its token stays, scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.kernels.sampling import Rule
from rwkv_lightning.plugins.samplers.options import PenaltyOptions, RuleSampler

if TYPE_CHECKING:
    from rwkv_lightning.core.hookspecs import RegisterSampler

DEFAULTS = PenaltyOptions(
    temperature=1.0, top_k=50, top_p=0.6, alpha_presence=2.0, alpha_frequency=0.2, alpha_decay=0.996
)


class V1Sampler(RuleSampler):
    """See native_api.md, "Samplers, exactly"."""

    rule = Rule.V1

    def __init__(self) -> None:
        super().__init__(DEFAULTS)


@hookimpl
def register_samplers(register: RegisterSampler) -> None:
    register("V1", lambda context: V1Sampler(), "decaying penalties; top-k and top-p with a scaled crossing token")
