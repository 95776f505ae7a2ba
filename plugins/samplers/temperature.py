"""The temperature-only sampler: softmax(l / T) over the whole vocabulary, no penalties, no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.kernels.sampling import Rule
from rwkv_lightning.plugins.samplers.options import RuleSampler, TemperatureOptions

if TYPE_CHECKING:
    from rwkv_lightning.core.hookspecs import RegisterSampler


class TemperatureSampler(RuleSampler):
    """See native_api.md, "Samplers, exactly"."""

    rule = Rule.TEMPERATURE

    def __init__(self) -> None:
        super().__init__(TemperatureOptions())


@hookimpl
def register_samplers(register: RegisterSampler) -> None:
    register("temperature", lambda context: TemperatureSampler(), "temperature only, over the whole vocabulary")
