"""What a comparison found: figures by contender and column, shares of the roofline, ratios, and the Markdown of it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers import PREFILL, Contender
from benchmarks.scaling import Machine, Model
from rwkv_lightning.core.random_checkpoint import SHAPES

OURS = "ours bf16"
NEAR_TIE = 0.3  # lead of the first logit below which reduced precision may choose another token
EXACT_TIE = 0.01  # the same in float32
FLOORS = {  # ours ÷ llama.cpp's figure, one thread
    ("ours bf16", "llama.cpp bf16"): {"1": 1.0, "8": 2.0, "64": 2.0, "256": 2.3, PREFILL: 1.7},
    ("ours int8", "llama.cpp Q8_0"): {"1": 1.0},
    ("ours int8", "llama.cpp bf16"): {"8": 2.5, "64": 2.5, "256": 3.0, PREFILL: 2.4},
}
WITHIN = {  # a figure of ours as a share of another one of ours
    ("ours bf16, sampler V1", "ours bf16"): {"64": 0.94, "960": 0.94},
    ("ours bf16", "ours bf16, no scheduler"): {"1": 0.95, "64": 0.98},
    ("ours HTTP", "ours bf16"): {"64": 0.92, "960": 0.85},
}
ROOFLINE = {"1": 0.70, "64": 0.75, "960": 0.85}  # least share of it, "ours bf16" on one thread
TWO_THREADS = {"64": 1.7, "256": 1.7, "960": 1.7}
MOST_LOADING, MOST_ROWS = 1.25, 2.5e9  # times the weights' bytes while loading; bytes of 960 rows beyond the weights

Take = Callable[[Sequence[float]], float]  # which of several samples counts


@dataclass(frozen=True, slots=True)
class Floor:
    """A figure that must be reached: `value` from medians, `best` from the fastest rounds."""

    what: str
    column: str
    floor: float
    value: float
    best: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """How greedy tokens compare: of `total`, `equal` before the first difference of each prompt, and the largest lead
    of the reference's token where one differed."""

    equal: int
    total: int
    lead: float

    @property
    def exact(self) -> bool:
        return self.lead < EXACT_TIE

    def __str__(self) -> str:
        if self.equal == self.total:
            return f"all {self.total} tokens equal"
        kind = "near ties" if self.lead < NEAR_TIE else "not only near ties"
        return f"{self.equal} of {self.total} tokens before the first differences, {kind} (lead {self.lead:.3f})"


def agree(expected: Sequence[Sequence[tuple[int, float]]], found: Sequence[Sequence[int]]) -> Verdict:
    """Compare answers with the reference's (token, lead) pairs; after a difference a row is another text."""
    equal, lead = 0, 0.0
    for reference, answer in zip(expected, found, strict=True):
        for (token, margin), other in zip(reference, answer, strict=True):
            if token != other:
                lead = max(lead, margin)
                break
            equal += 1
    return Verdict(equal, sum(map(len, expected)), lead)


@dataclass(slots=True)
class Run:
    """All rounds at one number of threads; `figures` has tokens per second by (contender, column) and round."""

    threads: int
    figures: dict[tuple[str, str], dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    ceilings: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory: Mapping[str, float] = field(default_factory=dict)

    def add(self, name: str, column: str, number: int, rate: float) -> None:
        self.figures[name, column][number] = rate

    def add_ceilings(self, sample: Mapping[str, float]) -> None:
        for name, value in sample.items():
            self.ceilings[name].append(value)

    def median(self, name: str, column: str) -> float | None:
        values = self.figures.get((name, column))
        return statistics.median(values.values()) if values else None

    def raw(self) -> dict[str, dict[str, list[float]]]:
        table: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for (name, column), values in self.figures.items():
            table[name][column] = list(values.values())
        return table

    def best(self, name: str, column: str) -> float | None:
        """The fastest round: where other work disturbs a machine, the nearest to what it does undisturbed."""
        return max(self.figures.get((name, column), {}).values(), default=None)

    def best_ratio(self, ours: str, theirs: str, column: str) -> float | None:
        mine, other = self.best(ours, column), self.best(theirs, column)
        return mine / other if mine and other else None

    def ratio(self, ours: str, theirs: str, column: str) -> float | None:
        """Median over the rounds of one figure divided by the other's of the same round."""
        mine, others = (self.figures.get((name, column), {}) for name in (ours, theirs))
        ratios = [mine[number] / others[number] for number in mine.keys() & others.keys()]
        return statistics.median(ratios) if ratios else None

    def machine(self, kind: str, take: Take = statistics.median) -> Machine:
        """This machine as the formulas see it: medians of the ceilings measured in this run."""
        products, memory = (take(self.ceilings[name]) * 1e9 for name in (kind, "memory"))
        return Machine("here", 0, memory, products)

    def roofline(self, shape: str, kind: str, column: str, take: Take = statistics.median) -> float:
        """Tokens per second that no implementation can pass, see benchmarks/scaling.py."""
        model = Model(SHAPES[shape], weight_bytes=1 if kind == "int8" else 2)
        machine = self.machine(kind, take)
        if column == PREFILL:
            return model.prefill(machine, int(PREFILL.split()[1]))
        return model.decode(machine, int(column))


def render(
    shape: str,
    contenders: Mapping[str, Contender],
    columns: Sequence[str],
    runs: Sequence[Run],
    verdicts: Mapping[str, Verdict],
) -> str:
    """The whole report as Markdown."""
    lines = [f"# {shape}: tokens per second", ""]
    if verdicts:
        lines += ["| greedy tokens against a plain float32 forward | |", "|---|---|"]
        lines += [f"| {name} | {verdict} |" for name, verdict in verdicts.items()] + [""]
    for run in runs:
        lines += [*_figures(shape, contenders, columns, run), "", *_ceilings(run), ""]
    if runs:
        lines += [*_floors(shape, runs), ""]
    return "\n".join(lines)


def _figures(shape: str, contenders: Mapping[str, Contender], columns: Sequence[str], run: Run) -> Iterator[str]:
    yield f"## {run.threads} thread{'s' * (run.threads > 1)}, pinned"
    yield ""
    yield "Medians; in brackets the share of the roofline (int8 and Q8_0: of int8's)."
    yield ""
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, contender in contenders.items():
        cells = [_cell(run.median(name, c), run.roofline(shape, contender.roofline, c)) for c in columns]
        if any(cell != "-" for cell in cells):
            yield f"| {name} | {' | '.join(cells)} |"
    for kind in ("bf16", "int8"):
        if any(run.ceilings[kind]):
            cells = [f"{run.roofline(shape, kind, column):,.0f}" for column in columns]
            yield f"| roofline {kind} | {' | '.join(cells)} |"


def _cell(value: float | None, roofline: float) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f} ({value / roofline:.0%})" if roofline else f"{value:,.0f}"


def _ceilings(run: Run) -> Iterator[str]:
    units = {"memory": "GB/s read", "bf16": "GFLOP/s bf16 products", "int8": "GOP/s int8 products"}
    units |= {"instruction": "GFLOP/s bf16 on registers only"}
    found = [_median_and_best(run.ceilings[name], unit) for name, unit in units.items() if any(run.ceilings[name])]
    yield f"Ceilings in the same rounds, medians: {', '.join(found)}."
    if run.memory:
        yield ""
        loading, rows, weights = (run.memory[name] for name in ("loading", "rows", "weights"))
        loads, runs = _met(loading <= MOST_LOADING * weights), _met(rows <= MOST_ROWS)
        yield f"Memory of ours bf16: {loading / 1e6:,.0f} MB more at most while loading, {loading / weights:.2f} times"
        yield f"the weights ({loads}: at most {MOST_LOADING}); {rows / 1e6:,.0f} MB more with all rows running"
        yield f"({runs}: at most {MOST_ROWS / 1e6:,.0f})."


def _median_and_best(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):,.1f} {unit} (best {max(values):,.1f})"


def _floors(shape: str, runs: Sequence[Run]) -> Iterator[str]:
    yield "## Floors"
    yield ""
    yield "| what | rows | floor | medians | | fastest rounds | |"
    yield "|---|---|---|---|---|---|---|"
    for f in floors(shape, runs):
        judged = [f"{value:.2f} | {_met(value >= f.floor)}" for value in (f.value, f.best)]
        yield f"| {f.what} | {f.column} | {f.floor:.2f} | {' | '.join(judged)} |"


def _met(good: bool) -> str:
    return "met" if good else "missed"


def floors(shape: str, runs: Sequence[Run]) -> Iterator[Floor]:
    """Every floor that these runs can say something about."""
    for run in (run for run in runs if run.threads == 1):
        for (ours, theirs), wanted in {**FLOORS, **WITHIN}.items():
            for column, floor in wanted.items():
                value, best = run.ratio(ours, theirs, column), run.best_ratio(ours, theirs, column)
                if value and best:
                    yield Floor(f"{ours} / {theirs}", column, floor, value, best)
        for column, floor in ROOFLINE.items():
            median, best = run.median(OURS, column), run.best(OURS, column)
            if median and best:
                ceiling, most = (run.roofline(shape, "bf16", column, take) for take in (statistics.median, max))
                yield Floor(f"{OURS} / roofline", column, floor, median / ceiling, best / most)
    yield from _floors_of_threads({run.threads: run for run in runs})


def _floors_of_threads(runs: Mapping[int, Run]) -> Iterator[Floor]:
    if not {1, 2} <= runs.keys():
        return
    for column, floor in TWO_THREADS.items():
        one, two = (runs[threads].median(OURS, column) for threads in (1, 2))
        fast_one, fast_two = (runs[threads].best(OURS, column) for threads in (1, 2))
        if one and two and fast_one and fast_two:
            yield Floor("two threads / one", column, floor, two / one, fast_two / fast_one)
