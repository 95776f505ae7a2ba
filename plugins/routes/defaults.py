"""Defaults by path: what a request gets when it names nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PathDefaults:
    """The defaults of one path; `sampling` by the native field names."""

    sampler: str
    stop: tuple[str, ...]
    max_tokens: int
    sampling: Mapping[str, Any]


def _sampling(
    temperature: float, top_k: int, top_p: float, presence: float, frequency: float, decay: float
) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "alpha_presence": presence,
        "alpha_frequency": frequency,
        "alpha_decay": decay,
    }


V1_BATCH = PathDefaults("V1", ("\nUser:",), 8192, _sampling(1.0, 50, 0.6, 2.0, 0.2, 0.996))
FIM = PathDefaults("V1", (), 8192, V1_BATCH.sampling)
V2_BATCH = PathDefaults("V2", ("\nUser:",), 8192, _sampling(1.0, 500, 0.5, 1.0, 0.1, 0.99))
BIG_BATCH = PathDefaults("temperature", ("\nUser:",), 8192, {"temperature": 1.0})
TRANSLATE = PathDefaults("V1", ("\n\n",), 2048, _sampling(0.0, 50, 0.6, 0.0, 0.0, 0.996))
OPENAI_CHAT = PathDefaults("V1", ("\nUser:",), 4096, _sampling(1.0, 20, 0.6, 1.0, 0.1, 0.996))
COMPLETIONS = PathDefaults("V1", ("\n\nUser",), 4096, OPENAI_CHAT.sampling)
