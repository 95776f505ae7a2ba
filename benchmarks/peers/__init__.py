"""The contenders of `python -m benchmarks.compare`, one room each; a contender lives in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

WARM_UP = 16  # tokens, as llama.cpp's batched-bench reads before it times anything


class Peer(Protocol):
    """A loaded contender. `greedy` may raise `Unable`."""

    def decode(self, rows: int, seconds: float) -> float:
        """Tokens per second of `rows` sequences, one token each per step, measured for about `seconds`."""

    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second of one prompt, after a short one of `WARM_UP` tokens that is not timed."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens after a prompt, one after the other."""


class Unable(Exception):
    """This contender does not do that; the message is a few words for the table."""


@dataclass(frozen=True, slots=True)
class Contender:
    """How to make a peer.

    Args:
        module: under benchmarks.peers; it has `missing() -> str | None` (how to install it) and `Peer`.
        options: for `Peer(checkpoint, threads, **options)`.
        exact: computes in float32, so its greedy tokens must be the reference's.
        most: rows it can serve, 0 for one that is only there for its tokens.
        columns: what is measured of it; empty for all.
        roofline: whose ceiling its figures are shares of.
    """

    module: str
    options: dict[str, Any]
    exact: bool = False
    most: int = 1 << 20
    columns: tuple[str, ...] = ()
    roofline: str = "bf16"

    def missing(self) -> str | None:
        reason: str | None = self._room().missing(**self.options)
        return reason

    def make(self, checkpoint: Path, threads: int) -> Peer:
        peer: Peer = self._room().Peer(checkpoint, threads, **self.options)
        return peer

    def _room(self) -> Any:
        return import_module(f"benchmarks.peers.{self.module}")


PREFILL = "prefill 512"

CONTENDERS = {
    "ours bf16": Contender("ours", {"engine": "fp16"}),
    "ours bf16, sampler V1": Contender("ours", {"engine": "fp16", "sampler": "v1"}, columns=("64", "960")),
    "ours bf16, no scheduler": Contender("ours", {"engine": "fp16", "bare": True}, columns=("1", "64", "960")),
    "ours int8": Contender("ours", {"engine": "gemlite"}, roofline="int8"),
    "ours HTTP": Contender("http", {}, columns=("1", "8", "64", "256", "960")),
    "llama.cpp bf16": Contender("llama", {"kind": "bf16"}, most=256),
    "llama.cpp Q8_0": Contender("llama", {"kind": "q8_0"}, most=256, roofline="int8"),
    "llama.cpp f32": Contender("llama", {"kind": "f32"}, exact=True, most=0),
    "rwkv package bf16": Contender("rwkv_package", {"strategy": "cpu bf16"}, most=1),
    "rwkv package fp32": Contender("rwkv_package", {"strategy": "cpu fp32"}, exact=True, most=1),
    "naive PyTorch bf16": Contender("naive", {"dtype": "bfloat16"}, columns=("1", "8", "64", "256", "960")),
}
REFERENCE = Contender("naive", {"dtype": "float32"}, exact=True, most=0)
