"""What the benchmarks share: a model in this process, its engine's own loop, interleaved rounds and their medians."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.checkpoints import make
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.metrics import Metrics
from rwkv_lightning.core.models import LoadedModel, ModelManager
from rwkv_lightning.core.request import GenerationRequest, SamplingParams
from rwkv_lightning.kernels.cpu.build import cache_dir

FOLDER = cache_dir() / "benchmarks"


def checkpoint(shape: str) -> Path:
    """A random checkpoint of a named shape, made once and kept."""
    path = FOLDER / f"random-{shape}.pth"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        make(path, shape, seed=1)
    return path


def load(path: Path, **settings: object) -> LoadedModel:
    """A model whose engine is driven by hand (its thread is not started)."""
    chosen = Settings(model_path=str(path), **settings)  # type: ignore[arg-type]
    torch.set_num_threads(chosen.threads)
    return ModelManager(chosen, PluginHost(chosen), Metrics()).load(lambda summary: None)


def params(model: LoadedModel, sampler: str, max_tokens: int, **values: object) -> SamplingParams:
    options = model.engine.samplers[sampler.lower()].validate(values)
    return SamplingParams(sampler.lower(), options, max_tokens, stop=("\nUser:",), end_token=None)


class EngineLoop:
    """The engine's own loop at a fixed number of rows: schedule, run, update, without HTTP."""

    def __init__(self, model: LoadedModel, rows: int, sampler: str = "temperature", **values: object) -> None:
        self.engine = model.engine
        self.rows = rows
        vocab = model.model.config.vocab_size
        prompts = [tuple(1 + (row * 7 + i) % (vocab - 1) for i in range(4)) for row in range(rows)]
        request = GenerationRequest("loop", prompts, params(model, sampler, 10**9, **values))
        self.engine._add(request)
        while self.engine.scheduler.num_waiting or any(s.unread for s in self._sequences()):
            self.engine.step()

    def _sequences(self) -> list[object]:
        return list(self.engine.scheduler._groups["loop"].rows.values())

    def rate(self, steps: int) -> float:
        """Tokens per second over `steps` steps."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        return self.rows * steps / (time.perf_counter() - begun)

    def close(self) -> None:
        self.engine.scheduler.abort("loop")


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Call each contender once per round, in turns, and return each one's median."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, run in contenders.items():
            progress(f"round {number + 1}/{rounds}: {name}")
            results[name].append(run())
    progress("")
    return {name: statistics.median(values) for name, values in results.items()}


def progress(text: str) -> None:
    """One line on a terminal that the next one overwrites; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r  {text:60}" if text else "\r" + " " * 62 + "\r", end="", file=sys.stderr, flush=True)
