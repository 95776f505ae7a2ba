"""Our engine's loop in this process: schedule, run, update, without HTTP."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import count as counter
from pathlib import Path

import torch

from benchmarks.peers import WARM_UP
from rwkv_lightning.core import bench_loop
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.interfaces import Batch

SEEDS = counter(1)
CONVERTED = {"gemlite": "gemlite-int8"}  # engines whose file is converted first, and for which target


def missing(engine: str, **options: object) -> str | None:
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
    """Args: engine: the backend's name; sampler: drawn from at its defaults, None for greedy; bare: no scheduler."""

    def __init__(
        self, checkpoint: Path, threads: int, engine: str, sampler: str | None = None, bare: bool = False
    ) -> None:
        before = peak_bytes()
        settings = settings_for(checkpoint, threads, engine)
        self.model = bench_loop.load(settings)
        self.weights = Path(str(settings.model_path)).stat().st_size
        self.loading, self.loaded = peak_bytes() - before, current_bytes()
        self.sampler = (sampler, {}) if sampler else (bench_loop.GREEDY, {"temperature": 0})
        self.bare = bare
        self.prefill(512)  # makes the buffers

    def decode(self, rows: int, seconds: float) -> float:
        if self.bare:
            return self._forward_and_draw(rows, seconds)
        name, values = self.sampler
        with bench_loop.loop(self.model, rows, name, **values) as running:
            running.rate(1)
            return running.rate_for(seconds)

    def _forward_and_draw(self, rows: int, seconds: float) -> float:
        """Tokens per second of nothing but the model's forward over a batch made once, and the sampler."""
        name, values = self.sampler
        sampler, runner = self.model.engine.samplers[name], self.model.engine.runner
        options = sampler.validate(values)
        members = [sampler.open(options, 0, row) for row in range(rows)]
        offsets = torch.arange(rows + 1, dtype=torch.int32)
        batch = Batch(torch.ones(rows, dtype=torch.int32), offsets, offsets[:-1], torch.arange(rows))
        for _ in range(2):
            sampler.sample(runner.model.forward(batch, runner.states), members)
        begun, steps = time.perf_counter(), 0
        while steps < 2 or time.perf_counter() - begun < seconds:
            sampler.sample(runner.model.forward(batch, runner.states), members)
            steps += 1
        return rows * steps / (time.perf_counter() - begun)

    def prefill(self, tokens: int) -> float:
        bench_loop.prefill_rate(self.model, WARM_UP, next(SEEDS))
        return bench_loop.prefill_rate(self.model, tokens, next(SEEDS))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return bench_loop.generate(self.model, [tuple(prompt)], count)[0]

    def memory(self, rows: int) -> dict[str, float]:
        """Bytes: of the file, growth of the process at most while loading, and after it with `rows` rows running."""
        with bench_loop.loop(self.model, rows, temperature=0) as running:
            running.rate(2)
            return {"weights": self.weights, "loading": self.loading, "rows": current_bytes() - self.loaded}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def current_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
