"""What the scheduler costs per step, without a model: `python -m benchmarks.scheduler`.

Rows decode in a steady state beside any number of waiting rows. A turn is `schedule` and `update`, the text's part left
out. Prints medians of CPU time: of a turn, per decoding row, and of a turn before which a request left and one came.
"""

from __future__ import annotations

import argparse
import gc
from statistics import median
from time import process_time

from benchmarks.common import count
from rwkv_lightning.core.ledger import SlotLedger
from rwkv_lightning.core.request import GenerationRequest, SamplingParams, Tokens
from rwkv_lightning.core.scheduler import RowParts, Sampled, Scheduler

DRAWN = Sampled(1)


class NoText:
    """Output of no cost worth naming: one letter per token."""

    stopped = False

    def push(self, token: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


def fill(rows: int, waiting: int, requests: int, chunk_size: int) -> Scheduler:
    """`rows` rows that decode for ever, in so many requests, and `waiting` requests of one row that wait."""
    scheduler = Scheduler(SlotLedger(rows), quantum=1 << 40)
    share = rows // requests
    for index in range(requests):
        add(scheduler, f"running{index}", share, chunk_size)
    while scheduler.num_running < rows:
        turn(scheduler)
    for index in range(waiting):
        add(scheduler, f"waiting{index}", 1, chunk_size)
    return scheduler


def add(scheduler: Scheduler, name: str, rows: int, chunk_size: int) -> None:
    params = SamplingParams("none", None, max_tokens=1 << 40)
    prompts: list[Tokens] = [(1 + row, 2, 3, 4) for row in range(rows)]
    parts = [RowParts(None, None, NoText()) for _ in prompts]  # type: ignore[arg-type]
    scheduler.add(GenerationRequest(name, prompts, params, chunk_size), parts)


def turn(scheduler: Scheduler) -> float:
    """CPU seconds of one schedule and update."""
    begun = process_time()
    step = scheduler.schedule()
    scheduled = process_time()
    assert step is not None
    samples = [DRAWN] * len(step.samples)
    drawn = process_time()
    scheduler.update(step, samples)
    return scheduled - begun + process_time() - drawn


def churn(scheduler: Scheduler, turns: int, chunk_size: int) -> list[float]:
    """Turns in each of which a request has left and another has come."""
    times = []
    for index in range(turns):
        scheduler.abort(f"running{index}")
        add(scheduler, f"new{index}", 1, chunk_size)
        times.append(turn(scheduler))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=count, default=200)
    turns = parser.parse_args().turns
    print(f"{'rows':>5} {'waiting':>8} {'chunk_size':>10} {'us/turn':>9} {'us/row':>7} {'us/turn with churn':>19}")
    for rows in (64, 960):
        for chunk_size in (1, 4):
            for waiting in (0, 10_000, 100_000):
                scheduler = fill(rows, waiting, rows, chunk_size)
                gc.collect()
                gc.freeze()  # the waiting rows are this benchmark's, not garbage to be looked through
                steady = median(turn(scheduler) for _ in range(turns)) * 1e6
                changing = median(churn(scheduler, min(turns, rows), chunk_size)) * 1e6
                gc.unfreeze()
                figures = f"{steady:>9.1f} {steady / rows:>7.2f} {changing:>19.1f}"
                print(f"{rows:>5} {waiting:>8} {chunk_size:>10} {figures}", flush=True)


if __name__ == "__main__":
    main()
