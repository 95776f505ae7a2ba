"""The scheduler under load, without a model: `python -m benchmarks.simulate [--sessions 100000] [--chart FILE]`.

Sessions arrive at random (a Poisson process) with prompts and answers of random length (geometric). The real
`Scheduler` decides every step; a step takes as long as benchmarks/scaling.py computes for the machine and the model.
Printed: time to first token and throughput against the load, then what the scheduler itself costs per step.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import count, place, positive, progress
from benchmarks.scaling import MACHINES, Machine, Model
from benchmarks.scheduler import DRAWN, NoText, fill, turn
from rwkv_lightning.core.collector import settle
from rwkv_lightning.core.ledger import SlotLedger
from rwkv_lightning.core.random_checkpoint import SHAPES
from rwkv_lightning.core.request import GenerationRequest, SamplingParams
from rwkv_lightning.core.scheduler import RowParts, Scheduler
from rwkv_lightning.core.sequence import Step

LOADS = (0.5, 0.8, 0.9, 0.95, 1.0, 1.2)
STEP_OVERHEAD = 200e-6  # seconds of a step besides the formulas' work
ACTIVE = (8, 64, 240, 480, 960)
WAITING = (0, 1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class Workload:
    """Args: prompt, answer: mean lengths in tokens; sessions: how many arrive; load: offered work as a share of what
    the machine can do with all slots busy; seed: of every random number."""

    sessions: int
    load: float
    prompt: float = 128
    answer: float = 128
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Times in seconds of the simulated clock; `first` has the time to first token of each session."""

    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    most_waiting: int = 0
    scheduler_seconds: float = 0.0  # of real processor time
    row_steps: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.first)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Site:
    """A model on a machine, with as many slots as fit, at most `most`."""

    model: Model
    machine: Machine
    most: int = 960

    @property
    def slots(self) -> int:
        return max(1, min(self.most, self.model.slots(self.machine)))

    def seconds(self, step: Step) -> float:
        tokens = sum(len(chunk.tokens) for chunk in step.chunks)
        rows, logits = len(step.chunks), len(step.samples)
        return STEP_OVERHEAD + self.model.step(self.machine, rows, max(1, tokens), logits) if tokens else STEP_OVERHEAD

    def capacity(self, work: Workload) -> float:
        """Sessions per second when every slot is busy: what all their tokens cost in full steps."""
        step = STEP_OVERHEAD + self.model.step(self.machine, self.slots)
        reading = work.prompt / self.model.prefill(self.machine, 512)
        return 1 / (work.answer * step / self.slots + reading)


def arrivals(work: Workload, rate: float) -> Iterator[tuple[float, int, int]]:
    """(time, prompt tokens, answer tokens) of each session, `rate` of them per second."""
    draw = random.Random(work.seed)
    now = 0.0
    for _ in range(work.sessions):
        now += draw.expovariate(rate)
        yield now, 1 + int(draw.expovariate(1 / work.prompt)), 1 + int(draw.expovariate(1 / work.answer))


class Simulation:
    """One site under one workload, from the first arrival to the last answer."""

    def __init__(self, site: Site, work: Workload) -> None:
        self.site, self.work = site, work
        self.scheduler = Scheduler(SlotLedger(site.slots))
        self.outcome = Outcome()
        self._pending = list(reversed(list(arrivals(work, site.capacity(work) * work.load))))
        self._arrived: dict[str, float] = {}
        self._now = 0.0

    def run(self) -> Outcome:
        while self._pending or not self.scheduler.idle:
            self._admit()
            self._step()
        self.outcome.seconds = self._now
        return self.outcome

    def _admit(self) -> None:
        """Everybody who has arrived by now; with nothing to do the clock moves on to the next one."""
        if self.scheduler.idle:
            self._now = max(self._now, self._pending[-1][0])
        while self._pending and self._pending[-1][0] <= self._now:
            at, prompt, answer = self._pending.pop()
            name = f"session {len(self._pending)}"
            self._arrived[name] = at
            request = GenerationRequest(name, [(1,) * prompt], SamplingParams("none", None, answer, end_token=None))
            self.scheduler.add(request, [RowParts(None, None, NoText())])  # type: ignore[arg-type]
        self.outcome.most_waiting = max(self.outcome.most_waiting, self.scheduler.num_waiting)

    def _step(self) -> None:
        begun = time.process_time()
        step = self.scheduler.schedule()
        assert step is not None, "rows are unfinished, and none can be fed"
        events = self.scheduler.update(step, [DRAWN] * len(step.samples))
        self.outcome.scheduler_seconds += time.process_time() - begun
        self.outcome.row_steps += len(step.chunks)
        self.outcome.tokens += len(step.samples)
        self._now += self.site.seconds(step)
        for event in events:
            if (arrived := self._arrived.pop(event.request_id, None)) is not None:
                self.outcome.first.append(self._now - arrived)


def load_table(site: Site, sessions: int, loads: Sequence[float]) -> Iterator[tuple[float, Outcome]]:
    settle()  # as the server does
    for load in loads:
        progress(f"load {load:.0%}")
        gc.collect()
        yield load, Simulation(site, Workload(sessions, load)).run()
    progress("")


def cost_table() -> Iterator[tuple[int, int, float]]:
    """(active rows, waiting rows, median microseconds of processor time of one scheduler turn)."""
    for waiting, rows in [(0, rows) for rows in ACTIVE] + [(waiting, ACTIVE[-1]) for waiting in WAITING[1:]]:
        progress(f"scheduler: {rows} rows, {waiting} waiting")
        scheduler = fill(rows, waiting, rows, 1)
        gc.collect()
        gc.freeze()  # the waiting rows are this measurement's, not garbage to be looked through
        yield rows, waiting, statistics.median(turn(scheduler) for _ in range(100)) * 1e6
        gc.unfreeze()
    progress("")


def draw(path: Path, results: Sequence[tuple[float, Outcome]]) -> None:
    """A chart of both curves. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    loads = [load for load, _ in results]
    for share in (0.5, 0.99):
        left.plot(
            loads, [outcome.percentile(share) for _, outcome in results], marker="o", label=f"{share:.0%} of sessions"
        )
    left.set(xlabel="load", ylabel="seconds to the first token", yscale="log")
    left.legend()
    right.plot(loads, [outcome.tokens / outcome.seconds for _, outcome in results], marker="o")
    right.set(xlabel="load", ylabel="tokens per second", ylim=0)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=count, default=100_000, help="of each load")
    parser.add_argument("--loads", type=positive, nargs="+", default=LOADS)
    parser.add_argument("--shape", choices=SHAPES, default="7.2b")
    parser.add_argument("--machine", choices=MACHINES, default="h200")
    parser.add_argument("--slots", type=count, default=960, help="at most")
    parser.add_argument("--chart", type=place, help="a PNG to write")
    parser.add_argument("--no-cost", action="store_true", help="leave the scheduler's own cost out")
    options = parser.parse_args(arguments)
    site = Site(Model(SHAPES[options.shape]), MACHINES[options.machine], options.slots)
    print(f"{options.shape} on {site.machine.name}, {site.slots} slots, {options.sessions:,} sessions per load\n")
    print_loads(results := list(load_table(site, options.sessions, options.loads)), not options.no_cost)
    if not options.no_cost:
        print_costs()
    if options.chart:
        draw(options.chart, results)
    return 0


def print_loads(results: Sequence[tuple[float, Outcome]], with_cost: bool) -> None:
    heading = ["load", "first token, median", "99 %", "tokens/s", "most waiting"]
    heading += ["scheduler, us per row and step"] * with_cost
    print(f"| {' | '.join(heading)} |\n{'|---' * len(heading)}|")
    for load, outcome in results:
        first = f"{outcome.percentile(0.5):.3f} s | {outcome.percentile(0.99):.3f} s"
        cost = f" {outcome.scheduler_seconds / outcome.row_steps * 1e6:.2f} |" if with_cost else ""
        rate = outcome.tokens / outcome.seconds
        print(f"| {load:.0%} | {first} | {rate:,.0f} | {outcome.most_waiting:,} |{cost}", flush=True)


def print_costs() -> None:
    print("\n| active rows | waiting | scheduler, us per step | per row |\n|---|---|---|---|")
    for rows, waiting, cost in cost_table():
        print(f"| {rows} | {waiting:,} | {cost:.0f} | {cost / rows:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
