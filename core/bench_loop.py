"""Measuring a model in this process: its engine's own loop, without HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rwkv_lightning.core.collector import settle
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.metrics import Metrics
from rwkv_lightning.core.models import LoadedModel, ModelManager
from rwkv_lightning.core.request import GenerationRequest, SamplingParams, Tokens

if TYPE_CHECKING:
    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.interfaces import Sampler
    from rwkv_lightning.core.request import Event

GREEDY = "temperature"  # the sampler that, at temperature 0, does nothing but find the largest logit
PROMPT = 4  # tokens that a decoding row begins with
SPREAD = 3.0  # standard deviation of the logits that samplers are measured on
WARM_UP = 20  # tokens drawn before a sampler is measured, so that there are penalties


def load(settings: Settings) -> LoadedModel:
    """The model that the settings name, with an engine that is driven by hand: its thread is not started."""
    torch.set_num_threads(settings.threads)
    model = ModelManager(settings, PluginHost(settings), Metrics()).load(lambda summary: None)
    settle()  # as the server does
    return model


def sampling(model: LoadedModel, sampler: str, max_tokens: int, **values: object) -> SamplingParams:
    """Parameters of rows that end at `max_tokens` and nowhere else."""
    options = model.engine.samplers[sampler].validate(values)
    return SamplingParams(sampler, options, max_tokens, end_token=None)


def prompt(model: LoadedModel, length: int, seed: int) -> Tokens:
    """Random tokens, the end of text not among them."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, model.model.config.vocab_size, (length,), generator=generator).tolist())


class EngineLoop:
    """The engine's own loop at a fixed number of rows: schedule, run, update.

    Args:
        values: the sampler's fields.
    """

    def __init__(self, model: LoadedModel, rows: int, sampler: str = GREEDY, **values: object) -> None:
        self.engine = model.engine
        self.rows = rows
        self._name = f"loop of {rows}"
        prompts = [prompt(model, PROMPT, row) for row in range(rows)]
        self.engine._add(GenerationRequest(self._name, prompts, sampling(model, sampler, 1 << 40, **values)))
        while self.engine.scheduler.num_running < rows or any(row.unread for row in self._unfinished()):
            self.engine.step()

    def _unfinished(self) -> Iterable[Any]:
        return self.engine.scheduler._groups[self._name].rows.values()

    def rate(self, steps: int) -> float:
        """Tokens per second over `steps` steps."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        return self.rows * steps / (time.perf_counter() - begun)

    def rate_for(self, seconds: float) -> float:
        """Tokens per second over as many steps as fit about `seconds`, two at least."""
        begun = time.perf_counter()
        self.engine.step()
        first = time.perf_counter() - begun
        return self.rate(max(2, int(seconds / first)))

    def close(self) -> None:
        self.engine.scheduler.abort(self._name)


@contextmanager
def loop(model: LoadedModel, rows: int, sampler: str = GREEDY, **values: object) -> Iterator[EngineLoop]:
    """An `EngineLoop` for the length of a block; the engine is idle afterwards."""
    running = EngineLoop(model, rows, sampler, **values)
    try:
        yield running
    finally:
        running.close()


def prefill_rate(model: LoadedModel, length: int, seed: int) -> float:
    """Prompt tokens per second of one prompt that no cache knows, its first generated token included."""
    begun = time.perf_counter()
    generate(model, [prompt(model, length, seed)], 1)
    return length / (time.perf_counter() - begun)


def generate(model: LoadedModel, prompts: list[Tokens], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt, all rows in one batch, through the engine's step."""
    scheduler, runner = model.engine.scheduler, model.engine.runner
    params = sampling(model, GREEDY, count, temperature=0)
    request = GenerationRequest("generate", prompts, params, use_prefix_cache=False)
    scheduler.add(request, model.engine._open_rows(request))
    answers: list[list[int]] = [[] for _ in prompts]
    while (step := scheduler.schedule()) is not None:
        events: list[Event] = scheduler.update(step, runner.run(step))
        for event in events:
            answers[event.row] += event.tokens
    return answers


def sampler_cost(sampler: Sampler, vocab_size: int, rows: int) -> Callable[[], float]:
    """A function that draws one token for each of `rows` rows at the sampler's defaults: microseconds per row."""
    fresh = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows)) * SPREAD
    logits = fresh.clone()
    options = sampler.validate({})
    members = [sampler.open(options, 1, row) for row in range(rows)]

    def run() -> float:
        logits.copy_(fresh)  # samplers may overwrite them
        begun = time.perf_counter()
        sampler.sample(logits, members)
        return (time.perf_counter() - begun) / rows * 1e6

    for _ in range(WARM_UP):
        run()
    return run


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int, note: Callable[[str], None] = lambda text: None
) -> dict[str, list[float]]:
    """Call each contender once per round, in turns: what each returned.

    Args:
        note: told the name of the contender that is about to run.
    """
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            note(name)
            results[name].append(run())
    return results


def medians(results: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in results.items()}
