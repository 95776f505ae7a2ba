"""Sampler V2: decaying counts and a lasting presence penalty; top-k, then top-p over what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.kernels.sampling import Rule
from rwkv_lightning.plugins.samplers.options import PenaltyOptions, RuleSampler

if TYPE_CHECKING:
    from rwkv_lightning.core.hookspecs import RegisterSampler

DEFAULTS = PenaltyOptions(
    temperature=1.0, top_k=500, top_p=0.5, alpha_presence=1.0, alpha_frequency=0.1, alpha_decay=0.99
)
UNCOUNTED = frozenset(bytes([byte]) for byte in b"\t 0123456789")


class V2Sampler(RuleSampler):
    """See native_api.md, "Samplers, exactly".

    Args:
        token_bytes: the bytes of each token id; the tokens that are one tab, space or digit are never counted.
    """

    rule = Rule.V2

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        super().__init__(DEFAULTS, [token for token, text in enumerate(token_bytes) if text in UNCOUNTED])


@hookimpl
def register_samplers(register: RegisterSampler) -> None:
    register(
        "V2", lambda context: V2Sampler(context.token_bytes), "decaying counts and lasting presence; top-k, then top-p"
    )
