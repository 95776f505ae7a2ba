"""Sampling speed, ours against a sort of the vocabulary: ``python -m benchmarks.sampling [ROWS ...]``.

Microseconds per row of 65,536 logits: medians of interleaved runs, wall time and processor time of all threads
(OMP_NUM_THREADS says how many there are). Rows have drawn WARM_UP tokens before, so that there are penalties.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import count
from rwkv_lightning.kernels import sampling, sampling_reference
from rwkv_lightning.plugins.samplers.options import RuleSampler
from rwkv_lightning.plugins.samplers.temperature import TemperatureSampler
from rwkv_lightning.plugins.samplers.v1 import V1Sampler
from rwkv_lightning.plugins.samplers.v2 import V2Sampler

VOCABULARY = 65536
SPREAD = 3.0  # standard deviation of the logits
WARM_UP = 20
ROUNDS = 7
AT_MOST = {"torch.sort": 16, "reference V1": 16}  # rows of the slow forms, which cost the same per row

Run = Callable[[], Any]


def draw(sampler: RuleSampler, logits: torch.Tensor, fields: dict[str, float]) -> Run:
    options = sampler.validate(fields)
    rows = [sampler.open(options, 1, row) for row in range(len(logits))]
    for _ in range(WARM_UP):
        sampler.sample(logits, rows)
    return lambda: sampler.sample(logits, rows)


def reference(logits: torch.Tensor) -> Run:
    sampler = V1Sampler()
    rows = [sampler.open(sampler.defaults, 1, row) for row in range(len(logits))]
    return lambda: sampling_reference.sample(sampler.rule, logits, rows)


def by_sorting(logits: torch.Tensor, top_k: int = 50, top_p: float = 0.6) -> Run:
    """What a sampler without kernels does, penalties left out: sort, cut, draw."""

    def run() -> torch.Tensor:
        ordered, order = torch.softmax(logits, -1).sort(dim=-1, descending=True)
        kept = (ordered.cumsum(-1) - ordered < top_p) & (torch.arange(VOCABULARY) < top_k)
        return order.gather(-1, torch.multinomial(ordered * kept, 1))

    return run


def forms(logits: torch.Tensor) -> dict[str, Run]:
    return {
        "V1": draw(V1Sampler(), logits, {}),
        "V1, top_k 0": draw(V1Sampler(), logits, {"top_k": 0}),
        "V1 greedy": draw(V1Sampler(), logits, {"temperature": 0}),
        "V2": draw(V2Sampler([]), logits, {}),
        "temperature": draw(TemperatureSampler(), logits, {}),
        "reference V1": reference(logits[: AT_MOST["reference V1"]]),
        "torch.sort": by_sorting(logits[: AT_MOST["torch.sort"]]),
    }


def measure(runs: dict[str, Run], rows: int) -> dict[str, tuple[float, float]]:
    """Per form: median microseconds per row, of wall time and of processor time."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            repeats = 1 if name in AT_MOST else max(1, 64 // rows)
            run()  # the form before it has filled the caches with other things
            start = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                run()
            per_row = 1e6 / min(rows, AT_MOST.get(name, rows)) / repeats
            wall[name].append((time.perf_counter() - start[0]) * per_row)
            processor[name].append((time.process_time() - start[1]) * per_row)
    return {name: (statistics.median(wall[name]), statistics.median(processor[name])) for name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", metavar="ROWS", type=count, nargs="*", default=[1, 64, 960])
    options = parser.parse_args()
    print(f"{sampling.select('cpu')[1]}; {torch.get_num_threads()} threads; us per row, wall (processor)")
    for rows in options.rows:
        logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * SPREAD
        for name, (wall, processor) in measure(forms(logits), rows).items():
            print(f"{rows:5} rows   {name:13} {wall:10.1f} ({processor:.1f})")


if __name__ == "__main__":
    main()
