"""Our engine's loop in this process: schedule, run, update, without HTTP."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import count as counter
from pathlib import Path

from rwkv_lightning.core import bench_loop
from rwkv_lightning.core.config import Settings

SEEDS = counter(1)
CONVERTED = {"gemlite": "gemlite-int8"}  # engines whose file is converted first, and for which target


def missing(engine: str, sampler: str | None = None) -> str | None:
    """Why this engine cannot be measured, if so."""
    plugins = {entry.name for entry in entry_points(group="rwkv_lightning")}
    return None if engine in plugins else f"this installation has no engine {engine}"


def file_for(checkpoint: Path, engine: str) -> Path:
    """The file that an engine reads: the checkpoint, or one converted from it, made once."""
    if engine not in CONVERTED:
        return checkpoint
    from rwkv_lightning.core.convert import convert

    path = checkpoint.with_name(f"{checkpoint.stem}-{CONVERTED[engine]}.safetensors")
    if not path.exists():
        convert(checkpoint, CONVERTED[engine], path)
    return path


def settings_for(checkpoint: Path, threads: int, engine: str) -> Settings:
    path = str(file_for(checkpoint, engine))
    return Settings(model_path=path, inference_engine=engine, threads=threads, state_store="none", max_batch=1024)


class Peer:
    """Args: engine: the backend's name; sampler: drawn from at its defaults; None for greedy."""

    def __init__(self, checkpoint: Path, threads: int, engine: str, sampler: str | None = None) -> None:
        before = peak_bytes()
        self.model = bench_loop.load(settings_for(checkpoint, threads, engine))
        self.load_bytes = peak_bytes() - before
        self.sampler = (sampler, {}) if sampler else (bench_loop.GREEDY, {"temperature": 0})
        self.prefill(512)  # makes the buffers

    def decode(self, rows: int, seconds: float) -> float:
        name, values = self.sampler
        with bench_loop.loop(self.model, rows, name, **values) as running:
            running.rate(1)
            return running.rate_for(seconds)

    def prefill(self, tokens: int) -> float:
        return bench_loop.prefill_rate(self.model, tokens, next(SEEDS))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return bench_loop.generate(self.model, [tuple(prompt)], count)[0]

    def memory(self, rows: int) -> dict[str, float]:
        """Bytes: peak growth of the process while loading, and what `rows` running rows take beyond that peak."""
        loaded = current_bytes()
        with bench_loop.loop(self.model, rows, temperature=0) as running:
            running.rate(2)
            running_bytes = current_bytes()
        return {"loading": self.load_bytes, "rows": running_bytes - loaded}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def current_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
