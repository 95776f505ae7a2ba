"""What the benchmarks share: a model in this process (core/bench_loop.py), rounds in turns, a line of progress."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from rwkv_lightning.core import bench_loop
from rwkv_lightning.core.bench_loop import EngineLoop
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.random_checkpoint import kept as checkpoint
from rwkv_lightning.kernels.cpu.build import cache_dir

FOLDER = cache_dir() / "benchmarks"  # where checkpoints and what is made from them are kept

HAS_TEST_EXTRA = all(find_spec(name) for name in ("httpx", "pytest"))

__all__ = [
    "FOLDER",
    "HAS_TEST_EXTRA",
    "EngineLoop",
    "checkpoint",
    "count",
    "document",
    "interleaved",
    "load",
    "place",
    "positive",
    "progress",
    "require_test_extra",
]


def place(text: str) -> Path:
    """A command line's file that is to be written, in a folder that is there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def require_test_extra() -> None:
    """Raise SystemExit with a sentence when the clients of the tests, which talk to a server, are not installed."""
    if not HAS_TEST_EXTRA:
        raise SystemExit("this benchmark uses the clients of the tests: pip install -e '.[test]' brings what they need")


def count(text: str) -> int:
    """A command line's whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def positive(text: str) -> float:
    """A command line's number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def document(text: str) -> Path:
    """A command line's file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file at {text!r}")
    return path


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


def share_of_the_loop(
    what: str, rounds: int, measure: Callable[[], float], loop: Callable[[], float]
) -> tuple[float, float, float]:
    """(share, measured, loop) in tokens/s of the median round; the engine's own loop runs before and after."""
    shares = []
    for number in range(rounds):
        progress(f"{what} against the loop, round {number + 1}/{rounds}")
        before, measured = loop(), measure()
        ours = statistics.mean([before, loop()])
        shares.append((measured / ours, measured, ours))
    progress("")
    return sorted(shares)[len(shares) // 2]
