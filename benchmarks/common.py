"""What the benchmarks share: a model in this process (core/bench_loop.py), rounds in turns, a line of progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rwkv_lightning.core import bench_loop
from rwkv_lightning.core.bench_loop import EngineLoop
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.random_checkpoint import kept as checkpoint
from rwkv_lightning.kernels.cpu.build import cache_dir

FOLDER = cache_dir() / "benchmarks"  # where checkpoints and what is made from them are kept

__all__ = ["FOLDER", "EngineLoop", "checkpoint", "interleaved", "load", "progress"]


def load(path: Path, **settings: object) -> LoadedModel:
    """A model whose engine is driven by hand (its thread is not started)."""
    chosen = {"model_path": str(path), "state_store": "none", **settings}
    return bench_loop.load(Settings(**chosen))  # type: ignore[arg-type]


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Call each contender once per round, in turns, and return each one's median."""
    results = bench_loop.interleaved(contenders, rounds, progress)
    progress("")
    return bench_loop.medians(results)


def progress(text: str) -> None:
    """One line on a terminal that the next one overwrites; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r  {text:60}" if text else "\r" + " " * 62 + "\r", end="", file=sys.stderr, flush=True)
