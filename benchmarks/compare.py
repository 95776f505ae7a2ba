"""Our engine against its peers and against what the machine can do: `python -m benchmarks.compare [--quick]`.

A random checkpoint is converted for each contender. First, greedy tokens of all are compared with a plain float32
forward. Then come rounds in which each contender runs once, in turns, pinned to one processor, and again to two. The
machine's ceilings are measured in the same rounds. Written to --out: compare.md, compare.png and compare.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.ceilings import Ceilings
from benchmarks.common import FOLDER, count, document
from benchmarks.comparison import Run, Verdict, agree, render
from benchmarks.peers import CONTENDERS, PREFILL, REFERENCE, Contender
from benchmarks.worker import Worker, WorkerFailed
from rwkv_lightning.core.random_checkpoint import SHAPES, kept

ROWS = (1, 8, 64, 256, 960)
PROMPTS = ((510, 33, 1044, 87), tuple(range(700, 720)), (5, 60000, 7), (12345, 999, 31, 4, 15, 9, 26, 5))
GREEDY_TOKENS = 16

console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@dataclass(slots=True)
class Plan:
    """What is compared, and how long."""

    shape: str
    contenders: dict[str, Contender]
    quick: bool = False
    rows: tuple[int, ...] = ROWS
    rounds: int = 5
    seconds: float = 1.0
    threads: tuple[int, ...] = (1, 2)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        return [*map(str, self.rows), PREFILL]


def available(names: Sequence[str]) -> dict[str, Contender]:
    """The contenders that can run here; a line for each of the others."""
    found = {}
    for name in names:
        reason = CONTENDERS[name].missing()
        if reason is None:
            found[name] = CONTENDERS[name]
        else:
            console.print(f"left out: {name}; {reason}")
    return found


def check(plan: Plan, checkpoint: Path, threads: int) -> None:
    """Compare greedy tokens with the float32 reference's. Raises SystemExit when an exact contender errs."""
    prompts = prompts_for(plan.shape)
    reference = Worker(REFERENCE.make, threads, checkpoint, threads)
    expected = [reference.call("with_margins", prompt, GREEDY_TOKENS) for prompt in prompts]
    reference.close()
    for name, contender in plan.contenders.items():
        if contender.module == "http" or contender.options.keys() & {"sampler", "bare"}:
            continue  # the same engine and model as the loop's
        console.print(f"greedy tokens: {name} ...")
        found = greedy_tokens(contender, checkpoint, threads, prompts)
        plan.verdicts[name] = verdict = agree(expected, found)
        console.print(f"greedy tokens: {name}: {verdict}")
        if contender.exact and not verdict.exact:
            raise SystemExit(f"{name} computes in float32 and yet {verdict}: its figures would mean nothing")


def prompts_for(shape: str) -> list[tuple[int, ...]]:
    """Prompts of tokens that the model has; token 0 ends texts and is in none."""
    size = SHAPES[shape].vocab_size
    return [tuple(1 + token % (size - 1) for token in prompt) for prompt in PROMPTS]


def greedy_tokens(
    contender: Contender, checkpoint: Path, threads: int, prompts: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    worker = Worker(contender.make, threads, checkpoint, threads)
    try:
        return [worker.call("greedy", prompt, GREEDY_TOKENS) for prompt in prompts]
    finally:
        worker.close()


def measure(plan: Plan, checkpoint: Path, threads: int) -> Run:
    """All rounds at one number of threads."""
    run = Run(threads)
    with ExitStack() as stack:
        workers = dict(start(plan, checkpoint, threads, stack))
        if "ours bf16" in workers:  # first: later there are rows that have been there before
            run.memory = workers["ours bf16"].call("memory", max(plan.rows))
        ceilings = Worker(Ceilings, threads, threads, plan.quick)
        stack.callback(ceilings.close)
        for number in range(plan.rounds):
            run.add_ceilings(ceilings.call("sample"))
            for column in plan.columns:
                console.print(f"{threads} thread(s), round {number + 1}/{plan.rounds}, {column}")
                measure_column(plan, workers, column, run, number)
            run.add_ceilings(ceilings.call("sample"))
    return run


def start(plan: Plan, checkpoint: Path, threads: int, stack: ExitStack) -> Iterator[tuple[str, Worker]]:
    for name, contender in plan.contenders.items():
        if contender.most:
            console.print(f"starting {name} ...")
            worker = Worker(contender.make, threads, checkpoint, threads)
            stack.callback(worker.close)
            yield name, worker


def measure_column(plan: Plan, workers: Mapping[str, Worker], column: str, run: Run, number: int) -> None:
    """Each contender once. One that fails is named, and goes on with its other columns."""
    for name, worker in workers.items():
        contender = plan.contenders[name]
        if contender.columns and column not in contender.columns:
            continue
        if column != PREFILL and int(column) > contender.most:
            continue
        try:
            if column == PREFILL:
                rate = worker.call("prefill", int(PREFILL.split()[1]))
            else:
                rate = worker.call("decode", int(column), plan.seconds)
            run.add(name, column, number, rate)
        except WorkerFailed as error:
            console.print(f"{name}, {column}: {error}")


def plan_from(options: argparse.Namespace) -> Plan:
    plan = Plan(options.shape, available(options.only or list(CONTENDERS)))
    if options.quick:
        plan.quick = True
        plan.rows, plan.rounds, plan.seconds, plan.threads = (1, 64), 1, 0.3, (1,)
    plan.rounds = options.rounds or plan.rounds
    plan.threads = tuple(options.threads or plan.threads)
    plan.rows = tuple(options.rows or plan.rows)
    return plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write what came out."""
    names = "\n".join(f"  '{name}'" for name in CONTENDERS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"contenders, in quotation marks as --only takes them:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help="some of the contenders below")
    parser.add_argument("--rounds", type=count, help="default: 5")
    parser.add_argument("--rows", type=count, nargs="+", help=f"batch sizes; default: {' '.join(map(str, ROWS))}")
    parser.add_argument("--threads", type=count, nargs="+", help="default: 1 2")
    parser.add_argument("--quick", action="store_true", help="one short round at 1 and 64 rows, one thread")
    parser.add_argument("--no-check", action="store_true", help="leave the comparison of greedy tokens out")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; default: %(default)s")
    parser.add_argument(
        "--write", type=marked, metavar="FILE", help="put the report between the marks of this document"
    )
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if options.threads and min(options.threads) > cores:
        parser.error(f"argument --threads: there are only {cores} processors")
    plan, checkpoint = plan_from(options), kept(options.shape)
    if not options.no_check:
        check(plan, checkpoint, cores)
    runs = [measure(plan, checkpoint, threads) for threads in plan.threads if threads <= cores]
    text = render(plan.shape, plan.contenders, plan.columns, runs, plan.verdicts)
    print(text)
    write(options.out, text, plan, runs)
    if options.write:
        options.write.write_text(with_report(options.write.read_text(), text))
        draw_chart(options.write.with_suffix(".png"), plan, runs)
    return 0


def write(folder: Path, text: str, plan: Plan, runs: Sequence[Run]) -> None:
    """The table, the raw figures and the chart."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text(text)
    raw = {f"{run.threads} threads": {"figures": run.raw(), "ceilings": run.ceilings} for run in runs}
    (folder / "compare.json").write_text(json.dumps(raw, indent=1))
    draw_chart(folder / "compare.png", plan, runs)
    console.print(f"written to {folder}")


def draw_chart(path: Path, plan: Plan, runs: Sequence[Run]) -> None:
    """Draw it, or say what that takes."""
    try:
        from benchmarks.chart import draw

        draw(path, plan.shape, plan.contenders, plan.columns, runs)
    except ImportError:
        console.print("no chart: pip install -e '.[bench]' brings matplotlib")


def with_report(document: str, report: str) -> str:
    """A document with a report between its marks, headings two levels lower: the marks lie in a section (##).

    Raises ValueError without the marks.
    """
    lowered = re.sub(r"^#", "###", report, flags=re.MULTILINE)
    marks = r"(<!-- compare -->\n).*?(<!-- end of compare -->)"
    text, count = re.subn(marks, lambda mark: f"{mark[1]}{lowered}{mark[2]}", document, flags=re.DOTALL)
    if count != 1:
        raise ValueError("the document needs the marks <!-- compare --> and <!-- end of compare --> once")
    return text


def marked(text: str) -> Path:
    """A command line's document that has the marks."""
    path = document(text)
    try:
        with_report(path.read_text(), "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return path


if __name__ == "__main__":
    sys.exit(main())
